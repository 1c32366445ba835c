"""A small tuned lens for the embedded model, fitted on text it wrote itself and on the package's own prompts.

``python -m benchmarks.tuned_lens --out lens`` writes

* ``texts.json``: the token ids of the generated texts (made once);
* ``fit.safetensors``: the checkpoint a stopped fit goes on from;
* ``params.pt``, ``config.json``: the lens in the published layout, for ``TunedLens.load``;
* with ``--table FILE``, held-out KL(final ‖ lens) per layer in nats, beside the logit lens's.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tl_iglens.demo import load_demo_model
from tl_iglens.methods.tuned_lens import TunedLens, generate_texts
from tl_iglens.prompts import PROMPTS

OPENERS = [
    "The", "In the", "A", "When", "Scientists have", "The capital of", "Once upon", "My favourite", "The city",
    "People who", "To make", "Water is", "She opened", "The history", "Music", "The river", "An important", "What is",
    "Some animals", "During the", "The new", "He said", "Mathematics", "There are", "A computer", "The president",
    "Physics", "The company", "I think", "Every morning", "According to", "The sun",
]  # fmt: skip
RECIPE = {"n_steps": 120, "tokens_per_step": 96, "context": 64, "lr": 0.1, "held_out": 0.1, "seed": 0}


def corpus(model: Any, file: Path) -> list[list[int]]:
    """Token ids of 32 generated texts and of all prompts with their answers."""
    if not file.exists():
        texts = generate_texts(model, OPENERS, n_tokens=48, temperature=0.7, prepend_bos=False, seed=0)
        file.write_text(json.dumps(texts))
    own = [model.tokenizer.encode(prompt.text + (prompt.answer or "")) for prompt in PROMPTS]
    return json.loads(file.read_text()) + own


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuned_lens", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("lens"))
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = load_demo_model()
    texts = corpus(model, args.out / "texts.json")
    lens = TunedLens.fit(model, texts, checkpoint=args.out / "fit.safetensors", **RECIPE)
    lens.save(args.out)
    assert lens.report is not None
    table = lens.report.to_dataframe().rename(
        columns={"tuned_lens": "tuned_lens_kl", "logit_lens": "logit_lens_kl"}
    )
    print(table.round(4).to_string(index=False))
    print(f"trained on {lens.report.n_trained} tokens, measured on {lens.report.n_held_out} others")
    if args.table:
        table.round(5).to_csv(args.table, index=False)


if __name__ == "__main__":
    main()
