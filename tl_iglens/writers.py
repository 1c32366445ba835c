"""What wrote into the residual stream: per block the attention heads, the MLP, its neurons, the biases.

A component's write δ_c is what actually enters the stream: behind the norms that Gemma or OLMo put after a
sublayer, scaled where Granite scales it. Writes of many components are never laid out as vectors. A head is
its pattern-weighted value z_h times W_O, a neuron its activation times a row of W_out, and what the
sublayer's output then passes is linear once the scale of this run is known, so that

    ∇f·δ_c = act_c · (W_c Lᵀ∇f)        with  L x = s (γ ⊙ x),

one product of W with a gradient for all components of a sublayer. Every call checks that the writes of a
block add up to what it did to the stream. Output weights are read here, in ``output_weights``, and nowhere
else outside the readout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ._checks import fail
from ._types import compute_dtype
from .readout import silent

UNITS = ("component", "head", "neuron")
TOLERANCE = 1e-4  # by how much writes may miss what they add up to, relative to their size

# Where the norm behind a sublayer stands; older bridges keep it under the name of the one before.
_NORMS_BEHIND = {"attn": ("ln1_post", "ln1"), "mlp": ("ln2_post", "ln2")}
_ACTIVATION = {"attn": "attn.hook_z", "mlp": "mlp.hook_post"}
_WEIGHTS = {"attn": ("W_O", "b_O"), "mlp": ("W_out", "b_out")}


@dataclass(frozen=True)
class Written:
    """Components whose writes are at hand as vectors."""

    labels: tuple[str, ...]
    delta: Float[Tensor, "component cell d_model"]

    def share(
        self, gradient: Float[Tensor, "step d_model"], cell: Int[Tensor, "step"]
    ) -> Float[Tensor, "component step"]:
        """⟨gradient, δ_c⟩ of every component, for a gradient of each of some steps in some cells."""
        return torch.stack([(delta[cell].to(gradient.dtype) * gradient).sum(-1) for delta in self.delta])


@dataclass(frozen=True)
class Factored:
    """Components whose writes are activations times output weights, ``feature`` of each to a component."""

    labels: tuple[str, ...]
    activation: Float[Tensor, "cell component feature"]
    block: Any
    part: str
    behind: "Behind"

    def share(
        self, gradient: Float[Tensor, "step d_model"], cell: Int[Tensor, "step"]
    ) -> Float[Tensor, "component step"]:
        """⟨gradient, δ_c⟩ = act_c · (W_c Lᵀ gradient)."""
        weight, _ = output_weights(self.block, self.part)
        pulled = self.behind.pull(gradient, cell) @ weight.to(gradient).T
        by_component = "step (component feature) -> step component feature"
        pulled = rearrange(pulled, by_component, component=len(self.labels))
        return (pulled * self.activation[cell].to(gradient.dtype)).sum(-1).T


Writer = Written | Factored  # some components that write into the stream in the same block


@dataclass(frozen=True)
class Behind:
    """What a sublayer's output passes on its way to the stream: x ↦ scale · gain ⊙ (x − mean x) + offset.

    The mean is removed only where the norm does so. ``scale`` is that of this run, one number per cell.
    """

    scale: Float[Tensor, "cell"]
    gain: Float[Tensor, "d_model"] | None
    offset: Float[Tensor, "d_model"] | None
    is_centred: bool

    def pull(self, gradient: Tensor, cell: Tensor) -> Float[Tensor, "step d_model"]:
        """Lᵀ gradient, ``gradient`` ``[step, d_model]`` at the cells ``cell`` ``[step]``."""
        pulled = gradient if self.gain is None else gradient * self.gain.to(gradient)
        if self.is_centred:
            pulled = pulled - pulled.mean(-1, keepdim=True)
        return pulled * self.scale[cell, None].to(gradient)

    def apply(self, raw: Float[Tensor, "cell d_model"]) -> Float[Tensor, "cell d_model"]:
        """What of the sublayer's own output reaches the stream, without the offset."""
        return self.scale[:, None] * self.shaped(raw)

    def shaped(self, raw: Float[Tensor, "cell d_model"]) -> Float[Tensor, "cell d_model"]:
        raw = raw - raw.mean(-1, keepdim=True) if self.is_centred else raw
        return raw if self.gain is None else raw * self.gain.to(raw)


