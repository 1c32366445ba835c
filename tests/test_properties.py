"""The laws on drawn questions: any small model, prompts, path, estimator, target, padding, batch and tile.

200 examples by default; ``TL_IGLENS_EXAMPLES=2000`` (``make nightly``) runs more. The draws are the same in every
run, and a failure prints the example and how to run it alone.
"""

import functools
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import HOOKED, IS_4, has_mid
from conftest import close_or_nan as close
from fixtures import bridge, hooked, no_trace
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from tl_iglens import TokenSet, collect_states, ig_lens
from tl_iglens._types import ESTIMATORS, QUANTITIES

N_LAYERS, N_LAWS = 3, 5
EXAMPLES = int(os.environ.get("TL_IGLENS_EXAMPLES", "200"))

lawful = settings(
    max_examples=-(-EXAMPLES // N_LAWS),
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

BRIDGES = ("gpt2-raw", "gpt2-compat", "llama-raw", "gemma2-compat", "neox_par-raw", "cohere-raw", "cohere-compat")
NAMES = ([] if IS_4 else [f"hooked-{name}" for name in HOOKED]) + list(BRIDGES)
DTYPES = ("float32", "float64")


@functools.cache
def random_model(name: str, seed: int, dtype: str) -> Any:
    kind, _, option = name.partition("-")
    if kind == "hooked":
        return hooked(seed=seed, dtype=getattr(torch, dtype), **HOOKED[option])
    family, kind = name.rsplit("-", 1)
    return bridge(family, seed=seed, dtype=getattr(torch, dtype), compat=kind == "compat")


def exists(name: str) -> bool:
    """Whether this TransformerLens has the model: 2.18 has no bridges, 4 no HookedTransformer."""
    try:
        random_model(name, 0, "float32")
    except pytest.skip.Exception:
        return False
    return True


@functools.cache
def names() -> list[str]:
    return [name for name in NAMES if exists(name)]


@dataclass(frozen=True)
class Question:
    """One drawn call of ``ig_lens``: rows of ids, and the options that ask something of them."""

    model: str
    seed: int
    dtype: str
    rows: list[list[int]]
    side: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def built(self) -> Any:
        return random_model(self.model, self.seed, self.dtype)

    @property
    def tolerance(self) -> float:
        return 1e-12 if self.dtype == "float64" else 1e-6

    def ask(self, rows: list[list[int]] | None = None, side: str | None = None, **changes: Any) -> Any:
        ids, mask = padded(self.rows if rows is None else rows, side or self.side)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ig_lens(self.built, ids, attention_mask=mask, **(self.options | changes))

    def alone(self, row: int) -> Any:
        """The solo run of a row: its own part of every option that has one per row."""
        changes = {}
        for name in ("targets", "incorrect_targets", "baseline"):
            given = self.options.get(name)
            if isinstance(given, list) or (isinstance(given, torch.Tensor) and given.ndim == 3):
                changes[name] = given[row : row + 1]
        return self.ask([self.rows[row]], **changes)


def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    pads = [width - len(row) for row in rows]
    if side == "left":
        pairs = [([2] * n + row, [0] * n + [1] * len(row)) for row, n in zip(rows, pads, strict=True)]
    else:
        pairs = [(row + [2] * n, [1] * len(row) + [0] * n) for row, n in zip(rows, pads, strict=True)]
    return torch.tensor([ids for ids, _ in pairs]), torch.tensor([mask for _, mask in pairs])


ids = st.integers(3, 49)


@st.composite
def questions(draw: st.DrawFn, *, estimators: tuple[str, ...] = ESTIMATORS, n_rows: int = 3) -> Question:
    name = draw(st.sampled_from(names()))
    rows = draw(st.lists(st.lists(ids, min_size=1, max_size=7), min_size=1, max_size=n_rows))
    question = Question(
        name, draw(st.integers(0, 1)), draw(st.sampled_from(DTYPES)), rows, draw(st.sampled_from(("left", "right")))
    )
    shortest, n = min(map(len, rows)), len(rows)
    several = st.lists(ids, min_size=1, max_size=3, unique=True)
    targets = draw(
        st.one_of(
            st.none(),
            st.just("next"),
            ids,
            st.lists(ids, min_size=n, max_size=n),
            several.map(lambda members: TokenSet(*members)),
        )
    )
    incorrect = st.integers(50, 60) if question.built.cfg.d_vocab > 60 else st.integers(0, 2)
    bounds = st.lists(st.integers(0, N_LAYERS), min_size=1, unique=True).map(sorted)
    seeds = st.integers(0, 99).map(lambda seed: torch.Generator().manual_seed(seed))
    width = question.built.cfg.d_model
    tensors = seeds.map(lambda g: torch.randn(width, generator=g)) | seeds.map(
        lambda g: torch.randn(n, 1, width, generator=g)
    )
    positions = [
        st.just(-1),
        st.just(0),
        st.none(),
        st.just((0, 2)),
        st.just((None, None, 2)),
        st.just(slice(-2, None)),
    ]
    positions.append(st.lists(st.integers(-shortest, shortest - 1), min_size=1, max_size=3, unique=True))
    options = {
        "targets": targets,
        "incorrect_targets": draw(st.none() | incorrect),
        "pos_slice": draw(st.one_of(positions)),
        "layers": draw(st.none() | bounds),
        "incl_mid": has_mid(question.built) and draw(st.booleans()),
        "baseline": draw(st.sampled_from(("embed", "zero", "mean", "bos")) | tensors),
        "estimator": draw(st.sampled_from(estimators)),
        "n_steps": draw(st.integers(1, 4)),
        "quantity": draw(st.sampled_from(QUANTITIES)),
        "batch_size": draw(st.none() | st.integers(1, 3)),
        "tile_bytes": draw(st.sampled_from((None, 1, 30_000, 70_000))),
    }
    embed_only = isinstance(options["baseline"], str) and options["baseline"] == "embed"
    assume(not (embed_only and options["layers"] == [0] and N_LAYERS == 0))
    if targets == "next" and not isinstance(targets, TokenSet):
        chosen = options["pos_slice"]
        assume(max(map(len, rows)) > 1 and chosen in (None, (0, 2)))
    event(f"{question.model.partition('-')[0]} {options['estimator']}")
    return Question(question.model, question.seed, question.dtype, rows, question.side, options)


def size(result: Any) -> float:
    """What rounding is relative to: 1 for probabilities, the largest level for logs and logits."""
    return max(1.0, float(torch.nan_to_num(result.levels).abs().max()))


# --- law 1 ------------------------------------------------------------------------------------------------


@lawful
@given(questions(estimators=("prediction_aware",)))
def test_credits_sum_to_the_change(question):
    result = question.ask()
    change = result.levels[-1] - result.levels[0]
    close(result.attribution.sum(0), change, question.tolerance * size(result))
    close(result.attribution, result.levels.diff(dim=0), question.tolerance * size(result))
    assert len(result.labels) == len(result.attribution) == len(result.point_labels) - 1
    if question.options["n_steps"] > 1:
        close(result.step_attribution.sum(1), result.attribution, question.tolerance * size(result))


# --- law 4 ------------------------------------------------------------------------------------------------


@lawful
@given(questions(estimators=("prediction_aware",)))
def test_refined_segments_sum_to_their_whole(question):
    coarse = question.ask(incl_mid=False)
    first = (
        None
        if isinstance(question.options["baseline"], str) and question.options["baseline"] == "embed"
        else (question.options["layers"] or [0])[0]
    )
    fine = question.ask(
        layers=None if first is None else list(range(first, N_LAYERS + 1)), incl_mid=has_mid(question.built)
    )
    assert torch.equal(fine.positions, coarse.positions)
    targets = fine.targets[fine.present], coarse.targets[coarse.present]
    assert torch.equal(*targets)
    start = 0
    for segment, end in enumerate(coarse.boundaries):
        inside = [
            i for i, boundary in enumerate(fine.boundaries) if start < boundary <= end or (i == 0 and segment == 0)
        ]
        close(fine.attribution[inside].sum(0), coarse.attribution[segment], question.tolerance * size(fine))
        start = end


# --- law 7 ------------------------------------------------------------------------------------------------


@lawful
@given(questions())
def test_every_row_equals_its_solo_run(question):
    together = question.ask()
    for row in range(len(question.rows)):
        at = together.present[row]
        if not bool(at.any()):
            continue
        solo = question.alone(row)
        # a float32 product differs in its last bits with its shape, and a gradient adds up some of them
        bound = max(question.tolerance, 1e-11) * size(solo) * (1 if solo.info.exact else 20)
        n = int(at.sum())
        assert bool(at[:n].all()) and solo.attribution.shape[-1] == n
        close(together.attribution[:, row, :n], solo.attribution[:, 0], bound)
        close(together.levels[:, row, :n], solo.levels[:, 0], bound)
        assert together.targets[row, :n].tolist() == solo.targets[0].tolist()
        assert together.target_strings[row][:n] == solo.target_strings[0]
        assert bool(together.attribution[:, row, n:].isnan().all())


# --- law 8 ------------------------------------------------------------------------------------------------


@lawful
@given(questions(), st.integers(0, 2 * N_LAYERS))
def test_no_call_leaves_a_trace(question, breaks):
    baseline = question.options["baseline"]
    tensors = [baseline] if isinstance(baseline, torch.Tensor) else []

    def broken(act, hook):
        raise ArithmeticError("from the caller's hook")

    with no_trace(question.built, *tensors):
        question.ask()
        if breaks < N_LAYERS:
            with pytest.raises(ArithmeticError, match=r"^from the caller's hook$"):
                question.ask(fwd_hooks=[(f"blocks.{breaks}.hook_resid_post", broken)])


# --- law 9 ------------------------------------------------------------------------------------------------


@lawful
@given(questions(), st.sampled_from((None, 1, 2)), st.sampled_from((None, 1, 50_000)))
def test_nothing_depends_on_tiles_batches_padding_or_collected_states(question, batch_size, tile_bytes):
    result = question.ask()
    other_side = "left" if question.side == "right" else "right"
    other = question.ask(side=other_side, batch_size=batch_size, tile_bytes=tile_bytes)
    bound = max(question.tolerance, 1e-11) * size(result) * (1 if result.info.exact else 20)
    close(other.attribution, result.attribution, bound)
    close(other.levels, result.levels, bound)
    assert other.labels == result.labels and other.target_strings == result.target_strings
    assert torch.equal(other.targets[other.present], result.targets[result.present])
    if result.step_attribution is not None:
        close(other.step_attribution, result.step_attribution, bound)

    tokens, mask = padded(question.rows, question.side)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = collect_states(
            question.built, tokens, attention_mask=mask, pos_slice=None, incl_mid=question.options["incl_mid"]
        )
        again = ig_lens(question.built, states=states, **(question.options | {"tile_bytes": tile_bytes}))
    if torch.equal(again.positions, result.positions):  # an explicit slice; -1 means all that were collected
        close(again.attribution, result.attribution, bound)

    twin = {"raw": "compat", "compat": "raw"}
    family, _, kind = question.model.rpartition("-")
    by_name = isinstance(question.options["baseline"], str)
    if question.model.startswith("gpt2") and by_name and question.options["quantity"] != "logit":
        processed = Question(
            f"{family}-{twin[kind]}", question.seed, question.dtype, question.rows, question.side, question.options
        ).ask()
        close(processed.levels, result.levels, 1e-5 * size(result))
