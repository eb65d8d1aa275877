"""One process of a group over Gloo: runs the cases of its number of ranks, and leaves what it got in a file.

python rank_program.py RANK RANKS FOLDER
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ranks as cases
import torch
from torch import distributed
from torch.multiprocessing import start_processes

import kda.distributed


def raised(function: Any) -> str:
    """What it raises."""
    try:
        function()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run(rank: int, ranks: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, (case, sizes) in cases.cases_of(ranks).items():
        own = cases.own_call(cases.call_of(case), sizes, rank)
        for impl in ("chunked", "recurrent"):
            result[f"{name}, {impl}"] = tuple(kda.distributed.fwd(**own, impl=impl))

    # A part of the group: the two-rank case on the first and the last rank.
    case, sizes = cases.CASES["one sequence on two"]
    group = distributed.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        own = cases.own_call(cases.call_of(case), sizes, int(rank > 0))
        result["part"] = tuple(kda.distributed.fwd(**own, group=group))
    else:
        own = cases.own_call(cases.call_of(case), sizes, 0)
        result["not in the part"] = raised(lambda: kda.distributed.fwd(**own, group=group))

    # Where they were given different lengths, each is told so.
    own = cases.own_call(cases.call_of(case), sizes, int(rank > 0))
    own |= {"initial_state": None, "cu_seqlens": None, "split_sizes": None}  # as many tokens on all as each has
    with patch.dict("os.environ", {"KDA_CHECK": "1"}):
        result["told"] = raised(lambda: kda.distributed.fwd(**own))
    return result


def main(rank: int, ranks: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", store, timedelta(seconds=60), rank=rank, world_size=ranks)
    torch.save(run(rank, ranks), folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[1])
    torch.set_num_threads(1)  # so that there is no thread yet to be lost when processes are forked
    start_processes(main, (count, Path(sys.argv[2])), nprocs=count, start_method="fork")