def component_hooks(model: Any, unit: str = "component") -> tuple[str, ...]:
    """The hook points that a decomposition into ``unit`` reads, for ``collect_states(..., extra=)``.

    Raises ValueError for a block without attention output or MLP output (state-space and convolution blocks),
    and for neurons where a block has none (mixtures of experts).
    """
    names = []
    for b, block in enumerate(model.blocks):
        for part in parts_of(block):
            names.append(_required(model, b, f"hook_{part}_out", unit))
            if (part, unit) in (("attn", "head"), ("mlp", "neuron")):
                names.append(_required(model, b, _ACTIVATION[part], unit))
                output_weights(block, part, unit, b)
    return tuple(names)


def embed_hooks(model: Any) -> tuple[str, ...]:
    """Token and position embedding where they are separate; rotary models list the second and never fire it."""
    names = ("hook_embed", "hook_pos_embed")
    if "pos_embed" not in getattr(model, "_modules", {}):
        return ()
    return names if all(name in model.hook_dict for name in names) else ()


def parts_of(block: Any) -> tuple[str, ...]:
    """The sublayers of a block; attention-only models have one."""
    return ("attn", "mlp") if getattr(block, "mlp", None) is not None else ("attn",)


def _required(model: Any, b: int, hook: str, unit: str) -> str:
    name = f"blocks.{b}.{hook}"
    if name not in model.hook_dict:
        kind = ", ".join(n for n in model.blocks[b]._modules if not n.startswith(("_", "ln", "norm", "hook")))
        todo = "whole blocks work: use ig_lens, or give the directions with components="
        got = f"{unit!r} with no {name} (a block of {kind})"
        fail("unit", "one whose outputs every block has", got, todo)
    return name


