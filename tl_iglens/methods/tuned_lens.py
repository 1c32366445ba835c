"""Tuned lens: the logit lens with a learned affine correction per layer.

    lens_l(h) = softmax( T(W_Uᵀ norm(h + A_l h + b_l)) ) ,  l = 0 … n − 1 ;  the final state is read as it is.

Translator l applies to the state that enters block l. It starts at zero, where the lens is the logit lens, and is
trained to bring KL(final ‖ lens_l) down by stochastic gradient descent with Nesterov momentum. A small lens, fitted on
text the model writes itself::

    texts = generate_texts(model, ["The history of", "Water is", ...], n_tokens=48, temperature=0.7)
    lens = TunedLens.fit(model, texts, n_steps=60, tokens_per_step=96, lr=0.1, checkpoint="fit.safetensors")
    lens.report.to_dataframe()  # held-out KL per layer beside the logit lens's
    lens.save("lens")

Source: Belrose et al., "Eliciting Latent Predictions from Transformers with the Tuned Lens" (2023).
"""

import hashlib
import json
import pickle
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import pandas as pd
import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor
from tqdm.auto import tqdm

from .._checks import check_model, check_positive, fail, unwrap
from ..collect import ResidualStates, collect_states
from ..files import write_tensors
from ..path import Point
from ..readout import Readout
from ..tokens import read_prompts
from ..watchers import Divergence
from .base import MethodResult, Question, ends_of
from .logit_lens import read_levels

LENS_TYPE = "linear_tuned_lens"
_FIT_TODO = "fit a lens on this model with TunedLens.fit(model, texts)"
_PROCESSED = (
    "lens must be used on the weights it was fitted on, got a model with processed weights; published lenses are "
    "fitted on raw Hugging Face states, so load the model without compatibility mode or from_pretrained_no_processing"
)


def tuned_lens(question: Question, *, lens: "TunedLens | str | FilePath | None" = None, top_k: int = 5) -> MethodResult:
    """Levels of f through a tuned lens at every boundary of the path, figures as for ``logit_lens``.

    ``lens``: a :class:`TunedLens` or the folder of one. Translators exist for the states between blocks, so states
    inside a block have no row. ``top_k``: tokens kept per state. ValueError for a lens that does not fit the model.
    """
    if lens is None:
        fail("lens", "a TunedLens or its folder for tuned_lens", "None", _FIT_TODO)
    lens = lens if isinstance(lens, TunedLens) else TunedLens.load(lens)
    lens.check(question.model)
    points = tuple(point for point in question.path.states if not point.mid)
    translated = torch.stack(
        [lens.translate_at(point.block, h) for point, h in zip(points, question.at(points), strict=True)]
    )
    where = ends_of(points, question.n_layers)
    return read_levels(question, "tuned_lens", translated, top_k, **where, notes=(lens.describe(),))


