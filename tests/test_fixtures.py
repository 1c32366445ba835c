"""The fixtures build, reproduce and agree with their references; facts about bridges the library leans on."""

import random
from importlib.metadata import version

import numpy as np
import pytest
import torch
from fixtures import (
    FAMILIES,
    IDS_BR,
    IDS_HT,
    bridge,
    hf_model,
    hooked,
    identity_block,
    needs_hooked,
    no_trace,
    reference_logits,
    reference_probs,
    reference_readout,
    reference_states,
    shared_bridge,
    tokenizer,
    tokenizer_from_folder,
)

IS_4 = version("transformer-lens").startswith("4.")

PARALLEL = {"cohere", "gptj", "phi", "neox_par", "falcon"}  # no hook_resid_mid; attn and mlp add up
NO_MID = PARALLEL | {"mamba"}
NO_FINAL_NORM = {"opt_post", "t5"}
READABLE = [family for family in FAMILIES if family not in NO_FINAL_NORM]
HAS_POS_EMBED = {"gpt2", "opt_pre", "opt_post", "t5"}
ADDS_TO_EMBED = {"gpt2", "opt_pre", "falcon_h1"} | (set() if IS_4 else {"granite"})  # hook_embed is not 0_pre
DAMPED = {"cohere", "granite", "falcon_h1", "t5"}  # their output multipliers flatten the softmax
TRANSFORMED = {"cohere", "granite", "falcon_h1", "gemma2"}
UNTIED_ATTENTION = {"lfm2", "qwen3_5_text"}  # some blocks have no hook_attn_out (conv, linear attention)

HOOKED = {
    "None": {"normalization_type": None},
    "LN": {},
    "LNPre": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS"},
    "RMSPre": {"normalization_type": "RMSPre"},
    "cap": {"normalization_type": "RMS", "output_logits_soft_cap": 2.0},
    "eps": {"normalization_type": "RMS", "eps": 0.1},
    "attn_only": {"attn_only": True},
    "parallel": {"parallel_attn_mlp": True},
    "gqa": {"n_key_value_heads": 2},
    "gated": {"gated_mlp": True},
    "sandwich": {"normalization_type": "RMS", "use_normalization_before_and_after": True},
}


def booted(family, compat=False, **options):
    """The shared bridge, or a skip where TransformerLens itself fails on it."""
    if compat and family == "falcon_h1":
        pytest.skip("falcon_h1 in compatibility mode fails upstream")
    if not IS_4 and family in ("qwen3_5_text", "t5"):
        pytest.skip(f"{family} fails upstream on TransformerLens 3.9 with transformers 5.24")
    return shared_bridge(family, compat=compat, **options)


def run(model, ids, names=()):
    """Logits, and the states the named hooks saw."""
    seen = {}

    def keeper(name):
        return lambda state, hook: seen.__setitem__(name, state.detach().clone())

    with torch.no_grad():
        logits = model.run_with_hooks(
            torch.atleast_2d(torch.as_tensor(ids)), fwd_hooks=[(name, keeper(name)) for name in names]
        )
    return logits, seen


def capture(model, ids, hook):
    """The named hook of every block, as one tensor [n_layers, batch, pos, d_model]."""
    names = [f"blocks.{b}.{hook}" for b in range(model.cfg.n_layers)]
    seen = run(model, ids, names)[1]
    return torch.stack([seen[name] for name in names])


def probs(logits):
    return logits.double().softmax(-1)


def gap(a, b):
    return float((a.double() - b.double()).abs().max())


# --- FX-BR --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_bridge_is_finite_and_not_degenerate(family):
    logits, _ = run(booted(family), IDS_BR)
    top = probs(logits).amax(-1)
    assert torch.isfinite(logits).all()
    assert 1.05 / 320 < top.min() and top.max() < 0.98
    assert family in DAMPED or top.max() > 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_bridge_reproduces_and_depends_on_the_seed(family):
    first, _ = run(booted(family), IDS_BR)
    assert torch.equal(first, run(bridge(family), IDS_BR)[0])
    assert not torch.equal(first, run(bridge(family, seed=1), IDS_BR)[0])


