"""validate_onset: does the layer where the credits place a token depend most on being there?

Credits along the stream say where the model's own readout begins to see a token; an ablation says what the
prediction loses without a layer, with all that the layers above make of it. The paper (arXiv 2606.29693)
leaves open whether the one foretells the other and proposes the test: ablating the onset layer should
suppress the target's probability more than ablating layers with lower scores. It can come out either way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from . import ranking
from ._checks import check_choice, check_model, check_positive, fail, unwrap
from ._html import number, page, table
from ._types import ONSET_RULES
from .ablation import ablate
from .collect import ResidualStates, collect_states
from .compare import compare
from .files import read_result, write_result
from .lens import ig_lens, weight_processing
from .readout import Readout
from .result import IGLensResult, largest_gap
from .sites import MODES
from .tokens import resolve_objective

UNITS: tuple[str, ...] = ("block", "attn", "mlp")
MONOTONE_BELOW = 1.5  # Σ|credit| / |Δ|: less than a fifth of it is steps in one direction undone by the other
LAYER_IG_STEPS = 16  # Captum warns where that many do not converge
EARLY = 2  # blocks 0 and 1, without which most models say nothing
_RULE_SCORES = {"mass": "abs_credit", "largest": "credit_towards", "settled": "credit_towards"}


@dataclass(frozen=True)
class Evidence:
    """What the scores are computed from: states of one forward, and the credits of the unit's segments."""

    model: Any
    input: Any
    states: ResidualStates
    targets: Int[Tensor, "batch 1"]
    unit: str
    receipt: IGLensResult
    seed: int

    @property
    def rows(self) -> list[int]:
        """The segments of the receipt that run through the unit."""
        ending = "_block" if self.unit == "block" else f"_{self.unit}_out"
        return [i for i, label in enumerate(self.receipt.labels) if label.endswith(ending)]

    @property
    def credit(self) -> Float[Tensor, "layer batch"]:
        return self.receipt.attribution[self.rows, :, 0]

    def of(self, values: Float[Tensor, "segment batch pos"]) -> Float[Tensor, "layer batch"]:
        return values[self.rows, :, 0]

    def ask(self, **options: Any) -> IGLensResult:
        """IG-Lens again on the same states."""
        return ig_lens(
            self.model, states=self.states, targets=self.targets, incl_mid=self.unit != "block", **options
        )


def _dla(e: Evidence) -> Tensor:
    """Direct logit attribution of the unit; its rows also hold what no block wrote."""
    options = {"targets": e.targets, "incl_mid": e.unit != "block"}
    found = compare(e.model, states=e.states, methods=("dla",), **options)["dla"]
    return found.values[[found.labels.index(e.receipt.labels[row]) for row in e.rows], :, 0]


def _layer_ig(e: Evidence) -> Tensor:
    """Captum's layer integrated gradients of the block's output, the part at the target position."""
    if e.unit != "block":
        fail("scores", f"without layer_ig for unit={e.unit!r}", "'layer_ig'", "it is a score of whole blocks")
    methods = {"layer_ig": {"n_steps": LAYER_IG_STEPS}}
    return compare(e.model, states=e.states, methods=methods, targets=e.targets)["layer_ig"].extra[
        "at_target"
    ][..., 0]


def _random(e: Evidence) -> Tensor:
    """Noise: what chance looks like in every measure."""
    prompts = e.states.prompts
    rows = [(e.seed, *prompts.ids[row, a:b].tolist()) for row, (a, b) in enumerate(prompts.spans)]
    noise = [np.random.default_rng(row).random(len(e.rows), dtype=np.float32) for row in rows]
    return torch.from_numpy(np.stack(noise, 1))


# A score is a function of the evidence, [layer, batch]; a new one is one line.
SCORES: dict[str, Callable[[Evidence], Tensor]] = {
    "ig_lens": lambda e: e.credit,
    "abs_credit": lambda e: e.credit.abs(),
    "log_prob": lambda e: e.of(e.ask(quantity="log_prob").attribution),
    "logit_lens": lambda e: e.of(e.receipt.levels[1:]),
    "dla": _dla,
    "layer_ig": _layer_ig,
    "depth": lambda e: torch.arange(len(e.rows), dtype=torch.float32)[:, None].expand_as(e.credit),
    "random": _random,
}
DEFAULT_SCORES: tuple[str, ...] = (
    "ig_lens",
    "abs_credit",
    "log_prob",
    "logit_lens",
    "dla",
    "depth",
    "random",
)


