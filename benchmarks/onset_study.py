"""Does the IG-Lens onset foretell the layer whose ablation hurts most? The whole study with one command.

``python -m benchmarks.onset_study --out study`` scores and ablates 240 prompts of ``tl_iglens.prompts`` in
both demo models (block, attention, MLP × skip, mean, resample × target position, all positions) and writes

* ``parts/``: one Parquet file per model and run of prompts, so that a study goes on where it was left;
* ``layers.parquet``: one row per (model, prompt, unit, layer) with every score and every effect;
* ``studies/``: one ``OnsetStudy`` per model and condition, for ``OnsetStudy.load``;
* ``summary.parquet``: every measure with its interval and p-values;
* ``summary.json``: the protocol, the machine's figures and the headline rows.
"""

import argparse
import functools
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from tl_iglens.ablation import ablate_each
from tl_iglens.demo import load_demo_model, load_gemma
from tl_iglens.prompts import sample, texts
from tl_iglens.sites import Reference, collect_reference
from tl_iglens.validation import DEFAULT_SCORES, UNITS, PromptScores, judge, prompt_scores

MODELS = {"smollm2": load_demo_model, "gemma": load_gemma}
RULES = ("mass", "largest", "settled")


@dataclass(frozen=True)
class Protocol:
    """Everything that decides the numbers."""

    models: tuple[str, ...] = tuple(MODELS)
    prompts: int = 240  # a sample that is even over the families
    references: int = 64  # prompts that `mean` averages and `resample` draws from
    captum: int = 8  # the first so many prompts are also scored by Captum's layer integrated gradients
    units: tuple[str, ...] = UNITS
    modes: tuple[str, ...] = ("skip", "mean", "resample")
    places: tuple[str, ...] = ("target", "all")
    resamples: int = 2000
    seed: int = 0
    chunk: int = 8

    @property
    def conditions(self) -> list[tuple[str, str, str]]:
        return list(product(self.units, self.modes, self.places))


