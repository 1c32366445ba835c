"""States and the model's own output: what is kept, at which positions, and where it may come from."""

import pytest
import torch
from conftest import IDS, IS_4, has_mid, small_model
from conftest import close_or_nan as close
from fixtures import bridge, hooked, no_trace, reference_states, tokenizer

import tl_iglens.collect as collect
from tl_iglens import NonFiniteStateError, ReadoutMismatchError, ResidualStates, collect_states, ig_lens
from tl_iglens.path import Point


def captured(model, ids, names, **options):
    """What the named hooks see in a plain run."""
    seen = {}
    hooks = [
        (name, lambda act, hook, name=name: seen.__setitem__(name, act.detach().clone())) for name in names
    ]
    with torch.no_grad():
        logits = model.run_with_hooks(torch.as_tensor(ids), fwd_hooks=hooks, **options)
    return seen, logits


def stream(model, incl_mid=False):
    n = model.cfg.n_layers
    if not incl_mid:
        return ["blocks.0.hook_resid_pre", *(f"blocks.{b}.hook_resid_post" for b in range(n))]
    names = ["blocks.0.hook_resid_pre"]
    for b in range(n):
        names += [f"blocks.{b}.hook_resid_mid", f"blocks.{b}.hook_resid_post"]
    return names


# --- what is collected --------------------------------------------------------------------------------


def test_states_are_those_of_the_hooks(model):
    incl_mid = has_mid(model)
    states = collect_states(model, IDS, pos_slice=None, incl_mid=incl_mid)
    seen, logits = captured(model, [IDS], stream(model, incl_mid))
    assert states.resid.shape == (7 if incl_mid else 4, 1, 7, model.cfg.d_model)
    for act, name in zip(states.resid, stream(model, incl_mid), strict=True):
        assert torch.equal(act, seen[name]), name
    assert states.points[0] == Point(0) and states.points[-1] == Point(3) and states.has_mid == incl_mid
    torch.testing.assert_close(states.mean, states.resid.mean(2), rtol=1e-5, atol=5e-6)
    assert torch.equal(states.first, states.resid[:, :, 0])
    assert not states.resid.requires_grad and states.resid.dtype == logits.dtype
    close(states.output.log_z, logits.double().logsumexp(-1), 1e-5)
    assert torch.equal(states.output.top, logits.argmax(-1))


def test_states_agree_with_the_reference():
    for family in ("gpt2", "llama", "neox_seq") if IS_4 else ("hooked-LN", "hooked-RMS"):
        model = small_model(f"{family}-raw" if IS_4 else family)
        close(collect_states(model, IDS, pos_slice=None).resid, reference_states(model, IDS), 1e-5)


@pytest.mark.parametrize("pos_slice", [-1, 0, (2, 5), [0, 3]], ids=str)
def test_only_the_asked_positions_are_kept(lens_model, pos_slice):
    all_of_them = collect_states(lens_model, IDS, pos_slice=None)
    some = collect_states(lens_model, IDS, pos_slice=pos_slice)
    at = torch.atleast_1d(torch.arange(7)[slice(*pos_slice) if isinstance(pos_slice, tuple) else pos_slice])
    assert some.positions.tolist() == [at.tolist()]
    close(some.resid, all_of_them.resid[:, :, at], 1e-6)
    close(some.mean, all_of_them.mean, 1e-6)
    assert some.output.logits.shape[1] == len(at)
    assert some.resid.untyped_storage().nbytes() == some.resid.numel() * some.resid.element_size()


def test_extra_activations(lens_model):
    names = ["blocks.1.hook_resid_pre", "blocks.0.hook_mlp_out"]
    states = collect_states(lens_model, IDS, pos_slice=(2, 4), extra=names)
    seen, _ = captured(lens_model, [IDS], names)
    for name in names:
        close(states.extra[name], seen[name][:, 2:4], 1e-6)
    narrowed = states.at(torch.tensor([[3]]))
    close(narrowed.extra[names[0]], seen[names[0]][:, 3:4], 1e-6)


@pytest.mark.parametrize("batch_size", [None, 1, 2])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_their_solo_runs(lens_model, side, batch_size):
    rows = [IDS, IDS[:3], IDS[2:6]]
    batch = [[2] * (7 - len(r)) + r if side == "left" else r + [2] * (7 - len(r)) for r in rows]
    mask = [
        [0] * (7 - len(r)) + [1] * len(r) if side == "left" else [1] * len(r) + [0] * (7 - len(r))
        for r in rows
    ]
    both = collect_states(lens_model, batch, attention_mask=mask, pos_slice=None, batch_size=batch_size)
    assert both.prompts.ids.tolist() == batch
    for b, row in enumerate(rows):
        solo = collect_states(lens_model, row, pos_slice=None)
        close(both.resid[:, b, : len(row)], solo.resid[:, 0], 1e-5)
        close(both.mean[:, b], solo.mean[:, 0], 1e-5)
        close(both.first[:, b], solo.first[:, 0], 1e-5)
        close(both.output.log_z[b, : len(row)], solo.output.log_z[0], 1e-5)
        places = both.positions[b, : len(row)]
        assert both.prompts.ids[b, places].tolist() == row