@dataclass(frozen=True)
class PromptScores:
    """Scores and onsets of the layers of every prompt; they serve any number of ablations."""

    scores: Mapping[str, Float[Tensor, "prompt layer"]]
    onsets: Mapping[str, Int[Tensor, "prompt"]]  # by rule; −1 where undefined
    credit: Float[Tensor, "prompt layer"]
    cancellation: Float[Tensor, "prompt"]
    labels: tuple[str, ...]
    texts: tuple[str, ...]
    families: tuple[str, ...]
    targets: Int[Tensor, "prompt"]
    target_strings: tuple[str, ...]
    info: Mapping[str, str]


@dataclass(frozen=True, repr=False)
class OnsetStudy:
    """Scores against ablation effects, layer by layer and prompt by prompt, with their statistics.

    ``statistics`` rows are (score, layers, stratum, measure, estimate, low, high, chance, p, p_holm, n). A
    score is judged by its highest-scored layer; ``onset:<rule>`` by the layer that this rule of
    ``IGLensResult.onset`` names, against the layers whose credit is lower.
    """

    scores: Float[Tensor, "score prompt layer"]
    effects: Float[Tensor, "prompt layer"]
    onsets: Int[Tensor, "rule prompt"]
    p_clean: Float[Tensor, "prompt"]
    cancellation: Float[Tensor, "prompt"]
    score_names: tuple[str, ...]
    rules: tuple[str, ...]
    labels: tuple[str, ...]
    texts: tuple[str, ...]
    families: tuple[str, ...]
    target_strings: tuple[str, ...]
    statistics: tuple[tuple[Any, ...], ...]
    info: Mapping[str, Any]

    def caption(self) -> str:
        """One line that says what was compared: the ablation, the model, and what the credits are."""
        info = {key: self.info.get(key, "?") for key in ("unit", "mode", "at", "model")}
        reference = self.info.get("reference", "none")
        done = f"{info['unit']} · mode {info['mode']} at {info['at']}"
        done += "" if reference == "none" else f", reference {reference}"
        gap = f" · |Σ − Δ| ≤ {self.info['completeness_gap']}" if "completeness_gap" in self.info else ""
        return f"effect on prob · {done} · {info['model']} · credits prob, baseline embed, prediction_aware{gap}"

    def __repr__(self) -> str:
        prompts, layers = self.effects.shape
        return f"OnsetStudy({prompts} prompts × {layers} layers × {len(self.scores)} scores; {self.caption()})"

    def _repr_html_(self) -> str:
        """For notebooks, every score's measures with their intervals over all prompts and layers; escaped."""
        found = self.summary(stratum="all", layers="all")
        measures = list(dict.fromkeys(found["measure"]))
        rows = []
        for score in dict.fromkeys(found["score"]):
            own = found[found["score"] == score].set_index("measure")
            rows.append((score, *(_interval(own.loc[m]) if m in own.index else "" for m in measures)))
        chance = found.groupby("measure")["chance"].mean()
        rows.append(("chance", *(number(float(chance[m]), ".2f") for m in measures)))
        title = f"{len(self.texts)} prompts, all layers; mean over prompts with its 95 % bootstrap interval"
        return page(self.caption(), [table(title, rows, ("score", *(m.replace("_", " ") for m in measures)))])

    def summary(
        self, *, measure: str | None = None, stratum: str | None = None, layers: str | None = None
    ) -> pd.DataFrame:
        """One row per (score, layers, stratum, measure) with its interval and p-values, optionally filtered.

        ``estimate`` is a mean over the ``n`` prompts where the measure is defined, ``low`` and ``high`` its
        95 % bootstrap interval, ``chance`` its mean when effects are dealt at random within prompts, ``p``
        the two-sided permutation p-value and ``p_holm`` the same corrected for the number of scores.
        """
        frame = pd.DataFrame(list(self.statistics), columns=_COLUMNS)
        for column, wanted in (("measure", measure), ("stratum", stratum), ("layers", layers)):
            if wanted is not None:
                check_choice(column, wanted, tuple(dict.fromkeys(frame[column])))
                frame = frame[frame[column] == wanted]
        return frame.reset_index(drop=True)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per (prompt, layer): the effect of its ablation, every score, and which rules name it."""
        n_prompts, n_layers = self.effects.shape
        prompt = np.repeat(np.arange(n_prompts), n_layers)
        layer = np.tile(np.arange(n_layers), n_prompts)
        columns: dict[str, Any] = {"prompt": prompt, "text": np.array(self.texts, object)[prompt]}
        columns |= {"family": np.array(self.families, object)[prompt]}
        columns |= {"target": np.array(self.target_strings, object)[prompt]}
        columns |= {
            "p_clean": self.p_clean.numpy()[prompt],
            "cancellation": self.cancellation.numpy()[prompt],
        }
        columns |= {"layer": layer, "segment": np.array(self.labels, object)[layer]}
        columns |= {"effect": self.effects.numpy().ravel()}
        columns |= {name: self.scores[i].numpy().ravel() for i, name in enumerate(self.score_names)}
        for i, rule in enumerate(self.rules):
            columns[f"onset_{rule}"] = self.onsets[i].numpy()[prompt] == layer
        return pd.DataFrame(columns)

    def save(self, path: str | FilePath) -> FilePath:
        """Write one safetensors file with JSON metadata; nothing in it is executable. Returns the path."""
        return write_result(self, path, "OnsetStudy")

    @classmethod
    def load(cls, path: str | FilePath) -> "OnsetStudy":
        """Read what ``save`` wrote to ``path``; ValueError for a file that is damaged or is something else."""
        return read_result(cls, path, "OnsetStudy")


def _interval(row: pd.Series) -> str:
    low, high = (number(float(row[end]), ".2f") for end in ("low", "high"))
    return f"{number(float(row['estimate']), '.2f')} [{low}, {high}]"


_COLUMNS = ["score", "layers", "stratum", "measure", "estimate", "low", "high", "chance", "p", "p_holm", "n"]


def validate_onset(
    model: Any,
    prompts: Sequence[Any],
    *,
    targets: Sequence[Any] | None = None,
    scores: Sequence[str] = DEFAULT_SCORES,
    unit: str = "block",
    mode: str = "skip",
    at: Any = "target",
    reference: Any = None,
    fraction: float = 0.5,
    n_resamples: int = 2000,
    seed: int = 0,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> OnsetStudy:
    """Whether scores of layers foretell what ablating them does, over many prompts.

    Measures, each a mean over prompts: ``superiority``, the probability that ablating the onset layer lowers
    the target's probability more than ablating a lower-scored layer (0.5 is chance); ``top1`` and ``top3``,
    whether the onset layer is among the one or three most damaging; ``spearman``, the rank correlation of
    score and effect over layers; ``partial_spearman``, the same with depth partialled out. Intervals are
    bootstrapped over prompts; p-values come from permuting effects within prompts, corrected over the scores
    by Holm's rule. Strata: prompts with a monotone and a non-monotone trajectory (cancellation below and from
    1.5) and families, each over all layers and without blocks 0 and 1.

    Args:
        prompts: texts, or objects with ``text``, ``answer`` (None for the model's top token) and ``family``.
        targets: one token per prompt, in place of their answers; None among them for the top token.
        scores: names from ``SCORES``.
        unit, mode, at, reference: the ablation, as for ``ablate``; unit is block, attn or mlp.
        fraction: of the onset rules.
        n_resamples: bootstrap samples of prompts, and permutations.
        prepend_bos: whether prompts get the tokenizer's BOS; None for the model's own default.

    Returns: an :class:`OnsetStudy` with ``effects`` ``[prompt, layer]`` in probability.

    Raises: ValueError naming the argument.
    """
    check_choice("unit", unit, UNITS)
    check_choice("mode", mode, MODES)
    check_positive("n_resamples", n_resamples)
    found = prompt_scores(
        model,
        prompts,
        targets=targets,
        scores=scores,
        unit=unit,
        fraction=fraction,
        seed=seed,
        prepend_bos=prepend_bos,
    )
    result = ablate(
        model,
        list(found.texts),
        targets=found.targets[:, None],
        unit=unit,
        mode=mode,
        at=at,
        reference=reference,
        seed=seed,
        prepend_bos=prepend_bos,
        progress=progress,
    )
    ablation = {"unit": unit, "mode": mode, "at": result.info.at, "reference": result.info.reference}
    return judge(
        found, result.effect.T, result.p_clean, n_resamples=n_resamples, seed=seed, ablation=ablation
    )


def prompt_scores(
    model: Any,
    prompts: Sequence[Any],
    *,
    targets: Sequence[Any] | None = None,
    scores: Sequence[str] = DEFAULT_SCORES,
    unit: str = "block",
    fraction: float = 0.5,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> PromptScores:
    """The scores of every layer for every prompt, from one forward; ``judge`` sets them against effects."""
    check_choice("unit", unit, UNITS)
    for name in (scores,) if isinstance(scores, str) else scores:
        check_choice("scores", name, tuple(SCORES))
    model = unwrap(model)
    check_model(model)
    texts, wanted, families = _read(prompts, targets)
    states = collect_states(model, texts, incl_mid=unit != "block", prepend_bos=prepend_bos)
    ids = _target_ids(model, wanted, states)
    receipt = ig_lens(model, states=states, targets=ids, incl_mid=unit != "block")
    evidence = Evidence(model, texts, states, ids, unit, receipt, seed)
    rows = evidence.rows
    # the rules of onset, among the segments of this unit
    own = replace(
        receipt,
        attribution=receipt.attribution[rows],
        labels=tuple(receipt.labels[i] for i in rows),
        boundaries=tuple(receipt.boundaries[i] for i in rows),
        step_attribution=None,
    )
    return PromptScores(
        scores={name: SCORES[name](evidence).T.contiguous() for name in dict.fromkeys(scores)},
        onsets={rule: own.onset(rule, fraction).index[:, 0] for rule in ONSET_RULES},
        credit=evidence.credit.T.contiguous(),
        cancellation=receipt.cancellation[:, 0],
        labels=own.labels,
        texts=tuple(texts),
        families=families,
        targets=receipt.targets[:, 0],
        target_strings=tuple(row[0] for row in receipt.target_strings),
        info={
            "model": receipt.info.model,
            "dtype": receipt.info.dtype,
            "transformer_lens": version("transformer-lens"),
            "weight_processing": weight_processing(model),
            "fraction": str(fraction),
            "completeness_gap": f"{largest_gap(receipt.completeness_gap):.1e}",
        },
    )


def judge(
    found: PromptScores,
    effects: Float[Tensor, "prompt layer"],
    p_clean: Float[Tensor, "prompt"],
    *,
    n_resamples: int = 2000,
    seed: int = 0,
    ablation: Mapping[str, str] | None = None,
) -> OnsetStudy:
    """Scores against the effects of one kind of ablation: measures, intervals, p-values, strata."""
    score = {name: (values.double().numpy(), None) for name, values in found.scores.items()}
    credit = found.credit.double().numpy()
    towards = credit * np.sign(credit.sum(-1, keepdims=True))
    basis = {"abs_credit": np.abs(credit), "credit_towards": towards}
    judged: dict[str, Any] = dict(score)
    for rule, onset in found.onsets.items():
        judged[f"onset:{rule}"] = (basis[_RULE_SCORES[rule]], onset.numpy())
    strata = _strata(found)
    rows: list[tuple[Any, ...]] = []
    n_layers = len(found.labels)
    for layers, first in (("all", 0), (f"{EARLY}+", EARLY)):
        if n_layers - first < 3:
            continue
        cut = {
            name: (s[:, first:], None if c is None else _later(c, first)) for name, (s, c) in judged.items()
        }
        rng = np.random.default_rng([seed, first])
        rows += _judge_layers(cut, effects.double().numpy()[:, first:], strata, layers, n_resamples, rng)
    return OnsetStudy(
        scores=torch.stack(list(found.scores.values())),
        effects=effects.contiguous(),
        onsets=torch.stack(list(found.onsets.values())),
        p_clean=p_clean,
        cancellation=found.cancellation,
        score_names=tuple(found.scores),
        rules=tuple(found.onsets),
        labels=found.labels,
        texts=found.texts,
        families=found.families,
        target_strings=found.target_strings,
        statistics=tuple(rows),
        info={**found.info, **(ablation or {}), "n_resamples": n_resamples, "seed": seed},
    )


def _later(onset: np.ndarray, first: int) -> np.ndarray:
    """Onset layers counted from ``first``; one before it is left out."""
    return np.where(onset < first, -1, onset - first)


def _strata(found: PromptScores) -> dict[str, np.ndarray]:
    """Which prompts belong to each stratum; a trajectory without Δ is neither monotone nor not."""
    cancellation = found.cancellation.double().numpy()
    strata = {"all": np.ones(len(found.texts), bool)}
    strata["monotone"] = cancellation < MONOTONE_BELOW
    strata["non-monotone"] = cancellation >= MONOTONE_BELOW
    families = np.array(found.families, object)
    strata |= {f"family: {name}": families == name for name in dict.fromkeys(found.families) if name}
    return {name: members for name, members in strata.items() if members.any()}


def _judge_layers(
    judged: Mapping[str, tuple[np.ndarray, np.ndarray | None]],
    effects: np.ndarray,
    strata: Mapping[str, np.ndarray],
    layers: str,
    n_resamples: int,
    rng: np.random.Generator,
) -> list[tuple[Any, ...]]:
    """Rows of ``OnsetStudy.statistics`` for one choice of layers."""
    observed = {name: ranking.measure(s, effects, chosen) for name, (s, chosen) in judged.items()}
    null = ranking.null_measures(judged, effects, n_resamples, rng)
    names = list(judged)
    rows: list[tuple[Any, ...]] = []
    for stratum, members in strata.items():
        for measure in ranking.MEASURES:
            # a rule names a layer and ranks none: correlations would be those of its credits
            own = [
                n for n in names if not n.startswith("onset:") or measure in ("superiority", "top1", "top3")
            ]
            values = np.stack([observed[name][measure][members] for name in own])
            chance = np.stack([ranking.mean(null[name][measure][:, members]) for name in own], 1)
            estimate = ranking.mean(values)
            low, high = ranking.interval(values, n_resamples, rng)
            p = ranking.p_value(estimate, chance)
            columns = (estimate, low, high, chance.mean(0), p, ranking.holm(p), (~np.isnan(values)).sum(-1))
            for i, name in enumerate(own):
                numbers = [float(column[i]) for column in columns[:-1]]
                rows.append((name, layers, stratum, measure, *numbers, int(columns[-1][i])))
    return rows


# --- prompts ------------------------------------------------------------------------------------


def _read(
    prompts: Sequence[Any], targets: Sequence[Any] | None
) -> tuple[list[str], list[Any], tuple[str, ...]]:
    """Texts, wanted tokens (None for the model's own) and families of texts or prompt objects."""
    if isinstance(prompts, str) or not len(prompts):
        fail(
            "prompts",
            "a list of texts or Prompt objects",
            repr(prompts),
            "give at least two, better a hundred",
        )
    texts = [p if isinstance(p, str) else p.text for p in prompts]
    families = tuple(str(getattr(p, "family", "")) for p in prompts)
    wanted = [getattr(p, "answer", None) for p in prompts] if targets is None else list(targets)
    if len(wanted) != len(texts):
        fail(
            "targets",
            f"one per prompt ({len(texts)})",
            f"{len(wanted)} tokens",
            "None stands for the top token",
        )
    return texts, wanted, families


def _target_ids(model: Any, wanted: Sequence[Any], states: ResidualStates) -> Int[Tensor, "batch 1"]:
    ids = states.output.top.clone()
    d_vocab = Readout(model).d_vocab
    for row, target in enumerate(wanted):
        if target is not None:
            found = resolve_objective(model, d_vocab, target, None, "prob", (1, 1)).ids
            if found.shape[-1] != 1:
                fail(
                    "targets", "single tokens", repr(target), "scores such as dla have no direction for a set"
                )
            ids[row, 0] = found[0, 0, 0]
    return ids
