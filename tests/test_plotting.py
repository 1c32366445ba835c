"""Figures carry the result's numbers and its text as it stands; nothing is shown, written or set."""

import dataclasses
import html
import re
import warnings

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest
import torch
from fixtures import tokenizer

from tl_iglens import IGLensResult, RunInfo, ig_lens, plotting
from tl_iglens.plotting._labels import full, shorten, tick, visible
from tl_iglens.plotting._style import _luminance, palette
from tl_iglens.tokens import token_text

PLOTLY = tuple(int(part) for part in __import__("plotly").__version__.split(".")[:2])
IDS = [1, 5, 40, 17, 20, 33, 9]
INFO = RunInfo("toy-model", "float32", "4.3.0", "raw", "prediction_aware", 1, "embed", "prob", "0_pre …", 0)

MARKUP = ("<s>", "<b>x</b>", "a<b", "&lt;", "</script><script>x", "$x^2$", "%{x}", "<br>", "{{data}}")
BLANK = (" ", "\n", "\t", "\u200b", "", "\x0c", "\u202e", "  \n")
NUMERIC = ("1", "2", "10", "1E1", "2024-01-02", "01:30", "NaN", "-5", "1,000")
DUPLICATES = ("the", " cat", "the", "!")


def receipt(tokens, n_blocks=4, *, targets=None, seed=0, dtype=torch.float32, **info):
    """A result with random levels at every boundary, one cell per token, that sums as a real one does."""
    generator = torch.Generator().manual_seed(seed)
    n = len(tokens)
    levels = torch.rand(n_blocks + 1, 1, n, generator=generator, dtype=torch.float64)
    targets = tokens[1:] + tokens[:1] if targets is None else targets
    return IGLensResult(
        attribution=levels.diff(dim=0).to(dtype),
        levels=levels.to(dtype),
        labels=tuple(f"{b}_block" for b in range(n_blocks)),
        point_labels=(*(f"{b}_pre" for b in range(n_blocks)), "final_post"),
        boundaries=tuple(range(1, n_blocks + 1)),
        targets=torch.arange(n)[None],
        target_strings=(tuple(targets),),
        tokens=torch.arange(n)[None],
        token_strings=(tuple(tokens),),
        attention_mask=torch.ones(1, n, dtype=torch.bool),
        positions=torch.arange(n)[None],
        model_level=levels[-1].to(dtype),
        info=dataclasses.replace(INFO, n_layers=n_blocks, **info),
    )


def drawn(text):
    """What plotly draws for a text: markup taken out, then character references read."""
    return html.unescape(re.sub(r"</?[a-z][^>]*>", "", text))


def axis_labels(axis):
    """The labels of an axis by coordinate, whichever way it carries them."""
    if axis.labelalias is not None:
        return {float(key): drawn(value) for key, value in axis.labelalias.items()}
    return dict(zip(map(float, axis.tickvals), map(drawn, axis.ticktext), strict=True))


@pytest.fixture(scope="module")
def small():
    return receipt(("The", " capital", " of", " France", " is"), n_blocks=6)


@pytest.fixture
def answers(lens_model):
    """Real results of every kind from one small random model."""
    from tl_iglens.ablation import ablate
    from tl_iglens.compare import compare
    from tl_iglens.components import direct_probability_attribution
    from tl_iglens.track import probability_flow, track

    kw = {"pos_slice": None}
    return {
        "ig": ig_lens(lens_model, IDS, **kw),
        "comparison": compare(lens_model, IDS, methods=("ig_lens", "logit_lens", "dla"), **kw),
        "components": direct_probability_attribution(lens_model, IDS, unit="component", **kw),
        "ablation": ablate(lens_model, IDS),
        "last": ig_lens(lens_model, IDS),
        "flow": probability_flow(lens_model, IDS, k=3),
        "track": track(lens_model, IDS, top_k=4),
        "baselines": [ig_lens(lens_model, IDS, targets=7, baseline=b) for b in ("embed", "mean", "bos")],
    }


