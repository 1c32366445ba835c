"""Results as Arrow tables: one row per analysed token, credits as lists of fixed size; and bad rows.

Columns that every analysis shares: ``prompt_id`` (the row of the source, counted from 0), ``id`` (the source's
own), ``pos`` (place in the prompt), ``token``, ``target``, ``context`` (the text that leads there), ``n_tokens``
and ``truncated``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from .._checks import fail
from .._types import ONSET_RULES
from ..ablation import AblationResult
from ..result import IGLensResult
from .sources import Row

_CONTEXT = 60  # characters

# What the model's own value and the credits are called, by quantity.
MODEL_COLUMN = {"prob": "p_model", "log_prob": "log_p_model", "logit": "logit_model"}
_KEYS = (("prompt_id", pa.int64()), ("id", pa.string()))


@dataclass(frozen=True)
class Ready:
    """A row that can be analysed: its token ids, and its target where it has one of its own."""

    row: Row
    ids: tuple[int, ...]
    truncated: bool = False
    target: Any = None


@dataclass(frozen=True)
class Problem:
    """A row that could not be analysed, and why."""

    row: Row
    kind: str
    error: str
    message: str


ERROR_SCHEMA = pa.schema(
    [*_KEYS, ("kind", pa.string()), ("error", pa.string()), ("message", pa.string()), ("prompt", pa.string())]
)


def error_table(problems: Sequence[Problem]) -> pa.Table:
    """One row per bad row of the source, in its order, with the beginning of what stood there."""
    rows = [
        {
            "prompt_id": p.row.number,
            "id": _clean(p.row.id),
            "kind": p.kind,
            "error": p.error,
            "message": _clean(p.message),
            "prompt": _clean(p.row.prompt if isinstance(p.row.prompt, str) else repr(p.row.prompt))[:200],
        }
        for p in sorted(problems, key=lambda p: p.row.number)
    ]
    return pa.Table.from_pylist(rows, ERROR_SCHEMA)


def _clean(text: str | None) -> Any:
    """Text without lone surrogates, which Arrow cannot hold."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def receipt_table(result: IGLensResult, rows: Sequence[Ready]) -> pa.Table:
    """One row per analysed token of an ``ig_lens`` or ``direct_probability_attribution`` result."""
    present = result.present
    b, p = (index.numpy() for index in present.nonzero(as_tuple=True))
    places = result.positions[present].tolist()

    def numbers(values: torch.Tensor) -> pa.Array:
        return pa.array(values[present].numpy())

    columns = _keys(rows, b) | _tokens(result, rows, b, places)
    columns["target_id"] = pa.array(result.targets[present].numpy().astype(np.int32))
    columns["target"] = pa.array([result.target_strings[i][j] for i, j in zip(b, p, strict=True)], pa.string())
    columns[MODEL_COLUMN[result.info.quantity]] = numbers(result.model_level)
    columns["delta"] = numbers(result.delta)
    for rule in ONSET_RULES:
        onset = result.onset(rule)
        index, ends = onset.index[present].numpy(), onset.boundary[present].numpy().astype(np.int32)
        names = np.array([*result.labels, None], dtype=object)[index]  # −1, undefined, is the last: null
        columns[f"onset_{rule}"] = pa.array(names, pa.string())
        columns[f"onset_{rule}_boundary"] = pa.array(ends, mask=index < 0)
    columns["cancellation"] = pa.array(result.cancellation[present].numpy(), from_pandas=True)  # NaN is null
    columns["completeness_gap"] = numbers(result.completeness_gap)
    columns["readout_gap"] = numbers(result.readout_gap)
    columns["credits"] = _lists(result.attribution[:, present])
    columns["levels"] = _lists(result.levels[:, present])
    return pa.table(columns)


def ablation_table(result: AblationResult, rows: Sequence[Ready]) -> pa.Table:
    """One row per prompt of an ``ablate`` result: what every ablation leaves, and the strongest."""
    b, places = np.arange(len(rows)), result.positions.tolist()
    strongest = result.effect.argmax(0)
    columns = _keys(rows, b) | _tokens(result, rows, b, places)
    columns["target_id"] = pa.array(result.targets.numpy().astype(np.int32))
    columns["target"] = pa.array(result.target_strings, pa.string())
    columns["p_model"] = pa.array(result.p_clean.numpy())
    columns["log_p_model"] = pa.array(result.log_p_clean.numpy())
    columns["strongest"] = pa.array([result.labels[s] for s in strongest.tolist()], pa.string())
    columns["strongest_block"] = pa.array([result.blocks[s] for s in strongest.tolist()], pa.int32())
    columns["largest_effect"] = pa.array(result.effect.amax(0).numpy())
    columns["p_ablated"] = _lists(result.p_ablated)
    columns["effects"] = _lists(result.effect)
    columns["log_effects"] = _lists(result.log_effect)
    return pa.table(columns)


