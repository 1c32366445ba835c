"""validate_onset: measures against their definitions, planted truths, chance, strata, a study end to end."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from fixtures import hooked, no_trace, shared_bridge, tokenizer
from scipy.special import ndtr

from tl_iglens import ig_lens, ranking
from tl_iglens.ablation import ablate
from tl_iglens.prompts import Prompt, sample
from tl_iglens.validation import (
    DEFAULT_SCORES,
    LAYER_IG_STEPS,
    SCORES,
    OnsetStudy,
    judge,
    prompt_scores,
    validate_onset,
)

TEXTS = [
    "The capital of France is",
    "The cat sat on the",
    "Paris is the capital of",
    " the cat is on the capital",
]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# --- measures -------------------------------------------------------------------------------------


def test_superiority_counts_pairs(rng):
    score, effect = rng.integers(0, 5, (30, 7)).astype(float), rng.integers(0, 4, (30, 7)).astype(float)
    got = ranking.measure(score, effect)["superiority"]
    for row in range(30):
        onset = max(range(7), key=lambda j: (score[row, j], -j))
        lower = [j for j in range(7) if score[row, j] < score[row, onset]]
        won = [
            1.0 if effect[row, onset] > effect[row, j] else 0.5 if effect[row, onset] == effect[row, j] else 0
            for j in lower
        ]
        assert got[row] == pytest.approx(np.mean(won)) if lower else np.isnan(got[row])


def test_correlations_against_scipy(rng):
    score, effect = rng.integers(0, 6, (20, 9)).astype(float), rng.normal(size=(20, 9))
    got = ranking.measure(score, effect)
    depth = np.arange(9)
    for row in range(20):
        pairs = {"se": (score[row], effect[row]), "sd": (score[row], depth), "ed": (effect[row], depth)}
        r = {name: scipy.stats.spearmanr(*pair).statistic for name, pair in pairs.items()}
        assert got["spearman"][row] == pytest.approx(r["se"])
        partial = (r["se"] - r["sd"] * r["ed"]) / np.sqrt((1 - r["sd"] ** 2) * (1 - r["ed"] ** 2))
        assert got["partial_spearman"][row] == pytest.approx(partial)


def test_agreement_with_the_most_damaging_layers():
    effect = np.array([[5.0, 4, 3, 2, 1]] * 3 + [[4.0, 4, 4, 4, 1]])
    chosen = np.array([0, 2, 3, 1])
    got = ranking.measure(np.arange(5.0) + np.zeros((4, 1)), effect, chosen)
    assert got["top1"].tolist() == [1, 0, 0, 0.25] and got["top3"].tolist() == [1, 1, 0, 0.75]


def test_what_is_undefined_is_left_out():
    flat, effect = np.ones((1, 4)), np.array([[1.0, 2, 3, 4]])
    got = ranking.measure(flat, effect)
    assert all(np.isnan(got[name][0]) for name in ("superiority", "spearman", "partial_spearman"))
    got = ranking.measure(effect, effect, np.array([-1]))
    assert np.isnan(got["superiority"][0]) and np.isnan(got["top1"][0]) and got["spearman"][0] == 1
    depth = ranking.measure(np.arange(4.0)[None], np.array([[3.0, 1, 4, 2]]))
    assert np.isnan(depth["partial_spearman"][0])
    unscored = ranking.measure(effect * np.nan, effect)
    assert all(np.isnan(value[0]) for value in unscored.values())
    both = np.array([np.nan, 1.0, 3.0])
    assert ranking.mean(both) == 2 and np.isnan(ranking.mean(both[:1]))


def test_interval_against_scipy(rng):
    """Percentiles of the bootstrap distribution at the widened levels, which SciPy can be asked for."""
    values = rng.exponential(size=25)
    low, high = ranking.interval(values, 20_000, rng)
    level = 1 - 2 * ndtr(scipy.stats.t.ppf(0.025, 24) * np.sqrt(25 / 24))
    wanted = scipy.stats.bootstrap(
        (values,), np.mean, confidence_level=level, method="percentile", n_resamples=20_000, rng=rng
    )
    assert level > 0.95
    assert (low, high) == pytest.approx(tuple(wanted.confidence_interval), abs=0.02)
    alone = ranking.interval(values[:1], 100, rng)
    assert np.isnan(alone).all()


def test_permutation_p_value_against_all_permutations(rng):
    score, effect = rng.normal(size=(1, 5)), rng.normal(size=(1, 5))
    every = np.array([effect[0, list(order)] for order in itertools.permutations(range(5))])[:, None]
    observed = ranking.measure(score, effect)
    exact = ranking.measure(score, every)
    null = ranking.null_measures({"s": (score, None)}, effect, 20_000, rng)["s"]
    for name in ("superiority", "top1", "spearman"):
        seen = observed[name][0]
        sides = [(exact[name] >= seen - 1e-12).mean(), (exact[name] <= seen + 1e-12).mean()]
        assert ranking.p_value(observed[name], null[name])[0] == pytest.approx(
            min(1, 2 * min(sides)), abs=0.02
        )
        assert null[name].mean() == pytest.approx(exact[name].mean(), abs=0.02)


def test_holm_against_its_definition():
    p = np.array([0.01, np.nan, 0.04, 0.03, 0.005])
    assert ranking.holm(p) == pytest.approx([0.03, np.nan, 0.06, 0.06, 0.02], nan_ok=True)
    assert ranking.holm(np.array([0.9, 0.8])).tolist() == [1, 1]
    assert np.isnan(ranking.holm(np.array([np.nan]))).all()


# --- planted truth --------------------------------------------------------------------------------

N_STUDIES, N_PROMPTS, N_LAYERS = 500, 48, 16


def planted(rng, rho):
    """Scores and effects of normal layers, correlated by ``rho[prompt]``."""
    score = rng.normal(size=(N_PROMPTS, N_LAYERS))
    noise = rng.normal(size=score.shape)
    return score, rho[:, None] * score + np.sqrt(1 - rho[:, None] ** 2) * noise


def truths(rhos):
    """Expected superiority and Spearman of normal layers, averaged over the kinds of prompt.

    Spearman: E r = 6 / (π (n + 1)) (arcsin ρ + (n − 2) arcsin(ρ / 2)) (Moran, 1948). Superiority: given the
    scores, P(e_o > e_j) = Φ(ρ (s_o − s_j) / √(2 (1 − ρ²))), averaged over a large draw of scores.
    """
    s = np.sort(np.random.default_rng(99).normal(size=(200_000, N_LAYERS)), -1)
    gap, n = s[:, -1:] - s[:, :-1], N_LAYERS
    higher = np.mean([ndtr(rho * gap / np.sqrt(2 * (1 - rho**2))).mean() for rho in rhos])
    rank = np.mean([6 / (np.pi * (n + 1)) * (np.arcsin(r) + (n - 2) * np.arcsin(r / 2)) for r in rhos])
    return {"superiority": higher, "spearman": rank, "partial_spearman": rank}


@pytest.mark.parametrize("rhos", [(0.0,), (0.5,), (-0.1, 0.3, 0.8)], ids=str)
def test_intervals_cover_a_planted_truth(rhos, rng):
    truth = truths(rhos)
    names = ["superiority", "spearman"] + ["partial_spearman"] * (rhos == (0.0,))  # no closed form otherwise
    covered = dict.fromkeys(names, 0)
    for _ in range(N_STUDIES):
        found = ranking.measure(*planted(rng, rng.choice(rhos, N_PROMPTS)))
        low, high = ranking.interval(np.stack([found[name] for name in names]), 400, rng)
        for i, name in enumerate(names):
            covered[name] += bool(low[i] <= truth[name] <= high[i])
    assert all(count >= 0.93 * N_STUDIES for count in covered.values()), covered
    assert truth["superiority"] == pytest.approx(0.5) or truth["superiority"] > 0.55


def test_the_planted_truth_is_estimated_without_bias(rng):
    truth = truths((0.5,))
    found = [ranking.measure(*planted(rng, np.full(N_PROMPTS, 0.5))) for _ in range(200)]
    for name in ("superiority", "spearman"):
        assert np.mean([ranking.mean(f[name]) for f in found]) == pytest.approx(truth[name], abs=0.01)


def test_random_scores_are_at_chance(rng):
    """Random scores: every measure at its chance, and p-values that reject about as often as they say."""
    wrong, estimates = 0, []
    for _ in range(200):
        score, effect = planted(rng, np.zeros(N_PROMPTS))
        found = ranking.measure(score, effect)
        null = ranking.null_measures({"s": (score, None)}, effect, 100, rng)["s"]
        wrong += ranking.p_value(ranking.mean(found["superiority"]), ranking.mean(null["superiority"])) < 0.05
        estimates.append([ranking.mean(found[name]) for name in ranking.MEASURES])
    assert wrong <= 20
    assert np.mean(estimates, 0) == pytest.approx([0.5, 1 / N_LAYERS, 3 / N_LAYERS, 0, 0], abs=0.01)


def test_a_score_that_only_follows_depth_has_nothing_left(rng):
    """Score and effect grow with depth and share nothing else: Spearman is high, partial is at chance."""
    depth = np.arange(N_LAYERS) / 3
    score, effect = (depth + rng.normal(size=(N_PROMPTS, N_LAYERS)) for _ in range(2))
    found = ranking.measure(score, effect)
    assert ranking.mean(found["spearman"]) > 0.6 and abs(ranking.mean(found["partial_spearman"])) < 0.1
    null = ranking.null_measures({"s": (score, None)}, effect, 500, rng)["s"]
    assert ranking.p_value(ranking.mean(found["spearman"]), ranking.mean(null["spearman"])) < 0.01
    assert (
        ranking.p_value(ranking.mean(found["partial_spearman"]), ranking.mean(null["partial_spearman"]))
        > 0.05
    )


# --- scores and onsets of a model -----------------------------------------------------------------


@pytest.fixture
def worded():
    """A small model with a tokenizer that knows the words of TEXTS."""
    return shared_bridge("llama")


def test_scores_are_what_they_say(worded):
    found = prompt_scores(worded, TEXTS, scores=(*DEFAULT_SCORES[:4], "depth"))
    for row, text in enumerate(TEXTS):
        target = int(found.targets[row])
        probability = ig_lens(worded, text, targets=target)
        logs = ig_lens(worded, text, targets=target, quantity="log_prob")
        credit = probability.attribution[:, 0, 0]
        expected = {
            "ig_lens": credit,
            "abs_credit": credit.abs(),
            "log_prob": logs.attribution[:, 0, 0],
            "logit_lens": probability.levels[1:, 0, 0],
            "depth": torch.arange(3.0),
        }
        for name, values in expected.items():
            assert torch.allclose(found.scores[name][row].float(), values, atol=1e-5), name
        assert torch.allclose(found.cancellation[row], probability.cancellation[0, 0], rtol=1e-3)
        for rule, onset in found.onsets.items():
            assert int(onset[row]) == int(probability.onset(rule).index)
    assert found.labels == ("0_block", "1_block", "2_block")


@pytest.mark.parametrize("unit", ["block", "attn", "mlp"])
def test_dla_is_the_share_of_the_unit_in_the_logit(worded, unit):
    """Against the final norm's scale held by hand: γ w_t · (what the unit adds) / σ, for an RMS norm."""
    found = prompt_scores(worded, TEXTS, unit=unit, scores=("dla",))
    for row, text in enumerate(TEXTS):
        with torch.no_grad():
            _, cache = worded.run_with_cache(text)
        final = cache["blocks.2.hook_resid_post"][0, -1].double()
        inner = worded.original_model
        sigma = (final.square().mean() + inner.config.rms_norm_eps).sqrt()
        along = (
            inner.model.norm.weight.double() * inner.lm_head.weight[int(found.targets[row])].double() / sigma
        )
        for layer in range(3):
            name = f"blocks.{layer}.hook_"
            whole = cache[name + "resid_post"] - cache[name + "resid_pre"]
            added = whole if unit == "block" else cache[name + f"{unit}_out"]
            assert float(found.scores["dla"][row, layer]) == pytest.approx(
                float((added[0, -1].double() @ along).detach()), abs=1e-4
            )


