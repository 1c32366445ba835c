"""run(): from a source to a folder, shard by shard, here or on many machines."""

import difflib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from .._checks import check_choice, check_positive, fail
from ..tokens import TokenSet
from .reading import Corpus, load
from .sources import Columns, Shard, Source, open_source
from .store import Folder, joint_digest
from .worker import ANALYSES, TOO_LONG, Plan, Worker, check_same_model, describe

ENGINES = ("local", "ray")

# Arguments of the analyses that a corpus decides for itself.
_OURS = {
    "input": "prompts come from source",
    "states": "states are collected batch by batch",
    "attention_mask": "prompts come without padding",
    "batch_size": "set batch_tokens",
    "top_k": "every prompt needs the same rows",
    "stack": "set batch_tokens",
}


def run(
    model: Any,
    source: Any,
    analysis: Any,
    out: Any,
    *,
    column: str = "text",
    id_column: str | None = None,
    target_column: str | None = None,
    prepend_bos: bool | None = None,
    max_tokens: Any = None,
    too_long: Any = "skip",
    shard_size: Any = 256,
    batch_tokens: Any = 4096,
    engine: Any = "local",
    num_actors: Any = 1,
    num_gpus_per_actor: Any = 0,
    num_cpus_per_actor: Any = 1,
    progress: bool = False,
    **options: Any,
) -> Corpus:
    """Analyse every prompt of a source; the result is a folder of Parquet files, read with ``load``.

    One row per analysed token: ``prompt_id``, ``id``, ``pos``, ``token``, ``target``, ``p_model``, ``delta``, the
    onset by each rule (null where undefined), ``cancellation``, both gaps, and ``credits`` and ``levels`` as lists
    of fixed size. The numbers are those of the analysis on each prompt alone.

    A shard, ``shard_size`` rows of the source in its order, is written in full or not at all. Run again after any
    interruption, and finished shards are skipped; the outcome is the same as without the interruption. Rows that
    cannot be analysed go to a table of errors with the reason and stop nothing.

    Args:
        model: a model, or a function without arguments that loads one, which is called only when there is work.
        source: an iterable (a generator is streamed) of texts, of lists of token ids, or of mappings; the path of a
            ``.jsonl``, ``.csv`` or ``.parquet`` file; a Hugging Face ``datasets.Dataset``; a pandas DataFrame.
        analysis: ``"ig_lens"``, ``"direct_probability_attribution"``, ``"ablate"``, or a function ``(model, prompts,
            **options)`` that returns a pandas DataFrame or pyarrow Table with one row per prompt, or with a column
            ``batch`` that counts the prompts of the call, as every ``to_dataframe`` has.
        out: the folder; new, empty, or of the same run. Another run's is refused.
        column, id_column, target_column: where a row has its text (or token ids), its name, and its target (a token
            as text or id, several to be summed, or nothing for the model's top token).
        prepend_bos: as for ``ig_lens``.
        max_tokens, too_long: rows with more tokens, or with more than the context holds, are errors (``"skip"``),
            cut after their first ``max_tokens`` and marked ``truncated``, or end the run (``"error"``).
        shard_size: prompts per partition: what an interruption can cost at most.
        batch_tokens: the memory budget. Prompts of like length are analysed together, prompts × longest prompt of
            them at most (a single longer prompt goes alone). The states of a batch take (boundaries × analysed
            tokens × d_model) numbers.
        engine: ``"local"``, or ``"ray"``: shards are mapped over a pool of Ray actors, on this machine or on the
            cluster ``ray.init`` was called for; ``out`` has to be a folder that all of them see. The rows still to do
            wait in Ray's object store, so a very large source is better given in parts, each with its own ``out``.
        num_actors, num_gpus_per_actor, num_cpus_per_actor: of the pool; each actor loads a model of its own.
        progress: a bar on stderr with rate and time left.
        options: of the analysis: ``targets``, ``pos_slice``, ``layers``, ``baseline``, …

    Returns: the :class:`Corpus` that ``load(out)`` returns.

    Raises: ValueError, TypeError or FileNotFoundError naming the argument, before anything is computed where that is
        possible; OSError where ``out`` cannot be written, with all finished shards kept; PromptTooLongError.
    """
    plan = _plan(analysis, options, prepend_bos, max_tokens, too_long, batch_tokens)
    check_positive("shard_size", shard_size)
    check_choice("engine", engine, ENGINES)
    if target_column is not None and "targets" in options:
        fail("target_column", "None where targets is given", repr(target_column), "give one of the two")
    columns = Columns(column, id_column, target_column)
    opened = open_source(source, columns)
    request = {
        "analysis": plan.name,
        "options": describe(plan.options),
        "columns": columns.names,
        "prepend_bos": prepend_bos,
        "max_tokens": max_tokens,
        "too_long": too_long,
        "shard_size": shard_size,
    }
    work = _work(model, plan, engine, num_actors, num_gpus_per_actor, num_cpus_per_actor)
    folder = Folder(out)
    with folder.claimed(request), tqdm(total=opened.length, unit="prompt", disable=not progress, desc=plan.name) as bar:
        ledger = _Ledger(folder, opened, shard_size, bar)
        work(ledger)
        ledger.close()
    return load(folder.path)


