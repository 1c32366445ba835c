"""What stacking saves: all blocks ablated in shared forwards against one full forward per site.

``python -m benchmarks.ablation``; both sides compute the same numbers and alternate in one run; medians.
"""

import argparse

from rich.console import Console
from rich.table import Table

from tl_iglens.ablation import ablate
from tl_iglens.demo import load_demo_model, load_gemma

from .measure import ratio

PROMPTS = {
    5: "The capital of France is",
    32: "When the old clock in the hall struck nine, everybody at the long table put down their cards, "
    "looked at each other in surprise, and began to",
}


def measured(repeats: int, model_name: str, model: object) -> list[tuple[str, str, str, str]]:
    rows = []
    for words, text in PROMPTS.items():
        for unit, at in (("block", "target"), ("block", "all"), ("mlp", "target")):
            options = {"unit": unit, "at": at, "prepend_bos": False}
            got = ratio(
                lambda o=options, t=text: ablate(model, t, stack=False, **o),
                lambda o=options, t=text: ablate(model, t, **o),
                repeats,
            )
            both = [ablate(model, text, stack=stack, **options).p_ablated for stack in (True, False)]
            gap = (both[0] - both[1]).abs()
            where = f"{model_name}, about {words} tokens, {unit} skipped at {at}"
            rows.append((where, f"{got.value:.2f}", f"{got.other:.2f} s", f"{float(gap.max()):.0e}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--gemma", action="store_true", help="Gemma-3-270M as well")
    args = parser.parse_args()
    columns = ("where", "one forward per site / stacked", "stacked", "largest |Δp|")
    table = Table(*columns, title="ablate, batch of 1")
    for name, load in (("SmolLM2", load_demo_model), *([("Gemma-3", load_gemma)] if args.gemma else [])):
        for row in measured(args.repeats, name, load()):
            table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
