"""Results of the benchmark as JSON, and as the Markdown that is made of it."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kda.bench import accuracy, decode, forward, host, segments, serving
from kda.bench.session import Row, Session, Table

#: The tables, in the order in which they are shown.
TABLES: dict[str, Table] = {
    **{suite: forward.table(suite) for suite in forward.SUITES},
    "segments": segments.TABLE,
    "decode": decode.TABLE,
    "serving": serving.TABLE,
    "host": host.TABLE,
    **accuracy.TABLES,
}

#: What stands between these in a file is the benchmark's and is replaced; the rest of the file is left as it is.
BEGIN = "<!-- begin: written by `python -m kda bench --markdown`, do not edit -->"
END = "<!-- end -->"

#: Table -> {"run": where and when it was measured, "rows": what}.
Results = dict[str, dict[str, Any]]


def driver() -> str:
    """The NVIDIA driver's version as its own tool has it; an empty text where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return f"driver {done.stdout.split()[0]}" if done.returncode == 0 and done.stdout.split() else ""


def run_of(session: Session, versions: str, note: str | None) -> Row:
    """Where and when a session measures. The rates are those that its floors are made of; 0 if none was needed."""
    measured = vars(session)  # where cached_property keeps its value
    return {
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "note": note or "",
        "bandwidth": measured.get("bandwidth", 0.0),
        "rate": measured.get("rate", 0.0),
    }


def save(results: Results, path: str) -> None:
    """Write results as JSON."""
    Path(path).write_text(json.dumps(results, indent=1) + "\n")


def load(paths: Sequence[str]) -> Results:
    """Read results; of a table that is in several files the last counts.

    Raises ValueError for what is no such file.
    """
    results: Results = {}
    for path in paths:
        try:
            found = json.loads(Path(path).read_text())
            for name, table in found.items():
                if name not in TABLES or not {"run", "rows"} <= table.keys():
                    raise ValueError(f"unknown table {name!r}")
                describe(table["run"])
                for row in table["rows"]:
                    [column.text(row) for column in TABLES[name].columns]
        except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{path}: expected results of `python -m kda bench --json`, got {error!r}") from error
        results |= found
    return {name: results[name] for name in TABLES if name in results}


def _lines(texts: list[list[str]]) -> str:
    lines = [texts[0], ["---"] * len(texts[0]), *texts[1:]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def describe(run: Mapping[str, Any]) -> str:
    """Where and when it was measured, and what the floors are made of."""
    rates = []
    if run["bandwidth"]:
        rates.append(f"copies {run['bandwidth'] / 1e12:.2f} TB/s")
    if run["rate"]:
        rates.append(f"products of bf16 matrices {run['rate'] / 1e12:.0f} TFLOP/s")
    measured = f" In this run: {', '.join(rates)}." if rates else ""
    note = f" {run['note']}" if run["note"] else ""
    return f"{run['versions']}; {run['date']}.{note}{measured}"


def markdown(results: Results) -> str:
    """The tables; what would stand below two headings in a row is said once."""
    parts: list[str] = []
    where, said = "", ""
    for name in (name for name in TABLES if name in results):
        table, run = TABLES[name], describe(results[name]["run"])
        about = "Columns as above." if table.about == said else table.about
        head = [text for text in ("" if run == where else run, about) if text]
        where, said = run, table.about
        parts.append("\n\n".join([f"### {table.title}", *head, _lines(table.texts(results[name]["rows"]))]))
    return "\n\n".join(parts) + "\n"


def place(path: str) -> tuple[str, str]:
    """What stands before and after the tables in a file; nothing around them if it is new or empty.

    Raises ValueError for a file with something in it and no place for them.
    """
    target = Path(path)
    before = target.read_text() if target.exists() else ""
    if not before.strip():
        return "", ""
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"--markdown: expected a new file, or one with the lines {BEGIN} and {END}, got {path}")
    return head, tail


def write(results: Results, path: str) -> None:
    """Write the tables to their place in a file; what was there is replaced. Raises ValueError as `place`."""
    head, tail = place(path)
    Path(path).write_text(f"{head}{BEGIN}\n\n{markdown(results)}\n{END}{tail or chr(10)}")
