"""Logit lens: what the model would predict if it stopped here.

Every state of the path is read by the model's own final norm, unembedding, output transform and softmax, with
statistics of that very state: f(h_l). These are the levels whose differences are the credits of IG-Lens.
Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).
"""

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from .._checks import check_positive
from ..watchers import Divergence, Entropy, Rank, TopK
from .base import MethodResult, Question, ends_of


def logit_lens(question: Question, *, top_k: int = 5) -> MethodResult:
    """Levels of f at every point of the path, with rank, entropy, top tokens and KL from the same stream.

    ``extra``: ``rank`` of the first target among all tokens (0 is the top one), ``entropy`` and ``kl`` =
    KL(final ‖ here) in nats, ``[row, batch, pos]``; ``top_ids`` and ``top_values`` (probabilities),
    ``[row, batch, pos, k]`` with k = ``top_k``, a ValueError where it is not positive. Levels sum to nothing.
    """
    points = question.path.states
    return read_levels(question, "logit_lens", question.at(points), top_k, **ends_of(points, question.n_layers))


def read_levels(
    question: Question,
    method: str,
    states: Float[Tensor, "point cell d_model"],
    top_k: int,
    *,
    ends: tuple[str, ...],
    boundaries: tuple[int, ...],
    notes: tuple[str, ...] = (),
) -> MethodResult:
    """Levels of any states that stand for points of the path, whatever produced them."""
    readout = question.readout
    top_k = min(check_positive("top_k", top_k), readout.d_vocab)
    objective, n_points, n_cells = question.flat_objective, *states.shape[:2]

    def by_point(values: Tensor) -> Tensor:
        return rearrange(values, "(cell point) ... -> point cell ...", point=n_points)

    # cell by cell, so that the rows of a cell pass together with its final distribution
    x = readout.normed(rearrange(states, "point cell d_model -> (cell point) d_model"))
    final = readout.normed(question.at(question.path.states[-1:])[0])
    ids = repeat(objective.ids, "cell id -> (cell point) id", point=n_points)
    cell = repeat(torch.arange(n_cells), "cell -> (cell point)", point=n_points)
    rank, top, entropy = (
        Rank(readout, x, ids[:, 0]),
        TopK(len(x), top_k, readout.device),
        Entropy(len(x), readout.device),
    )
    log_z = question.states.output.log_z[question.states.present]
    kl = Divergence(readout, final, log_z, cell)
    scan = readout.scan(x, ids, watchers=(rank, top, entropy, kl))
    levels = objective.value(by_point(scan.z), by_point(scan.log_z))
    probabilities = (top.values - scan.log_z[:, None]).exp()
    extra = {
        "rank": question.cells(by_point(rank.rank), -1),
        "entropy": question.cells(by_point(entropy.value(scan.log_z))),
        "kl": question.cells(by_point(kl.value(scan.log_z))),
        "top_ids": question.cells(by_point(top.ids), -1),
        "top_values": question.cells(by_point(probabilities)),
    }
    return MethodResult(
        method=method,
        values=question.cells(levels),
        labels=ends,
        ends=ends,
        boundaries=boundaries,
        kind="level",
        unit=question.unit,
        extra=extra,
        texts=question.texts(extra["top_ids"]),
        notes=notes,
    )