@pytest.mark.parametrize("side", ["left", "right"])
def test_text_of_different_length_is_its_solo_run(side):
    if IS_4:
        model = bridge("gpt2", tokenizer=tokenizer(padding_side=side))
    else:
        model = hooked("LN", d_vocab=291, tokenizer=tokenizer(padding_side=side))
    texts = ["The cat", "The capital of France is"]
    together = ig_lens(model, texts)
    for b, text in enumerate(texts):
        solo = ig_lens(model, text)
        close(together.attribution[:, b], solo.attribution[:, 0], 1e-6)
        assert together.targets[b].tolist() == solo.targets[0].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_id_zero_is_a_pad_like_any_other(side):
    tok = tokenizer(pad_id_zero=True, padding_side=side)
    model = bridge("gpt2", tokenizer=tok) if IS_4 else hooked("LN", d_vocab=291, tokenizer=tok)
    together = ig_lens(model, ["The cat", "The capital of France is"])
    close(together.attribution[:, 0], ig_lens(model, "The cat").attribution[:, 0], 1e-6)
    ids = model.to_tokens("The cat")[0].tolist()
    padded = [[0, 0, *ids]] if side == "left" else [[*ids, 0, 0]]
    mask = [[0, 0] + [1] * len(ids)] if side == "left" else [[1] * len(ids) + [0, 0]]
    close(ig_lens(model, padded, attention_mask=mask).attribution, ig_lens(model, ids).attribution, 1e-6)


def test_a_masked_middle_token_stays_masked():
    """What the model computes for such a mask is what is read; the mask is part of the result."""
    model = small_model("gpt2-raw" if IS_4 else "hooked-LN")
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        own = model(torch.tensor([IDS]), return_type="logits", attention_mask=mask)[0, -1].softmax(-1)
    result = ig_lens(model, IDS, targets=7, attention_mask=mask)
    close(result.levels[-1, 0, 0], own[7], 1e-6)
    assert result.attention_mask.tolist() == mask.bool().tolist()
    assert (result.levels - ig_lens(model, IDS, targets=7).levels).abs().max() > 1e-4


# --- reuse --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pos_slice", [-1, None, (1, 4)], ids=str)
def test_collected_states_serve_many_analyses(model, pos_slice):
    states = collect_states(model, IDS, pos_slice=None, incl_mid=has_mid(model))
    for options in (
        {},
        {"targets": "next", "pos_slice": None},
        {"targets": 7, "baseline": "mean", "layers": [1]},
        {"targets": 7, "baseline": "bos", "estimator": "midpoint", "n_steps": 2},
        {"incl_mid": has_mid(model)},
        {"baseline": states.at(torch.tensor([[6]])), "pos_slice": -1},
    ):
        chosen = {"pos_slice": pos_slice} | options
        reused = ig_lens(model, states=states, **chosen)
        direct = ig_lens(model, IDS, **chosen)
        close(reused.attribution, direct.attribution, 1e-6)
        close(reused.model_level, direct.model_level, 1e-6)
        assert torch.equal(reused.targets, direct.targets) and torch.equal(reused.positions, direct.positions)


def test_states_of_one_position_are_read_there(lens_model):
    states = collect_states(lens_model, IDS, pos_slice=2)
    close(
        ig_lens(lens_model, states=states).attribution,
        ig_lens(lens_model, IDS, pos_slice=2).attribution,
        1e-6,
    )


def test_states_of_a_ragged_batch_serve_again(lens_model):
    batch, mask = [IDS, [2] * 4 + IDS[:3]], [[1] * 7, [0] * 4 + [1] * 3]
    states = collect_states(lens_model, batch, attention_mask=mask, pos_slice=None)
    for options in (
        {"pos_slice": -1},
        {"pos_slice": None},
        {"pos_slice": None, "targets": "next"},
        {"pos_slice": (0, 2)},
    ):
        reused = ig_lens(lens_model, states=states, **options)
        close(
            reused.attribution, ig_lens(lens_model, batch, attention_mask=mask, **options).attribution, 1e-6
        )


