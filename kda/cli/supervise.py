"""`python -m kda fuzz`: processes that fuzz, watched by one that does not.

A process that dies, loses its device or hangs cannot say so itself. Each writes the case that is about to run into its
journal, from which the crash is reported here and the case run again, on a GPU under compute-sanitizer.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kda.cli import counts, journal
from kda.cli.fuzz import INTERRUPTED, Options
from kda.cuda.toolchain import DEFAULT_CUDA
from kda.dispatch import AUTO
from kda.testing.judge import reproducer

#: Seeds of the processes are so far apart that none reaches the next one's.
APART = 2**20

#: Until a process has written the first case: importing torch from a cold disk, starting a GPU.
STARTING_SECONDS = 600.0

#: For a process to end by itself when it is asked to, and to write where it is.
GRACE_SECONDS = 5.0

#: How much longer a case takes under compute-sanitizer.
SANITIZER_FACTOR = 20

#: For the process of a replay to start.
REPLAY_SECONDS = 60.0

#: Exit status of compute-sanitizer where it has found something.
SANITIZED = 99

#: Lines of the start and of the end of a report that are printed.
LINES = 25


@dataclass
class _Worker:
    """A process, and what is known of it. seen: number of the last record, at: when it was new."""

    process: subprocess.Popen[bytes]
    folder: Path
    seed: int
    seen: int = -1
    at: float = field(default_factory=time.monotonic)

    def hangs(self, case_seconds: float) -> bool:
        """Whether its case has taken too long by now."""
        record = journal.last(self.folder)
        if record is not None and record.number != self.seen:
            self.seen, self.at = record.number, time.monotonic()
        limit = max(case_seconds, STARTING_SECONDS) if record is None else case_seconds
        return time.monotonic() - self.at > limit

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace").rstrip()

    def traceback(self) -> str:
        path = self.folder / "traceback"
        return path.read_text(errors="replace").rstrip() if path.exists() else ""

    def dump(self) -> None:
        """Let it write where it is."""
        os.kill(self.process.pid, signal.SIGUSR1)
        until = time.monotonic() + GRACE_SECONDS
        while not self.traceback() and time.monotonic() < until and self.process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.1)  # the rest of it


def _start(options: Options, seed: int, ledger: bool, folder: Path) -> _Worker:
    folder.mkdir()
    command = [sys.executable, "-m", "kda", "fuzz", "--worker", str(folder), "--seed", str(seed)]
    command += ["--seconds", str(options.seconds), "--operation", options.operation]
    command += ["--impl", options.impl] if options.impl else []
    command += [] if ledger else ["--no-ledger"]
    with (folder / "output").open("wb") as output:
        # A process group of its own: Ctrl-C comes here alone, and what it started can be killed with it.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0)
    return _Worker(process, folder, seed)


def _stop(workers: list[_Worker]) -> None:
    """End all that have not ended, with what they have started: politely, then not."""
    until = time.monotonic() + GRACE_SECONDS
    for number in (signal.SIGINT, signal.SIGKILL):
        for worker in workers:
            if worker.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, number)
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(until - time.monotonic(), 0) if number == signal.SIGINT else None)


def _shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= 2 * LINES:
        return text
    return "\n".join([*lines[:LINES], f"... {len(lines) - 2 * LINES} lines ...", *lines[-LINES:]])


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def find_sanitizer() -> str | None:
    """compute-sanitizer of the PATH, else of the CUDA toolkit."""
    home = Path(os.environ.get("CUDA_HOME") or DEFAULT_CUDA)
    return shutil.which("compute-sanitizer") or shutil.which(str(home / "bin" / "compute-sanitizer"))


def replay(console: Console, record: journal.Record, case_seconds: float) -> None:
    """Run the case of a crash again in a process of its own, and print what comes of it."""
    row = record.counts
    command = [sys.executable, "-m", "kda", "replay", record.case, *(["--impl", row.impl] if row.impl else [])]
    environment = dict(os.environ)
    sanitizer = find_sanitizer() if row.impl in AUTO["cuda"] and row.device != "cpu" else None
    if sanitizer is not None:
        command = [sanitizer, "--tool", "memcheck", "--error-exitcode", str(SANITIZED), *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else an access beyond a tensor is one inside a block
        case_seconds *= SANITIZER_FACTOR
    _print(console, f"again: {shlex.join(command)}")
    # Its threads of CUDA and its own children may outlive a kill of the process alone.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, process_group=0
    )
    try:
        report, _ = process.communicate(timeout=case_seconds + REPLAY_SECONDS)
        what = {0: "it did not fail again", 1: "it failed again", 2: "it could not be run again"}.get(
            process.returncode, f"it failed again: {_how(process.returncode)}"
        )
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        report, _ = process.communicate()
        what = "it hangs again"
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    _print(console, _shortened(report.rstrip()))
    _print(console, what)


def _how(status: int) -> str:
    """How a process ended that did not end by itself."""
    if status == SANITIZED:
        return "compute-sanitizer reports errors"
    if status >= 0:
        return f"the process ended with status {status}"
    name = signal.Signals(-status).name
    return f"the process died by {name}" + (" (out of memory, perhaps)" if name == "SIGKILL" else "")


def _report(console: Console, worker: _Worker, how: str, case_seconds: float) -> None:
    """Print what is known of a crash, and run its case again."""
    console.print("[red]finding: a crash")
    _print(console, _shortened(worker.output()))
    if traceback := worker.traceback():
        _print(console, _shortened(traceback))
    record = journal.last(worker.folder)
    if record is None or not record.case:
        _print(
            console, f"{how}, {'before the first' if record is None else 'after the last'} case of seed {worker.seed}"
        )
        return
    name = record.counts.impl or record.counts.operation
    _print(console, reproducer(record.case, record.counts.impl, f"{name}: {how} while this case ran"))
    replay(console, record, case_seconds)


def _watch(
    workers: list[_Worker], options: Options, case_seconds: float, console: Console
) -> tuple[_Worker | None, str]:
    """Wait for all to end. Returns the first that did not end well, and how if not by itself."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task, began = progress.add_task("starting", total=options.seconds), time.monotonic()
        while True:
            running = False
            for worker in workers:
                status = worker.process.poll()
                record = journal.last(worker.folder)
                if status is None and worker.hangs(case_seconds):
                    worker.dump()
                    worker.process.kill()  # it would not hear of anything less
                    return worker, f"hung for more than {case_seconds:g} s"
                if status and record is not None and record.error:
                    return worker, record.error
                if status not in (None, 0, 1, 2):
                    return worker, _how(status)
                if status == 1 and not any(row.findings for row in journal.rows(worker.folder)):
                    return worker, "the process ended with an exception"
                if status:
                    return worker, ""
                running |= status is None
            if not running:
                return None, ""
            rows = [row for worker in workers for row in journal.rows(worker.folder)]
            told = (
                f"{sum(row.cases for row in rows)} cases, worst {max((row.worst for row in rows), default=0):.2f} sigma"
            )
            progress.update(task, completed=time.monotonic() - began, description=told)
            time.sleep(0.1)


