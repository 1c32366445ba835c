"""Pictures of figures, drawn by a Chromium that is installed beside Python; no network, nothing to add to it."""

import base64
import html
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
WIDTH = 860  # of figures that leave it to the page

PAGE = """<!DOCTYPE html><meta charset="utf-8"><body><div id="place"></div><script>{plotly}</script>
<script type="application/json" id="figures">{figures}</script><script>
(async () => {{
  const pictures = [];
  for (const [figure, options] of JSON.parse(document.getElementById("figures").textContent)) {{
    const place = document.createElement("div");
    document.getElementById("place").append(place);
    await Plotly.newPlot(place, figure.data, {{...figure.layout, width: options.width, height: options.height}});
    pictures.push(await Plotly.toImage(place, options));
  }}
  document.body.innerHTML = "";
  document.body.append(Object.assign(document.createElement("pre"), {{textContent: pictures.join(" ")}}));
}})();
</script>"""


def found() -> str | None:
    """The browser, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def pictures(figures: Sequence[Mapping[str, Any]], *, scale: float = 1.5) -> list[bytes]:
    """PNG files of figures given as plotly's JSON, ``{"data": …, "layout": …}``."""
    browser = found()
    if browser is None:
        raise RuntimeError(f"pictures need one of {', '.join(NAMES)}, none is installed; apt-get install chromium")
    asked = [[figure, {"format": "png", "scale": scale, **_size(figure["layout"])}] for figure in figures]
    text = json.dumps(asked).replace("<", "\\u003c")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(PAGE.format(plotly=get_plotlyjs(), figures=text), "utf-8")
        drawn = ("--virtual-time-budget=60000", "--dump-dom")
        command = [browser, *FLAGS, *drawn, f"--user-data-dir={folder}/profile", page.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    shown = re.search(r"<pre>(.*?)</pre>", dom, re.S)
    if shown is None:
        raise RuntimeError("the browser drew nothing; open the figure with write_html and look at its console")
    return [base64.b64decode(url.partition(",")[2]) for url in html.unescape(shown[1]).split()]


def _size(layout: Mapping[str, Any]) -> dict[str, int]:
    return {"width": int(layout.get("width") or WIDTH), "height": int(layout.get("height") or 450)}
