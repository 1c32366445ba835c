"""What results look like in a notebook: the result's own numbers, and no text that is taken for markup."""

import dataclasses
from html.parser import HTMLParser

import pytest
import torch
from conftest import IDS, small_model
from test_plotting import receipt

from tl_iglens import _html, compare, direct_probability_attribution, ig_lens, probability_flow, track
from tl_iglens.ablation import ablate
from tl_iglens.tokens import visible
from tl_iglens.validation import PromptScores, judge

EVIL = "</td><script>alert(1)</script>&amp;\u202e"


class Tables(HTMLParser):
    """The tables of a page: title, rows of texts, and which rows are bold; and everything outside of them."""

    def __init__(self, page):
        super().__init__()
        self.tables, self.outside, self.open = [], [], []
        self.feed(page)
        assert not self.open, "a tag stays open"

    def handle_starttag(self, tag, attrs):
        assert tag in ("div", "p", "table", "caption", "thead", "tbody", "tr", "th", "td"), tag
        assert set(dict(attrs)) <= {"style"}
        self.open.append(tag)
        if tag == "table":
            self.tables.append({"title": "", "rows": [], "bold": []})
        if tag == "tr":
            if "bold" in dict(attrs).get("style", ""):
                self.tables[-1]["bold"].append(len(self.tables[-1]["rows"]))
            self.tables[-1]["rows"].append([])
        if tag in ("td", "th"):
            self.tables[-1]["rows"][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] == "caption":
            self.tables[-1]["title"] += data
        elif self.open[-1] in ("td", "th"):
            self.tables[-1]["rows"][-1][-1] += data
        else:
            self.outside.append(data)


def tables(result):
    page = result._repr_html_()
    assert "\u202e" not in page  # no control that would turn the text around
    found = Tables(page)
    assert found.outside[0] == result.caption()
    return found.tables


def value(text):
    return float(text.replace("−", "-"))


@pytest.fixture(scope="module")
def answers():
    """Results of every kind from one small random model."""
    try:
        model = small_model("gpt2-raw")
    except pytest.skip.Exception:
        model = small_model("hooked-LN")
    return {
        "ig": ig_lens(model, IDS, pos_slice=None),
        "components": direct_probability_attribution(model, IDS, unit="head"),
        "comparison": compare(model, IDS, pos_slice=None),
        "ablation": ablate(model, [IDS, IDS[::-1]], unit="head"),
        "track": track(model, IDS, top_k=3, pos_slice=(-2, None)),
        "flow": probability_flow(model, IDS, k=2),
    }


# --- the parts ----------------------------------------------------------------------------------


def test_numbers_have_a_true_minus_and_never_read_as_zero():
    assert _html.number(-0.25, "+.3f") == "−0.250" and _html.number(0.25, "+.3f") == "+0.250"
    assert _html.number(-2e-9, "+.6f") == "−2.0e−09" and _html.number(0.0, ".3f") == "0.000"
    assert _html.number(float("nan"), ".3f") == "nan"


@pytest.mark.parametrize(
    ("sizes", "top", "kept"),
    [
        ([3, 1, 2, 4], 2, [0, 3]),
        ([3, 1, 2, 4], 3, [0, 1, 2, 3]),  # a single one is not gathered
        ([5, 1e-4, 1e-4, 6], 8, [0, 3]),
        ([0.0, 0.0, 0.0], 8, []),
        ([1.0], 8, [0]),
    ],
)
def test_small_rows_are_gathered_but_never_a_single_one(sizes, top, kept):
    assert _html.largest(sizes, top) == kept


# --- receipts -----------------------------------------------------------------------------------


def test_a_receipt_adds_up_and_marks_its_onset():
    result = receipt(("a", "b"), n_blocks=20, seed=5)
    for p, table in enumerate(tables(result)):
        names, amounts = zip(*table["rows"], strict=True)
        assert names[0] == "start" and names[-2:] == ("end", "model")
        assert len(names) == 12 and names[-3] == "other, 12 segments"
        start, *credits, end, own = map(value, amounts)
        assert sum(credits) == pytest.approx(end - start, abs=1e-5)
        assert (start, end) == pytest.approx((result.levels[0, 0, p].item(), result.levels[-1, 0, p].item()), abs=1e-6)
        assert own == pytest.approx(result.model_level[0, p].item(), abs=1e-6)
        shown = [int(name.split("_")[0]) for name in names[1:-3]]
        assert shown == sorted(result.attribution[:, 0, p].abs().topk(8).indices.tolist())
        for s, text in zip(shown, amounts[1:-3], strict=True):
            assert value(text) == pytest.approx(result.attribution[s, 0, p].item(), abs=1e-6)
        assert all("-" not in text for text in amounts) and any("−" in text for text in amounts)
        onset = result.onset().labels[0][p]
        assert table["title"].endswith(f"· onset {onset}")
        marked = [names[i] for i in table["bold"]]
        assert marked == ([f"{onset} ◆"] if int(onset.split("_")[0]) in shown else [])
    assert any(table["bold"] for table in tables(result))