def every_figure(answers, **options):
    """One figure of every function."""
    comparison = answers["comparison"]
    return {
        "heatmap": plotting.heatmap(answers["ig"], readout=comparison["logit_lens"], **options),
        "waterfall": plotting.waterfall(answers["ig"], pos=-1, **options),
        "trajectory": plotting.trajectory(answers["ig"], {"again": comparison["logit_lens"]}, **options),
        "comparison": plotting.comparison(comparison, **options),
        "components": plotting.components(answers["components"], top=3, **options),
        "ablation": plotting.ablation(answers["ablation"], **options),
        "scatter": plotting.ablation(answers["ablation"], answers["last"], **options),
        "flow": plotting.flow(answers["flow"], **options),
        "candidates": plotting.candidates(answers["track"], **options),
        "baselines": plotting.baselines(answers["baselines"], **options),
    }


# --- the numbers --------------------------------------------------------------------------------


def test_heatmap_carries_the_credits_exactly(small):
    figure = plotting.heatmap(small)
    cells, onsets, columns, rows = figure.data
    assert cells.z.dtype == np.float32
    assert np.array_equal(cells.z, small.attribution[:, 0].numpy())
    assert np.array_equal(columns.y, small.attribution.sum(0)[0].numpy())
    assert np.array_equal(rows.x, small.attribution[:, 0].sum(-1).numpy())
    assert np.array_equal(onsets.y, small.onset().index[0].numpy())
    levels = small.levels[:, 0].double().numpy()
    assert np.allclose(cells.customdata[..., 1], levels[:-1], rtol=0, atol=1e-7)
    assert np.allclose(cells.customdata[..., 2], levels[1:], rtol=0, atol=1e-7)
    assert np.array_equal(cells.customdata[:, 0, 0], small.boundaries)


def test_scales_are_symmetric_about_zero(small):
    cells = plotting.heatmap(small).data[0]
    largest = small.attribution.abs().max().item()
    assert (cells.zmin, cells.zmid, cells.zmax) == pytest.approx((-largest, 0, largest))
    stops = [stop for stop, _ in cells.colorscale]
    assert stops == [1 - s for s in stops[::-1]] and 0.5 in stops


def test_waterfall_adds_up(small):
    for top in (2, 3, 12):
        figure = plotting.waterfall(small, pos=2, top=top)
        bars, line = figure.data
        start, *steps, end = bars.x
        assert start == small.levels[0, 0, 2].item() and end == small.levels[-1, 0, 2].item()
        assert sum(steps) == pytest.approx(end - start, abs=1e-6)
        assert set(line.x) == {small.model_level[0, 2].item()}
        names = [drawn(text) for text in figure.layout.yaxis.ticktext]
        assert any(name == f"other, {6 - top} segments" for name in names) == (top < 5)
        credits = small.attribution[:, 0, 2]
        for name, value in zip(names[1:-1], steps, strict=True):
            if not name.startswith("other"):
                assert value == credits[int(name[0])].item()
        smallest = min(abs(v) for n, v in zip(names[1:-1], steps, strict=True) if not n.startswith("other"))
        assert smallest >= credits.abs().sort(descending=True).values[: min(top, 6)].min().item() - 1e-9


def test_waterfall_shows_what_a_gradient_rule_misses(small):
    rough = dataclasses.replace(
        small,
        attribution=small.attribution * 0.9,
        info=dataclasses.replace(small.info, estimator="left", n_steps=4),
    )
    figure = plotting.waterfall(rough)
    names = [drawn(text) for text in figure.layout.yaxis.ticktext]
    missed = figure.data[0].x[names.index("not in the credits")]
    assert missed == pytest.approx(-rough.completeness_gap[0, -1].item(), abs=1e-6)
    assert sum(figure.data[0].x[:-1]) == pytest.approx(rough.levels[-1, 0, -1].item(), abs=1e-6)
    assert "not in the credits" not in str(plotting.waterfall(small).layout.yaxis.ticktext)


def test_trajectory_stands_level_over_credit(small):
    figure = plotting.trajectory(small, {"other": small}, pos=1)
    lens, other, own, bars = figure.data
    assert np.array_equal(lens.y, small.levels[:, 0, 1].numpy()) and np.array_equal(other.y, lens.y)
    assert np.array_equal(bars.y, small.attribution[:, 0, 1].numpy())
    assert list(lens.x) == list(range(7)) and list(bars.x) == [i + 0.5 for i in range(6)]
    assert set(own.y) == {small.model_level[0, 1].item()}
    band = figure.layout.shapes[0]
    assert (band.x0, band.x1) == (small.onset().index[0, 1], small.onset().index[0, 1] + 1)


