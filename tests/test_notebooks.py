"""The notebooks run from top to bottom."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_cells_run_and_are_committed_without_output(path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="notebooks draw with matplotlib")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(NOTEBOOKS)
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    scope = {"__name__": "__main__"}
    for cell in cells:
        assert not cell["outputs"] and cell["execution_count"] is None
        exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), scope)
        for number in pyplot.get_fignums():  # as a notebook does after a cell
            pyplot.figure(number).canvas.draw()
        pyplot.close("all")