def labels_of(result: Any) -> dict[str, list[Any]]:
    """What the places of the lists stand for."""
    if isinstance(result, AblationResult):
        return {"sites": list(result.labels), "blocks": list(result.blocks)}
    names = {"segments": list(result.labels), "boundaries": list(result.boundaries)}
    return names | {"points": list(result.point_labels)}


def user_table(made: Any, rows: Sequence[Row]) -> pa.Table:
    """The table a user's function returned, its rows said to belong to which prompt.

    It has either one row per prompt, in their order, or an integer column ``batch`` that counts the prompts of
    the call, as every ``to_dataframe`` of this package has.
    """
    rule = "a function that returns a pandas DataFrame or a pyarrow Table"
    if isinstance(made, pa.Table):
        table = made
    elif hasattr(made, "itertuples"):
        table = pa.Table.from_pandas(made, preserve_index=False)
    else:
        fail("analysis", rule, f"one that returned {type(made).__name__}", "see to_dataframe of the results", TypeError)
    if "batch" in table.column_names:
        b = table["batch"].to_numpy()
        if b.dtype.kind not in "iu" or (len(b) and not 0 <= b.min() <= b.max() < len(rows)):
            got = f"batch = {b.min()} to {b.max()}" if b.dtype.kind in "iu" else f"batch of type {b.dtype}"
            fail("analysis", f"{rule} whose column batch counts the {len(rows)} prompts of the call", got, "count from 0")
        table = table.drop_columns(["batch"])
    elif len(table) != len(rows):
        got, todo = f"{len(table)} rows for {len(rows)} prompts", "add a column batch that says which prompt a row belongs to"
        fail("analysis", f"{rule} with one row per prompt", got, todo)
    else:
        b = np.arange(len(rows))
    own = {name: table[name] for name in table.column_names if name not in dict(_KEYS)}
    return pa.table(_keys(rows, b) | own)


def in_order(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables of several batches as one, prompts in the order of the source."""
    if not tables:
        return pa.table({name: pa.array([], kind) for name, kind in _KEYS})
    joined = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    return joined.take(np.argsort(joined["prompt_id"].to_numpy(), kind="stable"))


def _keys(rows: Sequence[Any], b: np.ndarray) -> dict[str, pa.Array]:
    owners = [row.row if isinstance(row, Ready) else row for row in rows]
    numbers = np.array([owner.number for owner in owners], np.int64)
    return {"prompt_id": pa.array(numbers[b]), "id": pa.array([_clean(owners[i].id) for i in b], pa.string())}


def _tokens(result: Any, rows: Sequence[Ready], b: np.ndarray, places: list[int]) -> dict[str, pa.Array]:
    """What stands at the analysed place, and what leads to it."""
    strings = [result.token_strings[i] for i in b]
    return {
        "pos": pa.array(places, pa.int32()),
        "token_id": pa.array([rows[i].ids[place] for i, place in zip(b, places, strict=True)], pa.int32()),
        "token": pa.array([row[place] for row, place in zip(strings, places, strict=True)], pa.string()),
        "context": pa.array([_context(row, place) for row, place in zip(strings, places, strict=True)], pa.string()),
        "n_tokens": pa.array([len(rows[i].ids) for i in b], pa.int32()),
        "truncated": pa.array([rows[i].truncated for i in b], pa.bool_()),
    }


def _context(tokens: Sequence[str], place: int) -> str:
    """The text up to and including a token, its end where it is long."""
    text = ""
    for token in tokens[place::-1]:
        text = token + text
        if len(text) > _CONTEXT:
            return "…" + text[-_CONTEXT:]
    return text


def _lists(values: torch.Tensor) -> pa.Array:
    """``[entry, cell]`` as one list of fixed size per cell."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.T.contiguous().numpy().reshape(-1)), len(values))


TABLES: Mapping[type, Callable[[Any, Sequence[Ready]], pa.Table]] = {
    IGLensResult: receipt_table,
    AblationResult: ablation_table,
}
