"""load(): a folder of corpus.run as a lazy table with the summaries one asks of it first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from .._checks import check_choice, check_positive, fail
from .._types import ONSET_RULES
from ..ablation import AblationInfo
from ..files import tuples
from ..result import NO_ONSET, RunInfo
from .store import Folder
from .tables import ERROR_SCHEMA

GROUPS = ("token class", "target class", "position")
TOKEN_CLASSES = ("word", "word piece", "number", "punctuation", "space", "special")
_ROWS_AT_ONCE = 16384


def load(out: Any) -> "Corpus":
    """What ``corpus.run`` wrote to a folder, finished or not; nothing but its first lines is read yet.

    Raises FileNotFoundError or ValueError that name ``out`` where there is no such folder, or nothing in it yet.
    """
    folder, todo = Folder(out), "give a folder that corpus.run wrote"
    if not folder.path.is_dir():
        fail("out", "an existing folder", str(folder.path), todo, FileNotFoundError)
    if not folder.manifest:
        fail("out", "a folder of corpus.run", f"{folder.path} without a manifest.json", todo)
    if not folder.finished():
        fail("out", "a folder with a finished shard", f"{folder.path} without one", "run again to continue")
    return Corpus(folder.path)


@dataclass(frozen=True)
class Corpus:
    """A lazy table: one row per analysed token, in the order of the source. Reads only what it is asked for."""

    path: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What was asked, of which model, and whether it came to its end."""
        return Folder(self.path).manifest

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Analysis, options, versions, labels and info, as a partition states them in its metadata."""
        folder = Folder(self.path)
        return folder.provenance(folder.finished()[0])

    @property
    def complete(self) -> bool:
        """Whether the run came to the end of its source."""
        return "complete" in self.manifest

    @property
    def info(self) -> RunInfo | AblationInfo | None:
        """Where the numbers come from; None for a user's own analysis."""
        words = self.provenance["info"]
        if words is None:
            return None
        kind = AblationInfo if words["analysis"] == "ablate" else RunInfo
        names = {f.name for f in fields(kind)}
        return kind(**{name: tuples(value) for name, value in words.items() if name in names})

    @property
    def segments(self) -> tuple[str, ...]:
        """What the places of ``credits`` are: segments, components, or the sites of ``effects``."""
        labels = self.provenance["labels"] or {}
        return tuple(labels.get("segments", labels.get("sites", ())))

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The boundary every segment ends at."""
        return tuple((self.provenance["labels"] or {}).get("boundaries", ()))

    @property
    def points(self) -> tuple[str, ...]:
        """What the places of ``levels`` are."""
        return tuple((self.provenance["labels"] or {}).get("points", ()))

    @cached_property
    def dataset(self) -> ds.Dataset:
        """The rows as a ``pyarrow.dataset.Dataset``, for filters, projections and scans of your own."""
        found = ds.dataset(self.path / "rows", format="parquet", partitioning="hive")
        if self.provenance["labels"] is None:  # a user's tables may differ from shard to shard in what is null
            schemas = [fragment.physical_schema for fragment in found.get_fragments()]
            whole = pa.unify_schemas([*schemas, found.schema], promote_options="permissive")
            return found.replace_schema(whole.with_metadata(found.schema.metadata))
        return found

    def __len__(self) -> int:
        return int(self.dataset.count_rows())

    def to_table(self, columns: Sequence[str] | None = None, filter: Any = None) -> pa.Table:
        """Some columns of some rows as an Arrow table; all of them where left out (the shard's number apart)."""
        if columns is None:
            columns = [name for name in self.dataset.schema.names if name != "shard"]
        self._check_columns("columns", columns)
        return self.dataset.to_table(columns=list(columns), filter=filter)

    def to_pandas(self, columns: Sequence[str] | None = None, filter: Any = None) -> pd.DataFrame:
        """``to_table`` as a DataFrame; ``filter`` is a ``pyarrow.dataset`` expression."""
        return self.to_table(columns, filter).to_pandas()

    def errors(self) -> pd.DataFrame:
        """One row per bad row of the source: prompt_id, id, kind, error, message, and the beginning of the prompt."""
        folder = self.path / "errors"
        if not folder.is_dir():
            return ERROR_SCHEMA.empty_table().to_pandas()
        found = ds.dataset(folder, format="parquet", partitioning="hive", schema=ERROR_SCHEMA)
        finished = set(Folder(self.path).finished())
        parts = [part for part in found.get_fragments() if _number(part.path) in finished]
        return ds.FileSystemDataset(parts, ERROR_SCHEMA, found.format).to_table().to_pandas()

    def onset_histogram(self, rule: str = "mass") -> pd.DataFrame:
        """How many tokens have their onset in each segment: segment, boundary, count, share.

        The last row counts the tokens whose onset is undefined; shares are of all tokens.
        """
        check_choice("rule", rule, ONSET_RULES)
        self._need("credits", "onset_histogram")
        counts = dict.fromkeys([*self.segments, None], 0)
        for batch in self._batches([f"onset_{rule}"]):
            for entry in batch[f"onset_{rule}"].value_counts().to_pylist():
                counts[entry["values"]] += entry["counts"]
        total = max(sum(counts.values()), 1)
        frame = pd.DataFrame(
            {
                "segment": [NO_ONSET if name is None else name for name in counts],
                "boundary": pd.array([*self.boundaries, None], dtype="Int64"),
                "count": list(counts.values()),
            }
        )
        return frame.assign(share=frame["count"] / total)

    def mean_credit(self, by: str = "token class") -> pd.DataFrame:
        """Mean credit of every segment for a group of tokens: a row per group, its ``count``, a column per segment.

        ``"token class"`` groups by the analysed token, ``"target class"`` by the token that is explained, both by
        ``token_class``; ``"position"`` by the place in the prompt.
        """
        check_choice("by", by, GROUPS)
        column = self._need("credits", "mean_credit")
        key = {"token class": "token", "target class": "target", "position": "pos"}[by]
        totals: dict[Any, np.ndarray] = {}
        counts: dict[Any, int] = {}
        for batch in self._batches([key, column]):
            credit = _matrix(batch[column], len(self.segments))
            names = pc.unique(batch[key]).to_pylist()
            group = {name: name if by == "position" else token_class(name) for name in names}
            found = np.array([group[name] for name in batch[key].to_pylist()])
            for name in set(group.values()):
                rows = credit[found == name]
                totals[name] = totals.get(name, 0) + rows.sum(0, dtype=np.float64)
                counts[name] = counts.get(name, 0) + len(rows)
        order = sorted(totals, key=None if by == "position" else TOKEN_CLASSES.index)
        means = {name: totals[name] / counts[name] for name in order}
        frame = pd.DataFrame.from_dict(means, orient="index", columns=list(self.segments)).rename_axis(by)
        frame.insert(0, "count", [counts[name] for name in order])
        return frame

    def top(self, by: str = "cancellation", n: int = 10, *, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The ``n`` rows with the largest value of a numeric column, largest first; rows without a value never."""
        check_positive("n", n)
        self._check_columns("by", [by])
        kind = self.dataset.schema.field(by).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            numeric = [f.name for f in self.dataset.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
            fail("by", f"a column of numbers ({', '.join(numeric)})", repr(by), "choose one of them")
        values = self.dataset.to_table(columns=[by])[by].to_numpy().astype(np.float64)
        known = np.flatnonzero(~np.isnan(values))
        order = known[np.argsort(-values[known], kind="stable")[:n]]
        if columns is None:
            columns = [f.name for f in self.dataset.schema if f.name != "shard" and not pa.types.is_nested(f.type)]
        self._check_columns("columns", columns)
        rows = self.dataset.take(pa.array(np.sort(order)), columns=list(columns)) if len(order) else None
        if rows is None:
            return self.dataset.schema.empty_table().select(list(columns)).to_pandas()
        return rows.take(np.argsort(np.argsort(order))).to_pandas()

    def summary(self) -> dict[str, Any]:
        """Prompts, rows, errors by kind, truncated prompts, the largest gaps and medians, in one pass."""
        errors = self.errors()
        names = [n for n in ("completeness_gap", "readout_gap", "delta", "cancellation", "largest_effect") if n in self._names]
        table = self.dataset.to_table(columns=["prompt_id", *(n for n in (*names, "truncated") if n in self._names)])
        numbers = {name: table[name].to_numpy().astype(np.float64) for name in names}
        prompts = table["prompt_id"].to_numpy()
        cut = prompts[table["truncated"].to_numpy()] if "truncated" in self._names else prompts[:0]
        gaps = {f"largest |{n}|": _or_none(np.max, np.abs(numbers[n])) for n in names if n.endswith("_gap")}
        medians = {f"median {n}": _or_none(np.median, v) for n, v in numbers.items() if not n.endswith("_gap")}
        return {
            "complete": self.complete,
            "prompts": len(np.unique(prompts)),
            "rows": len(table),
            "errors": errors["kind"].value_counts().sort_index().to_dict(),
            "truncated": len(np.unique(cut)),
            **gaps,
            **medians,
        }

    def caption(self) -> str:
        """One line that says what the numbers are, over how much, and how far credits are from their sum at most."""
        info, parts = self.info, [f"{len(self):,} tokens"]
        if "completeness_gap" in self._names:
            gaps = (pc.max(pc.abs(batch["completeness_gap"])).as_py() or 0.0 for batch in self._batches(["completeness_gap"]))
            parts.append(f"|Σ − Δ| ≤ {max(gaps, default=0.0):.1e}")
        if isinstance(info, RunInfo):
            parts = [info.quantity, f"baseline {info.baseline}", info.estimator, info.model, *parts]
        elif info is not None:
            parts = [f"{info.unit} · {info.mode}", info.model, *parts]
        return " · ".join(parts if self.complete else [*parts, "not finished"])

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r}; {self.provenance['analysis']} · {self.caption()})"

    @property
    def _names(self) -> list[str]:
        return self.dataset.schema.names

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        yield from self.dataset.to_batches(columns=columns, batch_size=_ROWS_AT_ONCE, batch_readahead=2, fragment_readahead=1)

    def _need(self, column: str, what: str) -> str:
        if column not in self._names or not self.segments:
            todo = "use to_pandas for this one"
            fail("analysis", f"ig_lens or direct_probability_attribution for {what}", self.provenance["analysis"], todo)
        return column

    def _check_columns(self, argument: str, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._names:
                fail(argument, f"a column of the table ({', '.join(self._names)})", repr(name), "check the spelling")


def token_class(text: str) -> str:
    """What kind of token a text is.

    ``word``: letters after a space or from a capital on; ``word piece``: letters that continue; ``number``;
    ``punctuation``; ``space``; ``special``: ``<…>`` such as ``<s>`` or ``<|im_end|>``.
    """
    if len(text) > 2 and text.startswith("<") and text.endswith(">"):
        return "special"
    body = text.strip()
    if not body:
        return "space"
    if any(c.isalpha() for c in body):
        return "word" if text[0].isspace() or body[0].isupper() else "word piece"
    return "number" if any(c.isdigit() for c in body) else "punctuation"


def _matrix(lists: Any, width: int) -> np.ndarray:
    """A column of lists of fixed size as ``[row, entry]``."""
    return lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)


def _number(path: str) -> int:
    return int(Path(path).parent.name.removeprefix("shard="))


def _or_none(reduce: Any, values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(reduce(known)) if len(known) else None
