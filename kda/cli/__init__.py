"""`python -m kda`: what runs here, and the commands that show, measure and attack it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kda import __version__

if TYPE_CHECKING:
    from rich.console import Console


def _parser() -> argparse.ArgumentParser:
    from kda.bench import SUITES
    from kda.dispatch import TABLE
    from kda.testing.operations import OPERATIONS

    parser = argparse.ArgumentParser(prog="python -m kda", description="Kernels for Kimi Delta Attention.")
    parser.add_argument("--version", action="version", version=f"kda {__version__}")
    parser.add_argument("--verbose", action="store_true", help="say which implementation runs each kind of call")
    commands = parser.add_subparsers(dest="command", metavar="command")

    commands.add_parser("info", help="which implementations run here, and why the rest does not (the default)")

    build = commands.add_parser("build", help="compile the Hopper kernels, and print what they take of the machine")
    build.add_argument("--force", action="store_true", help="compile although they are built")
    # No default of its own: it would overwrite the --verbose before the command's name.
    build.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help="print the compilers' output")

    commands.add_parser("demo", help="prefill and decode real documents, compared with the specification")

    fuzz = commands.add_parser("fuzz", help="draw cases at random and judge them, until the time is up")
    fuzz.add_argument("--seconds", type=float, default=60, help="how long, shared by all that is attacked (default 60)")
    fuzz.add_argument("--impl", choices=[*TABLE], help="implementation (default: every one that runs here, in turn)")
    fuzz.add_argument(
        "--operation",
        choices=[*OPERATIONS, "all"],
        default="fwd",
        help="what to attack; pool: fwd on one; refusal: malformed calls; all: each in turn (default fwd)",
    )
    fuzz.add_argument("--seed", type=int, help="start of the draws (default: random, printed)")
    fuzz.add_argument(
        "--processes", type=int, default=1, help="so many at once, each with a seed of its own (default 1)"
    )
    fuzz.add_argument("--case-seconds", type=float, default=120, help="a case that takes longer hangs (default 120)")
    fuzz.add_argument("--no-ledger", action="store_true", help="do not replay the ledger of findings first")
    fuzz.add_argument("--json", metavar="FILE", help="add the counts to FILE as JSON lines")
    fuzz.add_argument("--summary", nargs="+", metavar="FILE", help="attack nothing: sum up the counts in these files")
    fuzz.add_argument("--worker", metavar="DIR", help=argparse.SUPPRESS)  # be the process that is watched through DIR

    replay = commands.add_parser("replay", help="run one case and say how far it is from the specification")
    replay.add_argument("case", help="the text of a Case(...) of any kind, as a finding prints it")
    replay.add_argument("--impl", choices=[*TABLE], help="implementation (default: every one that runs here)")

    bench = commands.add_parser("bench", help="measure times and errors beside installed peers, correctness first")
    bench.add_argument("--suite", nargs="+", choices=SUITES, help="what to measure (default: all that can be here)")
    bench.add_argument("--impl", action="append", choices=[*TABLE], help="implementation; may be repeated")
    bench.add_argument("--heads", type=int, nargs="+", help="only the shapes with these numbers of heads")
    bench.add_argument("--no-peers", action="store_true", help="without other libraries, though they are installed")
    bench.add_argument("--json", metavar="FILE", help="write what was measured to FILE (replaced)")
    bench.add_argument(
        "--markdown", metavar="FILE", help="write the tables to a new FILE, or to their place in it (replaced)"
    )
    bench.add_argument("--plot", metavar="DIR", help="draw figures into DIR (needs matplotlib)")
    bench.add_argument("--note", help="a sentence that is kept with the results, such as the commit")
    bench.add_argument(
        "--from", dest="files", nargs="+", metavar="FILE", help="measure nothing: show the results in these JSON files"
    )
    return parser


def _fuzz(console: Console, args: argparse.Namespace) -> int:
    import secrets
    from pathlib import Path

    from kda.cli import counts

    if args.summary:
        return counts.summarise(console, map(Path, args.summary))
    try:
        from kda.cli import fuzz, supervise
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        console.print("fuzz needs hypothesis to draw cases: pip install hypothesis")
        return 2
    options = fuzz.Options(args.seconds, args.impl, args.operation, not args.no_ledger)
    start = secrets.randbelow(2**31) if args.seed is None else args.seed
    if args.worker:
        return fuzz.run(console, options, start, Path(args.worker))
    kept = None if args.json is None else Path(args.json)
    return supervise.run(console, options, start, args.processes, args.case_seconds, kept)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 if all is well, 1 for a finding, 2 for a wrong call."""
    args = _parser().parse_args(argv)
    if args.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        from rich.console import Console
    except ImportError:
        print("python -m kda needs rich to print its tables: pip install rich", file=sys.stderr)
        return 2
    console = Console()

    if args.command in (None, "info"):
        from kda.cli import info

        return info.run(console)
    if args.command == "build":
        from kda.cli import build

        return build.run(console, args.force, args.verbose)
    if args.command == "demo":
        from kda.cli import demo

        return 0 if demo.run(console) else 1
    if args.command in ("fuzz", "replay"):
        import torch

        torch.set_num_threads(1)  # the oracle's matrices are tiny: a second thread only waits
    if args.command == "fuzz":
        return _fuzz(console, args)
    if args.command == "replay":
        from kda.cli import replay

        return replay.run(console, args.case, args.impl)
    from kda.cli import bench

    return bench.run(
        console,
        args.suite,
        args.impl,
        args.heads,
        not args.no_peers,
        args.files,
        args.json,
        args.markdown,
        args.plot,
        args.note,
    )
