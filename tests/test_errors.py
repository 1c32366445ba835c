"""What is refused, before any forward pass, and every message in full: rule, got, what to do."""

import warnings

import numpy as np
import pytest
import torch
from conftest import IDS, IS_4, small_model
from fixtures import bridge, hooked, needs_hooked, no_trace, tokenizer

from tl_iglens import TokenSet, collect_states, ig_lens

ID_RULE = "input must be text, a list of texts, or integer ids [pos] or [batch, pos], got "


@pytest.fixture(scope="module")
def texts():
    """A model with the small byte-level tokenizer and 320 tokens."""
    return bridge("gpt2") if IS_4 else hooked("LN", d_vocab=320, n_ctx=64, tokenizer=tokenizer())


def refused(model, *args, error=ValueError, **options):
    """The message of a refusal that happens before the model runs and leaves no trace."""
    ran = []
    first = next(iter(model.blocks)) if hasattr(model, "blocks") else model
    handle = first.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with no_trace(model), pytest.raises(error) as caught:
            ig_lens(model, *args, **options)
    finally:
        handle.remove()
    assert type(caught.value) is error and not ran
    return str(caught.value)


# --- input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "got"),
    [
        (None, ValueError, "None; give a prompt of at least one token"),
        ([], ValueError, "an empty list; give a prompt of at least one token"),
        ([0, 1.5], TypeError, "dtype torch.float64; convert token ids to integers"),
        (torch.tensor([1.0]), TypeError, "dtype torch.float32; convert token ids to integers"),
        ([True, False], TypeError, "dtype torch.bool; convert token ids to integers"),
        ([[1, 2], [3]], ValueError, "list of unequal or mixed rows; pad ids and pass attention_mask"),
        (["a", 3], ValueError, "list of unequal or mixed rows; pad ids and pass attention_mask"),
        (3, ValueError, "shape (); see model.to_tokens"),
        (torch.zeros(1, 2, 3, dtype=torch.long), ValueError, "shape (1, 2, 3); see model.to_tokens"),
        ({"a": 1}, TypeError, "dict; see model.to_tokens"),
        (b"abc", TypeError, "bytes; see model.to_tokens"),
    ],
    ids=str,
)
def test_input_of_the_wrong_kind(texts, given, error, got):
    assert refused(texts, given, error=error) == ID_RULE + got


@pytest.mark.parametrize("given", [torch.zeros(1, 0, dtype=torch.long), [[]], np.zeros((2, 0))], ids=str)
def test_no_tokens(texts, given):
    shape = tuple(np.shape(given))
    assert refused(texts, given) == (
        f"input must be a prompt of at least one token, got ids of shape {shape}; give some token ids"
    )


@pytest.mark.parametrize("given", ["", [""], ["The", ""]], ids=str)
def test_empty_text(texts, given):
    assert refused(texts, given, prepend_bos=False) == (
        "input must be a prompt of at least one token, got ''; give some text, or prepend_bos=True"
    )


def test_empty_text_with_bos_is_the_bos(texts):
    result = ig_lens(texts, "")
    assert result.tokens.tolist() == [[0]] and result.completeness_gap.abs().max() <= 1e-6
    assert result.readout_gap.abs().max() <= 1e-6


def test_longer_than_the_context(texts):
    message = "input must be a prompt of at most n_ctx=64 tokens, got 65 tokens; shorten the prompt"
    assert refused(texts, [5] * 65) == message
    assert refused(texts, [[5] * 65] * 2) == message
    assert refused(texts, "The " * 100).startswith("input must be a prompt of at most n_ctx=64 tokens, got ")
    ig_lens(texts, [5] * 64)  # the longest that fits
    ig_lens(texts, [[5] * 60 + [2] * 20], attention_mask=[[1] * 60 + [0] * 20])  # pads do not count