def test_every_other_figure_carries_its_numbers(answers):
    figures = every_figure(answers)
    comparison = answers["comparison"]
    for trace, name in zip(figures["comparison"].data, comparison.methods, strict=True):
        result = comparison[name]
        kept = [i for i, end in enumerate(result.ends) if end or result.kind == "level"]
        assert np.array_equal(trace.y, result.values[kept, 0, -1].numpy()), name

    credit = answers["components"].attribution[:, 0, -1]
    order = credit.abs().argsort(descending=True, stable=True)[:3]
    bars = figures["components"].data[0]
    assert np.array_equal(bars.x[:3], credit[order].numpy())
    assert bars.x.sum() == pytest.approx(credit.sum().item(), abs=1e-6)

    ablation = answers["ablation"]
    assert np.array_equal(figures["ablation"].data[0].x, ablation.effect[:, 0].numpy())
    dots, onset = figures["scatter"].data
    last, at = answers["last"], int(answers["last"].onset().index[0, 0])
    assert list(onset.x) == [last.attribution[at, 0, 0].item()] and list(onset.y) == [ablation.effect[at, 0].item()]
    assert set(dots.x) | set(onset.x) == set(last.attribution[:, 0, 0].tolist())

    flow, bars = answers["flow"], figures["flow"].data
    for name, sign in (("gained", 1), ("lost", -1)):
        length = sum(np.asarray(b.x) for b in bars if np.all(np.asarray(b.x) * sign >= 0))
        assert np.allclose(length * sign, flow.total_variation[:, 0, 0].numpy(), atol=1e-5), name
    assert np.array_equal(bars[0].x, flow.gained[:, 0, 0, 0].clamp_min(0).numpy())

    track = answers["track"]
    for c, line in enumerate(figures["candidates"].data):
        assert np.array_equal(line.y, track.levels[:, 0, 0, c].numpy())

    grid = figures["baselines"].data[0]
    for row, result in enumerate(answers["baselines"]):
        values = grid.z[row][~np.isnan(grid.z[row])]
        assert np.array_equal(values, result.attribution[:, 0, 0].numpy())


def test_hover_knows_rank_and_top_tokens_where_a_readout_is_given(answers):
    lens = answers["comparison"]["logit_lens"]
    text = plotting.heatmap(answers["ig"], readout=lens).data[0].hovertext
    last = drawn(text[-1][-1])
    best = lens.tokens("top_ids", pos=-1)["final_post"][:3]
    assert "rank 1 at its end" in last and last.endswith(", ".join(visible(t) for t in best))


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "grad", "float64"])
def test_any_dtype_is_plotted_without_a_warning(small, kind):
    def cast(t):
        if not t.is_floating_point():
            return t
        return t.clone().requires_grad_() if kind == "grad" else t.to(getattr(torch, kind))

    tensors = {
        f.name: cast(v) for f in dataclasses.fields(small) if isinstance(v := getattr(small, f.name), torch.Tensor)
    }
    result = dataclasses.replace(small, **tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures = [plotting.heatmap(result), plotting.waterfall(result), plotting.trajectory(result)]
        figures.append(plotting.baselines([result]))
    z = figures[0].data[0].z
    assert z.dtype == (np.float64 if kind == "float64" else np.float32)
    assert np.array_equal(z, result.attribution[:, 0].detach().to(torch.float64).numpy().astype(z.dtype))


# --- labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        DUPLICATES,
        NUMERIC,
        MARKUP,
        BLANK,
        ("same beginning, long enough",) * 3 + ("same beginning, long enougH",),
    ],
)
@pytest.mark.parametrize("template", [None, "none", "plotly_dark"])
def test_every_token_has_a_column_of_its_own(tokens, template):
    figure = plotting.heatmap(receipt(tokens), template=template)
    cells, axis = figure.data[0], figure.layout.xaxis3
    assert list(cells.x) == list(range(len(tokens))) and cells.z.shape == (4, len(tokens))
    assert axis.type in ("category", "linear") and figure.layout.yaxis3.type == "linear"
    labels = axis_labels(axis)
    assert [labels[i] for i in range(len(tokens))] == [shorten(visible(t), 16) for t in tokens]
    assert all(full(t) in cells.hovertext[0][i] for i, t in enumerate(tokens))  # in full, shortened or not


