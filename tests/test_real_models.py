"""The laws on two real models: SmolLM2-135M-Instruct and Gemma-3-270M."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import IS_4
from conftest import close_or_nan as close
from fixtures import identity_block, no_trace

from tl_iglens import TokenSet, collect_states, ig_lens
from tl_iglens._types import QUANTITIES

FRANCE = "The capital of France is"
TEXTS = {
    "smollm2": [FRANCE, "Water boils at a temperature of", "Once upon a time, there was a little"],
    "gemma": [FRANCE, "The opposite of hot is", "One, two, three, four,"],
}


@pytest.fixture(params=["smollm2", "gemma"])
def real(request):
    """(name, model); the model is loaded once per session."""
    return request.param, request.getfixturevalue(request.param)


def own_probs(model, ids):
    with torch.no_grad():
        return model(ids, return_type="logits").double().softmax(-1)


def test_paris(smollm2):
    result = ig_lens(smollm2, FRANCE, targets=" Paris", prepend_bos=False)
    assert result.completeness_gap.abs().max() <= 1e-6
    assert abs(float(result.levels[-1]) - 0.7725) < 2e-4
    own = own_probs(smollm2, result.tokens)[0, -1, int(result.targets)]
    assert abs(float(result.levels[-1]) - float(own)) <= 2e-5
    assert abs(float(result.model_level) - float(own)) <= 2e-5
    assert result.labels[int(result.attribution[:, 0, 0].argmax())] == "29_block"
    assert result.labels == tuple(f"{b}_block" for b in range(30))
    assert result.onset("largest").labels == (("29_block",),) and result.target_strings == ((" Paris",),)
    assert result.tokens.shape[1] == 5 and result.token_strings[0][-1] == " is"


def test_the(gemma):
    result = ig_lens(gemma, FRANCE, prepend_bos=True)
    assert result.target_strings == ((" the",),) and abs(float(result.levels[-1]) - 0.191) < 1e-3
    paris = ig_lens(gemma, FRANCE, targets=" Paris", prepend_bos=True)
    assert abs(float(paris.levels[-1]) - 0.084) < 1e-3
    both = ig_lens(gemma, FRANCE, targets=TokenSet(" Paris", " the"), prepend_bos=True)
    close(both.attribution, result.attribution + paris.attribution, 1e-6)


def test_sum_and_both_ends(real):
    name, model = real
    for n_steps, quantity in ((1, "prob"), (2, "prob"), (1, "log_prob"), (1, "logit")):
        result = ig_lens(model, TEXTS[name][0], pos_slice=None, n_steps=n_steps, quantity=quantity)
        scale = result.levels.abs().max().clamp_min(1)
        assert (result.completeness_gap.abs() / scale).max() <= 1e-6
        assert (result.readout_gap.abs() / scale).max() <= 2e-5
    probs = own_probs(model, result.tokens)
    assert torch.equal(result.targets, probs.argmax(-1))
    close(ig_lens(model, result.tokens, pos_slice=None).levels[-1], probs.amax(-1), 2e-5)


@pytest.mark.skipif(
    not IS_4, reason="transformer_lens.tools.analysis.logit_lens came with TransformerLens 4"
)
def test_levels_are_the_logit_lens_of_transformer_lens(real):
    from transformer_lens.tools.analysis import logit_lens

    name, model = real
    for text in TEXTS[name][:2]:
        result = ig_lens(model, text, pos_slice=None)
        theirs = logit_lens(
            model, result.tokens, return_type="probs", positions=None, targets=result.targets[0]
        )
        assert tuple(theirs.labels) == result.point_labels
        exact = in_float64(model, result)
        close(result.levels, exact, 5e-6)
        own_error = float((theirs.values[..., 0] - exact).abs().max())  # up to 5e-5 on Gemma's large vocabulary
        close(result.levels, theirs.values[..., 0], 2e-5 + own_error)
        if text == FRANCE:
            close(result.levels[..., -1], theirs.values[..., -1, 0], 2e-5)


@torch.no_grad()
def in_float64(model, result):
    """The levels with unembedding and softmax in float64, a few rows at a time."""
    states = collect_states(model, result.tokens, pos_slice=None).resid
    rows = model.ln_final(states.flatten(0, 2)[None])[0]
    ids = result.targets[0].repeat(len(states))
    weight = model.W_U.double()
    parts = [
        (x.double() @ weight).softmax(-1).gather(1, i[:, None])[:, 0]
        for x, i in zip(rows.split(16), ids.split(16), strict=True)
    ]
    return torch.cat(parts).reshape(states.shape[:3])


@pytest.mark.parametrize("baseline", ["embed", "zero", "mean", "bos"])
def test_baselines(real, baseline):
    name, model = real
    result = ig_lens(model, TEXTS[name][0], baseline=baseline, layers=None)
    states = collect_states(model, result.tokens, pos_slice=None)
    start = {
        "embed": states.resid[0, :, -1],
        "zero": torch.zeros_like(states.resid[0, :, -1]),
        "mean": states.resid[0].mean(1),
        "bos": states.resid[0, :, 0],
    }[baseline]
    with torch.no_grad():
        logits = model.unembed(model.ln_final(start[:, None]))[:, 0]
    cap = getattr(model.cfg, "output_logits_soft_cap", None) or 0
    assert not cap or cap < 0  # neither model caps its output
    # the mean of large states is rounded differently by another order of summation
    tolerance = 2e-4 if baseline == "mean" else 2e-5
    close(result.levels[0, :, 0], logits.double().softmax(-1)[:, int(result.targets)], tolerance)
    assert result.completeness_gap.abs().max() <= 1e-6


def test_attention_and_mlp_add_up(real):
    name, model = real
    blocks = ig_lens(model, TEXTS[name][0])
    halves = ig_lens(model, TEXTS[name][0], incl_mid=True)
    close(halves.attribution[0::2] + halves.attribution[1::2], blocks.attribution, 2e-6)
    merged = ig_lens(model, TEXTS[name][0], layers=[0, 7, 12])
    n = len(blocks.labels)
    for s, (a, b) in enumerate(((0, 7), (7, 12), (12, n))):
        close(merged.attribution[s], blocks.attribution[a:b].sum(0), 2e-6)
    assert merged.labels == ("0-6_blocks", "7-11_blocks", f"12-{n - 1}_blocks")


def test_identity_block(real):
    name, model = real
    with identity_block(model, 4):
        result = ig_lens(model, TEXTS[name][0], pos_slice=None, n_steps=2)
    assert not bool(result.attribution[4].any()) and not bool(result.step_attribution[4].any())
    assert bool((result.attribution[[3, 5]] != 0).any(-1).all())


def test_gradient_rules_converge(real):
    name, model = real
    n = len(model.blocks)
    options = {"layers": [n // 3, 2 * n // 3, n - 1]}
    exact = ig_lens(model, TEXTS[name][0], **options).attribution
    for rule, bound in (("midpoint", 2e-2), ("gauss_legendre", 5e-3)):
        coarse, fine = (
            (ig_lens(model, TEXTS[name][0], estimator=rule, n_steps=n, **options).attribution - exact)
            .abs()
            .max()
            for n in (2, 32)
        )
        assert fine < coarse / 4 and fine < bound


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_batches(real, side):
    name, model = real
    solo = [ig_lens(model, text) for text in TEXTS[name]]
    rows = [r.tokens[0].tolist() for r in solo]
    width = max(map(len, rows))
    pad = [[0] * (width - len(r)) for r in rows]
    batch = [p + r if side == "left" else r + p for r, p in zip(rows, pad, strict=True)]
    mask = [p + [1] * len(r) if side == "left" else [1] * len(r) + p for r, p in zip(rows, pad, strict=True)]
    for together in (ig_lens(model, batch, attention_mask=mask), ig_lens(model, TEXTS[name])):
        for b, one in enumerate(solo):
            assert together.targets[b].tolist() == one.targets[0].tolist()
            close(together.attribution[:, b], one.attribution[:, 0], 5e-5)
            close(together.levels[:, b], one.levels[:, 0], 5e-5)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_tiles_and_batches(real, quantity):
    name, model = real
    usual = ig_lens(model, TEXTS[name][:2], quantity=quantity)
    for options in ({"tile_bytes": 2**20}, {"tile_bytes": 2**25}, {"batch_size": 1}):
        other = ig_lens(model, TEXTS[name][:2], quantity=quantity, **options)
        close(other.attribution, usual.attribution, 5e-5 if quantity == "prob" else 5e-4)


def test_states_serve_again(real):
    name, model = real
    states = collect_states(model, TEXTS[name][0], pos_slice=None)
    close(ig_lens(model, states=states).attribution, ig_lens(model, TEXTS[name][0]).attribution, 2e-5)


def test_no_trace(real):
    name, model = real
    with no_trace(model):
        ig_lens(model, TEXTS[name][0])
        ig_lens(model, TEXTS[name][0], estimator="midpoint", n_steps=2, baseline="mean", layers=[5])


MEMORY = """
import sys
import torch
from tl_iglens import collect_states, ig_lens
from tl_iglens.demo import load_gemma

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024