@pytest.mark.parametrize(("ids", "bad"), [([0, 320], 320), ([-1, 3], -1), ([10**6], 10**6)])
def test_ids_outside_the_vocabulary(texts, ids, bad):
    assert refused(texts, ids) == (
        f"input must be token ids between 0 and d_vocab-1=319, got {bad}; use the model's own tokenizer"
    )


def test_text_without_a_tokenizer():
    needs_hooked()
    assert refused(hooked("LN"), "The cat") == (
        "input must be token ids for a model without a tokenizer, got 'The cat'; set one, or pass ids [batch, pos]"
    )
    with pytest.raises(ValueError) as error:
        ig_lens(hooked("LN"), IDS, targets=" cat")
    assert str(error.value) == (
        "targets must be token ids for a model without a tokenizer, got ' cat'; pass the id"
    )


# --- padding and special tokens -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "row"),
    [
        ([2, 2, 2, 0, 5, 40, 77, 100], 0),
        ([0, 5, 40, 2], 0),
        ([[0, 5, 40], [2, 0, 5]], 1),
        ([[0, 5, 40], [0, 5, 2]], 1),
    ],
    ids=str,
)
def test_pad_ids_without_a_mask(texts, ids, row):
    message = (
        "attention_mask must be given when rows begin or end with the pad id 2, "
        f"got None with row {row} of input; pass attention_mask=(ids != pad_id) so that pads are not read as text"
    )
    assert refused(texts, ids) == message
    given = torch.atleast_2d(torch.tensor(ids))
    assert ig_lens(texts, given, attention_mask=given != 2).attribution.isfinite().all()


def test_a_left_padded_row_with_a_mask_is_the_plain_row(texts):
    padded = ig_lens(texts, [2, 2, 2, 0, 5, 40, 77, 100], attention_mask=[0, 0, 0, 1, 1, 1, 1, 1], targets=7)
    plain = ig_lens(texts, [0, 5, 40, 77, 100], targets=7)
    torch.testing.assert_close(padded.attribution, plain.attribution, rtol=0, atol=1e-6)


def test_pads_that_are_also_the_eos_are_read_with_a_warning(texts):
    tok = tokenizer()
    tok.pad_token = tok.eos_token
    model = bridge("gpt2", tokenizer=tok) if IS_4 else hooked("LN", d_vocab=320, tokenizer=tok)
    with pytest.warns(UserWarning) as caught:
        ig_lens(model, [0, 5, 40, 1, 1])
    assert [str(w.message) for w in caught] == [
        "attention_mask is None and rows of input begin or end with id 1, which is also the pad id; they are read as "
        "real tokens, pass attention_mask if they are padding"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ig_lens(model, [0, 5, 40, 1])  # one end-of-text is ordinary text


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        ([[1, 1]], "shape (1, 2)"),
        ([[1, 1, 1, 1, 1, 1, 2]], "other values"),
        ("abc", "str of something else"),
    ],
    ids=str,
)
def test_wrong_masks(texts, mask, got):
    assert refused(texts, IDS, attention_mask=mask) == (
        f"attention_mask must be 0 or 1 at every place of the ids, shape (1, 7), got {got}; 1 marks real tokens"
    )


def test_masks_that_leave_nothing(texts):
    assert refused(texts, [IDS, IDS], attention_mask=[[1] * 7, [0] * 7]) == (
        "attention_mask must be 1 at least once in every row, got all 0 in row 1; drop that row"
    )
    assert refused(texts, "The cat", attention_mask=[[1, 1, 1]]) == (
        "attention_mask must be None for text input, got a mask; pass token ids together with a mask"
    )