@pytest.mark.parametrize("compat", [False, True], ids=["raw", "compat"])
@pytest.mark.parametrize("family", READABLE)
def test_bridge_states_and_probabilities_agree_with_the_reference(family, compat):
    model = booted(family, compat)
    if family == "cohere" and not IS_4:
        pytest.skip("the 3.9 cohere bridge is 2e-4 away from Hugging Face")
    logits, _ = run(model, IDS_BR)
    assert gap(probs(logits), reference_probs(model, IDS_BR)) < 1e-6
    if not compat:  # compatibility mode centres the stream
        states = reference_states(model, IDS_BR)
        assert gap(capture(model, IDS_BR, "hook_resid_pre"), states[:-1]) < 1e-4
        assert gap(capture(model, IDS_BR, "hook_resid_post"), states[1:]) < 1e-4


@pytest.mark.parametrize("family", READABLE)
def test_reference_readout_is_the_head_of_the_reference(family):
    model = booted(family)
    states = reference_states(model, IDS_BR)
    assert states.dtype == torch.float64 and states.shape == (model.cfg.n_layers + 1, 1, 7, 32)
    assert gap(reference_readout(model, states[-1]), reference_logits(model, IDS_BR)) < 1e-6


@pytest.mark.parametrize("compat", [False, True], ids=["raw", "compat"])
@pytest.mark.parametrize("family", READABLE)
def test_fact_boundaries_coincide_and_the_head_is_exact(family, compat):
    model = booted(family, compat)
    pre = capture(model, IDS_BR, "hook_resid_pre")
    post = capture(model, IDS_BR, "hook_resid_post")
    logits, _ = run(model, IDS_BR)
    assert torch.equal(pre[1:], post[:-1])
    with torch.no_grad():
        bare = model.unembed(model.ln_final(post[-1]))
        full = model.adapter.apply_output_logits_transform(bare)
    applied_twice = family == "cohere" and compat and not IS_4  # 3.9 folds the scale and multiplies again
    assert torch.equal(bare if applied_twice else full, logits)
    folded = family == "cohere" and compat
    assert (gap(probs(bare), probs(logits)) > 1e-2) == (family in TRANSFORMED and not folded)


@pytest.mark.parametrize("compat", [False, True], ids=["raw", "compat"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "t5"])
def test_fact_modules_and_mid_hooks(family, compat):
    model = booted(family, compat)
    assert hasattr(model, "ln_final") == (family not in NO_FINAL_NORM)
    assert hasattr(model, "pos_embed") == (family in HAS_POS_EMBED)
    assert ("blocks.0.hook_resid_mid" in model.hook_dict) == (family not in NO_MID)
    assert isinstance(model.unembed.original_component, torch.nn.Linear)
    assert model.W_U.data_ptr() == model.unembed.original_component.weight.data_ptr()


@pytest.mark.parametrize(
    "family", [f for f in READABLE if f not in {"mamba", "falcon_h1"} | UNTIED_ATTENTION]
)
def test_fact_contributions_add_up(family):
    model = booted(family)
    pre, post = capture(model, IDS_BR, "hook_resid_pre"), capture(model, IDS_BR, "hook_resid_post")
    attn, mlp = capture(model, IDS_BR, "hook_attn_out"), capture(model, IDS_BR, "hook_mlp_out")
    assert (pre + attn + mlp - post).norm() < 1e-6 * post.norm()
    if family not in NO_MID:
        mid = capture(model, IDS_BR, "hook_resid_mid")
        assert torch.equal(pre + attn, mid) and torch.equal(mid + mlp, post)


def test_fact_falcon_h1_attention_is_not_the_whole_mixer():
    model = booted("falcon_h1")
    pre, mid = capture(model, IDS_BR, "hook_resid_pre"), capture(model, IDS_BR, "hook_resid_mid")
    assert torch.equal(
        mid + capture(model, IDS_BR, "hook_mlp_out"), capture(model, IDS_BR, "hook_resid_post")
    )
    assert (pre + capture(model, IDS_BR, "hook_attn_out") - mid).norm() > 0.1 * mid.norm()