@dataclass(frozen=True)
class TunedLens:
    """Translators of all layers, on the CPU in float32; ``config`` holds where they come from."""

    weight: Float[Tensor, "layer d_model d_model"]
    bias: Float[Tensor, "layer d_model"]
    config: Mapping[str, Any] = field(default_factory=dict)
    report: "FitReport | None" = None

    @property
    def n_layers(self) -> int:
        """How many translators there are."""
        return len(self.weight)

    @property
    def d_model(self) -> int:
        """The width of the stream."""
        return int(self.weight.shape[-1])

    @classmethod
    def zero(cls, n_layers: int, d_model: int) -> "TunedLens":
        """The lens that is the logit lens, of ``n_layers`` translators for a stream of width ``d_model``."""
        return cls(torch.zeros(n_layers, d_model, d_model), torch.zeros(n_layers, d_model))

    def describe(self) -> str:
        """Of which model it is, in a few words."""
        name = self.config.get("base_model_name_or_path", "an unnamed model")
        return f"lens of {name}, {self.n_layers} translators"

    def check(self, model: Any) -> None:
        """The lens fits the model: shapes (ValueError) and unprocessed weights (a warning)."""
        n_layers, d_model = int(model.cfg.n_layers), int(model.cfg.d_model)
        if (self.n_layers, self.d_model) != (n_layers, d_model):
            rule = f"of {n_layers} translators of d_model {d_model} for this model"
            fail("lens", rule, f"{self.n_layers} of d_model {self.d_model}", _FIT_TODO)
        if is_processed(model) and not self.config.get("processed_weights", False):
            warnings.warn(_PROCESSED, stacklevel=3)

    def translate_at(self, boundary: int, h: Float[Tensor, "*cell d_model"]) -> Float[Tensor, "*cell d_model"]:
        """h + A_l h + b_l for the states at one boundary; the states themselves at the last one."""
        if boundary == self.n_layers:
            return h
        dtype = torch.promote_types(h.dtype, torch.float32)
        wide = h.to(dtype)
        a, b = self.weight[boundary].to(wide), self.bias[boundary].to(wide)
        return (wide + einsum(wide, a, "... d_in, d_out d_in -> ... d_out") + b).to(h.dtype)

    def translate(self, states: ResidualStates) -> Float[Tensor, "point batch pos d_model"]:
        """The translated states of all boundaries 0 … n, ready for the readout."""
        if states.n_layers != self.n_layers or states.resid.shape[-1] != self.d_model:
            got = f"{states.n_layers} layers of d_model {states.resid.shape[-1]}"
            fail("states", f"of a model with {self.n_layers} layers of d_model {self.d_model}", got, _FIT_TODO)
        bounds = range(self.n_layers + 1)
        return torch.stack([self.translate_at(l, states.resid[states.index(Point(l))]) for l in bounds])

    # --- files ----------------------------------------------------------------------------------------------

    def save(self, folder: str | FilePath) -> FilePath:
        """Write ``config.json`` and ``params.pt`` in the published layout. Returns the folder."""
        folder = FilePath(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"base_model_name_or_path": "", "bias": True, "lens_type": LENS_TYPE, **self.config}
        config |= {"d_model": self.d_model, "num_hidden_layers": self.n_layers}
        params = {f"{l}.weight": self.weight[l].clone() for l in range(self.n_layers)}
        params |= {f"{l}.bias": self.bias[l].clone() for l in range(self.n_layers)}
        torch.save(params, folder / "params.pt")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return folder

    @classmethod
    def load(cls, folder: str | FilePath) -> "TunedLens":
        """A lens in the published layout from a local folder; opens no connection, runs nothing from the file.

        Raises ValueError naming ``lens`` for missing files, another kind of lens, the older format that bundles the
        unembedding, or parameters that do not have the shapes the config states.
        """
        folder = FilePath(folder)
        todo = "give a folder with config.json and params.pt of a linear tuned lens"
        for name in ("config.json", "params.pt"):
            if not (folder / name).is_file():
                fail("lens", "a local folder with config.json and params.pt", f"{folder} without {name}", todo)
        config = json.loads((folder / "config.json").read_text())
        kind = config.get("lens_type", LENS_TYPE)
        if kind != LENS_TYPE:
            fail("lens", f"of type {LENS_TYPE}", repr(kind), todo)
        try:
            params = torch.load(folder / "params.pt", map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            rule, got = "a plain state dict of tensors", f"{folder / 'params.pt'} ({str(error).splitlines()[0]})"
            fail("lens", rule, got, "get the file again, or one that holds tensors only")
        return _from_params(params, config)

    # --- fitting --------------------------------------------------------------------------------------------

    @classmethod
    def fit(cls, model: Any, texts: Any, **options: Any) -> "TunedLens":
        """A lens trained on texts, its held-out KL in ``lens.report``; options as for :func:`fit_tuned_lens`."""
        return fit_tuned_lens(model, texts, **options)


def _from_params(params: Any, config: Mapping[str, Any]) -> TunedLens:
    rule, todo = "a flat state dict of <layer>.weight and <layer>.bias", "fit it again, or convert it to that layout"
    if not isinstance(params, Mapping) or not all(isinstance(p, Tensor) for p in params.values()):
        fail("lens", rule, type(params).__name__, todo)
    n_layers, d_model = int(config["num_hidden_layers"]), int(config["d_model"])
    wanted = {f"{l}.{part}" for l in range(n_layers) for part in ("weight", "bias")}
    bundled = sorted(key for key in params if not key.split(".")[0].isdigit())
    if bundled:
        got = f"the older format that bundles the model's own head ({bundled[0]} and {len(bundled) - 1} more)"
        fail("lens", rule, got, todo)
    biases = {f"{l}.bias": torch.zeros(d_model) for l in range(n_layers)} if not config.get("bias", True) else {}
    params = {**biases, **params}
    if set(params) != wanted:
        odd = sorted(set(params) ^ wanted)
        fail("lens", f"of {n_layers} translators, as its config says", f"{odd[0]} missing or too many", todo)
    for key in sorted(wanted):
        shape = (d_model, d_model) if key.endswith("weight") else (d_model,)
        if tuple(params[key].shape) != shape:
            fail(
                "lens", f"of d_model {d_model}, as its config says", f"{key} of shape {tuple(params[key].shape)}", todo
            )
    weight = torch.stack([params[f"{l}.weight"].float() for l in range(n_layers)])
    bias = torch.stack([params[f"{l}.bias"].float() for l in range(n_layers)])
    if not bool(torch.isfinite(weight).all() and torch.isfinite(bias).all()):
        fail("lens", "finite", "NaN or infinity in its parameters", todo)
    return TunedLens(weight, bias, dict(config))


def is_processed(model: Any) -> bool:
    """Whether norm gains were folded or weights centred, so that states are not those of the raw model."""
    folded = str(getattr(model.cfg, "normalization_type", "")).endswith("Pre")
    return bool(getattr(model, "compatibility_mode", False)) or (folded and not hasattr(model, "adapter"))


# --- the recipe ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitReport:
    """Held-out KL(final ‖ lens) per layer in nats, beside the logit lens's, and the course of training."""

    kl: Float[Tensor, "layer"]
    logit_lens_kl: Float[Tensor, "layer"]
    n_held_out: int  # tokens
    n_trained: int  # tokens, repeats counted
    losses: tuple[float, ...]  # mean over layers, per step

    def to_dataframe(self) -> pd.DataFrame:
        columns = {
            "layer": range(len(self.kl)),
            "tuned_lens": self.kl.tolist(),
            "logit_lens": self.logit_lens_kl.tolist(),
        }
        return pd.DataFrame(columns)


def fit_tuned_lens(
    model: Any,
    texts: Any,
    *,
    n_steps: int = 250,
    tokens_per_step: int = 2**18,
    context: int = 2048,
    lr: float = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 1e-3,
    clip: float = 1.0,
    held_out: float = 0.1,
    seed: int = 0,
    checkpoint: str | FilePath | None = None,
    checkpoint_every: int = 10,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> TunedLens:
    """A tuned lens by the published recipe; the defaults are the published sizes, smaller ones train on a laptop.

    SGD with Nesterov momentum on KL(final ‖ lens), learning rate falling linearly to 0, weight decay, the gradient
    of each translator clipped to norm ``clip``. The gradient of the loss in the normed state is
    Σ_v (q_v − p_v) T'(z_v) w_v, which is streamed: no logits are kept and autograd is not used.

    Args:
        texts: a list of texts or of token id lists; each is cut into pieces of at most ``context`` tokens.
        tokens_per_step: tokens of one step; pieces are drawn in a seeded order, again from the start when used up.
        lr: the published one belongs to steps of 2¹⁸ tokens; steps of a few hundred need about a tenth of it.
        held_out: share of the pieces that only measure (at least one).
        checkpoint: a file written every ``checkpoint_every`` steps; a run that finds it goes on from there and
            ends in the same lens. A checkpoint of other settings or texts is refused.
        progress: a bar with the loss on stderr.
    """
    model = unwrap(model)
    check_model(model)
    for name, value in {"n_steps": n_steps, "tokens_per_step": tokens_per_step, "context": context}.items():
        check_positive(name, value)
    check_positive("checkpoint_every", checkpoint_every)
    if not 0 < held_out < 1:
        fail("held_out", "between 0 and 1", held_out, "0.1 keeps a tenth of the text for measuring")
    if is_processed(model):
        warnings.warn(_PROCESSED, stacklevel=2)
    n_ctx = int(getattr(model.cfg, "n_ctx", context) or context)
    pieces = _pieces(model, texts, min(context, n_ctx), prepend_bos)
    order = random.Random(seed)
    order.shuffle(pieces)
    n_held = max(1, round(held_out * len(pieces)))
    train, held = pieces[n_held:], pieces[:n_held]
    if not train:
        fail("texts", "at least two pieces of text", len(pieces), "give more text, or a smaller context")
    settings = {
        "n_steps": n_steps, "tokens_per_step": tokens_per_step, "context": context, "lr": lr, "momentum": momentum,
        "weight_decay": weight_decay, "clip": clip, "held_out": held_out, "seed": seed, "text": _digest(pieces),
    }  # fmt: skip
    state = _Training.start(model, settings, checkpoint)
    readout = Readout(model)
    batches = list(_batches(train, tokens_per_step, n_steps, seed))
    bar = tqdm(total=n_steps, initial=state.step, desc="tuned lens", unit="step", disable=not progress)
    with torch.no_grad(), bar:
        for batch in batches[state.step :]:
            states = _states_of(model, batch)
            loss, a, b = _gradients(readout, states, state.weight, state.bias)
            state.descend(a, b, lr * (1 - state.step / n_steps), momentum, weight_decay, clip)
            state.note(loss, sum(map(len, batch)))
            bar.set_postfix(kl=f"{loss:.3f}")
            bar.update()
            if checkpoint is not None and (state.step % checkpoint_every == 0 or state.step == n_steps):
                state.save(checkpoint, settings)
        report = _measure(model, readout, held, state, tokens_per_step)
    name = str(getattr(model.cfg, "model_name", None) or type(model).__name__)
    config = {"base_model_name_or_path": name, "processed_weights": is_processed(model), "fit": settings}
    return TunedLens(state.weight.cpu(), state.bias.cpu(), config, report)


@dataclass
class _Training:
    """Parameters, momentum and counters of a fit; everything a checkpoint holds."""

    weight: Tensor
    bias: Tensor
    weight_velocity: Tensor
    bias_velocity: Tensor
    losses: list[float]
    n_tokens: int = 0

    @property
    def step(self) -> int:
        return len(self.losses)

    @classmethod
    def start(cls, model: Any, settings: Mapping[str, Any], checkpoint: Any) -> "_Training":
        if checkpoint is not None and FilePath(checkpoint).is_file():
            return cls._resumed(checkpoint, settings, model.W_U.device)
        n, d, device = int(model.cfg.n_layers), int(model.cfg.d_model), model.W_U.device
        square = torch.zeros(n, d, d, device=device)
        line = torch.zeros(n, d, device=device)
        return cls(square, line, square.clone(), line.clone(), [])

    @classmethod
    def _resumed(cls, checkpoint: Any, settings: Mapping[str, Any], device: torch.device) -> "_Training":
        with safe_open(str(checkpoint), "pt") as file:
            meta = file.metadata() or {}
            held = {name: file.get_tensor(name).to(device) for name in file.keys()}
        known = json.loads(meta.get("settings", "{}"))
        odd = [name for name, value in settings.items() if known.get(name) != value]
        if odd:
            got = f"one with {odd[0]}={known.get(odd[0])!r}"
            fail(
                "checkpoint",
                f"of this fit ({odd[0]}={settings[odd[0]]!r})",
                got,
                "use another file, or the same settings",
            )
        return cls(**held, losses=json.loads(meta["losses"]), n_tokens=int(meta["n_tokens"]))

    def save(self, path: str | FilePath, settings: Mapping[str, Any]) -> None:
        """Write all of it to one file, whole or not at all."""
        names = ("weight", "bias", "weight_velocity", "bias_velocity")
        meta = {"settings": json.dumps(settings), "losses": json.dumps(self.losses), "n_tokens": str(self.n_tokens)}
        write_tensors({name: getattr(self, name).cpu().contiguous() for name in names}, meta, path)

    def note(self, loss: float, n_tokens: int) -> None:
        self.losses.append(loss)
        self.n_tokens += n_tokens

    def descend(self, a: Tensor, b: Tensor, lr: float, momentum: float, weight_decay: float, clip: float) -> None:
        """One step of SGD with Nesterov momentum, each translator's gradient clipped by itself."""
        norm = (a.square().sum((1, 2)) + b.square().sum(1)).sqrt()
        shrink = (clip / norm.clamp_min(1e-12)).clamp_max(1)
        for parameter, velocity, gradient in (
            (self.weight, self.weight_velocity, a * shrink[:, None, None]),
            (self.bias, self.bias_velocity, b * shrink[:, None]),
        ):
            gradient = gradient + weight_decay * parameter
            velocity.mul_(momentum).add_(gradient)
            parameter.sub_(lr * (gradient + momentum * velocity))


def _gradients(
    readout: Readout, states: ResidualStates, weight: Tensor, bias: Tensor
) -> tuple[float, Float[Tensor, "layer d_out d_in"], Float[Tensor, "layer d_model"]]:
    """Mean KL over layers and cells, and each layer's own mean KL differentiated in its translator."""
    present = states.present.to(states.resid.device)
    bounds = [states.index(Point(l)) for l in range(states.n_layers + 1)]
    h = states.resid[bounds][:, present].to(weight.dtype)
    n_layers, n_cells = len(h) - 1, h.shape[1]
    translated = (
        h[:-1] + einsum(h[:-1], weight, "layer cell d_in, layer d_out d_in -> layer cell d_out") + bias[:, None]
    )
    rows = rearrange(translated, "layer cell d -> (cell layer) d").to(states.resid.dtype)
    kl, x, pull = divergence_and_gradient(readout, rows, h[-1].to(states.resid.dtype), n_layers)
    back = readout.norm.vjp(rows, x, pull).to(weight.dtype)
    back = rearrange(back, "(cell layer) d -> layer cell d", cell=n_cells) / n_cells
    a = einsum(back, h[:-1], "layer cell d_out, layer cell d_in -> layer d_out d_in")
    return float(kl.mean()), a, back.sum(1)


def divergence_and_gradient(
    readout: Readout, rows: Float[Tensor, "row d_model"], final: Float[Tensor, "cell d_model"], n_layers: int
) -> tuple[Float[Tensor, "row"], Float[Tensor, "row d_model"], Float[Tensor, "row d_model"]]:
    """KL(final ‖ row) of rows ``(cell layer)``, their normed states, and its gradient in those.

    ∇_x KL = Σ_v (q_v − p_v) T'(z_v) w_v for the row's distribution q and the cell's final one p. Where the output
    is linear, Σ_v p_v T' w_v is one vector per cell and KL = ⟨x_final − x, Σ_v p_v T' w_v⟩ − log Z_final + log Z.
    """
    x, x_final = readout.normed(rows), readout.normed(final)
    none = torch.zeros(len(rows), 1, dtype=torch.int64)
    end = readout.scan(x_final, none[: len(final)], gradient=True)
    cell = repeat(torch.arange(len(final), device=readout.device), "cell -> (cell layer)", layer=n_layers)
    if readout.transform.is_linear:
        assert end.mean_direction is not None
        scan, toward = readout.scan(x, none, gradient=True), end.mean_direction[cell]
        kl = ((x_final[cell] - x).to(toward.dtype) * toward).sum(-1).double() - end.log_z[cell] + scan.log_z
    else:
        watcher = Divergence(readout, x_final, end.log_z, cell, pull=True)
        scan = readout.scan(x, none, gradient=True, watchers=(watcher,))
        assert watcher.direction is not None
        kl, toward = watcher.value(scan.log_z), watcher.direction
    assert scan.mean_direction is not None
    return kl, x, scan.mean_direction - toward


def _measure(
    model: Any, readout: Readout, held: Sequence[Sequence[int]], state: _Training, tokens_at_once: int
) -> FitReport:
    """Held-out KL per layer, of this lens and of the logit lens."""
    sums, n_cells = torch.zeros(2, state.weight.shape[0], dtype=torch.float64), 0
    for batch in _grouped(held, tokens_at_once):
        states = _states_of(model, batch)
        h = states.resid[:, states.present.to(states.resid.device)]
        lens = TunedLens(state.weight, state.bias)
        for row, translate in enumerate((lens.translate_at, lambda l, h: h)):
            seen = torch.stack([translate(l, h[l]) for l in range(states.n_layers)])
            flat = rearrange(seen, "layer cell d -> (cell layer) d")
            kl, _, _ = divergence_and_gradient(readout, flat, h[-1], states.n_layers)
            sums[row] += rearrange(kl, "(cell layer) -> cell layer", layer=states.n_layers).sum(0).cpu()
        n_cells += h.shape[1]
    tuned, plain = (sums / n_cells).float()
    return FitReport(tuned, plain, n_cells, state.n_tokens, tuple(state.losses))


def _pieces(model: Any, texts: Any, context: int, prepend_bos: bool | None) -> list[tuple[int, ...]]:
    """Token ids of all texts, cut to the context; pieces of one token teach nothing about context and stay out."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not len(texts):
        fail("texts", "a list of texts or of token ids", type(texts).__name__, "one entry per document")
    pieces = []
    for text in texts:
        prompts = read_prompts(model, text[:], None, prepend_bos) if isinstance(text, str) else None
        ids = [int(i) for i in (prompts.ids[0] if prompts is not None else text)]
        pieces += [tuple(ids[first : first + context]) for first in range(0, len(ids), context)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if len(pieces) < 2:
        fail("texts", "at least two pieces of two tokens", len(pieces), "give more text, or a smaller context")
    return pieces


def _grouped(pieces: Sequence[Sequence[int]], size: int) -> list[list[Sequence[int]]]:
    """Runs of pieces of about ``size`` tokens."""
    groups: list[list[Sequence[int]]] = [[]]
    for piece in pieces:
        if groups[-1] and sum(map(len, groups[-1])) + len(piece) > size:
            groups.append([])
        groups[-1].append(piece)
    return groups


def _batches(train: Sequence[Sequence[int]], size: int, n_steps: int, seed: int) -> Any:
    """The pieces of every step: shuffled anew each time they are used up, the same for the same seed."""
    order = random.Random(seed + 1)
    queue: list[Sequence[int]] = []
    for _ in range(n_steps):
        batch: list[Sequence[int]] = []
        while not batch or sum(map(len, batch)) < size:
            if not queue:
                queue = list(train)
                order.shuffle(queue)
            batch.append(queue.pop())
        yield batch


def _states_of(model: Any, pieces: Sequence[Sequence[int]]) -> ResidualStates:
    width = max(map(len, pieces))
    ids = torch.tensor([[*piece, *(piece[-1],) * (width - len(piece))] for piece in pieces])
    mask = torch.tensor([[place < len(piece) for place in range(width)] for piece in pieces])
    return collect_states(model, ids, attention_mask=mask, pos_slice=None)


def _digest(pieces: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(sorted(pieces)).encode()).hexdigest()[:16]


def generate_texts(
    model: Any,
    openers: Sequence[str],
    *,
    n_tokens: int = 96,
    temperature: float = 1.0,
    prepend_bos: bool | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Token ids of texts the model itself writes after each opener: something to fit on where no corpus is at hand.

    Openers of the same length are continued together, and every step reads the whole text again: the key–value
    cache of a bridge depends on the versions around it. The caller's random state stays as it was.
    """
    model = unwrap(model)
    check_model(model)
    by_length: dict[int, list[Tensor]] = {}
    for opener in openers:
        ids = read_prompts(model, opener, None, prepend_bos).ids
        by_length.setdefault(ids.shape[1], []).append(ids)
    texts: list[list[int]] = []
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature, "use_past_kv_cache": False}
    options |= {"stop_at_eos": False, "verbose": False, "return_type": "tokens"}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for rows in by_length.values():
            ids = torch.cat(rows).to(model.W_U.device)
            texts += model.generate(ids, max_new_tokens=n_tokens, **options).tolist()
    return texts
