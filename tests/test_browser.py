"""The report and every figure in a real browser with the network closed: drawn, literal, and answering the mouse.

Headless Chromium is driven over a pair of pipes with its own protocol; nothing beside the browser is needed.
"""

import base64
import functools
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from itertools import pairwise

import chromium
import pytest
import torch
from test_plotting import BLANK, MARKUP, every_figure, receipt

from tl_iglens import ig_lens, plotting
from tl_iglens.plotting._labels import shorten, visible
from tl_iglens.report import write_report

CHROMIUM = chromium.found()
FLAGS = [*chromium.FLAGS, "--hide-scrollbars", "--remote-debugging-pipe"]

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; on Debian: apt-get install chromium"),
    pytest.mark.skipif(sys.platform == "win32", reason="the pipes to the browser are POSIX file descriptors"),
]


class Browser:
    """A Chromium process and the two pipes it is driven by: messages are JSON, ended by a zero byte."""

    def __init__(self):
        self.folder = tempfile.mkdtemp()
        theirs, self.out = os.pipe()
        self.into, ours = os.pipe()
        quiet = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, a, b) for a, b in ((theirs, 3), (ours, 4), (quiet, 1), (quiet, 2))]
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={self.folder}", "about:blank"]
        self.pid = os.posix_spawn(CHROMIUM, words, dict(os.environ), file_actions=actions, setpgroup=0)
        for end in (theirs, ours, quiet):
            os.close(end)
        self.count, self.rest, self.events = 0, b"", []

    def call(self, method, session=None, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _read(self, seconds=60):
        end = time.monotonic() + seconds
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self.into, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("the browser does not answer")
            self.rest += part
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def close(self):
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.out)
        os.close(self.into)
        shutil.rmtree(self.folder, ignore_errors=True)


class Page:
    """A tab without a network that notes every error and every request to leave the file."""

    def __init__(self, browser, path, *, width=1200, height=1000, dark=False):
        self.browser = browser
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        closed = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.call("Network.emulateNetworkConditions", **closed)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.call("Page.navigate", url=path.as_uri())
        self.until("document.readyState === 'complete' && document.querySelector('.main-svg .subplot')")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.browser.call("Target.closeTarget", targetId=self.target)

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def js(self, code):
        """The value of an expression on the page."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def texts(self, selector):
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")

    def count(self, selector):
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def until(self, condition, seconds=15):
        end = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never: {condition}"
            time.sleep(0.03)

    def at(self, selector, number=0):
        """The middle of an element, scrolled into view."""
        box = f"document.querySelectorAll({json.dumps(selector)})[{number}]"
        self.js(f"{box}.scrollIntoView({{block: 'center'}})")
        return self.js(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box}.getBoundingClientRect())")

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x, y):
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, x, y):
        """What plotly writes beside the mouse at these coordinates of the first heatmap, bars or points."""
        place = (
            "(() => { const g = document.querySelector('.js-plotly-plot'), b = g.getBoundingClientRect();"
            f"const l = g._fullLayout, t = g._fullData[{x[0]}], axis = id => l[id[0] + 'axis' + id.slice(1)];"
            "const X = axis(t.xaxis), Y = axis(t.yaxis);"
            f"return [b.x + X._offset + X.l2p({x[1]}), b.y + Y._offset + Y.l2p({y})]; }})()"
        )
        self.move(1, 1)
        self.until("!document.querySelectorAll('.hoverlayer text').length")
        left, top = self.js(place)
        self.move(left - 2, top)
        self.move(left, top)
        self.until("document.querySelectorAll('.hoverlayer text').length")
        return " ".join(self.texts(".hoverlayer text")).replace("−", "-")

    def screenshot(self):
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def problems(self):
        """Console errors and warnings, uncaught exceptions, dialogs, and requests to anything but the file."""
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            kind, about = event["method"], event["params"]
            if kind == "Runtime.exceptionThrown":
                found.append(about["exceptionDetails"])
            if kind == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                found.append(about["entry"]["text"])
            if kind == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                found.append(about["args"])
            if kind == "Page.javascriptDialogOpening":
                found.append(about["message"])
            if kind == "Network.requestWillBeSent" and not about["request"]["url"].startswith(
                ("file:", "data:", "blob:")
            ):
                found.append(about["request"]["url"])
        return found


@pytest.fixture(scope="module")
def browser():
    started = Browser()
    yield started
    started.close()


PROMPT = ("The", " capital", *MARKUP, *BLANK, " is")
TOKENS = [visible(token) for token in PROMPT]


@pytest.fixture(scope="module")
def result():
    return receipt(PROMPT, n_blocks=20, seed=3)


@pytest.fixture(scope="module")
def report(result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    return write_report(result, folder / "report.html", title="<script>alert(1)</script> $x$")


def written(figure, folder, name="figure"):
    path = folder / f"{name}.html"
    figure.write_html(path, include_plotlyjs=True)
    return path


# --- the page itself ----------------------------------------------------------------------------


def test_a_page_that_leaves_its_file_or_fails_is_seen(browser, tmp_path):
    """The checks below can fail: a page with an error, a dialog and a request to another place has all three noted."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<svg class='main-svg'><g class='subplot'></g></svg><img src='http://example.invalid/x.png'>"
        "<script>console.error('wrong'); setTimeout(() => missing(), 0)</script>"
    )
    with Page(browser, path) as page:
        page.until("true")
        time.sleep(0.3)
        page.js("0")
        problems = str(page.problems())
    assert "wrong" in problems and "missing is not defined" in problems and "example.invalid" in problems


