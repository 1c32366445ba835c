"""Parity with the reference implementation of the paper (arXiv 2606.29693) where it is right."""

import json
from pathlib import Path

import pytest
import torch

from tl_iglens import ig_lens

CASES = json.loads((Path(__file__).parent / "data" / "golden_smollm2.json").read_text())["cases"]


def credits(model, case, **options):
    """Credits of the listed segments, [answer token, segment], and the result."""
    ids = torch.tensor([case["prompt_ids"] + case["answer_ids"]])
    first, n = len(case["prompt_ids"]) - 1, len(case["answer_ids"])
    result = ig_lens(
        model,
        ids,
        targets=ids[:, first + 1 :],
        pos_slice=(first, first + n),
        layers=case["layers"],
        baseline=case["baseline"],
        **options,
    )
    return result.attribution[: len(case["layers"]), 0].T, result


def name(case):
    return f"{case['answer'][:12]}-{case['baseline']}-from {case['layers'][0]}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_exact_credits_agree(smollm2, case):
    ours, result = credits(smollm2, case)
    theirs = torch.tensor(case["credits_prediction_aware"])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    torch.testing.assert_close(result.model_level[0], torch.tensor(case["p_model"]), rtol=0, atol=1e-4)
    assert result.labels[0] == f"base-{case['layers'][0] - 1}_blocks"
    assert len(result.labels) == len(case["layers"]) + 1  # the last boundary is added


@pytest.mark.parametrize(
    "case", [c for c in CASES if "credits_midpoint_64" in c and c["layers"][0] == 5], ids=name
)
def test_midpoint_credits_agree(smollm2, case):
    ours, _ = credits(smollm2, case, estimator="midpoint", n_steps=64)
    torch.testing.assert_close(ours, torch.tensor(case["credits_midpoint_64"]), rtol=0, atol=1e-4)


def test_the_last_state_is_normalised_once(smollm2):
    """What the reference gets wrong: its last level is 0.0055 here, the model's own is 0.7725."""
    result = ig_lens(smollm2, "The capital of France is", targets=" Paris", prepend_bos=False)
    with torch.no_grad():
        twice = smollm2.ln_final(smollm2.ln_final(_last_state(smollm2, result.tokens)))
        wrong = smollm2.unembed(twice)[0, -1].softmax(-1)[int(result.targets)]
    assert abs(float(result.levels[-1]) - 0.7725) < 2e-4 and abs(float(wrong) - 0.0055) < 5e-4


def _last_state(model, ids):
    seen = {}
    name = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=[(name, lambda act, hook: seen.__setitem__("h", act))])
    return seen["h"]