@pytest.mark.parametrize("unit", ["attn", "mlp"])
def test_sublayers(worded, unit):
    study = validate_onset(worded, TEXTS, unit=unit, n_resamples=50)
    assert study.labels == tuple(f"{layer}_{unit}_out" for layer in range(3))
    effects = ablate(worded, TEXTS[0], targets=study.target_strings[0], unit=unit).effect[:, 0]
    assert torch.allclose(study.effects[0], effects, atol=1e-6)
    credits = ig_lens(worded, TEXTS[0], incl_mid=True)
    rows = [credits.labels.index(label) for label in study.labels]
    assert torch.allclose(study.scores[0, 0], credits.attribution[rows, 0, 0], atol=1e-6)


def test_scores_of_a_prompt_do_not_depend_on_its_neighbours(worded):
    names = ("ig_lens", "log_prob", "dla", "random")
    together = prompt_scores(worded, TEXTS, scores=names)
    for row, text in enumerate(TEXTS):
        alone = prompt_scores(worded, [text], scores=names)
        for name in names:
            assert torch.allclose(together.scores[name][row], alone.scores[name][0], atol=1e-4), name
    assert not torch.equal(
        together.scores["random"], prompt_scores(worded, TEXTS, scores=names, seed=1).scores["random"]
    )