def test_a_gradient_rule_says_what_it_misses():
    whole = receipt(("a",), n_blocks=3)
    assert "not in the credits" not in whole._repr_html_()
    rough = dataclasses.replace(whole, attribution=whole.attribution * 0.9)
    rows = dict(tables(rough)[0]["rows"])
    assert value(rows["not in the credits"]) == pytest.approx(-rough.completeness_gap[0, 0].item(), abs=1e-6)


def test_components_are_gathered_under_their_name_and_have_no_onset(answers):
    result = answers["components"]
    (table,) = tables(result)
    rows = dict(table["rows"])
    assert f"other, {len(result.labels) - 8} components" in rows and "onset" not in table["title"]
    start, end = value(rows.pop("start")), value(rows.pop("end"))
    rows.pop("model")
    assert sum(map(value, rows.values())) == pytest.approx(end - start, abs=6e-6)  # eleven numbers are rounded
    assert "◆" not in str(rows) and not table["bold"]


# --- the other results --------------------------------------------------------------------------


def test_a_comparison_shows_what_its_methods_sum_to(answers):
    result = answers["comparison"]
    (table,) = tables(result)
    known = result.additivity()
    known = known[known["column"] == known["column"].max()].set_index("method")
    for name, _, _, total, should, expected, gap in table["rows"][1:]:
        assert value(total) == pytest.approx(known.loc[name, "total"], abs=1e-6)
        if name == "logit_lens":
            assert (should, expected, gap) == ("levels sum to nothing", "", "")
        else:
            assert should == known.loc[name, "sums_to"]
            assert value(expected) == pytest.approx(known.loc[name, "expected"], abs=1e-6)
    assert [row[0] for row in table["rows"][1:]] == list(result.methods)


def test_an_ablation_shows_its_largest_effects_and_the_range_of_the_others(answers):
    result = answers["ablation"]
    for b, table in enumerate(tables(result)):
        head, *rows, other = table["rows"]
        assert head == ["ablated", "p ablated", "effect"] and len(rows) == 8
        for name, p, effect in rows:
            s = result.labels.index(name)
            assert (value(p), value(effect)) == pytest.approx(
                (result.p_ablated[s, b].item(), result.effect[s, b].item()), abs=1e-6
            )
        rest = [i for i, label in enumerate(result.labels) if label not in [row[0] for row in rows]]
        low, high = map(value, other[2].split(" to "))
        assert other[0] == f"other, {len(rest)} sites"
        assert (low, high) == pytest.approx(
            (result.effect[rest, b].min().item(), result.effect[rest, b].max().item()), abs=1e-6
        )
        assert result.effect[rest, b].abs().max() <= min(abs(value(row[2])) for row in rows) + 1e-6


def test_tracks_and_flows_show_their_numbers(answers):
    tracks = answers["track"]
    assert len(tables(tracks)) == 2
    for p, table in enumerate(tables(tracks)):
        for c, (name, start, end, delta, segment, credit) in enumerate(table["rows"][1:]):
            assert name == visible(tracks.candidate_strings[0][p][c])
            assert value(end) - value(start) == pytest.approx(value(delta), abs=2e-6)
            assert value(end) == pytest.approx(tracks.levels[-1, 0, p, c].item(), abs=1e-6)
            s = tracks.labels.index(segment)
            assert value(credit) == pytest.approx(tracks.attribution[s, 0, p, c].item(), abs=1e-6)
            assert s == tracks.attribution[:, 0, p, c].abs().argmax()
    flow = answers["flow"]
    (table,) = tables(flow)
    for s, (label, moved, gained, lost) in enumerate(table["rows"][1:]):
        assert label == flow.labels[s]
        assert value(moved) == pytest.approx(flow.total_variation[s, 0, 0].item(), abs=1e-6)
        for text, ids, amounts in ((gained, flow.gained_ids, flow.gained), (lost, flow.lost_ids, flow.lost)):
            name, _, amount = text.rpartition(" ")
            assert name == visible(flow.texts[int(ids[s, 0, 0, 0])])
            assert value(amount) == pytest.approx(amounts[s, 0, 0, 0].item(), abs=1e-6)


