"""Shards over a pool of Ray actors, each with a model of its own; Ray Data schedules, restarts and retries.

An actor writes its shards itself, in full or not at all, to the folder that all machines see, so a shard that a
lost actor had begun is simply done again. Only the rows of pending shards travel, through Ray's object store.
"""

import contextlib
import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .._checks import check_positive, fail
from .sources import Shard
from .store import Folder
from .worker import Plan, Worker, check_same_model

try:
    import ray
    import ray.data
except ImportError as error:
    raise ValueError(f'engine="ray" needs {error.name}; run `pip install "tl-iglens[ray]"`') from error


class ActorError(RuntimeError):
    """An actor met an error that stops the run and that could not be sent as it was."""


@dataclass(frozen=True)
class Pool:
    """A pool of ``num_actors`` actors on the cluster ray is connected to, or on this machine."""

    factory: Callable[[], Any]
    plan: Plan
    num_actors: Any
    num_gpus: Any
    num_cpus: Any

    def __post_init__(self) -> None:
        check_positive("num_actors", self.num_actors)
        check_positive("num_cpus_per_actor", self.num_cpus)
        if isinstance(self.num_gpus, bool) or not isinstance(self.num_gpus, int | float) or self.num_gpus < 0:
            fail("num_gpus_per_actor", "a number of at least 0", repr(self.num_gpus), "0 runs on the CPU")

    def work(self, ledger: Any) -> None:
        """Have all pending shards done; an error of an actor is raised here, finished shards are kept."""
        items = [{"shard": pickle.dumps(shard)} for shard in ledger.pending()]
        if not items:
            return
        expected = ledger.folder.manifest.get("model")
        path = str(ledger.folder.path.resolve())
        with _connected(self.num_actors * self.num_cpus), _quiet():
            shards = ray.data.from_items(items, override_num_blocks=len(items))
            actor: Any = _Actor  # a class, which map takes too, though its annotation says functions only
            reports = shards.map(
                actor,
                fn_constructor_args=(self.factory, self.plan, path, expected, self.num_cpus, self.num_gpus),
                compute=ray.data.ActorPoolStrategy(size=self.num_actors, max_tasks_in_flight_per_actor=2),
                num_cpus=self.num_cpus,
                num_gpus=self.num_gpus,
            )  # Ray Data starts a lost actor again, and its tasks with it, as often as it takes
            for report in reports.iter_rows():
                if report["error"]:
                    raise pickle.loads(report["error"])
                ledger.meet(json.loads(report["model"]))
                ledger.bar.update(report["prompts"])


class _Actor:
    """One process with one model, which is loaded when the first shard arrives."""

    def __init__(self, factory: Any, plan: Plan, path: str, expected: Any, num_cpus: int, num_gpus: float | int):
        self.factory, self.plan, self.folder, self.expected = factory, plan, Folder(path), expected
        self.worker: Worker | None = None
        if not num_gpus:
            torch.set_num_threads(num_cpus)  # of this actor's own process

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        shard: Shard = pickle.loads(item["shard"])
        try:
            model = self._do(shard)
        except Exception as error:  # sent to the driver, since Ray would wrap it, or try again
            return {"prompts": 0, "model": "", "error": _as_bytes(error)}
        return {"prompts": len(shard.rows), "model": json.dumps(model), "error": b""}

    def _do(self, shard: Shard) -> dict[str, Any]:
        if self.worker is None:
            worker = Worker(self.factory(), self.plan)
            self.model = worker.describe()
            check_same_model(self.expected, self.model, self.folder.path)
            self.worker = worker
        done = self.worker.process(shard)
        self.folder.write(shard, done.rows, done.errors, done.provenance)
        return self.model


def _as_bytes(error: Exception) -> bytes:
    error = error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    try:
        sent = pickle.dumps(error)
        pickle.loads(sent)
    except Exception:  # of whatever type an exception may fail to be copied with
        return pickle.dumps(ActorError(f"{type(error).__name__}: {error}"))
    return sent


@contextlib.contextmanager
def _connected(cpus: int) -> Iterator[None]:
    """The cluster the caller is connected to, or one on this machine for as long as the run lasts."""
    if ray.is_initialized():
        yield
        return
    ray.init(num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray Data without bars and talk of its own; both are as before afterwards."""
    context, logger = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    before = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = before[0]
        logger.setLevel(before[1])
