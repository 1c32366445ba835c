"""Which model families the library reads exactly, measured: ``python -m benchmarks.matrix`` writes docs/MATRIX.md.

Every architecture that the installed TransformerLens has an adapter for is built as a small random model and
asked for its receipt, in float32 and bfloat16, raw and in compatibility mode; every option of HookedTransformer
likewise under the TransformerLens versions that have it. A cell says

* ``exact``: the laws hold: credits sum to the change, the last level is the model's own probability, every level
  is what the model predicts when its later blocks are left out, a block that adds nothing has credit 0, rows of a
  padded batch equal their solo runs, attention and MLP add up to their block;
* ``blocks only``: the same, and sublayers are refused because the blocks have no state between them;
* ``refused``: an error that can be read, with its reason: the library's own, or that of TransformerLens or
  transformers where they cannot build, process or run the model, whose name then stands in front;
* ``wrong``: anything else. There must be none.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from tl_iglens import ig_lens

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "MATRIX.md"
sys.path.insert(0, str(ROOT / "tests"))

from fixtures.architectures import Architecture, architectures, small_bridge, small_model, truncated  # noqa: E402
from fixtures.guards import identity_block  # noqa: E402
from fixtures.hooked import hooked, needs_hooked  # noqa: E402

IDS = [0, 5, 40, 17, 20, 33, 9]
SHORT = [0, 12, 7]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = ("raw", "compatibility mode")
OLDER = ("3.9.0", "2.18.0")  # TransformerLens versions that have HookedTransformer
# How far probabilities may differ: ``same`` for sums of the very same numbers, ``order`` for numbers added in another
# order, ``weights`` between a model and the one it was made of, where processed weights were rounded anew.
TOLERANCE = {
    "float32 raw": {"same": 1e-6, "order": 1e-6, "weights": 1e-6},
    "float32 compatibility mode": {"same": 1e-6, "order": 1e-6, "weights": 5e-6},
    "bfloat16 raw": {"same": 1e-6, "order": 1e-3, "weights": 5e-3},
    "bfloat16 compatibility mode": {"same": 1e-6, "order": 1e-3, "weights": 2e-2},
}


@dataclass(frozen=True)
class Cell:
    """One measured combination: its verdict, the reason of a refusal, and the largest errors."""

    verdict: str
    reason: str = ""
    gaps: dict[str, float] = field(default_factory=dict)


class Broken(Exception):
    """A law that does not hold."""


# --- one cell ---------------------------------------------------------------------------------------------


def measure(build: Callable[[], Any], untouched: Callable[[int], torch.Tensor], column: str) -> Cell:
    """The verdict on one model; ``untouched(l)`` is what the model it is made of predicts at boundary l."""
    try:
        model = build()
        own = _probabilities(model, [IDS])[0]
    except Exception as error:
        return Cell("refused", _blame(error))
    try:
        gaps = _laws(model, own, TOLERANCE[column])
        changed = _distance(reader_of(model), untouched, len(model.blocks))
    except Broken as error:
        return Cell("wrong", str(error))
    except Exception as error:
        ours = _last_package(error) == "tl_iglens"
        return Cell("refused" if ours else "wrong", _shorten(str(error)) if ours else _blame(error))
    note = ""
    if changed > TOLERANCE[column]["weights"]:
        note = f"TransformerLens makes another model of it, whose probabilities differ by {changed:.1g} from the original's"
    gaps["original"] = changed
    return Cell("exact" if gaps.pop("sublayers") else "blocks only", note, gaps)


def _distance(ours: Callable[[int], torch.Tensor], theirs: Callable[[int], torch.Tensor], n_layers: int) -> float:
    """How far the model is from the one it was made of, at the boundary where they differ most."""
    return max(float((ours(b) - theirs(b)).abs().max()) for b in range(n_layers + 1))


def reader_of(model: Any) -> Callable[[int], torch.Tensor]:
    """The model's own probabilities at any boundary: those of a forward without the blocks behind it."""

    def read(boundary: int) -> torch.Tensor:
        with truncated(model, boundary):
            return _probabilities(model, [IDS])[0]

    return read


