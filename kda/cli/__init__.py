"""`python -m kda`: what runs here, and the commands that show, measure and attack it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from kda import __version__


def _parser() -> argparse.ArgumentParser:
    from kda.dispatch import TABLE

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
    fuzz.add_argument("--seconds", type=float, default=60, help="how long (default 60)")
    fuzz.add_argument("--impl", choices=[*TABLE], help="implementation (default: every one that runs here, in turn)")
    fuzz.add_argument(
        "--operation",
        choices=["fwd", "step", "pool"],
        default="fwd",
        help="the call to attack; pool: fwd on one (default fwd)",
    )
    fuzz.add_argument("--seed", type=int, help="start of the draws (default: random, printed)")

    replay = commands.add_parser("replay", help="run one case and say how far it is from the specification")
    replay.add_argument("case", help="the text of a Case(...), as a finding prints it")
    replay.add_argument("--impl", choices=[*TABLE], help="implementation (default: every one that runs here)")

    bench = commands.add_parser("bench", help="time the named shapes, correctness checked first")
    bench.add_argument("--suite", choices=["all", "time", "accuracy", "decode", "serving", "host"], default="all")
    bench.add_argument("--impl", action="append", choices=[*TABLE], help="implementation; may be repeated")
    bench.add_argument("--heads", type=int, nargs="+", help="only the shapes with these numbers of heads")
    bench.add_argument("--markdown", metavar="FILE", help="also write the tables to FILE")
    return parser


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
        from kda.cli import fuzz

        return fuzz.run(console, args.seconds, args.impl, args.seed, args.operation)
    if args.command == "replay":
        from kda.cli import replay

        return replay.run(console, args.case, args.impl)
    from kda.cli import bench

    return bench.run(console, args.suite, args.impl, args.markdown, args.heads)