def _finish(console: Console, workers: list[_Worker], kept: Path | None, crashed: _Worker | None) -> None:
    """The counts of all: as a table, and in the file."""
    rows = []
    for worker in workers:
        mine = journal.rows(worker.folder)
        record = journal.last(worker.folder)
        if worker is crashed and mine and record is not None and not record.error:
            mine[-1].findings += 1
        rows += [row for row in mine if row.cases or row.findings]
    if len(rows) > 1:
        counts.show(console, rows)
    if kept is not None:
        counts.append(kept, rows)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, which `timeout` and schedulers send, ends all processes as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(
    console: Console, options: Options, start: int, processes: int, case_seconds: float, kept: Path | None = None
) -> int:
    """Fuzz in so many processes and watch them; counts are added to `kept`.

    Returns 0, 1 on a finding or a crash, 2 if nothing can run, INTERRUPTED after Ctrl-C.
    """
    if processes < 1 or not case_seconds > 0:
        console.print(f"expected processes and seconds above 0, got {processes} and {case_seconds:g}", style="red")
        return 2
    with tempfile.TemporaryDirectory(prefix="kda-fuzz-") as folder, _interruptible():
        workers: list[_Worker] = []
        crashed: _Worker | None = None
        try:
            for n in range(processes):
                workers.append(_start(options, start + n * APART, options.ledger and n == 0, Path(folder) / str(n)))
            ended, how = _watch(workers, options, case_seconds, console)
            _stop(workers)
            if ended is not None and how:
                crashed = ended
                _report(console, ended, how, case_seconds)
                return 1
            shown = workers[:1] if ended is None else [ended]
            for worker in shown:
                _print(console, worker.output())
            return 0 if ended is None else ended.process.returncode
        except KeyboardInterrupt:
            console.print("interrupted", style="red")
            return INTERRUPTED
        finally:
            _stop(workers)
            _finish(console, workers, kept, crashed)