def _laws(model: Any, own: torch.Tensor, tolerance: dict[str, float]) -> dict[str, float]:
    """The largest error of every law; Broken where one is above its tolerance."""
    read = reader_of(model)
    result = ig_lens(model, [IDS], targets=_tops(own), pos_slice=None)
    n_layers, at = len(result.labels), (torch.arange(len(IDS)), _tops(own)[0])
    gaps: dict[str, float] = {}

    def law(name: str, gap: torch.Tensor, bound: float) -> None:
        gaps[name] = float(gap.abs().max())
        if not gaps[name] <= bound:
            raise Broken(f"{name} off by {gaps[name]:.1e}")

    law("sum", result.attribution.sum(0) - (result.levels[-1] - result.levels[0]), tolerance["same"])
    law("readout", result.levels[-1, 0] - own[at], tolerance["order"])
    for boundary in range(n_layers + 1):
        law(f"level {boundary}", result.levels[boundary, 0] - read(boundary)[at], tolerance["order"])
    for layer in range(n_layers):
        with identity_block(model, layer):
            credit = ig_lens(model, [IDS], targets=_tops(own), pos_slice=None).attribution
        law(f"identity of block {layer}", credit[layer], 0.0)
        others = [i for i in range(n_layers) if i != layer]
        if not bool((credit[others] != 0).any(-1).all()):
            raise Broken(f"a block beside the identity {layer} has credit 0")
    for side in ("left", "right"):
        _same_rows(model, side, law, tolerance["order"])
    gaps["sublayers"] = float(_sublayers(model, result, law, tolerance["same"]))
    return gaps


def _same_rows(model: Any, side: str, law: Callable[..., None], bound: float) -> None:
    """Law 7: a long and a short row, padded, equal their solo runs."""
    pads, fill = [2] * (len(IDS) - len(SHORT)), [0] * (len(IDS) - len(SHORT))
    short = pads + SHORT if side == "left" else SHORT + pads
    mask = fill + [1] * len(SHORT) if side == "left" else [1] * len(SHORT) + fill
    options: dict[str, Any] = {"pos_slice": None, "targets": 7}
    both = ig_lens(model, [IDS, short], attention_mask=[[1] * len(IDS), mask], **options)
    for row, ids in enumerate((IDS, SHORT)):
        solo = ig_lens(model, [ids], **options)
        law(f"batch, {side} pads", both.attribution[:, row, : len(ids)] - solo.attribution[:, 0], bound)
        law(f"batch levels, {side} pads", both.levels[:, row, : len(ids)] - solo.levels[:, 0], bound)


def _sublayers(model: Any, blocks: Any, law: Callable[..., None], bound: float) -> bool:
    """Law 4, or whether sublayers are refused by name."""
    try:
        halves = ig_lens(model, [IDS], targets=blocks.targets, pos_slice=None, incl_mid=True)
    except ValueError as error:
        if not str(error).startswith("incl_mid must be False for a model whose blocks have no hook_resid_mid"):
            raise
        return False
    law("attention and MLP", halves.attribution[0::2] + halves.attribution[1::2] - blocks.attribution, bound)
    return True


def _probabilities(model: Any, ids: list[list[int]]) -> torch.Tensor:
    """[batch, pos, d_vocab] in float64, from a plain forward of a bridge, HookedTransformer or Hugging Face model."""
    with torch.no_grad():
        logits = model(torch.tensor(ids))
    return getattr(logits, "logits", logits).double().softmax(-1)


def _tops(own: torch.Tensor) -> torch.Tensor:
    return own.argmax(-1)[None]


# --- what went wrong, in a few words ----------------------------------------------------------------------

_PACKAGES = ("tl_iglens", "transformer_lens", "transformers", "torch", "tokenizers")


