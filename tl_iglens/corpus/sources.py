"""Prompts from many places, one row after the other: nothing is held but the row at hand.

A row carries its prompt as it was found, good or bad; whether it can be analysed is decided where the model is.
"""

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from .._checks import fail

_KINDS = "an iterable of texts, a .jsonl, .csv or .parquet file, or a datasets.Dataset"
_ROWS_AT_ONCE = 256  # of a Parquet file


@dataclass(frozen=True)
class Unreadable:
    """A row that could not be taken out of its file, and why."""

    reason: str


@dataclass(frozen=True)
class Row:
    """One prompt of a source: ``number`` counts from 0, bad rows included; ``id`` is the source's own name."""

    number: int
    id: str | None
    prompt: Any
    target: Any = None


@dataclass(frozen=True)
class Shard:
    """A run of rows that is written as one partition."""

    number: int
    rows: tuple[Row, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of what the rows hold, the same in every process."""
        seal = hashlib.sha256()
        for row in self.rows:
            words = (row.id, _plain(row.prompt), _plain(row.target))
            seal.update(repr(words).encode("utf-8", "backslashreplace"))
        return seal.hexdigest()


@dataclass(frozen=True)
class Columns:
    """Which fields of a row are read; the last two may be absent."""

    prompt: str
    id: str | None = None
    target: str | None = None

    @property
    def names(self) -> list[str]:
        return [name for name in (self.prompt, self.id, self.target) if name is not None]


@dataclass(frozen=True)
class Source:
    """Rows that can be read once, in order; ``length`` is None where it is not known beforehand."""

    name: str
    columns: Columns
    items: Callable[[], Iterator[Any]]
    length: int | None

    def __iter__(self) -> Iterator[Row]:
        items = self.items()
        head = list(islice(items, 1))
        if head and isinstance(head[0], Mapping):  # later rows without a column are bad rows, not a wrong name
            _check_columns(self.columns, list(head[0]), f"the first row of {self.name}")
        for number, item in enumerate(chain(head, items)):
            yield self._row(number, item)

    def shards(self, size: int) -> Iterator[Shard]:
        """Runs of ``size`` rows in the order of the source, the last one shorter."""
        rows, number = iter(self), 0
        while part := tuple(islice(rows, size)):
            yield Shard(number, part)
            number += 1

    def _row(self, number: int, item: Any) -> Row:
        if not isinstance(item, Mapping):
            return Row(number, None, item)
        missing = [name for name in self.columns.names if name not in item]
        found: Any = Unreadable(f"the row has no {missing[0]!r}") if missing else item[self.columns.prompt]
        name = item.get(self.columns.id) if self.columns.id else None
        target = item.get(self.columns.target) if self.columns.target else None
        return Row(number, None if name is None else str(name), found, target)


def open_source(source: Any, columns: Columns) -> Source:
    """A source of any supported kind; errors that name ``source`` or the column, before a row is read."""
    if isinstance(source, str | Path):
        return _file(source, columns)
    if isinstance(getattr(source, "column_names", None), Mapping):
        fail("source", "one dataset", f"a {type(source).__name__} of several splits", "choose one, as in data['train']")
    if isinstance(source, Mapping | bytes) or not isinstance(source, Iterable):
        fail("source", _KINDS, type(source).__name__, "put single prompts in a list", TypeError)
    name = type(source).__name__
    if hasattr(source, "itertuples") and hasattr(source, "index"):  # a pandas DataFrame, which iterates over its column names
        return Source(name, columns, lambda: _frame_rows(source, columns), len(source.index))
    if (known := getattr(source, "column_names", None)) is not None:
        _check_columns(columns, known, name)
        source = source.select_columns(columns.names) if hasattr(source, "select_columns") else source
    length = len(source) if isinstance(source, Sized) else None
    return Source(name, columns, lambda: iter(source), length)


def _file(source: str | Path, columns: Columns) -> Source:
    path = Path(source).expanduser()
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv_rows, ".parquet": _parquet_rows}
    if path.suffix.lower() not in readers:
        fail("source", _KINDS, repr(str(source)), "put single prompts in a list, or name the file after its format")
    if not path.is_file():
        fail("source", "an existing file", repr(str(source)), "check the path", FileNotFoundError)
    kind = path.suffix.lower()
    length = None
    if kind == ".parquet":
        found = pq.ParquetFile(path)
        _check_columns(columns, found.schema_arrow.names, str(path))
        length = found.metadata.num_rows
    elif kind == ".csv":
        with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
            _check_columns(columns, next(csv.reader(file), []), str(path))
    else:
        with path.open("rb") as file:
            length = sum(not line.isspace() for line in file)
    return Source(str(path), columns, lambda: readers[kind](path, columns), length)


def _json_lines(path: Path, columns: Columns) -> Iterator[Any]:
    """One JSON value per line; blank lines are no rows."""
    with path.open("rb") as file:
        for line in file:
            if line.isspace():
                continue
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Unreadable(f"the line is not JSON ({error})")


def _csv_rows(path: Path, columns: Columns) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
        reader = csv.DictReader(file)
        while True:
            try:
                with _long_fields():
                    yield next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield {name: None for name in columns.names} | {columns.prompt: Unreadable(f"the row is not CSV ({error})")}


@contextmanager
def _long_fields() -> Iterator[None]:
    """Texts longer than the csv module's limit, which belongs to the whole process, for one row."""
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet_rows(path: Path, columns: Columns) -> Iterator[Mapping[str, Any]]:
    for batch in pq.ParquetFile(path).iter_batches(_ROWS_AT_ONCE, columns=columns.names):
        yield from batch.to_pylist()


def _frame_rows(frame: Any, columns: Columns) -> Iterator[Mapping[str, Any]]:
    _check_columns(columns, list(frame.columns), "DataFrame")
    for values in frame[columns.names].itertuples(index=False, name=None):
        yield dict(zip(columns.names, values, strict=True))


def _check_columns(columns: Columns, known: Sequence[Any], where: str) -> None:
    arguments = {"column": columns.prompt, "id_column": columns.id, "target_column": columns.target}
    for argument, name in arguments.items():
        if name is not None and name not in known:
            shown = ", ".join(map(repr, known[:12])) or "none"
            fail(argument, f"a column of {where} ({shown})", repr(name), f"choose one with {argument}=")


def _plain(value: Any) -> Any:
    """A value as something whose ``repr`` is the same in every process."""
    if value is None or isinstance(value, str | int | float | bool | bytes):
        return value
    if isinstance(value, Unreadable):
        return "unreadable"
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(item)) for key, item in value.items()]
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else type(value).__qualname__