@pytest.mark.parametrize("dark", [False, True])
def test_the_report_is_drawn_without_a_network_or_an_error(browser, report, result, dark):
    with Page(browser, report, dark=dark) as page:
        page.until("document.querySelector('#heatmap .heatmaplayer image')")
        assert page.texts("button.tok") == TOKENS
        assert page.texts("h1") == ["<script>alert(1)</script> $x$"] == page.texts("title")
        assert page.count("#tokens tbody tr") == len(PROMPT)
        assert page.count("#heatmap .scatterlayer .point") == len(PROMPT)  # an onset per token
        assert page.count("#heatmap .barlayer .point") == len(PROMPT) + 20
        z = page.js("document.querySelector('#heatmap').data[0].z.map(r => Array.from(r))")
        assert torch.allclose(torch.tensor(z), result.attribution[:, 0], atol=1e-7)
        assert page.texts("#heatmap .x3tick text") == [shorten(t, 16) for t in TOKENS]
        ground, ink = (page.js(f"getComputedStyle(document.body).{c}") for c in ("backgroundColor", "color"))
        assert (ground, ink) == (
            ("rgb(20, 23, 28)", "rgb(236, 239, 243)") if dark else ("rgb(255, 255, 255)", "rgb(28, 36, 48)")
        )
        assert len(page.screenshot()) > 20_000
        assert page.problems() == []


def rows(page):
    """The receipt as [label, number] pairs."""
    return page.js(
        "[...document.querySelectorAll('#receipt tr')].map(r => [...r.cells].slice(0, 2).map(c => c.textContent))"
    )


def number(text):
    return float(text.replace("−", "-"))


def test_hovering_over_a_token_shows_its_receipt_and_a_click_keeps_it(browser, report, result):
    with Page(browser, report) as page:

        def shown():
            return page.texts("#receipt .who")[0]

        last = f"{visible(result.target_strings[0][-1])} predicted after {TOKENS[-1]} (place {len(PROMPT) - 1})"
        assert shown() == last
        for i in (0, 3, 6):
            page.move(*page.at("button.tok", i))
            want = f"{visible(result.target_strings[0][i])} predicted after {TOKENS[i]} (place {i})"
            page.until(f"document.querySelector('#receipt .who').textContent === {json.dumps(want)}")
            receipt_rows = rows(page)
            assert receipt_rows[0][0] == "start, 0_pre" and receipt_rows[-1][0] == "end, final_post"
            assert number(receipt_rows[-1][1]) == pytest.approx(result.levels[-1, 0, i].item(), abs=1e-6)
            credits = dict(zip(result.labels, result.attribution[:, 0, i].tolist(), strict=True))
            named = {label.removesuffix(" ◆ onset"): number(value) for label, value in receipt_rows[1:-1]}
            assert sum("◆" in label for label, _ in receipt_rows) <= 1 and "other, 8 segments" in named
            for label, value in named.items():
                if label in credits:
                    assert value == pytest.approx(credits[label], abs=1e-6)
            assert sum(named.values()) == pytest.approx(result.delta[0, i].item(), abs=2e-5)
        page.move(2, 2)
        page.until(f"document.querySelector('#receipt .who').textContent === {json.dumps(last)}")
        page.click(*page.at("button.tok", 1))
        page.move(2, 2)
        page.until(f"document.querySelector('#receipt .who').textContent.includes('after {TOKENS[1]} (place 1)')")
        page.click(*page.at("#all"))
        page.until("document.querySelectorAll('#receipt tr').length === 22")
        assert [label.removesuffix(" ◆ onset") for label, _ in rows(page)[1:-1]] == list(result.labels)
        page.click(*page.at("#tokens tbody tr", 4))
        page.until("document.querySelector('#receipt .who').textContent.includes('(place 4)')")
        assert page.problems() == []