@pytest.mark.parametrize("family", READABLE)
def test_fact_embedding_hook_is_not_always_the_first_boundary(family):
    _, seen = run(booted(family), IDS_BR, ["hook_embed", "blocks.0.hook_resid_pre"])
    same = torch.equal(seen["hook_embed"], seen["blocks.0.hook_resid_pre"])
    assert same == (family not in ADDS_TO_EMBED)


def test_fact_unknown_hook_names():
    model = booted("mamba")
    if IS_4:
        with pytest.raises(KeyError, match=r"blocks\.0\.hook_resid_mid"):
            run(model, IDS_BR, ["blocks.0.hook_resid_mid"])
    else:  # no error: the hook never fires
        assert run(model, IDS_BR, ["blocks.0.hook_resid_mid"])[1] == {}


def test_fact_encoder_decoder_has_no_blocks():
    model = booted("t5")
    assert (
        hasattr(model, "encoder_blocks") and not hasattr(model, "blocks") and not hasattr(model, "ln_final")
    )


def test_fact_post_norm_opt_has_a_narrow_head():
    model = booted("opt_post")
    assert model.W_U.shape == (16, 320) and model.cfg.d_model == 32


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", READABLE)
def test_fact_a_mask_alone_makes_padded_rows_equal_solo_runs(family, side):
    model = booted(family)
    short, long = IDS_BR[:4], IDS_BR
    row = [2] * 3 + short if side == "left" else short + [2] * 3
    mask = torch.tensor([[0] * 3 + [1] * 4 if side == "left" else [1] * 4 + [0] * 3, [1] * 7])
    with torch.no_grad():
        both = model(torch.tensor([row, long]), attention_mask=mask)
        alone = model(torch.tensor([short])), model(torch.tensor([long]))
    assert gap(probs(both[0, mask[0].bool()]), probs(alone[0][0])) < 1e-6
    assert gap(probs(both[1]), probs(alone[1][0])) < 1e-6