def _work(model: Any, plan: Plan, engine: str, num_actors: Any, num_gpus: Any, num_cpus: Any) -> Callable[[Any], None]:
    """What an engine does with the shards that are pending."""
    if engine == "local":
        return lambda ledger: _here(model, plan, ledger)
    from .ray_engine import Pool  # an optional dependency

    if not _is_factory(model):
        rule = "a function without arguments that loads the model where engine='ray'"
        fail("model", rule, type(model).__name__, "every actor loads its own: pass load_demo_model, not load_demo_model()")
    return Pool(model, plan, num_actors, num_gpus, num_cpus).work


def _here(model: Any, plan: Plan, ledger: "_Ledger") -> None:
    """All pending shards, one after the other, in this process."""
    worker = None
    for shard in ledger.pending():
        if worker is None:
            worker = Worker(model() if _is_factory(model) else model, plan)
            ledger.meet(worker.describe())
        done = worker.process(shard, ledger.bar.update)
        ledger.folder.write(shard, done.rows, done.errors, done.provenance)


@dataclass
class _Ledger:
    """What is finished, what is not, and of which source and model."""

    folder: Folder
    source: Source
    shard_size: int
    bar: Any
    digests: list[str] = field(default_factory=list)
    prompts: int = 0

    def pending(self) -> Iterator[Shard]:
        """The shards to compute. Finished ones are compared with the source and skipped."""
        finished = set(self.folder.finished())
        for shard in self.source.shards(self.shard_size):
            self.digests.append(shard.digest)
            self.prompts += len(shard.rows)
            if shard.number not in finished:
                yield shard
                continue
            self.folder.check_same(shard)
            if not self.bar.disable:
                self.bar.initial += len(shard.rows)  # so that the rate is that of the work done now
            self.bar.update(len(shard.rows))
        if not self.prompts:
            fail("source", "at least one row", f"none from {self.source.name}", "a generator can be read only once")
        if beyond := [number for number in finished if number >= len(self.digests)]:
            rule = f"the one that {self.folder.path} was made from"
            got = f"{self.prompts} rows where the folder holds shard {beyond[0]}"
            fail("source", rule, got, "give the whole source, or choose another folder")

    def meet(self, model: dict[str, Any]) -> None:
        """Note the model of a new folder; refuse another one than it was begun with."""
        before = self.folder.manifest.get("model")
        if before is None:
            self.folder.note(model=model, source=self.source.name)
        check_same_model(before, model, self.folder.path)

    def close(self) -> None:
        """Note that the source has ended and all its shards are there."""
        self.folder.note(complete={"prompts": self.prompts, "shards": len(self.digests), "digest": joint_digest(self.digests)})


def _is_factory(model: Any) -> bool:
    """Whether this is a function that loads a model, not a model, which can be called too."""
    return callable(model) and not isinstance(model, torch.nn.Module) and not hasattr(model, "cfg")


def _plan(
    analysis: Any, options: dict[str, Any], prepend_bos: Any, max_tokens: Any, too_long: Any, batch_tokens: Any
) -> Plan:
    if isinstance(analysis, str):
        check_choice("analysis", analysis, tuple(ANALYSES))
        analysis = ANALYSES[analysis]
    if not callable(analysis):
        rule = f"one of {', '.join(ANALYSES)}, or a function (model, prompts, **options)"
        fail("analysis", rule, type(analysis).__name__, "see corpus.run", TypeError)
    check_choice("too_long", too_long, TOO_LONG)
    check_positive("batch_tokens", batch_tokens)
    if max_tokens is not None:
        check_positive("max_tokens", max_tokens)
    plan = Plan(analysis, options, prepend_bos, max_tokens, too_long, batch_tokens)
    if plan.is_built_in:
        _check_options(plan)
    return plan


def _check_options(plan: Plan) -> None:
    """Options exist, and none of them is for one prompt or one batch only."""
    known = set(inspect.signature(plan.analysis).parameters) - {"model", "progress", *_OURS}
    for name, value in plan.options.items():
        if name in _OURS:
            fail(name, "left out of a corpus", repr(value)[:80], _OURS[name])
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            todo = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known))}"
            fail("options", f"arguments of {plan.name}", name, todo, TypeError)
    targets: Any = plan.options.get("targets")
    is_list = isinstance(targets, list | tuple) and not isinstance(targets, TokenSet)
    if is_list or (isinstance(targets, torch.Tensor) and targets.ndim):
        fail("targets", "one for all prompts", f"{len(targets)} of them", "put one per prompt in the source: target_column")