def test_captum_at_the_target_is_the_change_of_the_whole_at_the_last_block(worded):
    """At the last block only the target position reaches the output: the part there is all of Δ."""
    pytest.importorskip("captum")
    from tl_iglens.compare import compare

    found = prompt_scores(worded, TEXTS[:2], scores=("layer_ig",))
    whole = compare(worded, TEXTS[:2], methods={"layer_ig": {"n_steps": LAYER_IG_STEPS}})["layer_ig"]
    assert torch.allclose(
        found.scores["layer_ig"][:, -1].double(), whole.values[-1, :, 0].double(), atol=1e-5
    )


def test_prompts_with_and_without_answers(worded):
    prompts = [Prompt(TEXTS[0], "capitals", " Paris"), Prompt(TEXTS[1], "fixed", None), TEXTS[2]]
    found = prompt_scores(worded, prompts, scores=("ig_lens",))
    top = ig_lens(worded, TEXTS).target_strings
    assert found.target_strings == (" Paris", top[1][0], top[2][0]) and found.families == (
        "capitals",
        "fixed",
        "",
    )
    given = prompt_scores(worded, prompts, targets=[None, " the", 5], scores=("ig_lens",))
    assert given.target_strings[0] == top[0][0] and given.targets.tolist()[1:] == [
        tokenizer()(" the", add_special_tokens=False)["input_ids"][0],
        5,
    ]


