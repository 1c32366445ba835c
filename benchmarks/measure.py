"""How to measure on a noisy machine: alternate the sides, take medians; peak memory in a fresh process."""

import gc
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPEATS = 7


@dataclass(frozen=True)
class Ratio:
    """Median time of one side over the other's, with the medians themselves in seconds."""

    value: float
    ours: float
    other: float


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratio(ours: Callable[[], object], other: Callable[[], object], repeats: int = REPEATS) -> Ratio:
    """Median over the repeats of ours / other, each pair measured back to back, the order alternating."""
    ours(), other()  # warm caches, allocators and lazy set-up of both sides
    pairs = []
    for turn in range(repeats):
        if turn % 2:
            b, a = seconds(other), seconds(ours)
        else:
            a, b = seconds(ours), seconds(other)
        pairs.append((a, b))
    return Ratio(
        statistics.median(a / b for a, b in pairs),
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
    )


def slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Exponent of a power law fitted by least squares on logarithms."""
    import numpy as np

    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def in_fresh_process(expression: str) -> float:
    """A figure computed by ``benchmarks.cases`` in a process of its own."""
    code = f"from benchmarks.cases import *; print('FIGURE', {expression})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FIGURE")), None)
    if line is None:
        raise RuntimeError(f"{expression} failed: {done.stderr[-2000:]}")
    return float(line.split()[1])


def resident_mib() -> float:
    """Resident size of this process in MiB (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS on this system")


def peak_above(run: Callable[[], object]) -> float:
    """Peak resident size while ``run`` works, above the size before it, in MiB; sampled every millisecond."""
    gc.collect()
    start = resident_mib()
    peak, done = [start], threading.Event()

    def sample() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident_mib())
            time.sleep(0.001)

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(peak[0], resident_mib()) - start
