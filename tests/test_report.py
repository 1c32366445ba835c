"""The report is one offline page that shows every text as it stands and every number of the result."""

import base64
import dataclasses
import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from test_plotting import BLANK, MARKUP, receipt

from tl_iglens.plotting._labels import visible
from tl_iglens.report import write_report

PROMPT = ("The", " capital", *MARKUP, *BLANK, " is")


class Page(HTMLParser):
    """What a browser would find: elements with their attributes, and the text inside some of them."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "wbr"):
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, text):
        if self.open:
            tag, attrs = self.open[-1]
            key = attrs.get("id") or attrs.get("class", "").split(" ")[0] or tag
            self.texts.setdefault(key, []).append(text)


def read(path):
    return path.read_text("utf-8")


@pytest.fixture(scope="module")
def result():
    return receipt(PROMPT, n_blocks=5)


@pytest.fixture(scope="module")
def text(result, tmp_path_factory):
    return read(write_report(result, tmp_path_factory.mktemp("report") / "r.html", title="<b>$x$</b> {{data}}"))


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


@pytest.fixture(scope="module")
def data(page):
    return json.loads("".join(page.texts["data"]))


def test_it_is_one_file_without_an_outside_address(text, page):
    assert len(text.encode()) < 6e6
    assert text.count("plotly.js v") == 1
    assert not re.findall(r"(?:src|href)\s*=\s*\\?[\"']?\s*(?:https?:)?//", text)
    assert not [attrs for _, attrs in page.elements if "src" in attrs or "href" in attrs]
    assert not [tag for tag, _ in page.elements if tag in ("link", "iframe", "img", "base", "object")]
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "http" not in policy


def test_every_token_stands_there_as_it_is(page, result):
    assert page.texts["tok"] == [visible(token) for token in PROMPT]
    assert page.texts["title"] == ["<b>$x$</b> {{data}}"] == page.texts["h1"]
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"s", "x"} and len([t for t, _ in page.elements if t == "script"]) == 3
    cells = page.texts["mono"]
    assert cells[::2] == [visible(t) for t in PROMPT] and cells[1::2] == [visible(t) for t in result.target_strings[0]]


def test_the_page_holds_the_results_own_numbers(data, result):
    credits = np.frombuffer(base64.b64decode(data["credits"]), np.float32).reshape(len(PROMPT), 5)
    assert data["bits"] == 32 and np.array_equal(credits, result.attribution[:, 0].T.numpy())
    for i, cell in enumerate(data["cells"]):
        assert cell["start"] == result.levels[0, 0, i].item() and cell["end"] == result.levels[-1, 0, i].item()
        assert cell["model"] == result.model_level[0, i].item() and cell["place"] == i
        assert cell["onset"] == result.onset().index[0, i].item()
        assert (cell["token"], cell["target"]) == (visible(PROMPT[i]), visible(result.target_strings[0][i]))
    assert data["labels"] == [f"{b}_block" for b in range(5)]


def test_float64_credits_stay_float64(tmp_path):
    exact = receipt(("a", "b"), dtype=torch.float64)
    data = json.loads("".join(Page(read(write_report(exact, tmp_path / "r.html"))).texts["data"]))
    credits = np.frombuffer(base64.b64decode(data["credits"]), np.float64).reshape(2, 4)
    assert data["bits"] == 64 and np.array_equal(credits, exact.attribution[:, 0].T.numpy())


def test_the_table_has_a_row_per_token(page, result):
    rows = [a for tag, a in page.elements if tag == "tr" and "data-cell" in a]
    assert [int(a["data-cell"]) for a in rows] == list(range(len(PROMPT)))
    numbers = [float(text.replace("−", "-")) for text in page.texts["n"][6:]]  # after the heads of the columns
    by_row = np.array(numbers).reshape(len(PROMPT), -1)
    assert np.allclose(by_row[:, 1], result.levels[0, 0], atol=1e-6)
    assert np.allclose(by_row[:, 2], result.levels[-1, 0], atol=1e-6)
    assert np.allclose(by_row[:, 4], result.delta[0], atol=1e-6)
    assert np.allclose(by_row[:, 5], result.cancellation[0], rtol=1e-3, atol=6e-3)


def test_tokens_are_shaded_by_their_onset(page, result):
    shades = [a["class"] for tag, a in page.elements if tag == "button" and "data-cell" in a]
    assert shades == [f"tok o{i}" for i in result.onset().index[0].tolist()]


def test_tokens_without_an_onset_say_so(tmp_path, result):
    flat = dataclasses.replace(result, attribution=torch.zeros_like(result.attribution))
    page = Page(read(write_report(flat, tmp_path / "r.html")))
    assert {a["class"] for tag, a in page.elements if tag == "button" and "data-cell" in a} == {"tok o-none"}


def test_only_analysed_tokens_are_buttons(tmp_path):
    whole = receipt(("a", "b", "c", "d"))
    last = dataclasses.replace(
        whole,
        **{n: getattr(whole, n)[..., -1:] for n in ("attribution", "levels", "model_level", "targets", "positions")},
        target_strings=(("d",),),
    )
    page = Page(read(write_report(last, tmp_path / "r.html")))
    kinds = [(tag, attrs["class"]) for tag, attrs in page.elements if attrs.get("class", "").startswith("tok")]
    assert [tag for tag, _ in kinds] == ["span", "span", "span", "button"]


def test_the_middle_of_a_long_run_of_other_tokens_is_counted_not_shown(tmp_path):
    whole = receipt(tuple(f"w{i}" for i in range(50_000)), n_blocks=2)
    ends = [0, 49_999]
    names = ("attribution", "levels", "model_level", "targets", "positions")
    two = dataclasses.replace(whole, **{n: getattr(whole, n)[..., ends] for n in names}, target_strings=(("a", "b"),))
    page = Page(read(write_report(two, tmp_path / "r.html")))
    shown = page.texts["tok"]
    assert shown == [*(f"w{i}" for i in range(201)), *(f"w{i}" for i in range(49_799, 50_000))]
    assert "… 49598 tokens …" in page.texts["soft"]


def test_long_tokens_do_not_make_the_page_too_large(tmp_path):
    path = write_report(receipt(tuple("日" * 400 for _ in range(800)), n_blocks=2), tmp_path / "r.html")
    kept = [a for tag, a in Page(read(path)).elements if tag == "button" and "data-cell" in a]
    assert path.stat().st_size < 6e6 and 20 < len(kept) < 800


def test_a_result_too_large_is_cut_to_its_last_tokens(tmp_path):
    huge = receipt(tuple("ab" * 2048), n_blocks=80)
    path = write_report(huge, tmp_path / "r.html")
    page = Page(read(path))
    assert path.stat().st_size < 6e6
    kept = [int(a["data-cell"]) for tag, a in page.elements if tag == "button" and "data-cell" in a]
    assert 300 < len(kept) < 4096
    data = json.loads("".join(page.texts["data"]))
    assert data["cells"][-1]["place"] == 4095 and data["cells"][0]["place"] == 4096 - len(kept)
    assert f"{4096 - len(kept)} analysed tokens are not on this page" in " ".join(page.texts["b"])


def test_a_batch_has_every_prompt(tmp_path):
    one = receipt(("x", "y", "z"))
    names = ("attribution", "levels")
    both = dataclasses.replace(
        one,
        **{n: torch.cat([getattr(one, n)] * 2, 1) for n in names},
        **{n: torch.cat([getattr(one, n)] * 2, 0) for n in ("targets", "tokens", "attention_mask", "model_level")},
        positions=torch.tensor([[0, 1, 2], [0, 1, -1]]),
        token_strings=(("x", "y", "z"), ("u", "v", "w")),
        target_strings=(("y", "z", "x"), ("v", "u", "?")),
    )
    page = Page(read(write_report(both, tmp_path / "r.html")))
    data = json.loads("".join(page.texts["data"]))
    assert [(c["row"], c["token"]) for c in data["cells"]] == [
        (0, "x"),
        (0, "y"),
        (0, "z"),
        (1, "u"),
        (1, "v"),
    ]
    assert [(f["first"], f["count"]) for f in data["figures"]] == [(0, 3), (3, 2)]


def test_lone_surrogates_and_odd_names_can_be_written(tmp_path):
    odd = receipt(("\ud83d", "\ud800x"), model="<i>\udcff")
    text = read(write_report(odd, tmp_path / "r.html", title="\ud83d"))
    assert "&lt;U+D83D&gt;" in text and "<i>" not in text.replace("<i></i>", "")


def test_the_file_is_replaced_whole_or_not_at_all(tmp_path, result):
    path = tmp_path / "r.html"
    path.write_text("before")
    broken = dataclasses.replace(result, target_strings=())
    with pytest.raises(IndexError):
        write_report(broken, path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    assert write_report(result, str(path)) == path and len(read(path)) > 1e6


def test_a_folder_is_no_report(tmp_path, result):
    message = f"path must be a file to write, got the folder {tmp_path}; name a file in it, such as report.html"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        write_report(result, tmp_path)


def test_the_caption_states_what_the_numbers_are(page, result):
    assert page.texts["caption"] == [result.caption()]
    assert html.escape("toy-model") in " ".join(page.texts["dd"])


def test_the_command_writes_the_report(tmp_path, monkeypatch, capsys):
    from fixtures import needs_bridge, shared_bridge

    from tl_iglens import cli

    needs_bridge()
    monkeypatch.setattr(cli, "load_model", lambda name, progress: shared_bridge("llama"))
    path = tmp_path / "receipt.html"
    words = ("The <b>cat", "--model", "any", "--max-new-tokens", "3", "--onset", "largest", "--html", str(path))
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    out = capsys.readouterr().out
    assert ended.value.code == 0 and str(path) in out.replace("\n", "")
    page = Page(read(path))
    data = json.loads("".join(page.texts["data"]))
    assert page.texts["h1"] == ["The <b>cat"] and data["cells"]
    assert "onset, rule largest" in "".join(page.texts["soft"])
    for cell in data["cells"]:
        assert cell["target"] in out
    with pytest.raises(SystemExit) as refused:
        cli.main(("The", "--model", "any", "--html", str(tmp_path)))
    message = (
        f"iglens: html must be a file in an existing folder that can be written, got {str(tmp_path)!r}; "
        "choose another place\n"
    )
    assert refused.value.code == 2 and capsys.readouterr().err == message
