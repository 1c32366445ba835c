"""Layer integrated gradients and layer conductance: Captum's numbers on both model classes, with their errors."""

import builtins

import numpy as np
import pytest
import torch
from conftest import small_model
from fixtures import no_trace

from tl_iglens.compare import compare

pytest.importorskip("captum")
pytestmark = pytest.mark.filterwarnings("ignore:layer_:UserWarning")  # few steps keep these tests quick

IDS = [1, 5, 40, 17, 20]
METHODS = ("layer_ig", "layer_conductance")
MODELS = ["gpt2-raw", "llama-raw", "gemma2-compat", "cohere-raw", "neox_par-raw", "hooked-LN", "hooked-soft-cap"]


def options(**given):
    return {name: {"baseline_prompt": 9, "n_steps": 12, **given} for name in METHODS}


def prob_at_end(model, target):
    """F of token ids, by the model itself."""
    return lambda tokens: model(tokens)[:, -1].softmax(-1)[:, target]


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_totals_the_whole_change_within_its_reported_error(name):
    model = small_model(name)
    target = 4
    f = prob_at_end(model, target)
    change = float((f(torch.tensor([IDS])) - f(torch.tensor([[9] * 5]))).detach())
    comparison = compare(model, [IDS], targets=target, methods=options())
    for method in METHODS:
        found = comparison[method]
        assert found.labels == ("0_block", "1_block", "2_block") and found.boundaries == (1, 2, 3)
        delta = found.extra["convergence_delta"][:, 0, 0]
        torch.testing.assert_close(found.values[:, 0, 0] - delta, torch.full((3,), change), atol=2e-6, rtol=1e-4)
        assert float(found.expected) == pytest.approx(3 * change, abs=1e-6)  # n layers total n times the change
        assert abs(float(found.gap)) <= float(found.error) + 1e-6
        assert found.sums_to == "3·Δ from the baseline prompt"
        # nothing after the last block moves between positions: its part at the target is all of it
        torch.testing.assert_close(found.extra["at_target"][-1], found.values[-1], atol=1e-6, rtol=1e-5)


def test_layer_ig_is_the_integral_along_the_states_of_a_layer():
    model = small_model("llama-raw")
    layer, target, steps = "blocks.0.hook_resid_post", 4, 12
    found = compare(model, [IDS], targets=target, methods=options())["layer_ig"]
    h, h0 = _state(model, layer, IDS), _state(model, layer, [9] * 5)
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    total = torch.zeros_like(h[0])
    for x, w in zip((nodes + 1) / 2, weights / 2, strict=True):
        leaf = (h0 + x * (h - h0)).float().detach().requires_grad_(True)
        with model.hooks(fwd_hooks=[(layer, lambda act, hook, leaf=leaf: leaf)]):
            value = prob_at_end(model, target)(torch.tensor([IDS]))
        total += w * torch.autograd.grad(value.sum(), leaf)[0][0]
    parts = ((h - h0)[0] * total).sum(-1)
    assert float(found.values[0]) == pytest.approx(float(parts.sum()), rel=1e-3, abs=1e-6)
    assert float(found.extra["at_target"][0]) == pytest.approx(float(parts[-1]), rel=1e-3, abs=1e-6)


def test_layer_conductance_follows_the_path_of_the_input():
    model = small_model("gpt2-raw")
    start, layer, target, steps = "blocks.0.hook_resid_pre", "blocks.1.hook_resid_post", 4, 12
    found = compare(model, [IDS], targets=target, methods=options())["layer_conductance"]
    x, x0 = _state(model, start, IDS), _state(model, start, [9] * 5)
    nodes = (np.polynomial.legendre.leggauss(steps + 1)[0] + 1) / 2
    states, gradients = [], []
    for alpha in nodes:
        kept = []
        hooks = [
            (start, lambda act, hook, a=alpha: (x0 + a * (x - x0)).float()),
            (layer, lambda act, hook, kept=kept: kept.append(act)),
        ]
        with model.hooks(fwd_hooks=hooks):
            value = prob_at_end(model, target)(torch.tensor([IDS]))
        gradients.append(torch.autograd.grad(value.sum(), kept[0])[0][0])
        states.append(kept[0].detach()[0])
    parts = sum(((b - a) * g).sum(-1) for a, b, g in zip(states, states[1:], gradients, strict=False))
    assert float(found.values[1]) == pytest.approx(float(parts.sum()), rel=1e-3, abs=1e-6)
    assert float(found.extra["at_target"][1]) == pytest.approx(float(parts[-1]), rel=1e-3, abs=1e-6)


def _state(model, name, ids):
    kept = []
    with torch.no_grad(), model.hooks(fwd_hooks=[(name, lambda act, hook: kept.append(act.clone()))]):
        model(torch.tensor([ids]))
    return kept[0]


@pytest.mark.parametrize("name", ["gpt2-raw", "hooked-LN"])
def test_more_steps_bring_the_totals_closer(name):
    model = small_model(name)
    few, many = (compare(model, [IDS], methods=options(n_steps=n), layers=[0, 2]) for n in (4, 64))
    for method in METHODS:
        assert float(many[method].error) <= float(few[method].error) + 1e-6


