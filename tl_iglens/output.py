"""The model's own next-token distribution at the analysed positions, and whether the readout reproduces it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._checks import ReadoutMismatchError
from ._types import compute_dtype
from .readout import Readout


@dataclass(frozen=True)
class ModelOutput:
    """The model's own next-token distribution at the analysed positions.

    ``logits`` are those of the forward pass, transform included, or None where they would take more than
    64 MiB; ``log_z`` is log Σ exp over the vocabulary and ``top`` the most probable token, always there.
    ``bare_head``: the unembedding alone gave the logits, its declared output transform already being part
    of the weights.
    """

    log_z: Float[Tensor, "batch pos"]
    top: Int[Tensor, "batch pos"]
    logits: Float[Tensor, "batch pos d_vocab"] | None
    bare_head: bool = False


def pick(act: Float[Tensor, "batch ctx *d"], places: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos *d"]:
    """A copy of the activations at some places of every row."""
    at = places.to(act.device)
    return act[torch.arange(len(at), device=act.device)[:, None], at]


def model_output(
    readout: Readout,
    final: Float[Tensor, "batch pos d_model"],
    positions: Int[Tensor, "batch pos"],
    logits: Float[Tensor, "batch column d_vocab"] | None,
    logits_at: Int[Tensor, "batch 1"] | None,
    budget: int,
) -> ModelOutput:
    """log Z and the top token of every cell, from the forward's own logits or by the model's own modules.

    ``logits`` are at the positions, or at the columns ``logits_at`` of them alone; the modules then make the others,
    ``budget`` bytes of logits at a time. Rows without a position are not compared.
    """
    bare = False
    if logits is not None:
        bare = _matched_head(readout, final, positions, logits, logits_at)
    if logits is not None and logits_at is None:
        return ModelOutput(_log_z(logits), logits.argmax(-1).cpu(), logits, bare)
    cells, shape = final.reshape(-1, final.shape[-1]), final.shape[:-1]
    log_z, top = [], []
    for block in cells.split(readout.rows_of_logits(budget)):
        part = readout.model_logits(block)
        log_z.append(_log_z(part))
        top.append(part.argmax(-1).cpu())
    return ModelOutput(torch.cat(log_z).reshape(shape), torch.cat(top).reshape(shape), None, bare)


def _matched_head(
    readout: Readout, final: Tensor, positions: Tensor, logits: Tensor, logits_at: Tensor | None
) -> bool:
    """Whether the bare unembedding made the logits of the forward, seen at the last position of every row.

    The transform an architecture declares may have been folded into the weights; what decides is the model's
    own output. ReadoutMismatchError if norm and unembedding reproduce it neither way.
    """
    column = positions.argmax(1, keepdim=True) if logits_at is None else logits_at
    present = (positions >= 0).any(1).to(final.device)
    rows = pick(final, column)[present, 0]
    own = (pick(logits, column) if logits_at is None else logits)[:, 0].to(readout.device)[present]
    if not len(rows):
        return False
    gap = 0.0
    for block, said in zip(rows.split(32), own.split(32), strict=True):
        if readout.head_gap(block, said) > readout.tolerance(said.dtype):
            readout.use_bare_head()
            gap = max(gap, readout.head_gap(block, said))
    if gap > readout.tolerance(own.dtype):
        raise ReadoutMismatchError(
            "model must be read by ln_final, unembed and its output transform alone, got probabilities from the last "
            f"residual state that differ by {gap:.3g} from the model's own (tolerance {readout.tolerance(own.dtype):.0e}); "
            "a hook or head this package does not know changes the output"
        )
    return readout.is_bare


def _log_z(logits: Float[Tensor, "*cell d_vocab"]) -> Float[Tensor, "*cell"]:
    """log Σ exp in float64 scalars from float32 terms, without a second tensor of the size of the logits."""
    dtype = compute_dtype(logits.dtype)
    peak = logits.amax(-1, keepdim=True).to(dtype)
    total = torch.zeros(logits.shape[:-1], dtype=torch.float64, device=logits.device)
    for part in logits.split(8192, -1):
        total += (part.to(dtype) - peak).exp().sum(-1)
    return (peak[..., 0].double() + total.log()).cpu()