@pytest.mark.parametrize("logits", [True, False])
def test_states_adopted_from_a_cache(model, logits):
    incl_mid = has_mid(model)
    batch = torch.tensor([IDS, IDS[::-1]])
    with torch.no_grad():
        said, cache = model.run_with_cache(batch, return_type="logits")
    scaled = getattr(model.cfg, "logit_scale", None) is not None and getattr(model, "compatibility_mode", False)
    if scaled and not logits and not IS_4:
        pytest.skip("3.9 scales the logits of Cohere twice; without the logits of the run nothing says so")
    adopted = ResidualStates.from_cache(
        model, cache, batch, pos_slice=None, incl_mid=incl_mid, logits=said if logits else None
    )
    direct = collect_states(model, batch, pos_slice=None, incl_mid=incl_mid)
    assert torch.equal(adopted.resid, direct.resid) and adopted.points == direct.points
    close(adopted.output.log_z, direct.output.log_z, 1e-5)
    a, b = ig_lens(model, states=adopted), ig_lens(model, batch)
    close(a.attribution, b.attribution, 5e-6)
    close(a.model_level, b.model_level, 5e-6)


def test_a_cache_of_pre_states_and_the_last_post_state_is_enough(lens_model):
    _, cache = lens_model.run_with_cache(torch.tensor([IDS]))
    few = {f"blocks.{b}.hook_resid_pre": cache[f"blocks.{b}.hook_resid_pre"] for b in range(3)}
    few["blocks.2.hook_resid_post"] = cache["blocks.2.hook_resid_post"]
    adopted = ResidualStates.from_cache(lens_model, few, IDS)
    close(ig_lens(lens_model, states=adopted).attribution, ig_lens(lens_model, IDS).attribution, 1e-6)


def test_a_cache_without_a_batch_axis(lens_model):
    _, cache = lens_model.run_with_cache(torch.tensor([IDS]), remove_batch_dim=True)
    adopted = ResidualStates.from_cache(lens_model, cache, IDS)
    close(ig_lens(lens_model, states=adopted).attribution, ig_lens(lens_model, IDS).attribution, 1e-6)


def test_a_cache_that_lacks_a_state(lens_model):
    _, cache = lens_model.run_with_cache(torch.tensor([IDS]))
    few = {name: cache[name] for name in ("blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre")}
    with pytest.raises(ValueError) as error:
        ResidualStates.from_cache(lens_model, few, IDS)
    assert str(error.value) == (
        "cache must be one that holds blocks.1.hook_resid_post, got one without it; "
        "cache resid_pre of block 0 and resid_post of every block"
    )


def test_a_cache_of_other_tokens(lens_model):
    _, cache = lens_model.run_with_cache(torch.tensor([IDS]))
    with pytest.raises(ValueError) as error:
        ResidualStates.from_cache(lens_model, cache, IDS[:4])
    assert str(error.value) == (
        "cache must be of shape (1, 4, 32) at blocks.0.hook_resid_pre, as tokens say, got (1, 7, 32); "
        "pass the tokens of the cached run, cached without pos_slice"
    )


def test_cohere_scales_its_logits_once_or_twice():
    """Compatibility mode folds the scale into the weights; 3.9 multiplies again, 4.x does not. Each reads itself."""
    model = small_model("cohere-compat")
    states = collect_states(model, IDS)
    with torch.no_grad():
        own = model(torch.tensor([IDS]), return_type="logits")[0, -1].double().softmax(-1)
    declared = model.adapter.apply_output_logits_transform(torch.tensor([1.0]))
    assert states.output.bare_head == (float(declared) != 1.0)
    result = ig_lens(model, IDS, targets=7)
    close(result.levels[-1, 0, 0], own[7], 1e-6)
    assert not collect_states(small_model("cohere-raw"), IDS).output.bare_head


# --- memory and large vocabularies --------------------------------------------------------------------


def test_logits_that_do_not_fit_are_never_kept(lens_model, monkeypatch):
    usual = ig_lens(lens_model, [IDS, IDS[::-1]], pos_slice=None)
    log_prob = ig_lens(lens_model, [IDS, IDS[::-1]], pos_slice=None, quantity="log_prob", incorrect_targets=3)
    monkeypatch.setattr(collect, "_LOGITS_BUDGET", 3 * lens_model.cfg.d_vocab * 4)
    states = collect_states(lens_model, [IDS, IDS[::-1]], pos_slice=None)
    assert states.output.logits is None
    close(ig_lens(lens_model, [IDS, IDS[::-1]], pos_slice=None).attribution, usual.attribution, 1e-6)
    again = ig_lens(lens_model, states=states, pos_slice=None, quantity="log_prob", incorrect_targets=3)
    close(again.model_level, log_prob.model_level, 1e-5)
    assert torch.equal(states.output.top, usual.targets)