@pytest.mark.parametrize("tokens", [NUMERIC, MARKUP, BLANK])
def test_labels_of_segments_and_prompts_stay_apart_too(tokens):
    result = dataclasses.replace(receipt(("a",), len(tokens)), labels=tokens)
    figure = plotting.waterfall(result, top=20)
    assert list(figure.data[0].y) == list(range(len(tokens) + 2)) and figure.layout.yaxis.type == "linear"
    names = [drawn(text) for text in figure.layout.yaxis.ticktext[1:-1]]
    assert [name.removesuffix(" ◆ onset") for name in names] == [shorten(visible(t), 32) for t in tokens]


def test_no_text_can_be_read_as_markup_or_math():
    for text in MARKUP:
        assert drawn(tick(text, 99)) == visible(text)
        assert not re.search(r"[<>$]|&(?!amp;|lt;|gt;|#36;|#37;)|%", tick(text, 99))
    figure = plotting.heatmap(receipt(MARKUP), title="$a$ <b>of</b> &amp; %{x}")
    assert drawn(figure.layout.title.text.split("<br>")[0]) == "$a$ <b>of</b> &amp; %{x}"
    assert "$" not in figure.layout.title.text


def test_blank_tokens_are_visible():
    labels = [visible(text) for text in BLANK]
    assert labels == ["·", "⏎", "⇥", "␣", "∅", "<U+000C>", "<U+202E>", "··⏎"]
    assert visible("\ud83d") == "<U+D83D>" and visible("\u0301e") == "◌\u0301e"


@pytest.mark.parametrize("style", ["byte", "sentencepiece"])
def test_pieces_of_one_character_are_told_apart(style):
    pieces = tokenizer(style=style)
    ids = pieces("né 日", add_special_tokens=False)["input_ids"]
    texts = tuple(token_text(pieces, i) for i in ids)
    labels = axis_labels(plotting.heatmap(receipt(texts)).layout.xaxis3).values()
    assert not any("\ufffd" in label or "Ġ" in label or "▁" in label for label in labels)
    partial = [label for label in labels if "<0x" in label]
    assert len(partial) >= 3 and len(set(partial)) == len(partial)


# --- long prompts -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long():
    words = [f" word{i % 97}" for i in range(512)]
    return receipt(tuple(words), n_blocks=61)


def test_a_long_prompt_opens_at_its_end_and_holds_all_of_it(long):
    figure = plotting.heatmap(long)
    assert figure.data[0].z.shape == (61, 512)
    assert tuple(figure.layout.xaxis3.range) == (471.5, 511.5) == tuple(figure.layout.xaxis.range)
    assert tuple(figure.layout.yaxis3.range) == (-0.5, 60.5)
    assert figure.layout.yaxis3.ticktext[-1] == "60_block" and 60 in figure.layout.yaxis3.tickvals
    assert "last 40 of 512 tokens in view" in figure.layout.title.text
    assert tuple(plotting.heatmap(long, window=None).layout.xaxis3.range) == (-0.5, 511.5)
    assert tuple(plotting.heatmap(long, window=7).layout.xaxis3.range) == (504.5, 511.5)
    low = plotting.heatmap(long, height=420).layout.yaxis3
    assert low.ticktext[-1] == "60_block" and len(low.ticktext) < 30


def test_large_figures_stay_small(long):
    page = plotting.heatmap(long).to_html(include_plotlyjs=False)
    assert len(page) < 3e6
    huge = receipt(tuple("ab" * 1024), n_blocks=80)
    figure = plotting.heatmap(huge, window=None)
    assert figure.data[0].z.shape == (80, 2048) and figure.data[0].z.dtype == np.float32
    assert figure.data[0].customdata is None and figure.data[0].text is None and not figure.layout.annotations
    if PLOTLY >= (6, 0):  # earlier ones write every number as text
        assert len(figure.to_json()) <= 1.5e6


def test_only_few_columns_have_numbers_in_their_cells(small, long):
    assert plotting.heatmap(small).data[0].texttemplate == "%{text}"
    assert plotting.heatmap(long).data[0].text is None


# --- what all figures keep to -------------------------------------------------------------------