def test_a_doubled_bos_warns_and_is_shown(texts):
    with pytest.warns(UserWarning) as caught:
        result = ig_lens(texts, "<s>The cat", targets=7)
    assert [str(w.message) for w in caught] == [
        "row 0 of input starts with the BOS id 0 twice; pass prepend_bos=False if the text already has it"
    ]
    assert result.tokens.tolist() == [[0, 0, 268, 282]]
    assert torch.equal(
        result.attribution, ig_lens(texts, torch.tensor([[0, 0, 268, 282]]), targets=7).attribution
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once = ig_lens(texts, "<s>The cat", prepend_bos=False)
    assert once.tokens.tolist() == [[0, 268, 282]]


def test_an_eos_in_place_of_a_missing_bos_is_shown():
    tok = tokenizer(bos=False)
    model = bridge("gpt2", tokenizer=tok) if IS_4 else hooked("LN", d_vocab=320, tokenizer=tok)
    result = ig_lens(model, "The cat", targets=7)
    assert result.tokens.tolist() == model.to_tokens("The cat").tolist() == [[1, 268, 282]]
    own = model("The cat", return_type="logits")[0, -1].softmax(-1)[7]
    torch.testing.assert_close(result.levels[-1, 0, 0], own.detach(), rtol=0, atol=1e-6)


# --- targets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["targets", "incorrect_targets"])
@pytest.mark.parametrize("bad", [-1, 320, 10**6, np.int64(-1), torch.tensor(320)], ids=str)
def test_targets_outside_the_vocabulary(texts, argument, bad):
    message = (
        f"{argument} must be a token id between 0 and d_vocab-1=319, got {int(bad)}; "
        "negative ids do not count from the end"
    )
    for given in (bad, TokenSet(3, int(bad)), [bad]):
        with no_trace(texts), pytest.raises(ValueError) as error:
            ig_lens(texts, IDS, **{argument: given})
        assert str(error.value) == message


@pytest.mark.parametrize("bad", [True, 3.0, [1.5], {"a": 1}, torch.tensor(3.0)], ids=str)
def test_targets_of_the_wrong_kind(texts, bad):
    shown = repr(bad[0] if isinstance(bad, list) else bad.item() if isinstance(bad, torch.Tensor) else bad)
    with no_trace(texts), pytest.raises(TypeError) as error:
        ig_lens(texts, IDS, targets=bad)
    assert str(error.value) == (
        f"targets must be a token id, a single token as text, or a TokenSet, got {shown}; see model.to_single_token"
    )


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (" Berlin", "7 tokens [' ', 'B', 'e', 'r', 'l', 'i', 'n']"),
        ("The cat", "2 tokens ['The', ' cat']"),
        ("", "0 tokens []"),
    ],
)
def test_targets_of_several_tokens(texts, text, pieces):
    message = (
        f"targets must be a single token, got {text!r}, which is the {pieces}; choose one piece, "
        "sum several with TokenSet(...), or use explain_generation for a whole answer"
    )
    for given in (text, TokenSet(text), [text]):
        with no_trace(texts), pytest.raises(ValueError) as error:
            ig_lens(texts, IDS, targets=given)
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([1, 2], "targets must be one token, or one per row (3), got 2 tokens; "
                 "pass an integer tensor [batch, pos] for one per position"),
        (torch.tensor([1, 2]), "targets must be right-aligned to [batch, pos]=[3, 1], got shape (2,); "
                               "give one id per analysed position, or one per row"),
        (np.array([[1, 2, 3]]), "targets must be right-aligned to [batch, pos]=[3, 1], got shape (1, 3); "
                                "give one id per analysed position, or one per row"),
        (torch.ones(1, 3, 1, dtype=torch.long), "targets must be right-aligned to [batch, pos]=[3, 1], "
                                "got shape (1, 3, 1); give one id per analysed position, or one per row"),
        (torch.tensor([[1], [2], [320]]), "targets must be token ids between 0 and d_vocab-1=319, got 320; "
                                          "use the model's own tokenizer"),
        (torch.tensor([[1], [2], [-1]]), "targets must be token ids between 0 and d_vocab-1=319, got -1; "
                                         "use the model's own tokenizer"),
    ],
    ids=str,
)  # fmt: skip
def test_targets_that_do_not_fit_the_batch(texts, targets, message):
    with no_trace(texts), pytest.raises(ValueError) as error:
        ig_lens(texts, torch.tensor([IDS] * 3), targets=targets)
    assert str(error.value) == message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_target_tensors_of_the_wrong_dtype(texts, dtype):
    with no_trace(texts), pytest.raises(TypeError) as error:
        ig_lens(texts, IDS, targets=torch.ones(1, 1, dtype=dtype))
    assert str(error.value) == (
        f"targets must be integer token ids, got dtype {dtype}; convert the tensor to integers"
    )


