"""The only place that may say "your input is wrong". Messages: the argument, what was expected, what came, a hint.

`require` has the requirements on one argument, `memory` those on buffers, `inputs` what all calls share; `fwd`, `pool`
and `layouts` put them together for `kda.fwd`, `kda.step` and `kda.convert`, `transitions` and `ranks` for
`kda.transition` and `kda.distributed`, which import them themselves.
"""

from kda.validate.fwd import contents, forward, state_contents
from kda.validate.inputs import ROWS
from kda.validate.layouts import mask, matrix, offsets, packed
from kda.validate.memory import extent, meet, same
from kda.validate.pool import pool_contents, step
from kda.validate.require import implementation_name, looks_at_contents

__all__ = [
    "ROWS",
    "contents",
    "extent",
    "forward",
    "implementation_name",
    "looks_at_contents",
    "mask",
    "matrix",
    "meet",
    "offsets",
    "packed",
    "pool_contents",
    "same",
    "state_contents",
    "step",
]