def test_totals_that_miss_the_change_are_warned_about():
    model = small_model("gpt2-raw")
    with pytest.warns(
        UserWarning, match=r"^layer_ig with n_steps=1 misses the change of the output by \d+% at"
    ) as caught:
        found = compare(model, [IDS], targets=4, methods={"layer_ig": {"baseline_prompt": 9, "n_steps": 1}})["layer_ig"]
    miss = found.extra["convergence_delta"][:, 0, 0].abs() / max(abs(float(found.expected)) / 3, 1e-3)
    assert f"by {float(miss.max()):.0%} at {int(miss.argmax())}_block;" in str(caught[0].message)


def test_rows_positions_and_pads_are_told_apart():
    model = small_model("llama-raw")
    short = IDS[:3]
    batch, mask = torch.tensor([IDS, [*short, 2, 2]]), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    chosen, at = options(n_steps=3), {"pos_slice": (0, 4), "layers": [0, 2], "targets": 4}
    both = compare(model, batch, attention_mask=mask, methods=chosen, **at)
    alone = compare(model, [short], methods=chosen, **at)
    for method in METHODS:
        torch.testing.assert_close(both[method].values[:, 1, :3], alone[method].values[:, 0], atol=1e-6, rtol=1e-3)
        assert both[method].values[:, 1, 3].isnan().all() and both[method].values[:, 0].isfinite().all()


def test_the_same_scalar_is_explained_whatever_the_quantity():
    model = small_model("gpt2-raw")
    found = compare(model, [IDS], targets=4, quantity="logit", methods=options())["layer_ig"]
    change = model(torch.tensor([IDS]))[0, -1, 4] - model(torch.tensor([[9] * 5]))[0, -1, 4]
    assert found.unit == "logit" and float(found.expected) == pytest.approx(3 * float(change.detach()), rel=1e-5)


def test_the_baseline_prompt_is_the_end_of_text_token_unless_given():
    model = small_model("llama-raw")  # its tokenizer's </s> is 1
    named = compare(model, [IDS], methods={"layer_ig": {"n_steps": 3}}, targets=4)["layer_ig"]
    given = compare(model, [IDS], methods={"layer_ig": {"n_steps": 3, "baseline_prompt": [[1] * 5]}}, targets=4)[
        "layer_ig"
    ]
    torch.testing.assert_close(named.values, given.values)
    assert named.notes[1] == "baseline prompt: one token repeated (5 × </s>)"


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        (
            [[1, 2]],
            "baseline_prompt must be one token, or ids of shape [1, 5], got torch.int64 of shape [1, 2]; zero "
            "embeddings are no prompt",
        ),
        (
            0.0,
            "baseline_prompt must be one token, or ids of shape [1, 5], got torch.float32 of shape []; zero "
            "embeddings are no prompt",
        ),
        (
            10**6,
            "baseline_prompt must be one token, or ids of shape [1, 5], got 1000000; use the model's own tokenizer",
        ),
    ],
)
def test_baselines_that_are_no_prompt_are_named(baseline, message):
    model = small_model("llama-raw")
    with no_trace(model), pytest.raises(ValueError) as error:
        compare(model, [IDS], methods={"layer_ig": {"baseline_prompt": baseline}})
    assert str(error.value) == message


def test_a_model_without_a_tokenizer_needs_one_given(monkeypatch):
    model = small_model("llama-raw")
    monkeypatch.setattr(model, "tokenizer", None)
    with pytest.raises(ValueError) as error:
        compare(model, [IDS], methods="layer_ig")
    assert str(error.value) == (
        "baseline_prompt must be given for a model without a tokenizer, got None; pass a token id or ids of the same "
        "length as baseline_prompt"
    )


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["gpt2-raw", "hooked-LN"])
def test_gradients_are_ours_and_leave_no_trace(name, grad):
    model, given = small_model(name), torch.tensor([IDS])
    with torch.set_grad_enabled(grad), no_trace(model, given):
        found = compare(model, given, methods=options(n_steps=2), layers=[0, 2])
    assert not any(found[method].values.requires_grad for method in METHODS)


def test_a_caller_in_inference_mode_gets_gradients_too():
    model = small_model("llama-raw")
    plain = compare(model, [IDS], methods=options(n_steps=3))
    with torch.inference_mode():
        inside = compare(model, [IDS], methods=options(n_steps=3))
    for method in METHODS:
        torch.testing.assert_close(inside[method].values, plain[method].values)


def test_an_error_in_the_middle_leaves_no_hook():
    model = small_model("gpt2-raw")

    def explode(act, hook):
        if torch.is_grad_enabled():
            raise RuntimeError("user hook")

    with model.hooks(fwd_hooks=[("blocks.2.hook_resid_post", explode)]):
        with no_trace(model), pytest.raises(RuntimeError, match="user hook"):
            compare(model, [IDS], methods=options(n_steps=2))


def test_without_captum_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **more):
        if name.startswith("captum"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError) as error:
        compare(small_model("llama-raw"), [IDS], methods="layer_ig")
    assert str(error.value) == (
        'layer_ig and layer_conductance need Captum, which is not installed; run pip install "tl-iglens[captum]"'
    )


def test_smollm2_by_two_layers(smollm2):
    chosen = {"layer_ig": {"n_steps": 8}}
    found = compare(
        smollm2, "The capital of France is", targets=" Paris", prepend_bos=False, layers=[0, 29], methods=chosen
    )["layer_ig"]
    assert found.labels == ("28_block", "29_block")
    assert (found.values - found.expected / 2).abs().max() <= found.extra["convergence_delta"].abs().max() + 1e-5