def test_every_function_returns_a_captioned_figure_and_leaves_plotly_alone(answers, monkeypatch):
    def never(*args, **options):
        raise AssertionError("a figure was shown or written")

    for name in ("show", "write_html", "write_image"):
        monkeypatch.setattr(go.Figure, name, never)
    before, random_state = pio.templates.default, torch.get_rng_state()
    figures = every_figure(answers, title="A <title>", template="plotly_white", width=640, height=480)
    of_corpora = {"mean_credit", "onset_histogram", "top_prompts"}  # drawn in the tests of corpora
    assert set(plotting.__all__) <= set(figures) | of_corpora
    for name, figure in figures.items():
        assert isinstance(figure, go.Figure) and len(figure.data), name
        heading, *caption = map(drawn, figure.layout.title.text.split("<br>"))
        assert heading == "A <title>", name
        assert (figure.layout.width, figure.layout.height) == (640, 480), name
        assert figure.layout.template.layout.paper_bgcolor == pio.templates["plotly_white"].layout.paper_bgcolor
        caption = " ".join(caption)
        assert "prob" in caption and answers["ig"].info.model in caption, name
        if name in ("ablation", "scatter"):
            assert "block · mode skip at target" in caption, name
        if name != "ablation":
            assert "embed" in caption and "prediction_aware" in caption, name
            assert re.search(r"\|Σ (over the vocabulary|− Δ)\| ≤ \d", caption), name
        for axis in [*figure.select_xaxes(), *figure.select_yaxes()]:
            assert axis.type in ("linear", "category") or axis.visible is False, name
    assert pio.templates.default == before and torch.equal(torch.get_rng_state(), random_state)


def test_the_caption_says_what_the_numbers_are(small):
    text = drawn(plotting.waterfall(small).layout.title.text)
    assert small.caption() in text and "Δ = " in text
    narrow = plotting.heatmap(small, width=300).layout
    lines = [drawn(line) for line in narrow.title.text.split("<br>")]
    assert max(map(len, lines)) < 45 and "|Σ − Δ| ≤" in " ".join(lines)
    assert narrow.margin.t > plotting.heatmap(small, width=900).layout.margin.t


@pytest.mark.parametrize(
    ("name", "dark"),
    [("plotly_white", False), ("plotly_dark", True), ("none", False), ("plotly_dark+xgridoff", True)],
)
def test_colours_read_on_their_background(name, dark):
    colours = palette(name)
    assert colours.dark == dark
    ground = 0.07 if dark else 1.0
    for colour in (colours.gain, colours.loss, colours.ink, *colours.lines):
        assert abs(_luminance(colour) - ground) > 0.3, colour
    # blue and orange: the two ends differ along the axis that colour-blind readers keep
    red, blue = (int(colours.gain[i : i + 2], 16) - int(colours.loss[i : i + 2], 16) for i in (1, 5))
    assert red < -100 and blue > 100


def test_the_default_template_decides_where_none_is_given(small, monkeypatch):
    monkeypatch.setattr(pio.templates, "default", "plotly_dark")
    assert plotting.heatmap(small).data[0].colorscale[2][1] == palette("plotly_dark").scale[2][1]


def test_columns_of_a_ragged_batch_are_its_own():
    a, b = receipt(("x", "y", "z")), receipt(("u", "v"))
    wide = [
        torch.cat([t, torch.full_like(t[..., :1], torch.nan)], -1) for t in (b.attribution, b.levels, b.model_level)
    ]
    both = dataclasses.replace(
        a,
        attribution=torch.cat([a.attribution, wide[0]], 1),
        levels=torch.cat([a.levels, wide[1]], 1),
        model_level=torch.cat([a.model_level, wide[2]], 0),
        targets=torch.zeros(2, 3, dtype=torch.int64),
        tokens=torch.zeros(2, 3, dtype=torch.int64),
        positions=torch.tensor([[0, 1, 2], [0, 1, -1]]),
        attention_mask=torch.tensor([[True] * 3, [True, True, False]]),
        token_strings=(("x", "y", "z"), ("u", "v", "v")),
        target_strings=(("y", "z", "x"), ("v", "u", "?")),
    )
    figure = plotting.heatmap(both, batch=1)
    assert figure.data[0].z.shape == (4, 2) and np.isfinite(figure.data[0].z).all()
    assert "row 1 of 2 prompts" in figure.layout.title.text
    assert plotting.waterfall(both, batch=1, pos=-1).data[0].x[-1] == b.levels[-1, 0, 1].item()


# --- errors -------------------------------------------------------------------------------------


def whole(message):
    return f"^{re.escape(message)}$"