def test_an_empty_set():
    with pytest.raises(ValueError) as error:
        TokenSet()
    assert (
        str(error.value)
        == 'TokenSet must be at least one token, got none; for example TokenSet("Paris", " Paris")'
    )


def test_nothing_follows_the_last_token(texts):
    assert refused(texts, IDS, targets="next") == (
        "pos_slice must be positions that a token follows when targets='next', got only the last one; "
        "use pos_slice=None"
    )


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "simpson"}, "estimator must be one of prediction_aware, midpoint, left, right, trapezoid, "
                                   "gauss_legendre, got 'simpson'; check the spelling"),
        ({"quantity": "probs"}, "quantity must be one of prob, log_prob, logit, got 'probs'; check the spelling"),
        ({"baseline": "pad"}, "baseline must be one of embed, zero, mean, bos, got 'pad'; check the spelling"),
        ({"n_steps": 0}, "n_steps must be a whole number of at least 1, got 0; give a whole number"),
        ({"n_steps": -3}, "n_steps must be a whole number of at least 1, got -3; give a whole number"),
        ({"layers": [0, 5]}, "layers must be strictly increasing boundaries between 0 and n_layers=3, got [0, 5]; "
                             "boundary l is the state that enters block l, and boundary n_layers is always added"),
        ({"pos_slice": 7}, "pos_slice must be within the 7 real tokens of row 0, got 7; count from -1 at the end"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options(texts, options, message):
    assert refused(texts, IDS, **options) == message


@pytest.mark.parametrize("baseline", [3, None, ["zero"]], ids=str)
def test_baselines_of_the_wrong_kind(texts, baseline):
    assert refused(texts, IDS, baseline=baseline, error=TypeError) == (
        "baseline must be a name, a floating-point tensor or ResidualStates, "
        f"got {type(baseline).__name__}; choose from embed, zero, mean, bos, a tensor [batch, pos, d_model] or "
        "collect_states(...)"
    )


@pytest.mark.parametrize("shape", [(31,), (3, 32), (1, 2, 3, 32)], ids=str)
def test_baselines_that_do_not_fit(texts, shape):
    with no_trace(texts), pytest.raises(ValueError) as error:
        ig_lens(texts, IDS, baseline=torch.zeros(shape))
    assert str(error.value) == (
        f"baseline must be broadcastable to [batch, pos, d_model]=[1, 1, 32], got shape {list(shape)}; "
        "collect it at the same positions"
    )


@pytest.mark.parametrize("states", [False, True])
def test_baselines_of_more_rows_than_the_input(texts, states):
    baseline = collect_states(texts, [IDS, IDS]) if states else torch.zeros(2, 1, 32)
    with pytest.raises(ValueError) as error:
        ig_lens(texts, IDS, baseline=baseline)
    assert str(error.value) == (
        "baseline must be broadcastable to [batch, pos, d_model]=[1, 1, 32], got shape [2, 1, 32]; "
        "collect it at the same positions"
    )


def test_states_and_input_together(texts):
    states = collect_states(texts, IDS)
    message = (
        "input must be None where states is given, got both; "
        "states already hold their prompt, mask and interventions"
    )
    assert refused(texts, IDS, states=states) == message
    assert refused(texts, attention_mask=[[1] * 7], states=states) == message
    assert refused(texts, states=states, fwd_hooks=[("hook_embed", lambda act, hook: act)]) == message


def test_states_at_positions_given_as_a_tensor(texts):
    states = collect_states(texts, IDS, pos_slice=None)
    assert ig_lens(texts, states=states, pos_slice=torch.tensor([0, 2])).positions.tolist() == [[0, 2]]


def test_states_of_another_model(texts):
    other = bridge("gpt2", n_layer=2) if IS_4 else hooked("LN", n_layers=2)
    assert refused(texts, states=collect_states(other, IDS)) == (
        "states must be of a model with 3 layers, got 2; collect them with this model"
    )


# --- models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [torch.nn.Linear(2, 2), "gpt2", None], ids=["module", "name", "none"])
def test_something_that_is_no_model(other):
    with pytest.raises(TypeError) as error:
        ig_lens(other, IDS)
    assert str(error.value) == (
        "model must be a TransformerLens HookedTransformer or TransformerBridge, got "
        f"{type(other).__name__}; load it with TransformerBridge.boot_transformers(name) or "
        "HookedTransformer.from_pretrained(name)"
    )


def test_training_mode(texts):
    texts.train()
    try:
        message = "model must be in eval mode, got training mode at the model; call model.eval() first"
        assert refused(texts, IDS) == message
        with pytest.raises(ValueError) as error:
            collect_states(texts, IDS)
        assert str(error.value) == message and texts.training
    finally:
        texts.eval()


def test_one_module_in_training_mode(texts):
    module = texts.blocks[1].mlp
    module.train()
    try:
        found = refused(texts, IDS)
        assert found.startswith("model must be in eval mode, got training mode at blocks.1.")
        assert found.endswith("; call model.eval() first")
    finally:
        module.eval()


def test_dropout_has_no_say(texts):
    model = bridge("gpt2", resid_pdrop=0.1, embd_pdrop=0.1) if IS_4 else texts
    first, second = ig_lens(model, IDS), ig_lens(model, IDS)
    assert torch.equal(first.attribution, second.attribution)


def test_encoder_decoders():
    if not IS_4:
        pytest.skip("the t5 bridge fails upstream on TransformerLens 3.9 with transformers 5")
    assert refused(bridge("t5"), IDS, error=NotImplementedError) == (
        "model must be decoder-only, got the encoder-decoder T5ForConditionalGeneration; use a causal language model"
    )


def test_a_missing_final_norm():
    assert refused(bridge("opt_post"), IDS, error=NotImplementedError) == (
        "model must be pre-norm with a final norm `ln_final` before the unembedding, got OPTForCausalLM without one "
        "(its head uses project_out); post-norm layouts cannot be read layer by layer"
    )


def test_encoders():
    needs_hooked()
    from transformer_lens import HookedEncoder, HookedTransformerConfig

    cfg = HookedTransformerConfig(
        n_layers=2, d_model=16, n_heads=2, d_head=8, n_ctx=16, d_vocab=50, act_fn="gelu", device="cpu",
        attention_dir="bidirectional", normalization_type="LN", use_hook_tokens=False,
    )  # fmt: skip
    with pytest.raises(NotImplementedError) as error:
        ig_lens(HookedEncoder(cfg).eval(), IDS)
    assert str(error.value) == (
        "model must be a causal decoder with an unembedding, got the encoder-only custom; "
        "use a causal language model"
    )


@pytest.mark.parametrize("family", ["neox_par", "gptj", "phi", "cohere", "mamba"])
def test_blocks_without_a_middle(family):
    model = bridge(family)
    kind = type(model.blocks[0]).__name__ if family == "mamba" else "parallel attention and MLP"
    assert refused(model, IDS, incl_mid=True) == (
        "incl_mid must be False for a model whose blocks have no hook_resid_mid, "
        f"got True with blocks.0 ({kind}); whole blocks work: leave incl_mid out"
    )
    assert ig_lens(model, IDS).completeness_gap.abs().max() <= 1e-6


def test_a_sequential_neox_has_a_middle():
    model = small_model("neox_seq-raw")
    assert ig_lens(model, IDS, incl_mid=True).labels[:2] == ("0_attn_out", "0_mlp_out")


# --- states that break --------------------------------------------------------------------------------


def test_a_forward_that_overflows_names_the_dtype():
    from tl_iglens import NonFiniteStateError

    model = bridge("gpt2", dtype=torch.float16) if IS_4 else hooked("LN", dtype=torch.float16)
    big = torch.full((model.cfg.d_model,), 6e4)
    hooks = [("blocks.0.hook_resid_post", lambda act, hook: act + big.to(act)), 
             ("blocks.1.hook_resid_post", lambda act, hook: act + big.to(act))]  # fmt: skip
    with no_trace(model), pytest.raises(NonFiniteStateError) as error:
        ig_lens(model, IDS, fwd_hooks=hooks)
    assert str(error.value) == (
        "model must be finite on the residual stream, got NaN or infinity at 2_pre, row 0, position 6 (float16); "
        "look at that layer, or load the model in a wider dtype"
    )


# --- unusual models that work -------------------------------------------------------------------------


def test_a_stream_wider_than_the_head():
    """Mamba in bfloat16: residual and logits are float32, the unembedding is bfloat16."""
    model = bridge("mamba", dtype=torch.bfloat16)
    states = collect_states(model, IDS)
    assert states.resid.dtype == torch.float32 and model.W_U.dtype == torch.bfloat16
    result = ig_lens(model, IDS, targets=7)
    with torch.no_grad():
        own = model(torch.tensor([IDS]), return_type="logits")[0, -1].float().softmax(-1)[7]
    torch.testing.assert_close(result.levels[-1, 0, 0], own, rtol=0, atol=1e-6)
    assert result.info.dtype == "float32" and result.completeness_gap.abs().max() <= 1e-6


def test_a_compiled_model_is_unwrapped(texts):
    plain = ig_lens(texts, IDS)
    compiled = torch.compile(texts, backend="eager")
    with torch.no_grad():
        compiled(torch.tensor([IDS]))
    result = ig_lens(compiled, IDS)
    torch.testing.assert_close(result.attribution, plain.attribution, rtol=0, atol=1e-5)
    assert result.info.model == plain.info.model


@pytest.mark.parametrize("family", ["falcon_h1", "granite", "gemma2", "cohere"])
def test_every_way_to_an_end_point_applies_the_output_transform(family):
    if family == "granite" and not IS_4:
        pytest.skip("TransformerLens 3.9 is compared with itself in test_lens")
    model = bridge(family)
    with torch.no_grad():
        own = model(torch.tensor([IDS]), return_type="logits")[0, -1].double().softmax(-1)[7]
    for options in (
        {},
        {"n_steps": 3},
        {"estimator": "midpoint", "n_steps": 2},
        {"estimator": "trapezoid", "n_steps": 2},
        {"states": collect_states(model, IDS)},
    ):
        result = ig_lens(model, *(() if "states" in options else (IDS,)), targets=7, **options)
        torch.testing.assert_close(result.levels[-1, 0, 0].double(), own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "opt_pre", "falcon_h1", "granite"])
def test_the_baseline_is_what_enters_block_0(family):
    """Not the token embedding alone: positions and multipliers are part of it."""
    model = bridge(family)
    seen = {}
    hooks = [("blocks.0.hook_resid_pre", lambda act, hook: seen.__setitem__("pre", act.clone()))]
    with torch.no_grad():
        model.run_with_hooks(torch.tensor([IDS]), fwd_hooks=hooks)
        logits = model.adapter.apply_output_logits_transform(model.unembed(model.ln_final(seen["pre"])))
    result = ig_lens(model, IDS, targets=7)
    own = logits[0, -1].double().softmax(-1)[7]
    torch.testing.assert_close(result.levels[0, 0, 0].double(), own, rtol=0, atol=1e-6)
