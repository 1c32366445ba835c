"""Embedding projection: which tokens a component writes towards, and which against.

Every component c of the stream is read in the space of tokens, without bias and without the norm's scale:

    z_v(c) = ⟨γ ⊙ w_v, c − mean(c)⟩   (no mean for RMSNorm),

whose largest and smallest entries are the tokens it promotes and suppresses. The entries of the target add up to
σ(h_n) (logit − bias): additive, but in a unit that belongs to one position, and in logits, not in probability.
Sources: Geva et al. (2022); Dar et al., "Analyzing Transformers in Embedding Space" (2023).
"""

import torch
from einops import rearrange

from .._checks import check_positive
from ..path import resolve_path
from ..watchers import TopK, projections
from .base import MethodResult, Question, ends_of
from .logit_attribution import direction_of, norm_at


def embedding_projection(question: Question, *, top_k: int = 5) -> MethodResult:
    """The target's projection from each component, and the tokens each promotes and suppresses most.

    Components are the attention and MLP outputs where the path includes the states between them, else its segments.
    ``extra``: ``top_ids``, ``top_values``, ``bottom_ids``, ``bottom_values``, ``[row, batch, pos, k]``. Values are
    logits times the norm's scale, defined up to the unembedding's centring; the tokens' order is not affected by it.
    ``top_k``: tokens on either side. ValueError where it is not positive or the target is a set of tokens.
    """
    readout, n = question.readout, question.n_layers
    top_k = min(check_positive("top_k", top_k), readout.d_vocab)
    has_mid = any(point.mid for point in question.path.states)
    path = resolve_path(n, question.bounds, incl_mid=has_mid)
    states = question.at(path.states)
    components = torch.cat([states[:1], states[1:] - states[:-1]])
    gain, _, _, is_centred = norm_at(question, states[-1])
    rows = rearrange(components.double(), "term cell d -> (term cell) d")
    rows = rows - rows.mean(-1, keepdim=True) if is_centred else rows
    largest = TopK(len(rows), top_k, readout.device)
    smallest = TopK(len(rows), top_k, readout.device, largest=False)
    for first, z in projections(readout, (gain * rows).to(readout.dtype)):
        largest.see(z, slice(None), first)
        smallest.see(z, slice(None), first)
    head = direction_of(question)
    values = head.of(components) * head.sigma / head.scale

    def by_term(found: torch.Tensor) -> torch.Tensor:
        return rearrange(found, "(term cell) k -> term cell k", term=len(components))

    extra = {
        "top_ids": question.cells(by_term(largest.ids), -1),
        "top_values": question.cells(by_term(largest.values)),
        "bottom_ids": question.cells(by_term(smallest.ids), -1),
        "bottom_values": question.cells(by_term(smallest.values)),
    }
    expected = (head.logit - head.bias) * head.sigma / head.scale
    return MethodResult(
        method="embedding_projection",
        values=question.cells(values),
        labels=("embed", *path.labels),
        **ends_of(path.states, n),
        kind="additive",
        unit="logit × σ",
        sums_to="σ (logit − bias)",
        expected=question.cells(expected[None])[0],
        extra=extra,
        texts=question.texts(torch.cat([extra["top_ids"], extra["bottom_ids"]])),
        notes=("before the final norm's scale σ, bias left out", "defined up to the unembedding's centring"),
    )