def test_bad_arguments_are_named(small):
    with pytest.raises(ValueError, match=whole("batch must be between -1 and 0, got 1; the result has 1 rows")):
        plotting.heatmap(small, batch=1)
    with pytest.raises(
        ValueError, match=whole("pos must be between -5 and 4, got 5; the result has 5 analysed positions")
    ):
        plotting.waterfall(small, pos=5)
    with pytest.raises(
        ValueError,
        match=whole("window must be None or at least 1 column, got 0; None shows all tokens at once"),
    ):
        plotting.heatmap(small, window=0)
    with pytest.raises(
        ValueError,
        match=whole("width must be None or at least 10 pixels, got 9; None lets the figure choose"),
    ):
        plotting.trajectory(small, width=9)
    message = "study_or_result must be an AblationResult or an OnsetStudy, got IGLensResult; see ablate"
    with pytest.raises(TypeError, match=whole(message)):
        plotting.ablation(small)
    message = "results must be at least one result, got none; run ig_lens once per baseline"
    with pytest.raises(ValueError, match=whole(message)):
        plotting.baselines([])
    other = dataclasses.replace(small, target_strings=(("?",) * 5,))
    message = "results['embed (2)'] must be of the target 'The' like the others, got '?'; vary the baseline only"
    with pytest.raises(ValueError, match=whole(message)):
        plotting.baselines([small, other])


def test_figures_refuse_what_they_cannot_compare(answers, small):
    comparison = answers["comparison"]
    message = "methods must be among ig_lens, logit_lens, dla, got 'tuned_lens'; compare it first"
    with pytest.raises(ValueError, match=whole(message)):
        plotting.comparison(comparison, methods=["tuned_lens"])
    message = (
        "dla must be of the same prompts and positions, [row, 1, 5], got shape "
        f"{tuple(comparison['dla'].values.shape)}; take both from one prompt with the same pos_slice"
    )
    with pytest.raises(ValueError, match=whole(message)):
        plotting.components(small, comparison["dla"])
    message = (
        "others['dla'] must be levels, whose unit and meaning the axis shares, got additive; see plotting.comparison"
    )
    with pytest.raises(ValueError, match=whole(message)):
        plotting.trajectory(answers["ig"], comparison["dla"])
    message = (
        "result must be credits of the segments of a path, got rows such as "
        f"{answers['components'].labels[0]!r}; draw components with plotting.components"
    )
    with pytest.raises(ValueError, match=whole(message)):
        plotting.trajectory(answers["components"])


def test_a_study_is_drawn_with_its_intervals():
    from tl_iglens.validation import PromptScores, judge

    generator = torch.Generator().manual_seed(1)
    credit, effects = torch.rand(2, 12, 6, generator=generator)
    found = PromptScores(
        scores={"ig_lens": credit, "depth": torch.arange(6.0).expand(12, 6)},
        onsets={"mass": credit.argmax(1), "largest": credit.argmax(1), "settled": credit.argmax(1)},
        credit=credit,
        cancellation=torch.ones(12),
        labels=tuple(f"{b}_block" for b in range(6)),
        texts=tuple(f"prompt <{i}> $x$" for i in range(12)),
        families=("",) * 12,
        targets=torch.zeros(12, dtype=torch.int64),
        target_strings=("?",) * 12,
        info={"model": "toy"},
    )
    study = judge(
        found,
        effects,
        torch.ones(12),
        n_resamples=50,
        ablation={"unit": "block", "mode": "skip", "at": "target"},
    )
    figure = plotting.ablation(study)
    table = study.summary(stratum="all", layers="all")
    estimates = [t for t in figure.data if t.name == "estimate, 95 % interval"]
    assert len(estimates) == table["measure"].nunique()
    for trace, measure in zip(estimates, dict.fromkeys(table["measure"]), strict=True):
        rows = table[table["measure"] == measure]
        assert np.array_equal(trace.x, rows["estimate"], equal_nan=True)
        assert np.allclose(trace.x + trace.error_x.array, rows["high"], equal_nan=True)
        assert np.allclose(trace.x - trace.error_x.arrayminus, rows["low"], equal_nan=True)
    assert study.caption() in drawn(figure.layout.title.text).replace("<br>", " · ")
    layer, onset = figure.data[-2:]
    assert len(onset.x) == 12 and len(layer.x) == 60
    assert sorted([*layer.x, *onset.x]) == sorted(credit.ravel().tolist())
