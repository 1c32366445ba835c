"""Guards and their messages: what was asked, what came, what to do.

Every message reads ``{argument} must be {rule}, got {value}; {what to do}``. Checks that cost nothing
run before the forward pass; the functions inside trust them.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch


class ReadoutMismatchError(RuntimeError):
    """The readout of the final state does not reproduce the model's own output on this run."""


class NonFiniteStateError(ValueError):
    """A residual state of the run holds NaN or infinity."""


def fail(
    argument: str, rule: str, value: Any, todo: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raise ``error`` in the package's one sentence form."""
    raise error(f"{argument} must be {rule}, got {value}; {todo}")


def check_choice(argument: str, value: Any, choices: Sequence[str]) -> None:
    """``value`` is one of the named choices; ValueError otherwise."""
    if not isinstance(value, str) or value not in choices:
        fail(argument, f"one of {', '.join(choices)}", repr(value), "check the spelling")


def check_positive(argument: str, value: Any, todo: str = "give a whole number") -> int:
    """``value`` is a whole number of at least 1; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fail(argument, "a whole number of at least 1", repr(value), todo)
    return value


def unwrap(model: Any) -> Any:
    """The model itself under ``torch.compile``: hooks on a compiled graph are not reliable."""
    return getattr(model, "_orig_mod", model)


# Modules of a TransformerLens bridge that stand between the last block and the logits and that a readout
# of norm and unembedding would skip.
_EXTRA_HEAD_MODULES = ("mlm_head", "prediction_head", "project_out", "hc_head", "sigma_map", "classifier_ln")


def check_model(model: Any) -> None:
    """The model is a decoder-only TransformerLens model in eval mode whose logits come from one stream.

    Raises TypeError for something else, NotImplementedError for encoders and encoder-decoders,
    ValueError for training mode, a missing final norm, or a head this package would read wrongly.
    """
    name = type(model).__name__
    if not callable(getattr(model, "hooks", None)) or not hasattr(model, "cfg"):
        todo = "load it with TransformerBridge.boot_transformers(name) or HookedTransformer.from_pretrained(name)"
        fail("model", "a TransformerLens HookedTransformer or TransformerBridge", name, todo, TypeError)
    arch = _architecture(model)
    parts = getattr(model, "_modules", {})
    if "encoder_blocks" in parts or "decoder_blocks" in parts or _is_encoder_decoder(model):
        fail(
            "model",
            "decoder-only",
            f"the encoder-decoder {arch}",
            "use a causal language model",
            NotImplementedError,
        )
    if "blocks" not in parts:
        fail("model", "one stack of blocks", arch, "its layers are not a single residual stream", NotImplementedError)
    if "unembed" not in parts or getattr(model.cfg, "attention_dir", "causal") not in ("causal", None):
        fail(
            "model",
            "a causal decoder with an unembedding",
            f"the encoder-only {arch}",
            "use a causal language model",
            NotImplementedError,
        )
    for index, block in enumerate(model.blocks):
        if not getattr(block, "hook_out_is_single_residual_stream", True):
            fail(
                "model",
                "a single residual stream",
                f"{arch}, whose blocks.{index} carries several",
                "its stream is combined before the head and cannot be read per layer",
                NotImplementedError,
            )
    extra = [part for part in _EXTRA_HEAD_MODULES if part in parts]
    norm = getattr(model.cfg, "normalization_type", None)
    if norm is not None and "ln_final" not in parts:
        fail(
            "model",
            "pre-norm with a final norm `ln_final` before the unembedding",
            f"{arch} without one" + (f" (its head uses {', '.join(extra)})" if extra else ""),
            "post-norm layouts cannot be read layer by layer",
            NotImplementedError,
        )
    if extra:
        fail(
            "model",
            "read by ln_final and unembed alone",
            f"{arch}, whose head also uses {', '.join(extra)}",
            "the readout would not be the model's prediction",
            NotImplementedError,
        )
    training = next((n for n, m in _modules(model) if m.training), None)
    if training is not None:
        fail("model", "in eval mode", f"training mode at {training or 'the model'}", "call model.eval() first")


def _modules(model: Any) -> list[tuple[str, torch.nn.Module]]:
    roots = [("", model), ("original_model.", getattr(model, "original_model", None))]
    return [(prefix + n, m) for prefix, r in roots if isinstance(r, torch.nn.Module) for n, m in r.named_modules()]


def _architecture(model: Any) -> str:
    cfg = model.cfg
    for field in ("architecture", "original_architecture", "model_name"):
        if getattr(cfg, field, None):
            return str(getattr(cfg, field))
    return type(model).__name__


def _is_encoder_decoder(model: Any) -> bool:
    config = getattr(getattr(model, "original_model", None), "config", None)
    return bool(getattr(config, "is_encoder_decoder", False))


def check_mid(model: Any) -> None:
    """Every block has a state between attention and MLP; ValueError names the first that has none."""
    names = model.hook_dict
    kinds = model.layer_types() if callable(getattr(model, "layer_types", None)) else []
    for index, block in enumerate(model.blocks):
        parallel = bool(getattr(model.cfg, "parallel_attn_mlp", False))
        hybrid = index < len(kinds) and any(k in kinds[index] for k in ("mamba", "ssm", "mixer", "linear_attn"))
        if parallel or hybrid or f"blocks.{index}.hook_resid_mid" not in names:
            kind = "parallel attention and MLP" if parallel else type(block).__name__
            fail(
                "incl_mid",
                "False for a model whose blocks have no hook_resid_mid",
                f"True with blocks.{index} ({kind})",
                "whole blocks work: leave incl_mid out",
            )
