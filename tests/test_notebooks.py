"""Notebooks run from the package alone; each asserts its own numbers."""

from importlib.metadata import version
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="the notebooks extra is not installed")
nbformat = pytest.importorskip("nbformat", reason="the notebooks extra is not installed")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    if path.stem != "01_quickstart" and int(version("transformer-lens").split(".")[0]) < 4:
        pytest.skip("under older versions of TransformerLens the quickstart stands for all")
    notebook = nbformat.read(path, as_version=4)
    here = {"metadata": {"path": str(path.parent)}}  # where Jupyter would run it
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=here).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert sum("assert " in cell.source for cell in cells) >= 4
