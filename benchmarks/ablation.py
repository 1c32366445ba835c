"""What stacking saves: all blocks ablated in shared forwards against one full forward per site.

Both sides compute the same numbers and alternate in one run; medians. Part of ``python -m benchmarks``.
"""

from collections.abc import Iterator
from typing import Any

from tl_iglens.ablation import ablate
from tl_iglens.demo import load_demo_model, load_gemma

from .measure import Ratio, ratio

SHORT = "The capital of France is"
LONG = "When the old clock in the hall struck nine, everybody at the long table put down their cards, "
LONG += "looked at each other in surprise, and began to"
CASES = ((SHORT, "block", "target"), (SHORT, "mlp", "all"), (LONG, "block", "target"))


def stacked_and_not(model: Any, text: str, unit: str, at: str, repeats: int) -> tuple[Ratio, float]:
    """Time of one full forward per site over that of shared ones, and the largest difference in p."""
    last: dict[bool, Any] = {}

    def side(stack: bool) -> None:
        last[stack] = ablate(model, text, unit=unit, at=at, stack=stack, prepend_bos=False)

    got = ratio(lambda: side(False), lambda: side(True), repeats)
    return got, float((last[True].p_ablated - last[False].p_ablated).abs().max())


def measured(quick: bool, repeats: int = 7) -> Iterator[tuple[str, ...]]:
    for name, load in (("SmolLM2-135M", load_demo_model), ("Gemma-3-270M", load_gemma))[: 1 if quick else 2]:
        model = load()
        for text, unit, at in CASES:
            got, gap = stacked_and_not(model, text, unit, at, repeats)
            n_tokens = model.to_tokens(text, prepend_bos=False).shape[1]
            where = f"{name}, batch 1, {n_tokens} tokens, {unit} skipped at {at}"
            goal = "≥ 1.60" if name.startswith("SmolLM2") else "–"
            figure = f"{got.value:.2f}  ({got.other:.2f} s; |Δp| ≤ {gap:.0e})"
            yield "one forward per site / ours", where, figure, goal