def test_fact_positions_skip_a_masked_middle_token():
    model = booted("gpt2")
    ids, mask = torch.tensor([IDS_BR]), torch.tensor([[1, 1, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        own = probs(model(ids, attention_mask=mask))[0, -1]
        kept = probs(model(ids, attention_mask=mask, position_ids=torch.arange(7)[None]))[0, -1]
    counted = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1)}
    assert gap(own, reference_probs(model, ids, **counted)[0, -1]) < 1e-6
    assert gap(kept, reference_probs(model, ids, attention_mask=mask)[0, -1]) < 1e-6
    assert gap(own, kept) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite"])
def test_dtypes_are_kept(family, dtype):
    model = bridge(family, dtype=dtype)
    logits, _ = run(model, IDS_BR)
    assert logits.dtype == dtype and {p.dtype for p in model.parameters()} == {dtype}
    bound = {torch.float64: 1e-7, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]  # rotary stays float32
    assert gap(probs(logits), reference_probs(model, IDS_BR)) < bound


def test_mamba_in_half_types_casts_between_norm_and_head():
    model = bridge("mamba", dtype=torch.bfloat16)
    logits, seen = run(model, IDS_BR, ["blocks.2.hook_resid_post"])
    post = seen["blocks.2.hook_resid_post"]
    assert (post.dtype, logits.dtype, model.W_U.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    with torch.no_grad():
        normed = model.ln_final(post)
        assert normed.dtype == torch.float32
        assert torch.equal(model.unembed(normed.to(model.W_U.dtype)).float(), logits)


def test_config_overrides_reach_the_model_and_its_reference():
    model = bridge("llama", rms_norm_eps=0.1)
    logits, _ = run(model, IDS_BR)
    assert gap(probs(logits), reference_probs(model, IDS_BR)) < 1e-6
    assert gap(probs(logits), reference_probs(booted("llama"), IDS_BR)) > 1e-4


def test_unknown_family_names_fail_early():
    with pytest.raises(KeyError):
        hf_model("no_such_family")


# --- FX-HT --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", HOOKED.values(), ids=HOOKED)
def test_hooked_agrees_with_the_written_out_forward(options):
    model = hooked(**options)
    logits, _ = run(model, IDS_HT)
    states = reference_states(model, IDS_HT)
    assert 0.02 < probs(logits)[0, -1].max() < 0.98
    assert torch.equal(logits, run(hooked(**options), IDS_HT)[0])
    assert not torch.equal(logits, run(hooked(seed=1, **options), IDS_HT)[0])
    assert gap(probs(logits), reference_probs(model, IDS_HT)) < 1e-5
    assert gap(capture(model, IDS_HT, "hook_resid_pre"), states[:-1]) < 1e-3
    assert gap(capture(model, IDS_HT, "hook_resid_post"), states[1:]) < 1e-3


@pytest.mark.parametrize("options", HOOKED.values(), ids=HOOKED)
def test_hooked_in_float64_is_the_reference(options):
    model = hooked(dtype=torch.float64, **options)
    # the norms of TransformerLens go through float32 unless dtype is float64
    assert gap(run(model, IDS_HT)[0], reference_logits(model, IDS_HT)) < 1e-10
    for layer in range(4):
        assert torch.isfinite(reference_readout(model, reference_states(model, IDS_HT)[layer])).all()


def test_hooked_is_skipped_where_it_does_not_exist():
    if not IS_4:
        return needs_hooked()
    with pytest.raises(pytest.skip.Exception, match="HookedTransformer needs TransformerLens 2 or 3"):
        hooked()


# --- guards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compat", [False, True], ids=["raw", "compat"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "t5"])
@pytest.mark.parametrize("layer", [0, 2])
def test_identity_block_on_a_bridge(family, compat, layer):
    model = booted(family, compat)
    clean, _ = run(model, IDS_BR)
    with no_trace(model):
        with identity_block(model, layer):
            pre, post = capture(model, IDS_BR, "hook_resid_pre"), capture(model, IDS_BR, "hook_resid_post")
            skipped, _ = run(model, IDS_BR)
        assert torch.equal(pre[layer], post[layer])
        assert not torch.equal(pre[1], post[1])
        assert gap(clean, skipped) > 1e-6
        assert torch.equal(clean, run(model, IDS_BR)[0])


@pytest.mark.parametrize("options", HOOKED.values(), ids=HOOKED)
def test_identity_block_on_a_hooked_transformer(options):
    model = hooked(**options)
    clean, _ = run(model, IDS_HT)
    with no_trace(model), identity_block(model, 1):
        pre, post = capture(model, IDS_HT, "hook_resid_pre"), capture(model, IDS_HT, "hook_resid_post")
        assert torch.equal(pre[1], post[1]) and not torch.equal(pre[0], post[0])
        if "blocks.1.hook_resid_mid" in model.hook_dict:
            assert torch.equal(capture(model, IDS_HT, "hook_resid_mid")[1], pre[1])
    assert torch.equal(clean, run(model, IDS_HT)[0])


def leave_parameter(model):
    next(iter(model.parameters())).data.add_(1e-3)


def leave_hook(model):
    model.add_hook("blocks.1.hook_resid_post", lambda state, hook: None)


def leave_torch_hook(model):
    model.blocks[1].register_forward_hook(lambda *_: None)


def leave_training(model):
    model.blocks[2].train()


def leave_grad(model):
    parameter = next(iter(model.parameters()))
    parameter.grad = torch.zeros_like(parameter)


def leave_frozen(model):
    next(iter(model.parameters())).requires_grad_(False)


def leave_forward(model):
    model.ln_final.forward = model.ln_final.forward


def leave_padding_side(model):
    model.tokenizer.padding_side = "left"


def leave_config(model):
    model.cfg.default_prepend_bos = not model.cfg.default_prepend_bos


LEAVES = [
    leave_parameter, leave_hook, leave_torch_hook, leave_training, leave_grad, leave_frozen, leave_forward,
    leave_padding_side, leave_config,
]  # fmt: skip


@pytest.mark.parametrize("make", [lambda: bridge("gpt2"), lambda: hooked(d_vocab=291, tokenizer=tokenizer())])
@pytest.mark.parametrize("leave", LEAVES)
def test_no_trace_sees(leave, make):
    model = make()
    with pytest.raises(AssertionError, match="traces left"), no_trace(model):
        leave(model)


@pytest.mark.parametrize(
    "leave",
    [
        lambda: torch.rand(1),
        lambda: np.random.rand(1),
        random.random,
        lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    ],
    ids=["torch", "numpy", "python", "grad mode"],
)
def test_no_trace_sees_global_state(leave):
    model, grad_mode = booted("gpt2"), torch.is_grad_enabled()
    try:
        with pytest.raises(AssertionError, match="traces left"), no_trace(model):
            leave()
    finally:
        torch.set_grad_enabled(grad_mode)


def test_no_trace_checks_the_callers_tensors_and_after_exceptions():
    model, ids = booted("gpt2"), torch.tensor([IDS_BR])
    with pytest.raises(AssertionError, match="tensor 0 value"), no_trace(model, ids):
        ids[0, 0] = 1
    with pytest.raises(AssertionError, match="training"), no_trace(model):
        model.blocks[0].train()
        raise ZeroDivisionError
    model.blocks[0].eval()
    with pytest.raises(ZeroDivisionError), no_trace(model):
        raise ZeroDivisionError


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_hooked_run_leaves_no_trace(family):
    model = booted(family)
    names = [] if family == "t5" else ["blocks.0.hook_resid_pre", "blocks.2.hook_resid_post"]
    with no_trace(model):
        run(model, IDS_BR, names)


# --- tokenizers ---------------------------------------------------------------------------------


def test_pieces():
    one = tokenizer()
    assert len(one) == 291 and (one.bos_token_id, one.eos_token_id, one.pad_token_id) == (0, 1, 2)
    assert one.tokenize("Paris") == ["Paris"] and one.tokenize(" Paris") == ["ĠParis"]
    assert len(one.tokenize(" Berlin")) == 7
    assert one.tokenize("The capital of France is") == ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    assert one("<s>The cat").input_ids == [0, 0, 268, 282]
    text = "né 日 <b>\n\t"
    assert one.decode(one(text, add_special_tokens=False).input_ids) == text


def test_bos_variants():
    assert tokenizer(prepends_bos=False)("The cat").input_ids == [268, 282]
    assert tokenizer(bos=False).bos_token_id is None
    swapped = tokenizer(pad_id_zero=True)
    assert (swapped.pad_token_id, swapped.eos_token_id, swapped.bos_token_id) == (0, 1, 2)
    assert len(tokenizer(n_extra=40)) == 331
    assert tokenizer(padding_side="left")(["The cat", "The"], padding=True).input_ids[1][0] == 2


def test_sentencepiece_style():
    one = tokenizer(style="sentencepiece")
    assert len(one) == 291
    assert one.tokenize("The capital é") == ["▁", "The", "▁capital", "▁", "<0xC3>", "<0xA9>"]
    text = "The capital of né 日"
    assert one.decode(one(text, add_special_tokens=False).input_ids) == text


def test_folder_tokenizers_with_and_without_bos(tmp_path):
    with_bos = tokenizer_from_folder(tmp_path / "a", add_bos_token=True, prepends_bos=False)
    without = tokenizer_from_folder(tmp_path / "b", add_bos_token=False, prepends_bos=False)
    assert with_bos("The cat").input_ids == [0, 268, 282]
    assert without("The cat").input_ids == [268, 282]


@pytest.mark.parametrize(
    "options, ids",
    [
        ({}, [0, 268, 282]),
        ({"prepends_bos": False}, [0, 268, 282]),
        ({"bos": False}, [1, 268, 282]),  # EOS stands in
        ({"pad_id_zero": True}, [2, 268, 282]),
        ({"style": "sentencepiece"}, [0, 3, 268, 282]),
    ],
)
def test_bridge_takes_every_tokenizer(options, ids):
    model = bridge("gpt2", tokenizer=tokenizer(**options))
    assert model.to_tokens("The cat").tolist() == [ids]
    assert model.to_tokens("The cat", prepend_bos=False).tolist() == [ids[1:]]
