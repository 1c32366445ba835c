"""The modules of the model's head, run as they are: the final norm and what follows the unembedding.

Both are the model's own functions; their derivatives are measured from a few probes, so that epsilons, offsets,
folding and caps take care of themselves.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ._checks import fail
from ._types import compute_dtype


@contextmanager
def silent(module: torch.nn.Module | None) -> Iterator[None]:
    """Run a module with every hook on it and below it set aside, and put them back afterwards.

    The model's hook points belong to the user: hooks there must not see the rows of a readout.
    """
    saved: list[tuple[dict[str, Any], str, Any]] = []
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "fwd_hooks", "bwd_hooks")
    try:
        for part in module.modules() if module is not None else ():
            for name in names:
                own = part.__dict__
                if own.get(name):
                    saved.append((own, name, own[name]))
                    own[name] = type(own[name])()
        yield
    finally:
        for own, name, value in reversed(saved):
            own[name] = value


class OutputTransform:
    """What the model does to its logits after the unembedding: nothing, a scale, a soft cap, or both.

    The value is the model's own function. Its slope is measured from it: with a = T'(0) and the cap
    c = T(∞), T(z) = c·tanh(a z / c) has slope a (1 − (T/c)²). A function of another form has no slope here.
    """

    def __init__(self, function: Callable[[Tensor], Tensor] | None, dtype: torch.dtype, device: torch.device):
        self.function = function
        probe = torch.tensor([-64.0, -3.0, -0.5, 0.0, 0.5, 3.0, 64.0], dtype=dtype, device=device)
        with torch.no_grad():
            image = probe if function is None else function(probe.clone())
            tiny, huge = probe.new_tensor(2.0**-10), probe.new_tensor(3e4)
            self.scale = 1.0 if function is None else float(function(tiny.clone())) / float(tiny)
            limit = math.inf if function is None else abs(float(function(huge.clone())))
        linear = torch.allclose(image.double(), self.scale * probe.double(), rtol=1e-2, atol=1e-6)
        self.is_identity = bool(torch.equal(image, probe)) and linear
        self.cap = math.inf if linear else limit
        capped = probe.double() * self.scale
        if not linear:
            capped = self.cap * torch.tanh(capped / self.cap)
        self.is_known = bool(torch.allclose(image.double(), capped, rtol=2e-2, atol=1e-6))
        self.is_linear = linear

    def __call__(self, logits: Tensor) -> Tensor:
        return logits if self.is_identity or self.function is None else self.function(logits)

    def slope(self, image: Tensor) -> Tensor:
        """T'(z) where the transformed logits are ``image``, both ``[...]``."""
        if not self.is_known:
            todo = "use estimator='prediction_aware', which needs no gradient"
            fail("model", "one with a scaled or soft-capped output", "another output transform", todo, NotImplementedError)
        if self.is_linear:
            return torch.full_like(image, self.scale)
        return self.scale * (1 - (image / self.cap) ** 2)


class FinalNorm:
    """The model's final norm: its own module for the value, a closed form for the vector–Jacobian product.

    norm(h) = γ (h − μ) / σ + β with σ² = mean (h − μ)² + ε (μ = 0 for RMSNorm). γ, β, ε and whether the mean
    is removed are measured by running the module on a few probes, so offsets, folding and epsilons take care
    of themselves; a norm that is not of this form is differentiated by autograd, alone.
    """

    def __init__(self, module: torch.nn.Module | None):
        self.module = module
        own = [] if module is None else [p.device for p in (*module.parameters(), *module.buffers())]
        self.device = own[0] if own and own[0].type != "meta" else None  # a split model may keep it elsewhere
        self._measured: tuple[Tensor, Tensor, float, bool] | None = None

    def __call__(self, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_model"]:
        if self.module is None:
            return rows
        with torch.no_grad(), silent(self.module):
            return self.module(rows[None].to(self.device or rows.device))[0].to(rows.device)

    def vjp(
        self, h: Float[Tensor, "row d_model"], x: Float[Tensor, "row d_model"], g: Float[Tensor, "row d_model"]
    ) -> Float[Tensor, "row d_model"]:
        """Jᵀ g of the norm at h, where x = norm(h)."""
        if self.module is None:
            return g
        if self._measured is None:
            self._measured = self._measure(h)
        gain, bias, eps, centred = self._measured
        h = h.to(device=g.device, dtype=g.dtype)
        shifted = h - h.mean(-1, keepdim=True) if centred else h
        sigma = (shifted.square().mean(-1, keepdim=True) + eps).sqrt()
        unit = shifted / sigma
        tolerance = 1e-4 if x.dtype in (torch.float32, torch.float64) else 5e-2
        if not torch.allclose(unit * gain + bias, x.to(g.dtype), rtol=tolerance, atol=tolerance):
            return self._autograd_vjp(h, g)
        # (γg − mean(γg) − h̃ ⟨h̃, γg⟩ / d) / σ, the middle term only where the mean is removed
        pulled = g * gain
        projected = pulled - unit * (pulled * unit).mean(-1, keepdim=True)
        if centred:
            projected = projected - pulled.mean(-1, keepdim=True)
        return projected / sigma

    @torch.no_grad()
    def _measure(self, like: Tensor) -> tuple[Tensor, Tensor, float, bool]:
        dtype = compute_dtype(like.dtype)
        signs = like.new_ones(like.shape[-1])
        signs[1::2] = -1  # mean 0 for an even width
        probes = torch.stack([0 * signs, 100 * signs, 100 * signs.abs()])
        bias, scaled, level = self(probes).to(dtype)
        gain = (scaled - bias) * signs.to(dtype)
        centred = bool((level - bias).abs().max() < 1e-3 * gain.abs().max())
        return gain, bias, self._epsilon(signs, gain, bias), centred

    def _epsilon(self, signs: Tensor, gain: Tensor, bias: Tensor) -> float:
        """ε from the shrinkage c / √(c² + ε) of probes of size c; the clearest one, near one half, decides."""
        sizes = torch.logspace(-6, 0, 25, dtype=torch.float64)
        images = self(torch.stack([float(c) * signs for c in sizes]).to(signs.dtype)).to(gain.dtype)
        wide = gain.abs() > 0.1 * gain.abs().max()
        ratio = ((images - bias) * signs.to(gain.dtype) / gain)[:, wide].double().mean(-1)
        best = int((ratio.cpu() - 0.5).abs().argmin())
        return max(0.0, float(sizes[best] ** 2 * (1 / ratio[best] ** 2 - 1)))

    def _autograd_vjp(self, h: Tensor, g: Tensor) -> Tensor:
        assert self.module is not None
        with torch.inference_mode(False), torch.enable_grad(), silent(self.module):
            leaf = h.detach().clone().to(self.device or h.device).requires_grad_(True)
            (out,) = torch.autograd.grad(self.module(leaf[None])[0], leaf, g.detach().clone().to(leaf))
        return out.to(g.device)


def has_norm(model: Any) -> bool:
    """Whether the model norms its last state at all."""
    return getattr(model.cfg, "normalization_type", None) is not None


def output_transform(model: Any) -> Callable[[Tensor], Tensor] | None:
    """The transform of logits ``[..., d_vocab]`` of a bridge's adapter, or the soft cap of a HookedTransformer."""
    own = getattr(getattr(model, "adapter", None), "apply_output_logits_transform", None)
    if callable(own):
        return own
    cap = float(getattr(model.cfg, "output_logits_soft_cap", None) or 0.0)
    return (lambda logits: cap * torch.tanh(logits / cap)) if cap > 0 else None
