"""The folder of a run: a manifest, and one partition per shard that is there in full or not at all.

    manifest.json                          what was asked, of which model
    rows/shard=000000/part.parquet         one row per analysed token
    errors/shard=000000/part.parquet       bad rows, where a shard has any

A partition is written under another name, brought to the disk and renamed; the rows come last, so a shard
whose rows are there is finished. What a killed process leaves behind is never taken for a partition.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import filelock
import pyarrow as pa
import pyarrow.parquet as pq

from .._checks import fail
from .sources import Shard

FORMAT = 1
KIND = "tl_iglens.corpus"
META = b"tl_iglens"  # the key of our provenance in the metadata of every partition's schema
_OTHER = "choose another folder, or run again as before to continue"


class Folder:
    """The output folder of one run; ``request`` is what has to be the same for a run to be continued."""

    def __init__(self, path: Any):
        self.path = Path(path).expanduser()
        self.rows, self.errors = self.path / "rows", self.path / "errors"

    @property
    def manifest(self) -> dict[str, Any]:
        """What the folder says of itself; empty where it says nothing yet."""
        file = self.path / "manifest.json"
        if not file.is_file():
            return {}
        try:
            found = json.loads(file.read_text("utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("kind") != KIND:
            fail("out", "a folder of corpus.run", f"{self.path}, whose manifest.json is of something else", _OTHER)
        if found.get("format", FORMAT) > FORMAT:
            fail("out", f"of format {FORMAT} or older", f"format {found['format']}", "update tl-iglens")
        return found

    @contextmanager
    def claimed(self, request: Mapping[str, Any]) -> Iterator[None]:
        """Hold the folder for one run: made where it is new, refused where it is not of the same run."""
        before = self.manifest
        if not before:
            if self.path.exists() and not self.path.is_dir():
                fail("out", "a folder", f"the file {self.path}", "choose another place")
            if self.path.is_dir() and any(not entry.name.startswith(".") for entry in self.path.iterdir()):
                fail("out", "a new or empty folder, or one of this run", f"{self.path} with other files", _OTHER)
        for name, wanted in request.items():
            if before and before["request"].get(name) != wanted:
                rule = f"the folder of a run with {name}={wanted!r}"
                fail("out", rule, f"{self.path} with {name}={before['request'].get(name)!r}", _OTHER)
        with _named_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            fail("out", "a folder that no other run writes to now", str(self.path), "wait for that run to end")
        try:
            for stale in self.path.glob("*/shard=*/.*.partial"):  # of a process that was killed
                stale.unlink(missing_ok=True)
            if not before:
                self._write_manifest({"format": FORMAT, "kind": KIND, "request": dict(request)})
            yield
        finally:
            lock.release()

    def note(self, **known: Any) -> None:
        """Add to the manifest what is now known."""
        self._write_manifest(self.manifest | known)

    def finished(self) -> list[int]:
        """The numbers of the shards that are there."""
        return sorted(int(file.parent.name.removeprefix("shard=")) for file in self.rows.glob("shard=*/part.parquet"))

    def provenance(self, number: int) -> dict[str, Any]:
        """What a finished shard says of itself."""
        meta = pq.read_schema(self.part("rows", number)).metadata or {}
        return json.loads(meta[META])

    def part(self, table: str, number: int) -> Path:
        return self.path / table / f"shard={number:06d}" / "part.parquet"

    def check_same(self, shard: Shard) -> None:
        """The shard holds the rows it was made from; ValueError that names the first row of another one."""
        if self.provenance(shard.number)["digest"] != shard.digest:
            first, last = shard.rows[0].number, shard.rows[-1].number
            rule = f"the one that {self.path} was made from"
            fail("source", rule, f"other rows between {first} and {last}", "give the same source, or choose another folder")

    def write(self, shard: Shard, rows: pa.Table, errors: pa.Table, provenance: Mapping[str, Any]) -> None:
        """Publish one shard. Raises OSError that says what is kept where the disk is full."""
        words = json.dumps({"format": FORMAT, **provenance, "digest": shard.digest}, sort_keys=True)
        if len(errors):
            self._publish(errors, self.part("errors", shard.number), words)
        self._publish(rows, self.part("rows", shard.number), words)

    def _publish(self, table: pa.Table, target: Path, words: str) -> None:
        table = table.replace_schema_metadata({META: words.encode()})
        _replace(target, lambda file: pq.write_table(table, file, compression="zstd"))

    def _write_manifest(self, words: Mapping[str, Any]) -> None:
        text = json.dumps(words, indent=1, sort_keys=True, ensure_ascii=False)
        _replace(self.path / "manifest.json", lambda file: file.write(text.encode("utf-8", "backslashreplace")))


def joint_digest(digests: list[str]) -> str:
    """One fingerprint of a whole source from those of its shards."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _replace(target: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file so that others see all of it or nothing, also after a power failure."""
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    with _named_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        if hasattr(os, "O_DIRECTORY"):  # the new name itself has to reach the disk too
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@contextmanager
def _named_errors(target: Path) -> Iterator[None]:
    """OSErrors that name the argument and say that nothing is lost."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        todo = "make room there and run again: finished shards are kept and not computed twice"
        raise type(error)(error.errno, f"out must be a folder that can be written, got {reason!r} at {target}; {todo}") from error
