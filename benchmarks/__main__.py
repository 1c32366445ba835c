"""``python -m benchmarks``: one table of ratios, written to benchmarks/RESULTS.md with the machine stated."""

import argparse
import platform
import statistics
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from . import ablation, cases, components, corpus
from .measure import in_fresh_process, ratio, seconds, slope

Row = tuple[str, str, str, str]  # what, where, figure, goal
SMOL, GEMMA, LLAMA = cases.HEADS


def speed(quick: bool) -> list[Row]:
    lengths = (32, 128) if quick else (32, 128, 512, 2048)
    rows: list[Row] = []
    for head in cases.HEADS:
        for n in lengths:
            where = f"{head}, T = {n}"
            got = ratio(cases.value(head, n), cases.bare_product(head, n))
            rows.append(("value / bare product", where, f"{got.value:.2f}", "≤ 1.00" if n >= 128 else "–"))
            both = ratio(cases.value_and_grad(head, n), cases.bare_product(head, n))
            rows.append(("value + gradient / bare product", where, f"{both.value:.2f}", "≤ 2.20" if n >= 128 else "–"))
            cases.points.cache_clear()
    for head in (SMOL, GEMMA):
        lens = ratio(cases.transformer_lens_logit_lens(head, 128), cases.value(head, 128))
        rows.append(("TransformerLens logit_lens readout / ours", f"{head}, T = 128", f"{lens.value:.2f}", "≥ 1.80"))
        loop = ratio(cases.plain_loop(head, 128), cases.value(head, 128))
        rows.append(("plain loop, logits held / ours", f"{head}, T = 128", f"{loop.value:.2f}", "≥ 2.50"))
    loop = ratio(cases.segment_loop(SMOL, 128), cases.value(SMOL, 128))
    rows.append(("plain loop, both ends of every segment / ours", f"{SMOL}, T = 128", f"{loop.value:.2f}", "–"))
    auto = ratio(cases.autograd_integrals(SMOL, 16), cases.ours_integrals(SMOL, 16))
    rows.append(("autograd integrals, 8 nodes / ours", f"{SMOL}, T = 16", f"{auto.value:.2f}", "≥ 3.00"))
    captum = ratio(cases.captum_integrals(SMOL, 16), cases.ours_integrals(SMOL, 16))
    rows.append(("Captum LayerIntegratedGradients, 8 nodes / ours", f"{SMOL}, T = 16", f"{captum.value:.2f}", "–"))
    for head, n in ((SMOL, 128),) if quick else ((SMOL, 128), (SMOL, 256), (GEMMA, 128)):
        call = ratio(cases.whole_call(head, n), cases.forward_and_readout(head, n))
        rows.append(("whole ig_lens call / (forward + readout)", f"{head}, T = {n}", f"{call.value:.2f}", "≤ 1.10"))
    many = ratio(cases.steps(8), cases.steps(1))
    rows.append(("n_steps = 8 / n_steps = 1, exact", f"{SMOL}, T = 32", f"{many.value:.2f}", "≤ 8.20"))
    return rows


