"""One model at work on shards: rows are sorted into good and bad, good ones are analysed in batches of like length."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from .._checks import check_model, fail, unwrap
from ..ablation import ablate
from ..components import direct_probability_attribution
from ..lens import ig_lens, weight_processing
from ..readout import Readout
from ..tokens import Prompts, TokenSet, is_next, next_tokens, resolve_objective, select_positions, tokenise
from .sources import Row, Shard, Unreadable
from .tables import TABLES, Problem, Ready, error_table, in_order, labels_of, user_table

ANALYSES: dict[str, Callable[..., Any]] = {
    "ig_lens": ig_lens,
    "direct_probability_attribution": direct_probability_attribution,
    "ablate": ablate,
}
TOO_LONG = ("skip", "truncate", "error")
_VERSIONS = ("tl-iglens", "transformer-lens", "torch")


class PromptTooLongError(ValueError):
    """A row is longer than allowed, and the run was asked to stop there."""


@dataclass(frozen=True)
class Plan:
    """What is done with every row; can be sent to another process."""

    analysis: Callable[..., Any]
    options: Mapping[str, Any]
    prepend_bos: bool | None
    max_tokens: int | None
    too_long: str
    batch_tokens: int

    @property
    def name(self) -> str:
        """The name of a built-in analysis, or where the user's function stands."""
        names = {function: name for name, function in ANALYSES.items()}
        own = f"{getattr(self.analysis, '__module__', '')}.{getattr(self.analysis, '__qualname__', type(self.analysis).__name__)}"
        return names.get(self.analysis, own)

    @property
    def is_built_in(self) -> bool:
        return self.analysis in ANALYSES.values()

    def accepts(self, argument: str) -> bool:
        """Whether the function has an argument of this name."""
        known = inspect.signature(self.analysis).parameters
        return argument in known or any(p.kind is p.VAR_KEYWORD for p in known.values())


@dataclass(frozen=True)
class Done:
    """What became of a shard."""

    rows: pa.Table
    errors: pa.Table
    provenance: dict[str, Any]