def test_logits_of_other_positions_are_never_computed(lens_model):
    widths = []
    handle = lens_model.unembed.register_forward_hook(lambda module, args, out: widths.append(out.shape[1]))
    try:
        collect_states(lens_model, IDS, pos_slice=(5, 7))
    finally:
        handle.remove()
    assert widths == [2]


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_named(lens_model, value):
    def spoil(act, hook):
        act = act.clone()
        act[0, 4, 3] = value
        return act

    with no_trace(lens_model), pytest.raises(NonFiniteStateError) as error:
        ig_lens(lens_model, IDS, pos_slice=None, fwd_hooks=[("blocks.1.hook_resid_post", spoil)])
    assert str(error.value) == (
        "model must be finite on the residual stream, got NaN or infinity at 2_pre, row 0, position 4 (float32); "
        "look at that layer, or load the model in a wider dtype"
    )


def test_a_hook_that_never_fires_is_named():
    """The point is registered, the forward goes round it: no state of an earlier run may stand in."""
    model = bridge("gpt2") if IS_4 else hooked("LN")
    ig_lens(model, IDS)
    block = model.blocks[1]
    inherited = block.forward

    def around(*args, **kwargs):
        if IS_4:
            return block.original_component(*args, **kwargs)
        point = block.hook_resid_post
        hooks, point._forward_hooks = point._forward_hooks, type(point._forward_hooks)()
        try:
            return inherited(*args, **kwargs)
        finally:
            point._forward_hooks = hooks

    vars(block)["forward"] = around  # a bridge hands attributes on to what it wraps
    with no_trace(model), pytest.raises(RuntimeError) as error:
        ig_lens(model, IDS)
    assert type(error.value) is RuntimeError and str(error.value) == (
        "model must be one whose hook blocks.1.hook_resid_post fires, got a forward in which it did not; "
        "see model.hook_dict for the names it has"
    )


def test_extra_hooks_that_never_fire_are_named(lens_model):
    name = "blocks.0.attn.qkv.hook_out"  # of a bridge that splits the joint projection first
    if name not in lens_model.hook_dict:
        pytest.skip("every hook point of a HookedTransformer fires or is refused by TransformerLens")
    with no_trace(lens_model), pytest.raises(RuntimeError) as error:
        collect_states(lens_model, IDS, extra=[name])
    assert str(error.value) == (
        f"model must be one whose hook {name} fires, got a forward in which it did not; "
        "see model.hook_dict for the names it has"
    )


def test_positions_that_were_not_collected(lens_model):
    states = collect_states(lens_model, IDS, pos_slice=(0, 3))
    with pytest.raises(ValueError) as error:
        ig_lens(lens_model, states=states, pos_slice=(2, 6))
    assert str(error.value) == (
        "pos_slice must be positions that were collected, got places [3, 4, 5] that were not; "
        "collect them with collect_states(model, input, pos_slice=None)"
    )


def test_mid_states_that_were_not_collected():
    model = small_model("gpt2-raw" if IS_4 else "hooked-LN")
    with pytest.raises(ValueError) as error:
        ig_lens(model, states=collect_states(model, IDS), incl_mid=True)
    assert str(error.value) == (
        "states must be collected with the point 0_mid, got states without it; collect again with incl_mid=True"
    )


def test_an_output_that_the_head_does_not_make_is_refused():
    """Something behind the unembedding changes the logits: neither figure is returned as the other."""
    model = small_model("gpt2-raw" if IS_4 else "hooked-LN")
    name = "ln_final.hook_normalized"

    def scale(act, hook):
        return 1.5 * act

    with no_trace(model), pytest.raises(ReadoutMismatchError) as error:
        ig_lens(model, IDS, fwd_hooks=[(name, scale)])
    message = str(error.value)
    assert message.startswith(
        "model must be read by ln_final, unembed and its output transform alone, got probabilities from the last "
        "residual state that differ by 0."
    )
    assert message.endswith(
        " from the model's own (tolerance 2e-05); a hook or head this package does not know changes the output"
    )


@pytest.mark.parametrize("batch_size", [0, -1, True])
def test_wrong_batch_sizes(lens_model, batch_size):
    with pytest.raises(ValueError) as error:
        ig_lens(lens_model, IDS, batch_size=batch_size)
    assert (
        str(error.value)
        == f"batch_size must be a whole number of at least 1, got {batch_size}; give a whole number"
    )