def test_the_heatmap_of_the_report_answers_the_mouse(browser, report, result):
    with Page(browser, report) as page:
        page.at("#heatmap")
        text = page.hover((0, 4), 19)
        assert TOKENS[4] in text and "19_block" in text and f"{result.attribution[19, 0, 4].item():+.6f}" in text
        place = page.js(
            "(() => { const g = document.querySelector('#heatmap'), l = g._fullLayout, b = g.getBoundingClientRect();"
            "return [b.x + l.xaxis3._offset + l.xaxis3.l2p(4), b.y + l.yaxis3._offset + l.yaxis3.l2p(10)]; })()"
        )
        page.click(*place)
        page.until("document.querySelector('#receipt .who').textContent.includes('(place 4)')")
        assert page.problems() == []


def test_another_prompt_brings_its_own_heatmap(browser, lens_model, tmp_path):
    both = ig_lens(lens_model, [[1, 5, 40, 17], [9, 33, 20, 8]], pos_slice=None)
    with Page(browser, write_report(both, tmp_path / "r.html")) as page:
        assert page.texts("#which") == [" of prompt 1"]
        page.click(*page.at("button.tok", 0))
        page.until("document.querySelector('#which').textContent === ' of prompt 0'")
        z = page.js("document.querySelector('#heatmap').data[0].z.map(r => Array.from(r))")
        assert torch.allclose(torch.tensor(z), both.attribution[:, 0], atol=1e-7)
        assert page.problems() == []


# --- the figures --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers():
    from conftest import small_model
    from test_plotting import answers as build

    name = "gpt2-raw"
    try:
        model = small_model(name)
    except pytest.skip.Exception:
        model = small_model("hooked-LN")
    return getattr(build, "__wrapped__", build)(model)


# figure: (how many marks of which kind, as a function of the answers)
MARKS = {
    "heatmap": (".heatmaplayer image", lambda a: 1),
    "waterfall": (".trace.bars .point", lambda a: len(plotting.waterfall(a["ig"]).data[0].x)),
    "trajectory": (".scatterlayer .point", lambda a: 2 * len(a["ig"].point_labels)),
    "comparison": (
        ".trace.bars .point",
        lambda a: len(a["ig"].labels) + sum(map(bool, a["comparison"]["dla"].ends)),
    ),
    "components": (".trace.bars .point", lambda a: 4),
    "ablation": (".trace.bars .point", lambda a: len(a["ablation"].labels)),
    "scatter": (".scatterlayer .point", lambda a: len(a["last"].labels)),
    "flow": (".trace.bars .point", lambda a: 8 * len(a["flow"].labels)),
    "candidates": (".scatterlayer .point", lambda a: 4 * len(a["track"].point_labels)),
    "baselines": (".scatterlayer .point", lambda a: 3 * len(a["baselines"])),
}
# figure: (trace, x, y) to hover over, and words the receipt there holds
HOVERS = {
    "heatmap": ((0, 0), 0, ("segment", "0_block", "credit", "level", "rank", "top tokens")),
    "waterfall": ((0, "l.xaxis.range[1]"), 0, ("start", "0_pre")),  # anywhere in the row
    "trajectory": ((0, 1), "t.y[1]", ("1_pre", "level")),
    "comparison": ((1, 1), "t.y[1]", ("1_pre", "rank")),
    "components": ((0, "t.x[0] / 2"), 0, ("credit", "rank 1 of")),
    "ablation": ((0, "t.x[0] / 2"), 0, ("effect", "when ablated")),
    "scatter": ((0, "t.x[0]"), "t.y[0]", ("credit", "when ablated")),
    "flow": ((0, "t.x[0] / 2"), 0, ("gained",)),
    "candidates": ((0, 1), "t.y[1]", ("1_pre", "level")),
    "baselines": ((0, 1), 0, ("baseline", "embed", "credit")),
}


@pytest.mark.parametrize(("name", "template"), list(zip(MARKS, ("plotly_white", "plotly_dark") * 5, strict=True)))
def test_every_figure_is_drawn_and_answers_the_mouse(browser, answers, tmp_path, name, template):
    figure = every_figure(answers, template=template)[name]
    with Page(browser, written(figure, tmp_path)) as page:
        selector, marks = MARKS[name]
        page.until(f"document.querySelectorAll({json.dumps(selector)}).length")
        assert page.count(selector) == marks(answers)
        assert len(page.texts(".gtitle")) == 1
        (trace, x), y, words = HOVERS[name]
        text = page.hover((trace, x), y)
        assert all(word in text for word in words), text
        assert outside(page) == []
        assert page.problems() == []


