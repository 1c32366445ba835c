"""``make pictures``: the README's pictures, from the embedded model. Look at them before committing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import chromium
from rich.console import Console
from rich.text import Text

from tl_iglens import compare, explain_generation, plotting
from tl_iglens.demo import load_demo_model

FOLDER = Path(__file__).with_name("pictures")
WIDTH = 182
QUESTION = "What is the capital of Vietnam?"
STYLE: dict[str, Any] = {"template": "plotly_white"}


def table() -> None:
    """What the command prints, as an SVG that loads nothing from elsewhere."""
    env = os.environ | {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tl_iglens", QUESTION]
    printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    # the rendered prompt and its ids are not part of it
    shown = printed[: printed.rindex("\n", 0, printed.index("fed, "))]
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title=f'iglens "{QUESTION}"')
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg).replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    (FOLDER / "table.svg").write_text(svg)


def figures() -> None:
    """The receipt of one token, the heatmap of an answer and three methods beside each other, as PNG."""
    model = load_demo_model()
    answer = explain_generation(model, QUESTION)
    methods = ("ig_lens", "logit_lens", "dla")
    comparison = compare(model, "The capital of France is", targets=" Paris", prepend_bos=False, methods=methods)
    drawn = {
        "receipt": plotting.waterfall(answer, pos=4, width=860, **STYLE),
        "heatmap": plotting.heatmap(answer, width=860, **STYLE),
        "comparison": plotting.comparison(comparison, width=860, **STYLE),
    }
    pngs = chromium.pictures([json.loads(figure.to_json()) for figure in drawn.values()])
    for name, png in zip(drawn, pngs, strict=True):
        (FOLDER / f"{name}.png").write_bytes(png)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    table()
    figures()