def measured(
    model: Any, protocol: Protocol, first: int, chosen: Sequence[Any], reference: Reference
) -> pd.DataFrame:
    """Scores and effects of a run of prompts: one row per (prompt, unit, layer)."""
    frames = []
    found = {}
    for unit in protocol.units:
        names = list(DEFAULT_SCORES)
        if unit == "block" and first < protocol.captum:
            names.append("layer_ig")
        found[unit] = prompt_scores(model, chosen, scores=names, unit=unit, seed=protocol.seed)
    one = found[protocol.units[0]]
    results = ablate_each(
        model,
        list(one.texts),
        protocol.conditions,
        targets=one.targets,
        reference=reference,
        seed=protocol.seed,
    )
    for unit, scores in found.items():
        n_prompts, n_layers = scores.credit.shape
        prompt = np.repeat(np.arange(n_prompts), n_layers)
        layer = np.tile(np.arange(n_layers), n_prompts)
        columns: dict[str, Any] = {"prompt": first + prompt, "unit": unit, "layer": layer}
        columns |= {"segment": np.array(scores.labels, object)[layer]}
        for name in ("texts", "families", "target_strings"):
            columns[name] = np.array(getattr(scores, name), object)[prompt]
        columns |= {"source": np.array([p.source for p in chosen], object)[prompt]}
        columns |= {
            "target_id": scores.targets.numpy()[prompt],
            "p_clean": results[0].p_clean.numpy()[prompt],
        }
        columns |= {"cancellation": scores.cancellation.numpy()[prompt]}
        columns |= {f"onset_{rule}": scores.onsets[rule].numpy()[prompt] for rule in RULES}
        columns |= {"credit": scores.credit.numpy().ravel()}
        columns |= {f"score_{name}": values.numpy().ravel() for name, values in scores.scores.items()}
        for (own, mode, at), result in zip(protocol.conditions, results, strict=True):
            if own == unit:
                columns[f"effect_{mode}_{at}"] = result.effect.T.numpy().ravel()
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def runs(protocol: Protocol, folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Every piece of work: a model, the first prompt of a run, and the file it goes to."""
    for name in protocol.models:
        for first in range(0, protocol.prompts, protocol.chunk):
            yield name, first, folder / f"{name}-{first:04d}.parquet"


def collect(protocol: Protocol, out: Path, workers: int = 2, progress: bool = True) -> tuple[pd.DataFrame, float]:
    """All rows of the study and the processor seconds it took; parts that exist are read, the others measured."""
    parts = out / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    _same_protocol(protocol, parts / "protocol.json")
    every = list(runs(protocol, parts))
    missing = [run for run in every if not run[2].exists()]
    bar = tqdm(total=len(every), initial=len(every) - len(missing), desc="study", unit="part", disable=not progress)
    with bar:
        seconds = 0.0
        for done in _each_part(protocol, missing, workers):
            seconds += done
            bar.update()
    return pd.concat([pd.read_parquet(file) for _, _, file in every], ignore_index=True), seconds


def _each_part(protocol: Protocol, missing: Sequence[tuple[str, int, Path]], workers: int) -> Iterator[float]:
    """Measure the parts, ``workers`` at a time, and say how many processor seconds each took."""
    if workers == 1:
        yield from (measure_part(protocol, *run) for run in missing)
        return
    # one process per core with one thread each: short prompts leave a second thread waiting
    threads = max(1, torch.get_num_threads() // workers)
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        for done in as_completed([pool.submit(measure_part, protocol, *run) for run in missing]):
            yield done.result()


def measure_part(protocol: Protocol, name: str, first: int, file: Path) -> float:
    """Measure one run of prompts into its file, whole or not at all; returns processor seconds."""
    start = time.process_time()
    model, reference = _loaded(name, protocol)
    chosen = sample(protocol.prompts, protocol.seed)[first : first + protocol.chunk]
    draft = file.with_suffix(".draft")
    measured(model, protocol, first, chosen, reference).assign(model=name).to_parquet(draft)
    draft.replace(file)
    return time.process_time() - start


@functools.lru_cache(maxsize=1)
def _loaded(name: str, protocol: Protocol) -> tuple[Any, Reference]:
    model = MODELS[name]()
    others = texts(sample(protocol.references, protocol.seed + 1))
    return model, collect_reference(model, others, protocol.units)


def _same_protocol(protocol: Protocol, file: Path) -> None:
    """Parts of another protocol must not be mixed in."""
    own = {
        **json.loads(json.dumps(vars(protocol))),
        "models": None,
        "resamples": None,
        "tl_iglens": version("tl-iglens"),
    }
    if file.exists() and json.loads(file.read_text()) != own:
        raise SystemExit(f"{file.parent} holds parts of another protocol; give another --out or remove it")
    file.write_text(json.dumps(own))


def judged(rows: pd.DataFrame, protocol: Protocol, folder: Path, progress: bool = True) -> pd.DataFrame:
    """Every measure of every score in every condition; each condition's study goes to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    frames = []
    groups = list(product(protocol.models, protocol.conditions))
    for name, (unit, mode, at) in tqdm(groups, desc="statistics", unit="condition", disable=not progress):
        own = rows[(rows["model"] == name) & (rows["unit"] == unit)].sort_values(["prompt", "layer"])
        scores, effects, p_clean = arrays(own, f"effect_{mode}_{at}")
        ablation = {"unit": unit, "mode": mode, "at": at, "reference": f"{protocol.references} prompts"}
        study = judge(
            scores, effects, p_clean, n_resamples=protocol.resamples, seed=protocol.seed, ablation=ablation
        )
        study.save(folder / f"{name}-{unit}-{mode}-{at}.safetensors")
        frames.append(study.summary().assign(model=name, unit=unit, mode=mode, at=at))
    return pd.concat(frames, ignore_index=True)


def arrays(rows: pd.DataFrame, effect: str) -> tuple[PromptScores, torch.Tensor, torch.Tensor]:
    """The scores of one model and unit, sorted by prompt and layer, as ``judge`` takes them."""
    n_layers = int(rows["layer"].max()) + 1
    heads = rows[rows["layer"] == 0]

    def table(column: str) -> torch.Tensor:
        return torch.tensor(rows[column].to_numpy(float).reshape(-1, n_layers))

    def one(column: str) -> np.ndarray:
        return heads[column].to_numpy()

    names = [c for c in rows if c.startswith("score_") and rows[c].notna().any()]
    scores = PromptScores(
        scores={name.removeprefix("score_"): table(name) for name in names},
        onsets={rule: torch.tensor(one(f"onset_{rule}")) for rule in RULES},
        credit=table("credit"),
        cancellation=torch.tensor(one("cancellation")),
        labels=tuple(rows["segment"].iloc[:n_layers]),
        texts=tuple(one("texts")),
        families=tuple(one("families")),
        targets=torch.tensor(one("target_id")),
        target_strings=tuple(one("target_strings")),
        info={
            "model": str(heads["model"].iloc[0]),
            "dtype": "float32",
            "transformer_lens": version("transformer-lens"),
            "weight_processing": "raw",
            "fraction": "0.5",
        },
    )
    return scores, table(effect), torch.tensor(one("p_clean"))


def headline(summary: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows that answer the question: whole blocks, all prompts and by trajectory."""
    wanted = summary["stratum"].isin(["all", "monotone", "non-monotone"]) & (summary["unit"] == "block")
    wanted &= summary["measure"].isin(["superiority", "spearman"])
    return json.loads(summary[wanted].to_json(orient="records", double_precision=4))


def study(protocol: Protocol, out: Path, workers: int = 2, progress: bool = True) -> pd.DataFrame:
    """Measure what is missing, judge, write; returns the summary."""
    start = time.perf_counter()
    rows, cpu = collect(protocol, out, workers, progress)
    rows.to_parquet(out / "layers.parquet")
    summary = judged(rows, protocol, out / "studies", progress)
    summary.to_parquet(out / "summary.parquet")
    about = {
        "protocol": vars(protocol),
        "conditions": protocol.conditions,
        "versions": {name: version(name) for name in ("tl-iglens", "transformer-lens", "torch")},
        "workers": workers,
        "seconds_of_this_run": round(time.perf_counter() - start),
        "processor_seconds_of_this_run": round(cpu),
        "headline": headline(summary),
    }
    (out / "summary.json").write_text(json.dumps(about, indent=1))
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.onset_study", description=__doc__.split("\n")[0]
    )
    standard = Protocol()
    parser.add_argument("--out", type=Path, default=Path("study"))
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    for name in ("prompts", "references", "captum", "resamples", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(standard, name))
    parser.add_argument("--workers", type=int, default=2, help="processes that measure side by side")
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in ("prompts", "references", "captum", "resamples", "seed")}
    summary = study(Protocol(models=tuple(args.models), **options), args.out, args.workers)
    shown = summary[(summary["stratum"] == "all") & (summary["measure"] == "superiority")]
    columns = ["model", "unit", "mode", "at", "layers", "score", "estimate", "low", "high", "p_holm", "n"]
    print(shown[columns].to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