def test_a_study_shows_its_measures_with_intervals():
    generator = torch.Generator().manual_seed(1)
    credit, effects = torch.rand(2, 12, 6, generator=generator)
    found = PromptScores(
        scores={"ig_lens": credit, EVIL: credit},
        onsets={"mass": credit.argmax(1)},
        credit=credit,
        cancellation=torch.ones(12),
        labels=tuple(f"{b}_block" for b in range(6)),
        texts=("text",) * 12,
        families=("",) * 12,
        targets=torch.zeros(12, dtype=torch.int64),
        target_strings=("?",) * 12,
        info={"model": "toy", "completeness_gap": "1.0e-08"},
    )
    about = {"unit": "block", "mode": "resample", "at": "all", "reference": "11 prompts"}
    study = judge(found, effects, torch.ones(12), n_resamples=50, ablation=about)
    assert study.caption() == (
        "effect on prob · block · mode resample at all, reference 11 prompts · toy · "
        "credits prob, baseline embed, prediction_aware · |Σ − Δ| ≤ 1.0e-08"
    )
    page = study._repr_html_()
    found = Tables(page).tables[0]["rows"]
    known = study.summary(stratum="all", layers="all", measure="spearman").set_index("score").loc["ig_lens"]
    row = dict(zip(found[0], next(r for r in found if r[0] == "ig_lens"), strict=True))
    want = [_html.number(known[end], ".2f") for end in ("estimate", "low", "high")]
    assert row["spearman"] == f"{want[0]} [{want[1]}, {want[2]}]"
    assert found[-1][0] == "chance" and EVIL in [r[0] for r in found]


# --- texts --------------------------------------------------------------------------------------


def spoilt(result):
    """The same result with a label, a token and a target that are markup and turn the text around."""
    changes = {"token_strings": tuple((EVIL,) * len(row) for row in result.token_strings)}
    if hasattr(result, "target_strings"):
        rows = result.target_strings
        changes["target_strings"] = tuple(EVIL if isinstance(row, str) else (EVIL,) * len(row) for row in rows)
    if hasattr(result, "labels"):
        changes["labels"] = ("<i>0</i>", *result.labels[1:])
    if hasattr(result, "candidate_strings"):
        changes["candidate_strings"] = tuple(tuple((EVIL,) * len(c) for c in row) for row in result.candidate_strings)
    if hasattr(result, "texts"):
        changes["texts"] = dict.fromkeys(result.texts, EVIL)
    changes["info"] = dataclasses.replace(result.info, model="<b>model</b>")
    return dataclasses.replace(result, **changes)


@pytest.mark.parametrize("name", ["ig", "components", "comparison", "ablation", "track", "flow"])
def test_text_is_literal_and_every_character_of_it_is_seen(answers, name):
    found = tables(spoilt(answers[name]))  # the parser refuses any tag that is not of the table
    text = " ".join(" ".join([t["title"], *(" ".join(r) for r in t["rows"])]) for t in found)
    assert visible(EVIL) in text and "<U+202E>" in text


@pytest.mark.parametrize("name", ["ig", "components", "comparison", "ablation", "track", "flow"])
def test_a_caption_says_what_the_numbers_are(answers, name):
    result = answers[name]
    assert "prob" in result.caption() and result.info.model in result.caption()
    assert result.caption() in repr(result)
    if name == "ablation":
        assert result.caption() == f"effect on prob · head · mode skip at target · {result.info.model}"
    else:
        steps = f", {result.info.n_steps} steps" if name == "components" else ""
        assert f"prob · baseline embed · prediction_aware{steps} · {result.info.model} · |Σ" in result.caption()


def test_provenance_of_tracks_and_flows_is_that_of_a_receipt(answers):
    ours = dataclasses.asdict(answers["ig"].info)
    for name, analysis in (("track", "track"), ("flow", "probability_flow")):
        assert dataclasses.asdict(answers[name].info) == {**ours, "analysis": analysis}
    assert torch.isfinite(answers["track"].completeness_gap).all()
