"""Results as files: safetensors with JSON metadata, written whole or not at all; nothing in them is executable."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ._checks import fail

FORMAT = 1
Result = TypeVar("Result")


def write_result(result: Any, path: str | Path, kind: str) -> Path:
    """A frozen result as one file: its tensors as they are, every other field as JSON. Returns the path."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    tensors = {name: value.contiguous().clone() for name, value in values.items() if isinstance(value, Tensor)}
    words = {name: value for name, value in values.items() if name not in tensors}
    own = {name: json.dumps(asdict(words.pop(name))) for name in list(words) if is_dataclass(words[name])}
    meta = {"format": str(FORMAT), "kind": f"tl_iglens.{kind}", "fields": json.dumps(words), **own}
    return write_tensors(tensors, meta, path)


def read_result(cls: type[Result], path: str | Path, kind: str, **parts: type) -> Result:
    """What ``write_result`` wrote, also by an older version; ``parts`` are fields that are dataclasses themselves.

    ValueError for a file that is damaged, of a later format, or something else; fields this version does not know
    are left out, and those it knows and the file lacks have their defaults.
    """
    todo = f"give a file written by {kind}.save"
    if not Path(path).is_file():
        fail("path", "an existing file", str(path), todo, FileNotFoundError)
    try:
        with safe_open(str(path), "pt") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:
        raise ValueError(f"path must be a result file, got {path} ({error}); {todo}") from error
    if meta.get("kind") != f"tl_iglens.{kind}":
        fail("path", "a result file", f"{path}, a safetensors file of something else", todo)
    if (written := meta.get("format", str(FORMAT))).isdecimal() and int(written) > FORMAT:
        fail("path", f"a result file of format {FORMAT} or older", f"format {written}", "update tl-iglens")
    try:
        words = json.loads(meta["fields"])
        for name, part in parts.items():
            words[name] = part(**_known(part, json.loads(meta[name]) if name in meta else words[name]))
        return cls(**_known(cls, words | tensors))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"path must be a result file, got {path} ({error}); {todo}") from error


def write_tensors(tensors: Mapping[str, Tensor], meta: Mapping[str, str], path: str | Path) -> Path:
    """One safetensors file of tensors ``[...]``, whole or not at all; OSError naming the path where it cannot be written."""
    path = Path(path)
    if not path.name or path.is_dir():
        fail("path", "a file to write", f"{str(path)!r}, a folder", "name a file in it, such as result.safetensors")
    try:
        with replaced(path) as partial:
            save_file(dict(tensors), str(partial), metadata=dict(meta))
    except SafetensorError as error:
        todo = "free some space, or choose another place"
        fail("path", "a place that can be written to", f"{path} ({error})", todo, OSError)
    return path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to, which takes its place when the block ends well and is gone when it does not."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _known(cls: type, words: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass among those of a file, lists as the tuples they were."""
    names = {field.name for field in fields(cls)}
    return {name: tuples(value) for name, value in words.items() if name in names}


def tuples(value: Any) -> Any:
    """JSON lists as the tuples they were."""
    if isinstance(value, dict):
        return {name: tuples(inner) for name, inner in value.items()}
    return tuple(tuples(inner) for inner in value) if isinstance(value, list) else value
