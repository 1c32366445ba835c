"""What a corpus costs beyond its forwards and readouts, what it holds in memory, and what a second worker brings.

Part of ``python -m benchmarks``. The two workers of the last measurement need two cores that nobody else uses.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tl_iglens import collect_states, corpus
from tl_iglens.collect import only_rows
from tl_iglens.corpus.sources import Columns, open_source
from tl_iglens.corpus.tables import Ready
from tl_iglens.corpus.worker import batches
from tl_iglens.demo import load_demo_model
from tl_iglens.prompts import PROMPTS
from tl_iglens.quantity import Objective
from tl_iglens.readout import Readout

BATCH_TOKENS = 4096


def texts(n: int) -> list[str]:
    """The package's own prompts, and from the 281st on the same behind another beginning."""
    ways = ("", "Now: ", "Please note: ", "As we all know: ", "In short: ", "A first sentence. ", "He said: ", "Well, ")
    return [way + prompt.text for way in ways for prompt in PROMPTS][:n]


def throughput(n: int, repeats: int) -> tuple[float, float]:
    """CPU time of forward and readout of the same batches over that of the whole run; prompts per CPU second."""
    model = load_demo_model()
    rows = open_source(texts(n), Columns("text"))
    ready = [Ready(row, tuple(model.to_tokens(row.prompt, prepend_bos=False)[0].tolist())) for row in rows]
    parts = [_forward_and_readout(model, batch) for batch in batches(ready, BATCH_TOKENS)]

    def bare() -> None:
        for part in parts:
            part()

    def whole() -> None:
        with tempfile.TemporaryDirectory() as out:
            options: dict[str, Any] = {"prepend_bos": False, "shard_size": n, "batch_tokens": BATCH_TOKENS}
            corpus.run(model, texts(n), "ig_lens", out, **options)

    bare(), whole()
    pairs = []
    for turn in range(repeats):
        first, second = (bare, whole) if turn % 2 else (whole, bare)
        times = {side: _cpu_seconds(side) for side in (first, second)}
        pairs.append((times[bare], times[whole]))
    return statistics.median(a / b for a, b in pairs), n / statistics.median(b for _, b in pairs)


def _forward_and_readout(model: Any, batch: list[Ready]) -> Callable[[], None]:
    """One forward whose unembedding sees the last tokens only, and the streamed values at all boundaries."""
    width = max(len(one.ids) for one in batch)
    ids = torch.tensor([[*one.ids, *one.ids[-1:] * (width - len(one.ids))] for one in batch])
    last = torch.tensor([[len(one.ids) - 1] for one in batch])
    mask = (torch.arange(width)[None] <= last).long()
    states = collect_states(model, ids, attention_mask=mask)
    h, readout = states.resid[:, :, 0], Readout(model)
    target = Objective("prob", states.output.top[:, :1], torch.ones(len(batch), 1, dtype=torch.float64))

    def run() -> None:
        with torch.no_grad(), only_rows(model.unembed, last):
            model(ids)
        readout.value(h, target)

    return run


def _cpu_seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def peak_mib(n: int) -> float:
    """Peak resident size of a process that analyses ``n`` short prompts with a small random model."""
    code = f"""
import resource, sys, tempfile
from transformer_lens.model_bridge import TransformerBridge
from tl_iglens import corpus
config = {{"n_layers": 4, "d_model": 64, "n_heads": 4, "d_head": 16, "n_ctx": 32, "d_vocab": 1000, "act_fn": "gelu"}}
model = TransformerBridge.boot_native(config).eval()
rows = ([1 + (7 * i + k) % 999 for k in range(3 + i % 12)] for i in range({n}))
with tempfile.TemporaryDirectory() as out:
    table = corpus.run(model, rows, "ig_lens", out)
    assert len(table) == {n}, len(table)
print("FIGURE", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return float(done.stdout.split("FIGURE")[1])


def rate(n: int, shard_size: int, num_actors: int) -> float:
    """Shards per second over a pool of Ray actors of one thread, from when each of them has finished one."""
    with tempfile.TemporaryDirectory() as out:
        options: dict[str, Any] = {"prepend_bos": False, "shard_size": shard_size}
        corpus.run(load_demo_model, texts(n), "ig_lens", out, engine="ray", num_actors=num_actors, **options)
        ends = sorted(file.stat().st_mtime for file in Path(out).glob("rows/shard=*/part.parquet"))
    return (len(ends) - num_actors) / (ends[-1] - ends[num_actors - 1])


def measured(quick: bool) -> Iterator[tuple[str, str, str, str]]:
    share, speed = throughput(32 if quick else 128, 1 if quick else 5)
    where = f"SmolLM2-135M, {32 if quick else 128} prompts, last position"
    yield "corpus: (forward + readout) / whole run, CPU time", where, f"{share:.2f}  ({speed:.1f} prompts/s)", "≥ 0.90"
    few, many = (100, 300) if quick else (1_000, 10_000)
    peaks = [peak_mib(n) for n in (few, many)]
    where = f"small random model, {few:,} and {many:,} prompts"
    yield "corpus: peak memory, MiB", where, f"{peaks[0]:.0f} and {peaks[1]:.0f}", "equal within 5 %"
    n, shard_size = (24, 4) if quick else (320, 10)
    one, two = (rate(n, shard_size, num_actors) for num_actors in (1, 2))
    where = f"SmolLM2-135M, {n} prompts in {n // shard_size} shards, one thread each"
    yield "corpus: two Ray workers / one, shards per second", where, f"{two / one:.2f}", "≥ 1.60"


if __name__ == "__main__":
    for line in measured("--quick" in sys.argv):
        print(" | ".join(line))
