"""What stacking saves: all blocks ablated in shared forwards against one full forward per site.

``python -m benchmarks.ablation``; both sides compute the same numbers and alternate in one run; medians.
"""

import argparse
from typing import Any

from rich.console import Console

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--gemma", action="store_true", help="Gemma-3-270M as well")
    args = parser.parse_args()
    console = Console()
    for name, load in (("SmolLM2", load_demo_model), *([("Gemma-3", load_gemma)] if args.gemma else [])):
        model = load()
        for text, unit, at in CASES:
            got, gap = stacked_and_not(model, text, unit, at, args.repeats)
            n_tokens = model.to_tokens(text, prepend_bos=False).shape[1]
            where = f"{name}, batch 1, {n_tokens} tokens, {unit} skipped at {at}"
            console.print(f"{where}: {got.value:.2f} times faster ({got.other:.2f} s), |Δp| ≤ {gap:.0e}")


if __name__ == "__main__":
    main()
