"""``make pictures``: the README's pictures, from the embedded model. Look at them before committing."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).with_name("pictures")
WIDTH = 182


def table() -> None:
    """What the command prints, as an SVG that loads nothing from elsewhere."""
    env = os.environ | {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tl_iglens", "What is the capital of Vietnam?"]
    printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    shown = printed[: printed.rindex("\n", 0, printed.index("fed, "))]  # the rendered prompt and its ids are not part of it
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title='iglens "What is the capital of Vietnam?"')
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg).replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    (FOLDER / "table.svg").write_text(svg)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    table()
