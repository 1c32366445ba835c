"""What is measured of a row of logits: the probability, log-probability or logit of some tokens.

An :class:`Objective` is a scalar function of the logits z_i of a few tokens and of the row's log-partition
log Z; with its partial derivatives in both it is all a readout needs. Pure tensors, no model.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """f(z, log Z) for every analysed cell.

    * ``prob``: Σ_i s_i exp(z_i − log Z), the summed probability of a token set, less that of the
      incorrect tokens;
    * ``log_prob``: log Σ exp z_i over the targets − log Z, or − log Σ exp z_i over the incorrect tokens;
    * ``logit``: log Σ exp z_i over the targets (z itself for one token), less that of the incorrect ones.

    ``sign`` is +1 for a target, −1 for an incorrect token, 0 for an empty place.
    """

    quantity: str
    ids: Int[Tensor, "*cell id"]
    sign: Float[Tensor, "*cell id"]

    def at(self, cells: slice) -> "Objective":
        """The same objective for a run of cells."""
        return Objective(self.quantity, self.ids[cells], self.sign[cells])

    def value(self, z: Float[Tensor, "*row id"], log_z: Float[Tensor, "*row"]) -> Float[Tensor, "*row"]:
        """f at rows whose trailing axes are the cells; in the dtype of ``z``."""
        if self.quantity == "prob":
            return (self._sign(z) * (z - log_z[..., None]).exp()).sum(-1)
        value = self._gathered(z, 1)
        if self._has_incorrect:
            return value - self._gathered(z, -1)
        return value - log_z if self.quantity == "log_prob" else value

    def partials(
        self, z: Float[Tensor, "*row id"], log_z: Float[Tensor, "*row"]
    ) -> tuple[Float[Tensor, "*row id"], Float[Tensor, "*row"]]:
        """∂f/∂z_i and ∂f/∂log Z."""
        if self.quantity == "prob":
            weight = self._sign(z) * (z - log_z[..., None]).exp()
            return weight, -weight.sum(-1)
        weight = self._share(z, 1)
        if self._has_incorrect:
            return weight - self._share(z, -1), torch.zeros_like(log_z)
        return weight, torch.full_like(log_z, -1.0 if self.quantity == "log_prob" else 0.0)

    @property
    def needs_partition(self) -> bool:
        """Whether f depends on log Z at all; a logit and a log-ratio do not."""
        return self.quantity == "prob" or (self.quantity == "log_prob" and not self._has_incorrect)

    @property
    def _has_incorrect(self) -> bool:
        return bool((self.sign < 0).any())

    def _sign(self, z: Tensor) -> Tensor:
        return self.sign.to(device=z.device, dtype=z.dtype)

    def _members(self, z: Tensor, sign: int) -> Tensor:
        """Logits of the tokens of one sign, −∞ elsewhere."""
        return z.masked_fill(self._sign(z) != sign, -torch.inf)

    def _gathered(self, z: Tensor, sign: int) -> Tensor:
        return torch.logsumexp(self._members(z, sign), -1)

    def _share(self, z: Tensor, sign: int) -> Tensor:
        return torch.softmax(self._members(z, sign), -1)