def _last_package(error: BaseException) -> str:
    """The package whose code raised: the innermost frame that belongs to one, torch aside."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    for filename in reversed(frames):
        parts = Path(filename).parts
        found = next((p for p in _PACKAGES if p in parts and p != "torch"), None)
        if found:
            return found
    return "torch"


def _blame(error: BaseException) -> str:
    """Whose error it is and what it says, such as ``TransformerLens: KeyError 'W_Q'``."""
    names = {"transformer_lens": "TransformerLens", "torch": "torch"}
    package = _last_package(error)
    return _shorten(f"{names.get(package, package)}: {type(error).__name__}: {error}")


def _shorten(text: str, width: int = 240) -> str:
    line = re.sub(r"\s+", " ", text.strip()).replace("|", "/")
    return line if len(line) <= width else line[: width - 1] + "…"


# --- bridges ----------------------------------------------------------------------------------------------


def bridge_cell(architecture: Architecture, dtype: str, kind: str) -> Cell:
    """The verdict on one architecture that transformers (or TransformerLens itself) has a class for."""

    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        try:
            plain = small_model(architecture, DTYPES[dtype])
            _probabilities(plain, [IDS])
        except Exception as error:
            return Cell("refused", _blame(error))

        build = partial(small_bridge, architecture, DTYPES[dtype], kind == KINDS[1])
        return measure(build, reader_of(plain), f"{dtype} {kind}")


def bridge_cells(names: list[str] | None = None) -> dict[str, dict[str, Cell]]:
    """Verdicts on all decoder-only architectures that can be built from a configuration, or on the named ones.

    Architecture → ``dtype kind`` → cell.
    """
    buildable = [a for a in architectures() if a.kind == "decoder" and a.model_class]
    chosen = [a for a in buildable if names is None or a.name in names]
    table: dict[str, dict[str, Cell]] = {}
    for one in tqdm(chosen, desc="architectures", disable=None):
        table[one.name] = {f"{d} {k}": bridge_cell(one, d, k) for d in DTYPES for k in KINDS}
    return table


# --- HookedTransformer ------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "normalization LN": {"normalization_type": "LN"},
    "normalization LNPre": {"normalization_type": "LNPre"},
    "normalization RMS": {"normalization_type": "RMS"},
    "normalization RMSPre": {"normalization_type": "RMSPre"},
    "no normalization": {"normalization_type": None},
    "epsilon 0.1": {"normalization_type": "RMS", "eps": 0.1},
    "soft-capped output": {"normalization_type": "RMS", "output_logits_soft_cap": 2.0},
    "soft-capped attention": {"attn_scores_soft_cap": 2.0},
    "parallel attention and MLP": {"parallel_attn_mlp": True},
    "attention only": {"attn_only": True},
    "gated MLP": {"gated_mlp": True, "normalization_type": "RMS"},
    "grouped-query attention": {"n_key_value_heads": 2},
    "norms before and after": {"use_normalization_before_and_after": True, "normalization_type": "RMS"},
    "rotary positions": {"positional_embedding_type": "rotary"},
    "shortformer positions": {"positional_embedding_type": "shortformer"},
    "alibi positions": {"positional_embedding_type": "alibi"},
    "local attention": {"use_local_attn": True, "window_size": 3, "attn_types": ["global", "local", "local"]},
    "attention result hook": {"use_attn_result": True, "use_split_qkv_input": True, "use_hook_mlp_in": True},
}  # fmt: skip
HOOKED_KINDS = ("raw", "processed")


def hooked_cell(option: str, dtype: str, kind: str) -> Cell:
    """The verdict on one option of HookedTransformer, raw or after ``process_weights_``."""

    def build() -> Any:
        with torch.random.fork_rng():
            model = hooked(**({"dtype": DTYPES[dtype], "d_vocab": 50} | OPTIONS[option]))
        if kind == HOOKED_KINDS[1]:
            model.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=True)
            model.eval()  # new norm modules are in training mode
        return model

    try:
        plain = hooked(**({"dtype": DTYPES[dtype], "d_vocab": 50} | OPTIONS[option]))
    except Exception as error:
        return Cell("refused", _blame(error))
    return measure(build, reader_of(plain), f"{dtype} {kind}".replace("processed", KINDS[1]))


def hooked_cells() -> dict[str, dict[str, Cell]]:
    """Verdicts on all options: option → ``dtype kind`` → cell; empty where there is no HookedTransformer."""
    try:
        needs_hooked()
    except BaseException:  # pytest's skip is not an Exception
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            option: {f"{d} {k}": hooked_cell(option, d, k) for d in DTYPES for k in HOOKED_KINDS}
            for option in tqdm(OPTIONS, desc="options", disable=None)
        }


def hooked_cells_of(release: str) -> dict[str, dict[str, Cell]]:
    """The same under another TransformerLens, in a process of its own."""
    folder = ROOT / ".tl-versions" / release
    if not (folder / "transformer_lens").is_dir():
        raise SystemExit(f"{folder} must hold transformer-lens {release}; run `make matrix`, which installs it there")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "benchmarks.matrix", "--hooked"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    table = json.loads(done.stdout.splitlines()[-1])
    return {option: {key: Cell(**cell) for key, cell in row.items()} for option, row in table.items()}


# --- the page ---------------------------------------------------------------------------------------------


def counts(table: dict[str, dict[str, Cell]]) -> str:
    """The line that the README repeats."""
    found = Counter(row["float32 raw"].verdict for row in table.values())
    usable = found["exact"] + found["blocks only"]
    return (
        f"{usable} of {len(table)} decoder-only architectures are read exactly in float32, {found['exact']} of them with "
        f"attention and MLP apart, {found['blocks only']} by whole blocks; {found['refused']} are refused by name, "
        f"{found['wrong']} are wrong."
    )


def page(bridges: dict[str, dict[str, Cell]], options: dict[str, dict[str, dict[str, Cell]]]) -> str:
    """docs/MATRIX.md."""
    lines = [
        "# Which models are read exactly",
        "",
        "Generated by `make matrix`; do not edit.",
        f"TransformerLens {version('transformer-lens')}, transformers {version('transformers')}, torch {version('torch')}.",
        "",
        counts(bridges),
        "",
        *(__doc__ or "").split("\n\n", 1)[1].strip().split("\n"),
        "",
        "## Bridges",
        "",
        *_table("architecture", bridges),
        "",
        "Alone their checkpoints bring the code of: " + ", ".join(_foreign()) + ".",
        "",
        "## Out of scope",
        "",
        *_out_of_scope(),
    ]
    for release, table in options.items():
        lines += ["", f"## HookedTransformer options, TransformerLens {release}", "", *_table("option", table)]
    return "\n".join(lines) + "\n"


def _table(title: str, table: dict[str, dict[str, Cell]]) -> list[str]:
    columns = list(next(iter(table.values())))
    lines = [f"| {title} | {' | '.join(columns)} | notes |", "|---" * (len(columns) + 2) + "|"]
    for name, row in table.items():
        lines.append(f"| {name} | {' | '.join(row[c].verdict for c in columns)} | {_notes(row)} |")
    return lines


def _notes(row: dict[str, Cell]) -> str:
    """Every reason once, with the columns it belongs to where it is not all of them."""
    columns: dict[str, list[str]] = {}
    for column, cell in row.items():
        if cell.reason:
            columns.setdefault(cell.reason, []).append(column)
    said = [reason if len(where) == len(row) else f"{', '.join(where)}: {reason}" for reason, where in columns.items()]
    return "<br>".join(said)


def _foreign() -> list[str]:
    return [one.name for one in architectures() if one.kind == "decoder" and one.model_class is None]


def _out_of_scope() -> list[str]:
    kinds: dict[str, list[str]] = {}
    for one in architectures():
        if one.kind != "decoder":
            kinds.setdefault(one.kind, []).append(one.name)
    return [f"- {kind}: {', '.join(names)}" for kind, names in sorted(kinds.items())]


def read_page(text: str) -> dict[str, dict[str, str]]:
    """The cells of all tables of a page: first column → column → text."""
    cells: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.strip().strip("|").split(" | ")] if line.startswith("| ") else []
        if parts and parts[0] in ("architecture", "option"):
            columns = parts[1:]
        elif parts and columns:
            cells.setdefault(parts[0], {}).update(zip(columns, parts[1:], strict=True))
    return cells


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hooked", action="store_true", help="only HookedTransformer's options, as JSON")
    parser.add_argument("--only", nargs="*", help="only these architectures, printed and not written")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.hooked:
        print(json.dumps({o: {k: asdict(c) for k, c in row.items()} for o, row in hooked_cells().items()}))
        return
    bridges = bridge_cells(options.only)
    if options.only is not None:
        for name, row in bridges.items():
            print(name, *(f"\n  {key}: {cell}" for key, cell in row.items()))
        return
    PAGE.write_text(page(bridges, {release: hooked_cells_of(release) for release in OLDER}), "utf-8")
    wrong = [
        f"{name}, {key}: {c.reason}" for name, row in bridges.items() for key, c in row.items() if c.verdict == "wrong"
    ]
    print(counts(bridges), *wrong, sep="\n")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