torch.set_num_threads(1)
model, n = load_gemma(), int(sys.argv[1])
ids = torch.randint(10, 200_000, (1, n), generator=torch.Generator().manual_seed(0))
targets = ids.roll(-1, 1)
states = collect_states(model, ids, pos_slice=None)
ig_lens(model, states=states.at(torch.tensor([[n - 1]])), targets=targets[:, -1:])  # libraries and buffers warm
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
result = ig_lens(model, states=states, targets=targets, pos_slice=None)
print(status("VmHWM") - before, tuple(result.levels.shape), float(result.completeness_gap.abs().max()))
"""


FULL = pytest.mark.skipif(
    not os.environ.get("TL_IGLENS_SLOW"), reason="set TL_IGLENS_SLOW=1 for the two minutes it takes"
)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux' /proc"
)
@pytest.mark.parametrize("n_positions", [64, pytest.param(512, marks=FULL)])
def test_reading_a_large_vocabulary_stays_small(gemma, n_positions):
    """All layers of many positions; 64 already fill a block of rows, beyond which memory does not grow."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY, str(n_positions)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    peak, rest = found.stdout.split(maxsplit=1)
    assert rest.startswith(f"(19, 1, {n_positions})")
    assert float(peak) <= 256  # MiB; float32 logits of 64 positions alone would be 1.2 GiB over the layers
