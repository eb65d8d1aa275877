"""Kernels for Kimi Delta Attention (KDA): one function, several implementations, one specification."""

from kda import convert
from kda.api import build, explain, fwd, step
from kda.dispatch import Availability, Explanation, Unsupported, implementations
from kda.problem import Output
from kda.transitions import Transition, transition
from kda.version import __version__

__all__ = [
    "Availability",
    "Explanation",
    "Output",
    "Transition",
    "Unsupported",
    "__version__",
    "build",
    "convert",
    "explain",
    "fwd",
    "implementations",
    "step",
    "transition",
]
