"""IG-Lens as one method among others: the credits of the receipt every comparison starts with."""

from .base import MethodResult, Question


def credits(question: Question) -> MethodResult:
    """Credits of the segments; they sum to Δ, the change of the model's own quantity from the baseline on.

    ``[segment, batch, pos]``. Errors are those of ``ig_lens``, such as ReadoutMismatchError. Source: arXiv 2606.29693.
    """
    receipt = question.receipt
    return MethodResult(
        method="ig_lens",
        values=receipt.attribution,
        labels=receipt.labels,
        ends=receipt.point_labels[1:],
        boundaries=receipt.boundaries,
        kind="additive",
        unit=question.unit,
        sums_to="Δ",
        expected=receipt.model_level - receipt.levels[0],
        notes=receipt.info.notes,
    )