def memory(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for head in cases.HEADS:
        for n in (128,) if quick else (128, 2048):
            for case, goal in (("value", 64), ("value_and_grad", 96)):
                mib = in_fresh_process(f"peak({case}, {head!r}, {n})")
                rows.append((f"peak memory of {case}, MiB", f"{head}, T = {n}", f"{mib:.0f}", f"≤ {goal}"))
    sweeps = {
        "T": ("tokens_of", (128, 512, 2048)),
        "layers": ("rows_of", (4, 8, 16, 31)),
        "n_steps": ("steps", (1, 2, 4, 8)),
        "vocabulary": ("vocabulary", (8_192, 32_768, 131_072)),
    }
    for name, (case, sizes) in {} if quick else sweeps.items():
        peaks = [in_fresh_process(f"peak_of_sweep({case}, {size})") for size in sizes]
        found = ", ".join(f"{size:,}: {mib:.0f}" for size, mib in zip(sizes, peaks, strict=True))
        exponent = slope(sizes, [max(mib, 1) for mib in peaks])
        rows.append((f"peak memory of value against {name}, MiB; exponent", found, f"{exponent:.2f}", "–"))
    return rows


def scaling(quick: bool) -> list[Row]:
    """Exponents of fitted power laws; sizes visited in turn, several rounds, medians."""
    sweeps = {
        "T": ([32, 64, 128, 256], lambda n: cases.value(SMOL, n)),
        "layers": ([3, 6, 15, 30], cases.layers),
        "n_steps": ([1, 2, 4, 8], cases.steps),
        "vocabulary": ([8_192, 16_384, 32_768, 65_536], cases.vocabulary),
    }
    rows: list[Row] = []
    saved, cases.WORK = cases.WORK, 1e15
    for name, (sizes, case) in sweeps.items():
        runs = [case(size) for size in sizes]
        for run in runs:
            run()
        rounds = [[seconds(run) for run in runs] for _ in range(3 if quick else 7)]
        times = [statistics.median(column) for column in zip(*rounds, strict=True)]
        counted = [size + 1 for size in sizes] if name == "layers" else sizes  # k segments read k + 1 points
        rows.append((f"time against {name}, exponent", f"{sizes[0]} to {sizes[-1]}", f"{slope(counted, times):.2f}", "0.9–1.1"))
    cases.WORK = saved
    cases.points.cache_clear()
    return rows


def accuracy(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for head in (SMOL, GEMMA):
        rows.append(("largest |p − p in float64|", f"{head}, T = 32, all layers", f"{cases.accuracy(head):.1e}", "≤ 1e-5"))
    return rows


def component_credits(quick: bool) -> list[Row]:
    return list(components.measured(["cost", "grid", "memory"], quick))


def ablations(quick: bool) -> list[Row]:
    return list(ablation.measured(quick))


def corpora(quick: bool) -> list[Row]:
    return list(corpus.measured(quick))


PARTS = {
    "accuracy": accuracy,
    "speed": speed,
    "memory": memory,
    "scaling": scaling,
    "components": component_credits,
    "ablation": ablations,
    "corpus": corpora,
}
INTRODUCTION = """# Measured

`make bench` measures all of it again; `python -m benchmarks --only speed` a part. Times are ratios of medians measured in
one run, sides alternating, at least seven repeats. Rows are limited to about 5·10¹⁰ multiply-adds a side by taking
evenly spaced layers, at T = 2,048 the first 1,024 positions or more of one layer. Memory is the peak resident size above model and states, in a fresh process per case."""


def sections(file: Path) -> dict[str, str]:
    """The parts of a table that was written before, by name."""
    text = file.read_text() if file.exists() else ""
    return {part.split("\n", 1)[0].lower(): part.rstrip() for part in text.split("\n## ")[1:]}


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return (
        f"{cpu}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}, "
        f"transformer-lens {version('transformer-lens')}; float32; {date.today().isoformat()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short lengths only; nothing is written")
    parser.add_argument("--only", choices=list(PARTS), nargs="*", default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    args = parser.parse_args()
    console = Console()
    found = sections(args.out)
    for name in args.only:
        with console.status(f"measuring {name} ..."):
            rows = PARTS[name](args.quick)
        table = Table("what", "where", "figure", "goal", title=name)
        lines = [name.capitalize(), "", f"{machine()}.", "", "| what | where | figure | goal |", "|---|---|---|---|"]
        for row in rows:
            table.add_row(*row)
            lines.append("| " + " | ".join(row) + " |")
        console.print(table)
        found[name] = "\n".join(lines)
        if not args.quick:
            parts = [found[part] for part in PARTS if part in found]
            args.out.write_text("\n\n## ".join([INTRODUCTION, *parts]) + "\n")
            console.print(f"written to {args.out}")


if __name__ == "__main__":
    main()
