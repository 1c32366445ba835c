"""What can be seen of a distribution while it streams past: rank, top tokens, entropy, divergence.

Watchers look at the tiles of ``Readout.scan``; each keeps a few numbers per row and never a row of logits.
With the running maximum m of a row, sums of e^{z_v − m} are rescaled whenever m grows, as in the softmax.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .readout import Readout, exp_

_TILE = 4096  # tokens per tile where a second stream runs beside the readout's own


class Rank:
    """How many tokens have a strictly larger logit than the asked one: 0 for the top token.

    The logit it is compared with is computed before the stream, so tokens that tie to the last bit may
    count either way.
    """

    def __init__(self, readout: Readout, x: Float[Tensor, "row d_model"], ids: Int[Tensor, "row"]):
        self.ids = ids.to(readout.device)
        self.score = _logits_of(readout, x, self.ids[:, None])
        self.rank = torch.zeros(len(x), dtype=torch.int64, device=readout.device)

    def see(self, logits: Float[Tensor, "row tile"], rows: slice, first: int) -> None:
        above = logits > self.score[rows]
        itself = self.ids[rows, None] - first
        inside = (itself >= 0) & (itself < logits.shape[1])
        own = above.gather(1, itself.clamp(0, logits.shape[1] - 1)) & inside
        self.rank[rows] += above.sum(1) - own[:, 0].long()


class TopK:
    """The ``k`` largest (or smallest) logits of every row and their tokens, largest (smallest) first."""

    def __init__(self, n_rows: int, k: int, device: torch.device, *, largest: bool = True):
        self.k, self.largest = k, largest
        worst = -torch.inf if largest else torch.inf
        self.values = torch.full((n_rows, k), worst, dtype=torch.float64, device=device)
        self.ids = torch.full((n_rows, k), -1, dtype=torch.int64, device=device)

    def see(self, logits: Float[Tensor, "row tile"], rows: slice, first: int) -> None:
        values, ids = logits.topk(min(self.k, logits.shape[1]), 1, largest=self.largest)
        values = torch.cat([self.values[rows], values.double()], 1)
        ids = torch.cat([self.ids[rows], ids + first], 1)
        self.values[rows], best = values.topk(self.k, 1, largest=self.largest)
        self.ids[rows] = ids.gather(1, best)


class Entropy:
    """H = log Z − Σ_v p_v z_v of every row, in nats; needs log Z, which the same stream yields."""

    def __init__(self, n_rows: int, device: torch.device):
        self.peak = torch.full((n_rows, 1), -torch.inf, dtype=torch.float64, device=device)
        self.mass = torch.zeros(n_rows, dtype=torch.float64, device=device)
        self.moment = torch.zeros(n_rows, dtype=torch.float64, device=device)

    def see(self, logits: Float[Tensor, "row tile"], rows: slice, first: int) -> None:
        peak = torch.maximum(self.peak[rows], logits.amax(1, keepdim=True).double())
        shrink = (self.peak[rows] - peak).exp()[:, 0]
        weight = exp_(logits - peak.to(logits.dtype))
        self.mass[rows] = self.mass[rows] * shrink + weight.sum(1).double()
        self.moment[rows] = self.moment[rows] * shrink + (weight * logits).sum(1).double()
        self.peak[rows] = peak

    def value(self, log_z: Float[Tensor, "row"]) -> Float[Tensor, "row"]:
        return log_z - self.moment / self.mass


class Divergence:
    """KL(p_final ‖ p_row) in nats: how far a row is from the model's final distribution of its cell.

    Σ_v p_v (z_v − z'_v) − log Z + log Z', with the final logits z recomputed beside the rows that pass, once
    per tile and cell. ``pull`` also accumulates Σ_v p_v T'(z'_v) w_v, the final distribution's part of the
    gradient in the normed row.
    """

    def __init__(
        self,
        readout: Readout,
        final: Float[Tensor, "cell d_model"],
        log_z: Float[Tensor, "cell"],
        cell: Int[Tensor, "row"],
        *,
        pull: bool = False,
    ):
        self.readout, self.final = readout, final
        self.log_z, self.cell = log_z.to(readout.device), cell.to(readout.device)
        self.moment = torch.zeros(len(cell), dtype=torch.float64, device=readout.device)
        shape = (len(cell), readout.d_model)
        self.direction = torch.zeros(shape, dtype=readout.acc_dtype, device=readout.device) if pull else None

    def see(self, logits: Float[Tensor, "row tile"], rows: slice, first: int) -> None:
        cells, place = self.cell[rows].unique(return_inverse=True)
        final = logits_between(self.readout, self.final[cells], first, first + logits.shape[1])
        p = exp_(final - self.log_z[cells, None].to(final.dtype))
        # Σ p (z − z') splits into one term of the cell and one of the row; together they do not cancel badly
        self.moment[rows] += (p[place] * (final[place] - logits)).sum(1).double()
        if self.direction is not None:
            weight = p[place] * self.readout.transform.slope(logits)
            tile = self.readout.W_U[:, first : first + logits.shape[1]].to(weight.dtype)
            self.direction[rows] += weight @ tile.T

    def value(self, log_z: Float[Tensor, "row"]) -> Float[Tensor, "row"]:
        return (self.moment - self.log_z[self.cell] + log_z).clamp_min(0)


def logits_between(
    readout: Readout, x: Float[Tensor, "row d_model"], start: int, stop: int
) -> Float[Tensor, "row tile"]:
    """Transformed logits of normed rows for a run of the vocabulary, in float32 or better."""
    logits = x @ readout.W_U[:, start:stop].to(x.dtype)
    if readout.b_U is not None:
        logits += readout.b_U[start:stop]
    return readout.transform(logits).to(readout.acc_dtype)


def tiles(
    readout: Readout, x: Float[Tensor, "row d_model"], width: int = _TILE
) -> Iterator[tuple[int, Float[Tensor, "row tile"]]]:
    """The transformed logits of all rows, one run of the vocabulary at a time, with its first token."""
    for first in range(0, readout.d_vocab, width):
        yield first, logits_between(readout, x, first, min(first + width, readout.d_vocab))


def projections(
    readout: Readout, x: Float[Tensor, "row d_model"], width: int = _TILE
) -> Iterator[tuple[int, Float[Tensor, "row tile"]]]:
    """⟨w_v, x⟩ alone, without bias and transform, one run of the vocabulary at a time, with its first token."""
    for first in range(0, readout.d_vocab, width):
        yield first, (x @ readout.W_U[:, first : first + width].to(x.dtype)).to(readout.acc_dtype)


def _logits_of(readout: Readout, x: Tensor, ids: Int[Tensor, "row id"]) -> Float[Tensor, "row id"]:
    """Transformed logits of a few tokens per row."""
    logits = torch.einsum("rd,dri->ri", x, readout.W_U[:, ids].to(x.dtype))
    if readout.b_U is not None:
        logits = logits + readout.b_U[ids]
    return readout.transform(logits).to(readout.acc_dtype)
