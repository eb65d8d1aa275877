"""What the README shows runs, and what it names exists."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kda
from kda.dispatch import TABLE

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)
#: Those that torchrun starts, in processes of their own.
RANKS = [snippet for snippet in SNIPPETS if "init_process_group" in snippet]


def test_the_serving_recipe_is_right() -> None:
    """What the README's functions for a serving layer return, by the specification on each sequence alone."""
    (text,) = (x for x in SNIPPETS if "def prefill" in x)
    recipe: dict[str, Any] = {}
    exec(compile(text, "README.md", "exec"), recipe)
    pool, gate, slots = recipe["pool"], recipe["gate"], torch.tensor([3, 0])
    pool.normal_()
    for activated in (False, True):
        first, second = recipe["tokens"](9), recipe["tokens"](2)
        if activated:
            first, second = ((*x[:4], x[4].sigmoid()) for x in (first, second))
        before = pool.clone()
        offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
        o = recipe["prefill"](*first, offsets, slots, torch.tensor([False, True]), activated)
        next_o = recipe["decode"](*second, slots, activated)
        for n, (start, stop) in enumerate(((0, 4), (4, 9))):
            rows = [torch.cat([a[start:stop], b[n : n + 1]])[None] for a, b in zip(first, second, strict=True)]
            state = before[slots[n]][None] * n
            exact = kda.fwd(
                *rows,
                **gate,
                initial_state=state,
                output_final_state=True,
                use_beta_sigmoid=not activated,
                impl="recurrent",
            )
            torch.testing.assert_close(torch.cat([o[start:stop], next_o[n : n + 1]]), exact.o[0], rtol=2e-2, atol=2e-3)
            torch.testing.assert_close(pool[slots[n]], exact.final_state[0], rtol=1e-3, atol=1e-4)
        untouched = [1, 2, 4, 5, 6, 7]
        assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("snippet", [snippet for snippet in SNIPPETS if snippet not in RANKS])
def test_snippets_run(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if "explain" in snippet:
        assert "torch.Size([1, 300, 2, 64]) torch.Size([3, 2, 64, 64])" in printed
        assert "chosen" in printed
    elif "drafts" in snippet:
        assert printed == "torch.Size([3, 1, 2, 64]) True True\n"
    elif "checkpoint_every" in snippet:
        assert printed == "True True\n"
    elif "batch_invariant" in snippet:
        assert printed == "True\n"
    elif "torch.compile" in snippet:
        assert printed == "torch.Size([1, 65, 2, 64])\ntorch.Size([1, 130, 2, 64])\n"


def test_the_snippet_for_ranks_runs(tmp_path: Path) -> None:
    """On two, on the CPU."""
    (snippet,) = RANKS
    program = tmp_path / "context_parallel.py"
    program.write_text(snippet)
    assert f"torchrun --nproc-per-node 2 {program.name}" in snippet
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.splitlines()) == [
        "rank 0: (1, 150, 2, 64), final states of [0], True",
        "rank 1: (1, 150, 2, 64), final states of [1, 2], True",
    ]


def test_tables_are_complete() -> None:
    for name in TABLE:
        assert f"| `{name}` |" in README
    parameters = inspect.signature(kda.fwd).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = f'"{parameter.default}"' if isinstance(parameter.default, str) else str(parameter.default)
            rows = (line.split(" | ") for line in README.splitlines() if line.startswith("| `"))
            assert any(f"`{parameter.name}`" in names and value == f"`{default}`" for names, value, *_ in rows)
    for call in (kda.fwd, kda.step):
        parameters = inspect.signature(call).parameters.values()
        positional = ", ".join(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        assert f"`kda.{call.__name__}({positional}, *, ...)`" in README


def test_commands_exist() -> None:
    for target in re.findall(r"^make ([a-z-]+)", README, re.M):
        assert f"\n{target}: " in MAKEFILE


def test_environment_variables_are_told() -> None:
    sources = [path.read_text() for path in (*ROOT.glob("kda/**/*.py"), ROOT / "setup.py")]
    names = {name for text in sources for name in re.findall(r"(?:environ\.get\(|_set\(|switched_on\()\"(\w+)\"", text)}
    assert {"KDA_CACHE", "CUDA_HOME", "KDA_NO_JIT", "KDA_CHECK", "KDA_WITH_BINARY"} <= names
    told = re.findall(r"[`$](\w+)", README)
    assert sorted(names - {*told, "TRITON_INTERPRET"}) == []  # that one is Triton's
