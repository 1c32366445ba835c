"""Direct probability attribution as one method among others: rows with the labels of DLA, in probability."""

import re
from typing import Any

from .._checks import check_choice, check_positive, fail
from .._types import BASELINES
from ..components import PATHS, ComponentQuestion
from ..path import Point, resolve_path
from ..windows import WindowReader
from ..writers import UNITS, component_hooks, embed_hooks
from .base import MethodResult, Question, ends_of


def hooks(model: Any, *, unit: str = "component", **options: Any) -> tuple[str, ...]:
    """The outputs a unit needs beside the residual stream; ValueError for a unit the model has not."""
    check_choice("unit", unit, UNITS)
    return component_hooks(model, unit) + embed_hooks(model)


def direct_probability(
    question: Question,
    *,
    unit: str = "component",
    path: str = "layers",
    n_nodes: int = 8,
    top_k: int | None = None,
) -> MethodResult:
    """The credit of every component, head or neuron; credits sum to Δ, the change of the model's own quantity.

    Options as for ``direct_probability_attribution``. Raises ValueError for a baseline that has no name.
    """
    check_choice("path", path, PATHS)
    check_positive("n_nodes", n_nodes)
    baseline, points, states = question.receipt.info.baseline, question.path.states, question.states
    if baseline not in BASELINES:
        todo = "call direct_probability_attribution with the baseline itself"
        fail("baseline", f"one of {', '.join(BASELINES)} for the method dpa", f"a {baseline}", todo)
    layers = [point.block for point in points if not point.mid]
    route = resolve_path(question.n_layers, layers, from_embed=baseline == "embed")
    asked = ComponentQuestion(
        question.model,
        question.readout,
        question.objective,
        False,
        unit,
        None,
        route,
        path,
        baseline,
        n_nodes,
    )
    names = hooks(question.model, unit=unit)
    reader = WindowReader(question.model, states.prompts, states.positions, states, names, (), None)
    found = asked.answer(reader, top_k, question.progress)
    has_mid = "blocks.0.hook_resid_mid" in question.model.hook_dict
    pairs = zip(found.labels, found.boundaries, strict=True)
    places = tuple(_end(label, boundary, has_mid) for label, boundary in pairs)
    assert found.quadrature_error is not None
    missed = found.quadrature_error.nan_to_num().sum(0).max().item()
    return MethodResult(
        method="dpa",
        values=found.attribution,
        labels=found.labels,
        **ends_of(places, question.n_layers),
        kind="additive",
        unit=question.unit,
        sums_to="Δ",
        expected=found.model_level - found.levels[0],
        notes=(*found.info.notes, f"quadrature error of a cell at most {missed:.1e}, shared out"),
    )


def _end(label: str, boundary: int, has_mid: bool) -> Point:
    """The state a component's sublayer ends at: behind the attention of its block, or behind the block."""
    attention = has_mid and re.match(r"L\d+H|\d+_attn_", label) is not None
    return Point(boundary - 1, mid=True) if attention else Point(boundary)