def output_weights(
    block: Any, part: str, unit: str = "component", b: int = -1
) -> tuple[Float[Tensor, "feature d_model"], Float[Tensor, "d_model"] | None]:
    """W_O or W_out with its bias, as views: one row per feature that is written out."""
    module, (weight_name, bias_name) = getattr(block, part), _WEIGHTS[part]
    weight = getattr(module, weight_name, None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        other = "'component' or 'head'" if part == "mlp" else "'component'"
        kind = f"{unit!r} with blocks.{b} ({type(module).__name__}) that has no {weight_name}"
        fail("unit", f"{other} where {part} has no readable output weights", kind, "whole sublayers work")
    bias = getattr(module, bias_name, None)
    return weight.detach().flatten(0, -2), bias.detach() if bias is not None and bool(bias.any()) else None


def block_writers(
    model: Any,
    b: int,
    unit: str,
    acts: Mapping[str, Float[Tensor, "cell ..."]],
    before: Float[Tensor, "cell d_model"],
    after: Float[Tensor, "cell d_model"],
) -> Iterator[Writer]:
    """Everything that block ``b`` wrote between two states, in the order of its sublayers.

    Raises ValueError where the writes do not add up: to the change of the stream (hooks that mean something
    else, an intervention on the stream itself), or to their sublayer's output.
    """
    block = model.blocks[b]
    outputs = {part: acts[f"blocks.{b}.hook_{part}_out"].to(before.device) for part in parts_of(block)}
    _check_block(b, unit, outputs, before, after)
    for part, output in outputs.items():
        if (part, unit) in (("attn", "head"), ("mlp", "neuron")):
            act = acts[f"blocks.{b}.{_ACTIVATION[part]}"].to(before.device)
            yield from _factored(model, b, part, unit, act, output)
        else:
            yield Written((f"{b}_{part}_out",), output[None])


def _check_block(b: int, unit: str, outputs: Mapping[str, Tensor], before: Tensor, after: Tensor) -> None:
    """pre + Σ δ = post, up to a ten-thousandth of the writes and the rounding of the stream."""
    dtype = compute_dtype(before.dtype)
    miss = before.to(dtype) + sum(out.to(dtype) for out in outputs.values()) - after.to(dtype)
    size = sum(out.to(dtype).norm(dim=-1) for out in outputs.values())
    rounding = 4 * torch.finfo(before.dtype).eps * after.to(dtype).norm(dim=-1)
    if bool((miss.norm(dim=-1) > TOLERANCE * size + rounding).any()):
        gap = float((miss.norm(dim=-1) / (after - before).to(dtype).norm(dim=-1).clamp_min(1e-30)).max())
        what = " + ".join(f"hook_{part}_out" for part in outputs)
        todo = "whole blocks work: use ig_lens, or give the directions with components="
        rule = "one whose outputs add up to what every block wrote"
        fail("unit", rule, f"{unit!r} with {what} that miss the change over blocks.{b} by {gap:.1%}", todo)


def _factored(model: Any, b: int, part: str, unit: str, act: Tensor, output: Tensor) -> Iterator[Writer]:
    """The heads or neurons of one sublayer, and its bias."""
    block = model.blocks[b]
    weight, bias = output_weights(block, part, unit, b)
    n = int(model.cfg.n_heads) if part == "attn" else len(weight)
    act = act.reshape(len(act), n, -1)
    kind = "H" if part == "attn" else "N"
    dtype = compute_dtype(output.dtype)
    flat, weight = act.flatten(1).to(dtype), weight.to(device=output.device, dtype=dtype)
    raw = flat @ weight if flat.shape[1] == len(weight) else flat.new_full(output.shape, torch.nan)
    bias = None if bias is None else bias.to(raw)
    whole = raw if bias is None else raw + bias
    tolerance = max(TOLERANCE, 8 * torch.finfo(output.dtype).eps)
    behind = _behind(block, part, whole, output.to(dtype), tolerance)
    if behind is None:
        other = "'component'" if part == "attn" else "'component' or 'head'"
        names = "heads" if part == "attn" else "neurons"
        rule = f"{other} where {names} do not add up to their sublayer"
        todo = "its output passes something this package does not know; whole sublayers work"
        fail("unit", rule, f"{unit!r} with blocks.{b}.hook_{part}_out", todo)
    yield Factored(tuple(f"L{b}{kind}{i}" for i in range(n)), act, block, part, behind)
    constant = None if bias is None else behind.apply(bias.expand_as(raw))
    if behind.offset is not None:
        constant = behind.offset.expand_as(raw) + (0 if constant is None else constant)
    if constant is not None:
        yield Written((f"{b}_{part}_bias",), constant[None])


def _behind(block: Any, part: str, raw: Tensor, output: Tensor, tolerance: float) -> Behind | None:
    """How a sublayer's own output becomes what enters the stream, or None if none of the known ways fits.

    Nothing, or one factor; or a norm, at the scale it had in this run. The factor is the one that maps one
    onto the other best; whether it does is checked.
    """
    for gain, offset, is_centred in _candidates(block, part, raw):
        way = Behind(raw.new_ones(len(raw)), gain, offset, is_centred)
        shaped, wanted = way.shaped(raw), output if offset is None else output - offset
        scale = (shaped * wanted).sum(-1) / shaped.square().sum(-1).clamp_min(torch.finfo(raw.dtype).tiny)
        miss = (wanted - scale[:, None] * shaped).norm(dim=-1)
        if bool((miss <= tolerance * output.norm(dim=-1)).all()):
            return Behind(scale, gain, offset, is_centred)
    return None


def _candidates(block: Any, part: str, like: Tensor) -> Iterator[tuple[Tensor | None, Tensor | None, bool]]:
    yield None, None, False
    for name in _NORMS_BEHIND[part]:
        module = getattr(block, name, None)
        if isinstance(module, torch.nn.Module):
            yield _measured(module, like)


@torch.no_grad()
def _measured(norm: torch.nn.Module, like: Tensor) -> tuple[Tensor, Tensor | None, bool]:
    """Gain, offset and whether the mean is removed, from three probes; the gain up to a factor."""
    parameter = next(norm.parameters(), like)
    signs = torch.ones(like.shape[-1], dtype=parameter.dtype, device=parameter.device)
    signs[1::2] = -1
    probes = torch.stack([0 * signs, 100 * signs, 100 * signs.abs()])
    with silent(norm):
        offset, alternating, level = norm(probes[None])[0].to(like)
    gain = (alternating - offset) * signs.to(like)
    is_centred = bool((level - offset).abs().max() < 1e-3 * gain.abs().max())
    return gain, offset if bool(offset.any()) else None, is_centred
