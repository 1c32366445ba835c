"""Methods of a comparison: one file each, one return type, one line in the table below.

A new method is a function from a :class:`Question` to a :class:`MethodResult`. In a file of its own::

    from tl_iglens.methods import MethodResult, Question, register_method
    from tl_iglens.methods.base import ends_of

    @register_method("update_norm")
    def update_norm(question: Question) -> MethodResult:
        states = question.at(question.path.states)
        sizes = question.cells((states[1:] - states[:-1]).norm(dim=-1))
        where = ends_of(question.path.states[1:], question.n_layers)
        return MethodResult("update_norm", sizes, question.path.labels, **where, kind="level", unit="norm")

after which ``compare(model, prompt, methods=("ig_lens", "update_norm"))`` has a column of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._checks import check_choice, fail
from .base import MethodResult, Question
from .direct_probability import direct_probability
from .direct_probability import hooks as _component_hooks
from .embedding_projection import embedding_projection
from .ig_lens import credits
from .jacobian import jacobian
from .layer_gradients import layer_conductance, layer_ig
from .logit_attribution import hooks as _attribution_hooks
from .logit_attribution import logit_attribution
from .logit_lens import logit_lens
from .tuned_lens import TunedLens, tuned_lens

__all__ = [
    "METHODS",
    "Method",
    "MethodResult",
    "Question",
    "TunedLens",
    "hooks_of",
    "read_methods",
    "register_method",
]


def _nothing(model: Any, **options: Any) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Method:
    """A row of the table: the method, and which activations it needs beside the residual stream."""

    run: Callable[..., MethodResult]
    hooks: Callable[..., Sequence[str]] = _nothing


METHODS: dict[str, Method] = {
    "ig_lens": Method(credits),
    "logit_lens": Method(logit_lens),
    "tuned_lens": Method(tuned_lens),
    "jacobian": Method(jacobian),
    "dla": Method(logit_attribution, _attribution_hooks),
    "dpa": Method(direct_probability, _component_hooks),
    "embedding_projection": Method(embedding_projection),
    "layer_ig": Method(layer_ig),
    "layer_conductance": Method(layer_conductance),
}


def register_method(name: str, hooks: Callable[..., Sequence[str]] = _nothing) -> Callable[..., Any]:
    """Decorator that adds a method to the table under a new name; ValueError for a name that is taken.

    The method takes a ``Question`` and returns a ``MethodResult`` with values ``[row, batch, pos]`` and their unit.
    ``hooks(model, **options)`` names the hook points it needs beside the residual stream.
    """
    if name in METHODS:
        fail("name", "new to the table of methods", repr(name), "choose another, or del METHODS[name] first")

    def add(run: Callable[..., MethodResult]) -> Callable[..., MethodResult]:
        METHODS[name] = Method(run, hooks)
        return run

    return add


def read_methods(methods: str | Sequence[str] | Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Names with their options, of a name, a sequence of names or a mapping from names to options."""
    methods = (methods,) if isinstance(methods, str) else methods
    chosen = {name: dict(methods[name]) if isinstance(methods, Mapping) else {} for name in methods}
    if not chosen:
        fail("methods", "at least one name", "none", f"choose from {', '.join(METHODS)}")
    for name in chosen:
        check_choice("methods", name, tuple(METHODS))
    return chosen


def hooks_of(model: Any, methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The hook points that these methods need beside the residual stream, for ``collect_states(extra=...)``."""
    names = [hook for name, options in methods.items() for hook in METHODS[name].hooks(model, **options)]
    return list(dict.fromkeys(names))
