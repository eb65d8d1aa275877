"""What the README shows runs, and what it names exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import kda
from kda.dispatch import TABLE

README = (Path(__file__).parent.parent / "README.md").read_text()
MAKEFILE = (Path(__file__).parent.parent / "Makefile").read_text()


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", README, re.S))
def test_snippets_run(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if "explain" in snippet:
        assert "torch.Size([1, 300, 2, 64]) torch.Size([3, 2, 64, 64])" in printed
        assert "chosen" in printed
    else:
        assert printed == "torch.Size([3, 1, 2, 64]) True True\n"


def test_tables_are_complete() -> None:
    for name in TABLE:
        assert f"| `{name}` |" in README
    parameters = inspect.signature(kda.fwd).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = f'"{parameter.default}"' if isinstance(parameter.default, str) else str(parameter.default)
            assert f"| `{parameter.name}` | `{default}` |" in README
    for call in (kda.fwd, kda.step):
        parameters = inspect.signature(call).parameters.values()
        positional = ", ".join(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        assert f"`kda.{call.__name__}({positional}, *, ...)`" in README


def test_commands_exist() -> None:
    for target in re.findall(r"^make ([a-z-]+)", README, re.M):
        assert f"\n{target}: " in MAKEFILE


def test_environment_variables_are_told() -> None:
    root = Path(__file__).parent.parent
    sources = [path.read_text() for path in (*root.glob("kda/**/*.py"), root / "setup.py")]
    names = {name for text in sources for name in re.findall(r"(?:environ\.get\(|_set\(|switched_on\()\"(\w+)\"", text)}
    assert {"KDA_CACHE", "CUDA_HOME", "KDA_NO_JIT", "KDA_CHECK", "KDA_WITH_BINARY"} <= names
    told = re.findall(r"[`$](\w+)", README)
    assert sorted(names - {*told, "TRITON_INTERPRET"}) == []  # that one is Triton's