def outside(page):
    """Texts that reach beyond the figure's edge, with how far."""
    return page.js(
        "(() => { const g = document.querySelector('.js-plotly-plot').getBoundingClientRect();"
        "const texts = [...document.querySelectorAll('.main-svg text')].filter(t => !t.closest('.hoverlayer'));"
        "const over = b => Math.max(g.left - b.left, b.right - g.right, g.top - b.top, b.bottom - g.bottom);"
        "return texts.map(t => [t.textContent, t.getBoundingClientRect()])"
        ".filter(([text, b]) => text && b.width && over(b) > 1).map(([text, b]) => [text, over(b)]); })()"
    )


@pytest.mark.parametrize("template", ["plotly", "none"])
def test_odd_tokens_are_literal_text_on_the_axis_and_on_hover(browser, result, tmp_path, template):
    figure = plotting.heatmap(result, template=template, title="<b>bold</b> & $x$", width=1100)
    with Page(browser, written(figure, tmp_path)) as page:
        assert page.texts(".x3tick text") == [shorten(t, 16) for t in TOKENS]
        assert page.texts(".gtitle tspan.line")[0] == "<b>bold</b> & $x$"
        for i, token in enumerate(PROMPT):
            assert f"{visible(token)} → {visible(result.target_strings[0][i])}" in page.hover((0, i), 3)
        assert page.problems() == []


def test_math_is_left_alone_where_mathjax_is_loaded(browser, result, tmp_path):
    """A stand-in for MathJax notes whether plotly hands it a text; a bare ``$x$`` shows that it would."""
    spy = (
        "<script>window.asked = 0; window.MathJax = new Proxy({version: '3.2.0'}, "
        "{get(target, name) { window.asked += 1; return target[name]; }});</script>"
    )
    bare = plotting.heatmap(result)
    bare.layout.xaxis.title.text = "$x$"
    asked = {}
    for name, figure in (("ours", plotting.heatmap(result, title="$x^2$")), ("bare", bare)):
        path = written(figure, tmp_path, name)
        path.write_text(path.read_text("utf-8").replace("<head>", "<head>" + spy, 1), "utf-8")
        with Page(browser, path) as page:
            page.until("document.querySelectorAll('.heatmaplayer image').length || window.asked")
            time.sleep(0.3)
            asked[name] = page.js("window.asked")
    assert asked["bare"] > asked["ours"] == 0


def test_a_long_prompt_shows_its_last_columns_with_all_their_labels(browser, tmp_path):
    long = receipt(tuple(f" w{i}" for i in range(512)), n_blocks=61)
    figure = plotting.heatmap(long)
    with Page(browser, written(figure, tmp_path), height=1400) as page:
        assert page.texts(".x3tick text") == [f"·w{i}" for i in range(472, 512)]
        assert page.texts(".y3tick text")[-1] == "60_block" and page.count(".y3tick text") == 61
        assert f"{long.attribution[60, 0, 511].item():+.6f}" in page.hover((0, 511), 60)
        # every token once they are all in view: as many labels as fit, none on another
        page.js(
            "Plotly.relayout(document.querySelector('.js-plotly-plot'), {'xaxis.range': [-0.5, 511.5]}).then(() => 1)"
        )
        page.until("document.querySelectorAll('.x3tick text').length !== 40")
        code = "[...document.querySelectorAll('.x3tick text')].map(t => t.getBoundingClientRect())"
        boxes = sorted(page.js(f"{code}.map(b => [b.left, b.right])"))
        assert len(boxes) > 30 and all(a[1] <= b[0] + 1 for a, b in pairwise(boxes))
        assert page.problems() == []


@functools.cache
def _pixels():
    return pytest.importorskip("PIL.Image")


def test_figures_export_themselves_without_a_network(browser, result, tmp_path):
    """The camera button of the report works offline: the picture it makes is drawn, not blank."""
    with Page(browser, written(plotting.waterfall(result), tmp_path)) as page:
        url = page.js(
            "Plotly.toImage(document.querySelector('.js-plotly-plot'), {format: 'png', width: 800, height: 500})"
        )
    assert url.startswith("data:image/png;base64,")
    path = tmp_path / "figure.png"
    path.write_bytes(base64.b64decode(url.split(",")[1]))
    assert len(_pixels().open(path).convert("RGB").getcolors(1 << 20)) > 50