@dataclass
class Worker:
    """A model and what is asked of it. Holds no row longer than its shard."""

    model: Any
    plan: Plan
    labels: dict[str, list[Any]] | None = field(init=False, default=None)
    info: dict[str, Any] | None = field(init=False, default=None)
    versions: dict[str, str] = field(init=False, default_factory=lambda: {name: version(name) for name in _VERSIONS})
    made: int = field(init=False, default=0)
    d_vocab: int = field(init=False, default=0)
    nothing: pa.Table = field(init=False, default_factory=lambda: in_order([]))

    def __post_init__(self) -> None:
        self.model = unwrap(self.model)
        if self.plan.is_built_in:
            check_model(self.model)
            self.d_vocab = Readout(self.model).d_vocab
            example = _example(self.plan, self.model, self.d_vocab)
            self.nothing = self._call([example]).schema.empty_table()  # wrong options fail here, once

    def describe(self) -> dict[str, Any]:
        """The model as far as two runs have to agree on it: its sizes, and its answers at a fixed prompt."""
        try:
            check_model(self.model)
        except (TypeError, ValueError, NotImplementedError):
            return {"name": type(self.model).__name__}
        cfg, ids = self.model.cfg, torch.arange(1, 9)[None, : getattr(self.model.cfg, "n_ctx", None) or 8]
        seen = ig_lens(self.model, ids, attention_mask=torch.ones_like(ids), targets=1, quantity="log_prob")
        return {
            "name": seen.info.model,
            "n_layers": int(cfg.n_layers),
            "dtype": seen.info.dtype,
            "weight_processing": weight_processing(self.model),
            "log_probs": seen.levels[:, 0, 0].tolist(),
        }

    def process(self, shard: Shard, tick: Callable[[int], object] = lambda n: None) -> Done:
        """The tables of one shard. ``tick`` hears how many rows were dealt with."""
        judged = [self._judge(row) for row in shard.rows]
        problems = [one for one in judged if isinstance(one, Problem)]
        ready = [one for one in judged if isinstance(one, Ready)]
        tick(len(problems))
        tables: list[pa.Table] = []
        for batch in batches(ready, self.plan.batch_tokens):
            for outcome in self._analyse(batch):
                if isinstance(outcome, Problem):
                    problems.append(outcome)
                else:
                    tables.append(outcome)
            tick(len(batch))
        self._check_function(ready, problems)
        self.made += len(tables)
        provenance = {
            "analysis": self.plan.name,
            "options": {name: describe(value) for name, value in self.plan.options.items()},
            "versions": self.versions,
            "info": self.info,
            "labels": self.labels,
            "first": shard.rows[0].number,
            "prompts": len(shard.rows),
            "errors": len(problems),
        }
        return Done(in_order([self.nothing, *tables]), error_table(problems), provenance)

    # --- rows ------------------------------------------------------------------------------------

    def _judge(self, row: Row) -> Ready | Problem:
        """A row with its token ids, or what is wrong with it."""
        prompt = row.prompt
        if isinstance(prompt, Unreadable):
            return Problem(row, "unreadable", "ValueError", prompt.reason)
        if isinstance(prompt, str) and not prompt.strip():
            return Problem(row, "empty", "ValueError", "prompt must be some text, got white space or nothing")
        if isinstance(prompt, str) and not _is_unicode(prompt):
            return Problem(row, "not text", "ValueError", "prompt must be valid Unicode, got lone surrogates")
        if not isinstance(prompt, str) and not _is_ids(prompt):
            got = type(prompt).__name__
            return Problem(row, "not text", "TypeError", f"prompt must be text or a list of token ids, got {got}")
        try:
            ids = self._ids(prompt)
        except Exception as error:  # of any tokenizer, and of any type
            return Problem(row, "tokenizer", type(error).__name__, str(error))
        limit = self._limit()
        truncated = limit is not None and len(ids) > limit
        if truncated and self.plan.too_long != "truncate":
            message = f"prompt must be at most {limit} tokens, got {len(ids)} in row {row.number}"
            if self.plan.too_long == "error":
                raise PromptTooLongError(f'{message}; set too_long="skip" or "truncate", or max_tokens')
            return Problem(row, "too long", "ValueError", message)
        ready = Ready(row, ids[:limit], truncated, _own_target(row.target))
        return self._misasked(ready) or ready

    def _ids(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(tokenise(self.model, prompt, self.plan.prepend_bos))
        return tuple(int(i) for i in prompt)

    def _limit(self) -> int | None:
        known = [n for n in (getattr(self.model.cfg, "n_ctx", None), self.plan.max_tokens) if n and n > 0]
        return min(known, default=None)

    def _misasked(self, ready: Ready) -> Problem | None:
        """What is wrong with a row's own target, or with the positions asked of it; None for nothing."""
        if not self.plan.is_built_in:
            return None
        try:
            if ready.target is not None:
                resolve_objective(self.model, self.d_vocab, ready.target, None, "prob", (1, 1))
        except (TypeError, ValueError) as error:
            return Problem(ready.row, "target", type(error).__name__, str(error))
        try:
            ids, pos_slice = torch.tensor([ready.ids]), self.plan.options.get("pos_slice", -1)
            positions = select_positions(Prompts(ids, torch.ones_like(ids, dtype=torch.bool)), pos_slice)
            if is_next(self.plan.options.get("targets")):
                next_tokens(Prompts(ids, torch.ones_like(ids, dtype=torch.bool)), positions)
        except ValueError as error:
            return Problem(ready.row, "no position", "ValueError", str(error))
        return None

    # --- batches ---------------------------------------------------------------------------------

    def _analyse(self, batch: Sequence[Ready]) -> Iterator[pa.Table | Problem]:
        """The table of a batch; where it fails, of its halves, so that a bad row costs only itself."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "model must be finite")
                found: Any = self._call(batch)
        except Exception as error:  # whatever a model or a user's function may raise
            found = (type(error).__name__, str(error))
        again: list[Sequence[Ready]] = []
        if isinstance(found, pa.Table):
            yield found
            there = set(found["prompt_id"].to_pylist())
            if self.plan.is_built_in and len(batch) > 1:  # rows left out are not finite; alone they say so
                again = [[ready] for ready in batch if ready.row.number not in there]
        elif len(batch) == 1:
            yield Problem(batch[0].row, "model", *found)
        else:
            again = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        for part in again:
            yield from self._analyse(part)

    def _call(self, batch: Sequence[Ready]) -> pa.Table:
        """The analysis of one batch as a table."""
        plan, options = self.plan, dict(self.plan.options)
        own = [ready.target for ready in batch]
        if any(target is not None for target in own):
            options["targets"] = own
        if not plan.is_built_in:
            if plan.prepend_bos is not None and plan.accepts("prepend_bos"):
                options["prepend_bos"] = plan.prepend_bos
            prompts = [self._as_given(ready) for ready in batch]
            return user_table(plan.analysis(self.model, prompts, **options), [ready.row for ready in batch])
        width = max(len(ready.ids) for ready in batch)
        ids = torch.tensor([[*ready.ids, *ready.ids[-1:] * (width - len(ready.ids))] for ready in batch])
        mask = torch.tensor([[place < len(ready.ids) for place in range(width)] for ready in batch])
        if plan.analysis is ig_lens:
            options["batch_size"] = len(batch)
        result = plan.analysis(self.model, ids, attention_mask=mask, **options)
        labels = labels_of(result)
        if self.labels is not None and self.labels != labels:
            raise RuntimeError(f"{plan.name} must have the same rows for every prompt, got other labels in a later batch")
        self.labels, self.info = labels, asdict(result.info)
        table = next(made for kind, made in TABLES.items() if isinstance(result, kind))
        return table(result, batch)

    def _as_given(self, ready: Ready) -> Any:
        """A prompt as it stands in the source, or the text of what is left of it."""
        if not ready.truncated:
            return ready.row.prompt
        if not isinstance(ready.row.prompt, str):
            return list(ready.ids)
        return self.model.tokenizer.decode(ready.ids, skip_special_tokens=True)

    def _check_function(self, ready: Sequence[Ready], problems: Sequence[Problem]) -> None:
        """A user's function that fails on every prompt it is first given is wrong itself."""
        failed = [problem for problem in problems if problem.kind == "model"]
        if not self.plan.is_built_in and not self.made and ready and len(failed) == len(ready):
            rule = "a function that works on some prompt of the first shard"
            got = f"{failed[0].error} on each of {len(failed)}: {failed[0].message}"
            fail("analysis", rule, got, "call it with the model and a few prompts to see why")


def batches(ready: Sequence[Ready], budget: int) -> Iterator[list[Ready]]:
    """Rows of like length together, none longer than ``budget`` tokens with its padding unless it is one row.

    Rows with a target of their own stay apart from those without.
    """
    order = sorted(ready, key=lambda one: (one.target is not None, len(one.ids), one.row.number))
    batch: list[Ready] = []
    for one in order:  # lengths rise, so the newest row is the widest
        mixed = bool(batch) and (batch[0].target is None) != (one.target is None)
        if batch and (mixed or len(one.ids) * (len(batch) + 1) > budget):
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def describe(value: Any) -> Any:
    """An option as JSON, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, TokenSet):
        return repr(value)
    if isinstance(value, torch.Tensor | np.ndarray) and np.ndim(value):
        flat = torch.as_tensor(value).double().reshape(-1)
        return f"tensor {tuple(np.shape(value))}, sum {flat.sum().item():.9g}, norm {flat.norm().item():.9g}"
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [describe(item) for item in value]
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value.item() if hasattr(value, "item") else repr(value)


def check_same_model(before: Mapping[str, Any] | None, model: Mapping[str, Any], path: Any) -> None:
    """A folder is continued with the model it was begun with: the same sizes, and the same answers."""
    if before is None:
        return
    other = [name for name in ("n_layers", "dtype", "weight_processing") if before.get(name) != model.get(name)]
    a, b = before.get("log_probs", []), model.get("log_probs", [])
    slack = 0.25 if model.get("dtype") in ("bfloat16", "float16") else 1e-3
    near = len(a) == len(b) and all(math.isclose(x, y, abs_tol=slack, rel_tol=slack) for x, y in zip(a, b, strict=True))
    if other or not near:
        rule, got = f"the one {path} was begun with ({before['name']})", f"{model['name']} with other {(*other, 'weights')[0]}"
        fail("model", rule, got, "load the same model, or choose another folder")


def _example(plan: Plan, model: Any, d_vocab: int) -> Ready:
    """A prompt that is no row of the source: what fails on it is asked wrongly."""
    wanted = getattr(plan.options.get("pos_slice", -1), "slice", plan.options.get("pos_slice", -1))
    parts = [wanted.start, wanted.stop] if isinstance(wanted, slice) else np.ravel(np.asarray(wanted)).tolist()
    reach = max((abs(part) for part in parts if isinstance(part, int)), default=0)
    length = min(reach + 4, getattr(model.cfg, "n_ctx", None) or reach + 4)
    return Ready(Row(-1, None, ""), tuple((i % (d_vocab - 1)) + 1 for i in range(length)))


def _own_target(target: Any) -> Any:
    """A row's target as ``targets`` takes it: a list of tokens is summed, a missing number is no target."""
    if isinstance(target, float) and math.isnan(target):
        return None
    if isinstance(target, list | tuple) and not isinstance(target, TokenSet) and target:
        return TokenSet(*target)
    return target


def _is_ids(prompt: Any) -> bool:
    """Whether a row is a list, tuple, array or tensor of whole numbers."""
    if isinstance(prompt, torch.Tensor | np.ndarray):
        return prompt.ndim == 1 and len(prompt) > 0 and "int" in str(prompt.dtype)
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in prompt)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
