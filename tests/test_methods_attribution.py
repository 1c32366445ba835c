"""Direct logit attribution: terms + bias = logit on every architecture, or a refusal by name."""

from dataclasses import replace

import pytest
import torch
from conftest import IDS, small_model
from fixtures import bridge, hooked, shared_bridge

from tl_iglens import collect_states
from tl_iglens.compare import compare
from tl_iglens.methods import hooks_of

UNITS = ("block", "component", "head")


def dla(model, unit, ids=IDS, **options):
    return compare(model, [ids], methods={"dla": {"unit": unit}}, **options)["dla"]


@pytest.mark.parametrize("unit", UNITS)
def test_terms_and_bias_are_the_models_own_logit(model, unit):
    if unit == "head" and getattr(model.cfg, "use_normalization_before_and_after", False):
        pytest.skip("heads are refused there")
    try:
        found = dla(model, unit, pos_slice=None, targets=4)
    except ValueError as error:
        assert unit == "head" and "head outputs that miss it" in str(error)
        return
    logits = model(torch.tensor([IDS]))[..., 4].detach()
    cap = {"gemma2": 3.0}.get(getattr(model.cfg, "model_name", "").removeprefix("fx-"), None)
    cap = cap or float(getattr(model.cfg, "output_logits_soft_cap", 0) or 0)
    if cap > 0:
        assert found.unit == found.sums_to == "logit before the soft cap"
        torch.testing.assert_close(cap * torch.tanh(found.total / cap), logits, atol=1e-4, rtol=1e-3)
    else:
        assert found.unit == "logit"
        torch.testing.assert_close(found.total, logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("unit", ["component", "head"])
@pytest.mark.parametrize(
    "name", ["gpt2-compat", "llama-compat", "neox_par-compat", "cohere-compat", "hooked-LNPre", "hooked-RMSPre"]
)
def test_transformer_lens_tool_agrees(name, unit):
    analysis = pytest.importorskip("transformer_lens.tools.analysis")
    model = small_model(name)
    theirs = analysis.direct_logit_attribution(model, torch.tensor([IDS]), 4, 9, unit=unit)
    ours = dla(model, unit, targets=4, incorrect_targets=9)
    assert ours.labels == tuple(theirs.labels)
    torch.testing.assert_close(ours.values[:, 0, 0], theirs.attribution[:, 0].detach(), atol=1e-4, rtol=1e-3)
    assert any("direct_logit_attribution" in note for note in ours.notes)
    # and with the terms we take ourselves where the tool does not apply
    blocks = dla(model, "block", targets=4, incorrect_targets=9)
    embeds = sum(1 for label in theirs.labels if label.endswith("embed"))
    if unit == "component":
        parts = ours.values[embeds:, 0, 0].reshape(3, 2).sum(1)
        torch.testing.assert_close(parts, blocks.values[1:, 0, 0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox_par", "cohere", "gemma3"])
def test_processed_weights_give_the_same_difference_of_logits(family):
    raw, compat = shared_bridge(family), shared_bridge(family, compat=True)
    for unit in ("block", "component"):
        a, b = (dla(m, unit, targets=4, incorrect_targets=9) for m in (raw, compat))
        merged = (
            b.values if len(b.labels) == len(a.labels) else torch.cat([b.values[:2].sum(0, keepdim=True), b.values[2:]])
        )
        torch.testing.assert_close(a.values[1:], merged[1:], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", ["bloom", "granite", "falcon_h1", "mixtral", "mamba", "lfm2", "olmo2", "gptj"])
def test_unusual_blocks_are_right_or_refused_by_name(family):
    model = bridge(family)
    logit = float(model(torch.tensor([IDS]))[0, -1, 4])
    for unit in UNITS:
        try:
            found = dla(model, unit, targets=4)
        except ValueError as error:
            assert unit != "block" and str(error).startswith("unit must be ")
            assert "use unit='" in str(error) or "whole blocks work" in str(error)
        else:
            assert float(found.total) == pytest.approx(logit, rel=1e-3, abs=1e-4)


def test_heads_behind_a_norm_are_refused_by_name():
    with pytest.raises(ValueError) as error:
        dla(small_model("gemma3-raw"), "head")
    assert str(error.value) == (
        "unit must be a unit whose parts add up in blocks.0, got 'head' with head outputs that miss it by 36%; use "
        "unit='component'"
    )


def with_stream_in_the_hook(model, incl_mid):
    """States whose blocks.1.hook_attn_out holds the stream as well, as BLOOM's once did."""
    methods = {"dla": {"unit": "component"}}
    states = collect_states(model, [IDS], incl_mid=incl_mid, extra=hooks_of(model, methods))
    name = "blocks.1.hook_attn_out"
    return replace(states, extra={**states.extra, name: states.extra[name] + states.resid[1]})


def test_a_hook_that_holds_more_than_its_contribution_is_refused():
    model = small_model("neox_par-raw")
    with pytest.raises(ValueError, match=r"^unit must be a unit whose parts add up in blocks\.1, got 'component' with"):
        compare(model, states=with_stream_in_the_hook(model, False), methods={"dla": {"unit": "component"}})


def test_where_states_lie_between_the_parts_such_a_hook_is_not_needed():
    model = small_model("gpt2-compat")
    states = with_stream_in_the_hook(model, True)
    found = compare(model, states=states, targets=4, methods={"dla": {"unit": "component"}})["dla"]
    right = dla(model, "component", targets=4)
    torch.testing.assert_close(found.values[1:], right.values[2:], atol=1e-5, rtol=1e-4)
    assert found.labels[0] == "embed" and right.labels[:2] == ("embed", "pos_embed")


def test_units_a_model_has_not_are_refused_before_the_forward():
    model = bridge("mamba")
    calls = []
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda act, hook: calls.append(1))]):
        with pytest.raises(ValueError) as error:
            dla(model, "component")
    assert str(error.value) == (
        "unit must be 'block' for a model without blocks.0.hook_attn_out, got 'component'; whole blocks work for every "
        "model"
    )
    assert not calls


@pytest.mark.parametrize("options", [{"attn_only": True}, {"parallel_attn_mlp": True}, {"n_key_value_heads": 2}])
def test_hooked_transformers_of_every_layout(options):
    model = hooked("LN", **options)
    logit = float(model(torch.tensor([IDS]))[0, -1, 4])
    for unit in UNITS:
        assert float(dla(model, unit, targets=4).total) == pytest.approx(logit, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model = bridge("llama", dtype=dtype)
    found = dla(model, "component", targets=4)
    size = max(1.0, float(found.values.abs().max()))
    assert abs(float(found.gap)) <= size * (1e-6 if dtype == torch.float64 else 3e-2)  # its norm runs in float32


def test_gemma_by_component_and_smollm2_by_head(smollm2, gemma):
    by_head = compare(smollm2, "The capital of France is", targets=" Paris", methods={"dla": {"unit": "head"}})["dla"]
    assert len(by_head.labels) == 30 * 9 + 1 and abs(float(by_head.gap)) < 1e-3 * float(by_head.expected)
    with pytest.raises(ValueError, match=r"^unit must be a unit whose parts add up in blocks\.0, got 'head' with"):
        compare(gemma, "The capital of France is", methods={"dla": {"unit": "head"}})
