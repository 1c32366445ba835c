"""How well a score over layers foretells an effect over layers: measures per prompt, intervals, p-values.

Pure arrays, no model. ``score`` and ``effect`` are ``[..., prompt, layer]``; a measure is one number per
prompt, NaN where it is undefined, and is averaged over prompts, which are the units that are sampled.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Float, Int
from scipy.special import ndtr
from scipy.stats import rankdata
from scipy.stats import t as student

Array = np.ndarray

MEASURES: tuple[str, ...] = ("superiority", "top1", "top3", "spearman", "partial_spearman")


def superiority(
    chosen: Int[Array, "*#run prompt"],
    score: Float[Array, "*#run prompt layer"],
    effect: Float[Array, "*#run prompt layer"],
) -> Float[Array, "*run prompt"]:
    """The share of layers scored lower than the chosen one whose effect is smaller too; ties count half.

    One half is chance. NaN where no layer is scored lower.
    """
    lower = score < np.take_along_axis(score, chosen[..., None], -1)
    own = np.take_along_axis(
        np.broadcast_to(effect, np.broadcast_shapes(effect.shape, score.shape)), _fit(chosen, effect), -1
    )
    wins = (own > effect) + 0.5 * (own == effect)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (wins * lower).sum(-1) / lower.sum(-1)


def top_k(
    chosen: Int[Array, "*#run prompt"], effect: Float[Array, "*#run prompt layer"], k: int
) -> Float[Array, "*run prompt"]:
    """Whether the chosen layer is among the ``k`` with the largest effect; ties share the places.

    k / layers is chance.
    """
    own = np.take_along_axis(effect, _fit(chosen, effect), -1)
    larger, equal = (effect > own).sum(-1), (effect == own).sum(-1)
    return np.clip((k - larger) / equal, 0, 1)


def _fit(chosen: Array, effect: Array) -> Array:
    return np.broadcast_to(chosen, np.broadcast_shapes(chosen.shape, effect.shape[:-1]))[..., None]


def ranks(values: Float[Array, "*run prompt layer"]) -> Float[Array, "*run prompt layer"]:
    """Ranks over layers, ties averaged."""
    return rankdata(values, axis=-1).astype(float)


def correlation(
    a: Float[Array, "*#run prompt layer"], b: Float[Array, "*#run prompt layer"]
) -> Float[Array, "*run prompt"]:
    """Pearson's r over layers; of ranks it is Spearman's. NaN where one side is constant."""
    a, b = (x - x.mean(-1, keepdims=True) for x in (a, b))
    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size > 1e-9, (a * b).sum(-1) / size, np.nan)


def without_depth(values: Float[Array, "*run prompt layer"]) -> Float[Array, "*run prompt layer"]:
    """What is left of ranks when a straight line in depth is taken out."""
    depth = np.arange(values.shape[-1]) - (values.shape[-1] - 1) / 2
    centred = values - values.mean(-1, keepdims=True)
    slope = (centred * depth).sum(-1, keepdims=True) / (depth * depth).sum()
    rest = centred - slope * depth
    return np.where(np.abs(rest) < 1e-9, 0.0, rest)  # depth itself leaves nothing, not rounding


def measure(
    score: Float[Array, "*#run prompt layer"],
    effect: Float[Array, "*#run prompt layer"],
    chosen: Int[Array, "*#run prompt"] | None = None,
    *,
    effect_ranks: Array | None = None,
    effect_rest: Array | None = None,
) -> dict[str, Float[Array, "*run prompt"]]:
    """Every measure of one score. ``chosen`` is its onset layer, left out: the highest-scored one.

    A chosen layer of −1 is an undefined one. ``partial_spearman`` is Spearman's with depth partialled out.
    ``effect_ranks`` and ``effect_rest`` (ranks without depth) may be given where they are known.
    """
    chosen = score.argmax(-1) if chosen is None else chosen
    onset = np.maximum(chosen, 0)
    score_ranks = ranks(score)
    effect_ranks = ranks(effect) if effect_ranks is None else effect_ranks
    effect_rest = without_depth(effect_ranks) if effect_rest is None else effect_rest
    found = {"superiority": superiority(onset, score, effect)}
    found |= {f"top{k}": top_k(onset, effect, k) for k in (1, 3)}
    found |= {"spearman": correlation(score_ranks, effect_ranks)}
    found |= {"partial_spearman": correlation(without_depth(score_ranks), effect_rest)}
    bad = np.isnan(score).any(-1) | np.isnan(effect).any(-1)
    without_onset = bad | (chosen < 0)
    picks = ("superiority", "top1", "top3")
    return {name: np.where(without_onset if name in picks else bad, np.nan, v) for name, v in found.items()}


def mean(values: Float[Array, "*run prompt"]) -> Float[Array, "*run"]:
    """Mean over the prompts where a measure is defined, NaN where it is nowhere."""
    count = (~np.isnan(values)).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count > 0, np.nansum(values, -1) / count, np.nan)


def interval(
    values: Float[Array, "*run prompt"], n_resamples: int, rng: np.random.Generator, confidence: float = 0.95
) -> tuple[Float[Array, "*run"], Float[Array, "*run"]]:
    """Bootstrap interval of the mean over prompts: percentiles, widened for small samples.

    Percentiles of n resampled values are too narrow by the factor √((n−1)/n) and by normal instead of
    Student quantiles; taking them at Φ(± t √(n/(n−1))) repairs both (Hesterberg, "What Teachers Should Know
    About the Bootstrap", 2015, section 5.3). Checked against planted truths in the tests. NaN for fewer than
    two prompts; of zero width where all prompts agree.
    """
    n = values.shape[-1]
    if n < 2:
        nothing = np.full(values.shape[:-1], np.nan)
        return nothing, nothing
    weight = rng.multinomial(n, np.full(n, 1 / n), size=n_resamples).astype(float)  # [resample, prompt]
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (np.nan_to_num(values) @ weight.T) / (known.astype(float) @ weight.T)  # [*run, resample]
    counts = np.maximum(known.sum(-1), 2)
    low = ndtr(student.ppf((1 - confidence) / 2, counts - 1) * np.sqrt(counts / (counts - 1)))
    flat, levels = means.reshape(-1, n_resamples), low.reshape(-1)
    ends = [
        np.nanquantile(m, [q, 1 - q]) if np.isfinite(m).any() else [np.nan] * 2
        for m, q in zip(flat, levels, strict=True)
    ]
    few = known.sum(-1) < 2
    low_end, high_end = np.array(ends).T.reshape(2, *values.shape[:-1])
    return np.where(few, np.nan, low_end), np.where(few, np.nan, high_end)


def null_measures(
    scores: Mapping[str, tuple[Float[Array, "prompt layer"], Int[Array, "prompt"] | None]],
    effect: Float[Array, "prompt layer"],
    n_resamples: int,
    rng: np.random.Generator,
) -> dict[str, dict[str, Float[Array, "resample prompt"]]]:
    """The measures of every score when effects are handed to the layers of their prompt at random.

    With depth partialled out, it is what depth leaves of the effect's ranks that is handed around (Freedman
    and Lane, 1983), so that a score which only follows depth stays at chance.
    """
    effect_ranks = ranks(effect)
    rest = without_depth(effect_ranks)
    found: dict[str, dict[str, list[Array]]] = {name: {m: [] for m in MEASURES} for name in scores}
    for size in _sizes(n_resamples, effect.size):
        order = rng.random((size, *effect.shape)).argsort(-1)
        dealt, dealt_rest = (np.take_along_axis(x[None], order, -1) for x in (effect_ranks, rest))
        dealt_rest = without_depth(dealt_rest)
        for name, (score, chosen) in scores.items():
            for key, value in measure(
                score, dealt, chosen, effect_ranks=dealt, effect_rest=dealt_rest
            ).items():
                found[name][key].append(value)
    return {name: {m: np.concatenate(parts) for m, parts in own.items()} for name, own in found.items()}


def _sizes(n_resamples: int, n_values: int) -> Iterator[int]:
    """Resamples at a time, so that memory stays bounded."""
    step = max(1, 2_000_000 // n_values)
    for first in range(0, n_resamples, step):
        yield min(step, n_resamples - first)


def p_value(observed: Float[Array, "*run"], null: Float[Array, "resample *run"]) -> Float[Array, "*run"]:
    """Two-sided permutation p-value: twice the share of chance results at least as far out on that side."""
    with np.errstate(invalid="ignore"):
        sides = [
            (1 + side.sum(0)) / (1 + len(null))
            for side in (null >= observed - 1e-12, null <= observed + 1e-12)
        ]
    return np.where(np.isnan(observed), np.nan, np.minimum(2 * np.minimum(*sides), 1))


def holm(p: Float[Array, "test"]) -> Float[Array, "test"]:
    """Holm's step-down adjusted p-values; NaN stays NaN and does not count as a test."""
    adjusted = np.full(p.shape, np.nan)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    steps = p[order] * (len(order) - np.arange(len(order)))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1) if len(order) else steps
    return adjusted