# --- studies --------------------------------------------------------------------------------------


def planted_study(worded, n=60, **options):
    """A study of 60 prompts and 12 layers whose effects are known."""
    rng = np.random.default_rng(5)
    score = torch.tensor(rng.normal(size=(n, 12)))
    effect = score + 0.3 * torch.tensor(rng.normal(size=(n, 12)))
    cancellation = torch.tensor([1.0] * (n // 2) + [3.0] * (n - n // 2 - 1) + [float("nan")])
    effect[n // 2 :] = torch.tensor(rng.normal(size=(n - n // 2, 12)))  # nothing to find without monotony
    found = prompt_scores(worded, [TEXTS[0]], scores=("ig_lens", "random"))
    found = replace(
        found,
        scores={"ig_lens": score, "random": torch.tensor(rng.normal(size=(n, 12)))},
        onsets={"mass": score.abs().argmax(1), "largest": score.argmax(1), "settled": torch.full((n,), -1)},
        credit=score - score.min(),
        cancellation=cancellation,
        labels=tuple(f"{i}_block" for i in range(12)),
        texts=tuple(map(str, range(n))),
        families=tuple(["a"] * (n - 10) + ["b"] * 10),
        target_strings=("x",) * n,
        targets=torch.zeros(n, dtype=torch.long),
    )
    return judge(found, effect, torch.full((n,), 0.5), n_resamples=300, **options)


def test_strata_layers_and_rules(worded):
    study = planted_study(worded)
    frame = study.summary(measure="spearman").set_index(["score", "layers", "stratum"])
    assert set(frame.index.get_level_values("stratum")) == {
        "all",
        "monotone",
        "non-monotone",
        "family: a",
        "family: b",
    }
    own = {
        stratum: frame.loc[("ig_lens", "all", stratum)]
        for stratum in ("all", "monotone", "non-monotone", "family: b")
    }
    assert [own[s]["n"] for s in own] == [60, 30, 29, 10]
    assert own["monotone"]["estimate"] > 0.8 and own["monotone"]["p_holm"] < 0.02
    assert own["non-monotone"]["low"] < 0 < own["non-monotone"]["high"]
    assert frame.loc[("random", "all", "all")]["p"] > 0.05
    late = scipy.stats.spearmanr(study.scores[0, 0, 2:], study.effects[0, 2:]).statistic
    prompts = [
        scipy.stats.spearmanr(study.scores[0, i, 2:], study.effects[i, 2:]).statistic for i in range(60)
    ]
    assert prompts[0] == late and frame.loc[("ig_lens", "2+", "all")]["estimate"] == pytest.approx(
        np.mean(prompts)
    )
    rules = study.summary(measure="top1", stratum="all", layers="all").set_index("score")
    assert rules.loc["onset:settled", "n"] == 0 and np.isnan(rules.loc["onset:settled", "estimate"])
    assert rules.loc["onset:largest", "estimate"] == pytest.approx(rules.loc["ig_lens", "estimate"])
    assert rules.loc["ig_lens", "chance"] == pytest.approx(1 / 12, abs=0.01)
    # a rule ranks no layers, so it has no correlation
    assert not any(name.startswith("onset:") for name in study.summary(measure="spearman")["score"])
    early = int((study.onsets[0] < 2).sum())
    named = study.summary(measure="top1", stratum="all", layers="2+").set_index("score")
    assert named.loc["onset:mass", "n"] == 60 - early


def test_holm_is_over_the_scores(worded):
    frame = planted_study(worded).summary(measure="spearman", stratum="all", layers="all")
    assert frame["p_holm"].tolist() == ranking.holm(frame["p"].to_numpy()).tolist() and len(frame) == 2


def test_the_same_seed_gives_the_same_study(worded):
    one, two, other = planted_study(worded), planted_study(worded), planted_study(worded, seed=1)
    pd.testing.assert_frame_equal(one.summary(), two.summary())
    assert one.summary()["estimate"].equals(other.summary()["estimate"]) and not one.summary()["low"].equals(
        other.summary()["low"]
    )


def test_frame_save_and_load(worded, tmp_path):
    study = validate_onset(worded, TEXTS, n_resamples=50)
    frame = study.to_dataframe()
    assert len(frame) == 12 and set(DEFAULT_SCORES) <= set(frame.columns)
    line = frame[(frame["prompt"] == 2) & (frame["layer"] == 1)].iloc[0]
    assert line["effect"] == float(study.effects[2, 1]) and line["log_prob"] == float(study.scores[2, 2, 1])
    assert line["text"] == TEXTS[2] and line["segment"] == "1_block"
    assert frame.groupby("prompt")["onset_mass"].sum().tolist() == (study.onsets[0] >= 0).long().tolist()
    back = OnsetStudy.load(study.save(tmp_path / "study.safetensors"))
    pd.testing.assert_frame_equal(back.summary(), study.summary())
    pd.testing.assert_frame_equal(back.to_dataframe(), frame)
    assert dict(back.info) == dict(study.info) and study.info["mode"] == "skip"


def test_no_trace(worded):
    with no_trace(worded):
        validate_onset(worded, TEXTS, mode="resample", at="all", n_resamples=20)


def test_effects_are_those_of_ablate(worded):
    study = validate_onset(worded, TEXTS, mode="mean", at="all", seed=2, n_resamples=20)
    effects = ablate(worded, TEXTS, mode="mean", at="all", seed=2)
    assert torch.allclose(study.effects, effects.effect.T, atol=1e-6) and torch.allclose(
        study.p_clean, effects.p_clean
    )


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (
            "The cat", {},
            "prompts must be a list of texts or Prompt objects, "
            "got 'The cat'; give at least two, better a hundred",
        ),
        (
            [], {},
            "prompts must be a list of texts or Prompt objects, "
            "got []; give at least two, better a hundred",
        ),
        (TEXTS, {"unit": "head"}, "unit must be one of block, attn, mlp, got 'head'; check the spelling"),
        (
            TEXTS, {"scores": ("luck",)},
            f"scores must be one of {', '.join(SCORES)}, "
            f"got 'luck'; check the spelling",
        ),
        (
            TEXTS, {"targets": [1]},
            "targets must be one per prompt (4), "
            "got 1 tokens; None stands for the top token",
        ),
        (
            TEXTS, {"n_resamples": 0},
            "n_resamples must be a whole number of at least 1, "
            "got 0; give a whole number",
        ),
        (
            TEXTS, {"scores": ("layer_ig",), "unit": "mlp"},
            "scores must be without layer_ig for unit='mlp', "
            "got 'layer_ig'; it is a score of whole blocks",
        ),
    ],
)  # fmt: skip
def test_messages(worded, prompts, options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        validate_onset(worded, prompts, **options)


@pytest.mark.parametrize("unit", ["block", "mlp"])
def test_a_hooked_transformer_is_judged_too(unit):
    model = hooked("RMSPre", tokenizer=tokenizer(), d_vocab=291)
    with no_trace(model):
        study = validate_onset(model, TEXTS, unit=unit, scores=("ig_lens", "depth"), n_resamples=20)
    for row, text in enumerate(TEXTS):
        effects = ablate(model, text, unit=unit).effect[:, 0]  # of the top token, as the study's
        assert torch.allclose(study.effects[row], effects, atol=1e-6)
        assert float(study.p_clean[row]) == pytest.approx(
            float(model(text)[0, -1].softmax(-1).max().detach()), abs=1e-6
        )


# --- the study's script ---------------------------------------------------------------------------


def test_a_study_is_resumed_where_it_was_left(worded, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    from benchmarks import onset_study

    onset_study._loaded.cache_clear()

    protocol = onset_study.Protocol(
        models=("small",), prompts=5, references=6, captum=0, resamples=20, chunk=2
    )
    prompts = tuple(Prompt(text, "f", None) for text in (*TEXTS, " cat sat on"))
    monkeypatch.setattr(onset_study, "MODELS", {"small": lambda: worded})
    monkeypatch.setattr(onset_study, "sample", lambda n, seed: prompts)
    first = onset_study.study(protocol, tmp_path, workers=1, progress=False)
    whole = pd.read_parquet(tmp_path / "layers.parquet")
    assert len(whole) == 5 * 3 * 3 and len(list((tmp_path / "parts").glob("*.parquet"))) == 3
    assert set(first.groupby(["unit", "mode", "at"]).groups) == set(protocol.conditions)

    (tmp_path / "parts" / "small-0002.parquet").unlink()
    calls = []
    measured = onset_study.measured
    monkeypatch.setattr(onset_study, "measured", lambda *args: calls.append(args[2]) or measured(*args))
    again = onset_study.study(protocol, tmp_path, workers=1, progress=False)
    assert calls == [2]
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "layers.parquet"), whole)
    pd.testing.assert_frame_equal(again, first)

    own = ablate(worded, TEXTS[0], targets=whole["target_strings"][0], unit="mlp").effect[:, 0]
    rows = whole[(whole["prompt"] == 0) & (whole["unit"] == "mlp")]
    assert rows["effect_skip_target"].to_numpy() == pytest.approx(own.numpy(), abs=1e-6)
    assert rows["effect_skip_all"].notna().all()
    with pytest.raises(
        SystemExit,
        match="^"
        + re.escape(f"{tmp_path / 'parts'} holds parts of another protocol; give another --out or remove it")
        + "$",
    ):
        onset_study.study(replace(protocol, seed=1), tmp_path, workers=1, progress=False)


def test_a_study_of_24_prompts(smollm2, tmp_path):
    pytest.importorskip("pyarrow")
    from benchmarks import onset_study

    onset_study._loaded.cache_clear()

    protocol = onset_study.Protocol(
        models=("smollm2",),
        prompts=24,
        references=2,
        captum=0,
        resamples=300,
        units=("block",),
        modes=("skip",),
        places=("target",),
    )
    summary = onset_study.study(protocol, tmp_path, workers=1, progress=False)
    rows = summary[(summary["stratum"] == "all") & (summary["layers"] == "all")]
    table = rows.set_index(["score", "measure"])
    assert (table.loc[[("ig_lens", "superiority"), ("depth", "spearman")], "n"] == 24).all()
    known = rows[rows["n"] > 0]
    assert ((known["low"] <= known["estimate"] + 1e-9) & (known["estimate"] <= known["high"] + 1e-9)).all()
    low, high = table.loc[("random", "spearman"), ["low", "high"]]
    assert low < 0 < high
    # without block 0 hardly any prediction survives, and the change of log-probability is largest there
    layers = pd.read_parquet(tmp_path / "layers.parquet")
    lost = layers[layers["layer"] == 0].set_index("prompt")
    assert (lost["effect_skip_target"] > 0.5 * lost["p_clean"]).mean() > 0.9
    assert len(sample(24)) == lost.shape[0]
