"""The notebooks, executed from top to bottom; they are stored without outputs, so that changes can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

DIRECTORY = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(DIRECTORY.glob("*.ipynb"))
#: Seconds that the slowest may take where everything else runs too.
LONGEST = 300


def test_there_are_notebooks_and_a_list_of_them() -> None:
    listed = (DIRECTORY / "README.md").read_text()
    assert len(NOTEBOOKS) >= 6
    for path in NOTEBOOKS:
        assert path.name in listed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own assertions hold, and it draws what it speaks of. Two threads would only wait for one another."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(DIRECTORY.parent))
    monkeypatch.delenv("KDA_FIGURES", raising=False)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=LONGEST, resources={"metadata": {"path": str(DIRECTORY)}}).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in shown if "image/png" in output.get("data", {})]
    drawn = sum("style.save(" in line for cell in notebook.cells for line in cell.source.splitlines())
    assert len(pictures) >= drawn - 1 >= 3, "one may need a GPU"
    errors = [output for output in shown if output.get("name") == "stderr"]
    assert not errors, errors
