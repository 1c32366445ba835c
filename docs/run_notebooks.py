"""``make notebooks``: run the notebooks and keep their outputs, a picture beside every interactive figure.

``python docs/run_notebooks.py [name …]`` runs those whose file name contains one of the words, or all. Pages that
cannot run plotly's script, such as a forge's, show the picture. Without a Chromium figures have none.
"""

import base64
import json
import os
import sys
from pathlib import Path

import chromium
import nbclient
import nbformat

FOLDER = Path(__file__).parent.parent / "notebooks"
FIGURE, PICTURE = "application/vnd.plotly.v1+json", "image/png"


def run(path: Path) -> None:
    """Run one notebook and write it back with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    here = {"metadata": {"path": str(path.parent)}}  # where Jupyter would run it
    nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=here).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    bundles = [output.data for output in outputs if FIGURE in output.get("data", {})]
    if bundles and chromium.found():
        figures = [json.loads(json.dumps(bundle[FIGURE])) for bundle in bundles]
        for bundle, png in zip(bundles, chromium.pictures(figures, scale=1), strict=True):
            bundle[PICTURE] = base64.b64encode(png).decode()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    nbformat.write(notebook, path)


def main(words: list[str]) -> None:
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"  # the figure itself, without the 4 MB script
    os.environ.setdefault("TQDM_DISABLE", "1")
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not words or any(word in path.name for word in words):
            print(path.name, flush=True)
            run(path)


if __name__ == "__main__":
    main(sys.argv[1:])
