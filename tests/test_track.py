"""track and probability_flow: several tokens from one stream, and where probability goes."""

import importlib

import numpy as np
import pytest
import torch
from conftest import IDS, small_model
from fixtures import bridge, identity_block, no_trace

from tl_iglens import TokenSet, collect_states, ig_lens
from tl_iglens.readout import Readout
from tl_iglens.track import probability_flow, track
from tl_iglens.watchers import tiles

BATCH = [IDS, IDS[::-1]]


def distributions(model, **options):
    """The full softmax at every point [point, batch, pos, d_vocab], from one ig_lens call per token of a few."""
    states = collect_states(model, BATCH, **options)
    with torch.no_grad():
        flat = states.resid.reshape(-1, 1, states.resid.shape[-1])
        logits = model.unembed(model.ln_final(flat) if hasattr(model, "ln_final") else flat)[:, 0].double()
    return logits.softmax(-1).reshape(*states.resid.shape[:-1], -1)


@pytest.mark.parametrize("quantity", ["prob", "log_prob", "logit"])
def test_a_track_is_ig_lens_for_each_candidate(model, quantity):
    tracks = track(model, BATCH, candidates=[4, 9, TokenSet(3, 7)], quantity=quantity, pos_slice=None)
    assert tracks.attribution.shape == (3, 2, 7, 3) and tracks.levels.shape == (4, 2, 7, 3)
    for c, target in enumerate([4, 9, TokenSet(3, 7)]):
        alone = ig_lens(model, BATCH, targets=target, quantity=quantity, pos_slice=None)
        torch.testing.assert_close(tracks.levels[..., c], alone.levels, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(tracks.attribution[..., c], alone.attribution, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(tracks.model_level[..., c], alone.model_level)
    torch.testing.assert_close(tracks.attribution.sum(0), tracks.delta, atol=1e-5, rtol=1e-5)


def test_all_candidates_come_from_one_forward_and_one_stream(lens_model, monkeypatch):
    forwards, rows = [], []
    scan = Readout.scan
    monkeypatch.setattr(Readout, "scan", lambda self, x, ids, **more: rows.append(len(x)) or scan(self, x, ids, **more))
    with lens_model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda act, hook: forwards.append(1))]):
        track(lens_model, BATCH, candidates=list(range(10)), pos_slice=None)
    assert len(forwards) == 1 and sum(rows) == 4 * 2 * 7  # every state once, for all candidates


def test_top_k_follows_the_models_own_best_tokens(model):
    tracks = track(model, BATCH, top_k=3, pos_slice=None)
    with torch.no_grad():
        best = model(torch.tensor(BATCH)).softmax(-1).topk(3, -1)
    torch.testing.assert_close(tracks.levels[-1], best.values, atol=2e-5, rtol=1e-5)
    assert (tracks.levels[-1].diff(dim=-1) <= 1e-7).all()


def test_candidates_per_position_and_padding(lens_model):
    short = IDS[:4]
    batch, mask = torch.tensor([IDS, [*short, 2, 2, 2]]), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    ids = torch.arange(2 * 7 * 2).reshape(2, 7, 2)
    both = track(lens_model, batch, attention_mask=mask, candidates=ids, pos_slice=None)
    solo = track(lens_model, [short], candidates=ids[1:, :4], pos_slice=None)
    torch.testing.assert_close(both.attribution[:, 1, :4], solo.attribution[:, 0], atol=1e-6, rtol=1e-4)
    assert both.levels[:, 1, 4:].isnan().all() and torch.equal(both.candidates, ids)
    frame = both.to_dataframe()
    assert len(frame) == (7 + 4) * 2 * 3 and not frame["credit"].isna().any()
    np.testing.assert_allclose(frame["level_after"] - frame["level_before"], frame["credit"], atol=1e-6)


def test_candidates_are_named(lens_model):
    tracks = track(lens_model, [IDS], candidates=[4, TokenSet(3, 7)])
    one, both = tracks.candidate_strings[0][0]
    assert both.startswith("{") and ", " in both and one and tracks.candidates[0, 0].tolist() == [4, 3]


def test_a_block_that_adds_nothing_gets_exactly_nothing(lens_model):
    with identity_block(lens_model, 1):
        tracks = track(lens_model, BATCH, top_k=4, pos_slice=None)
        flow = probability_flow(lens_model, BATCH, pos_slice=None)
    assert (tracks.attribution[1] == 0).all() and (tracks.attribution[0] != 0).any()
    assert (flow.total_variation[1] == 0).all() and (flow.gained[1] == 0).all() and (flow.lost[1] == 0).all()


@pytest.mark.parametrize("name", ["gpt2-raw", "llama-compat", "neox_par-raw", "hooked-LN"])
def test_a_flow_is_the_difference_of_two_distributions(name):
    model = small_model(name)
    flow = probability_flow(model, BATCH, k=4, pos_slice=None)
    change = distributions(model, pos_slice=None).diff(dim=0)
    torch.testing.assert_close(flow.gained.double(), change.topk(4, -1).values, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(flow.lost.double(), change.topk(4, -1, largest=False).values, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(change.gather(-1, flow.gained_ids), flow.gained.double(), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(change.gather(-1, flow.lost_ids), flow.lost.double(), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(flow.total_variation.double(), change.abs().sum(-1) / 2, atol=2e-6, rtol=1e-4)


def test_over_the_whole_vocabulary_the_credits_of_a_segment_sum_to_zero(model):
    flow = probability_flow(model, BATCH, pos_slice=None)
    assert flow.residue.abs().max() < 2e-6
    d_vocab = int(model.cfg.d_vocab)
    everything = probability_flow(model, [IDS], k=d_vocab)
    gains, losses = everything.gained.clamp_min(0).sum(-1), everything.lost.clamp_max(0).sum(-1)
    torch.testing.assert_close(gains, -losses, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(gains, everything.total_variation, atol=2e-6, rtol=1e-4)
    # and so do the credits of all tokens as candidates
    tracks = track(model, [IDS], candidates=list(range(d_vocab)))
    assert tracks.attribution.sum(-1).abs().max() < 2e-6


def test_a_token_gains_in_the_flow_what_its_credit_says(model):
    tracks = track(model, [IDS], top_k=1)
    flow = probability_flow(model, [IDS], k=5)
    target = int(tracks.candidates[0, 0, 0])
    for s in range(3):
        ids = flow.gained_ids[s, 0, 0].tolist()
        if target in ids:
            amount = float(flow.gained[s, 0, 0, ids.index(target)])
            assert amount == pytest.approx(float(tracks.attribution[s, 0, 0, 0]), abs=2e-6)
            break
    else:
        pytest.skip("the top token is never among the five largest gains here")


def test_soft_caps_and_scales_are_part_of_both_distributions():
    for family in ("gemma2", "cohere", "granite"):
        model = bridge(family)
        flow, tracks = probability_flow(model, [IDS], k=320), track(model, [IDS], top_k=320)
        assert tracks.readout_gap.abs().max() < 2e-5
        torch.testing.assert_close(
            tracks.attribution[:, 0, 0].max(-1).values, flow.gained[:, 0, 0, 0], atol=2e-6, rtol=1e-4
        )


def test_tiles_and_blocks_do_not_matter(lens_model, monkeypatch):
    whole = probability_flow(lens_model, BATCH, pos_slice=None)
    module = importlib.import_module("tl_iglens.track")
    monkeypatch.setattr(module, "_ROWS", 5)
    monkeypatch.setattr(module, "tiles", lambda readout, x: tiles(readout, x, 7))
    small = probability_flow(lens_model, BATCH, pos_slice=None, tile_bytes=64)
    torch.testing.assert_close(small.total_variation, whole.total_variation, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(small.gained, whole.gained, atol=1e-6, rtol=1e-5)


def test_paths_with_fewer_or_more_points(lens_model):
    merged = probability_flow(lens_model, [IDS], layers=[0, 2])
    assert merged.labels == ("0-1_blocks", "2_block") and merged.boundaries == (2, 3)
    fine = track(lens_model, [IDS], incl_mid=True, top_k=2)
    coarse = track(lens_model, [IDS], top_k=2)
    assert fine.labels[:2] == ("0_attn_out", "0_mlp_out")
    torch.testing.assert_close(fine.attribution[0] + fine.attribution[1], coarse.attribution[0], atol=1e-6, rtol=1e-4)


def test_collected_states_can_be_used_again(lens_model):
    states = collect_states(lens_model, BATCH)
    again, fresh = (track(lens_model, **given, top_k=2) for given in ({"states": states}, {"input": BATCH}))
    assert torch.equal(again.attribution, fresh.attribution)
    with pytest.raises(ValueError) as error:
        probability_flow(lens_model, BATCH, states=states)
    assert str(error.value) == "input must be None where states is given, got both; states already hold their prompt"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: track(m, [IDS], candidates=4),
            "candidates must be a sequence of tokens, or an integer tensor [batch, pos, candidate], got 4; for example "
            'candidates=[" Paris", " London"]',
        ),
        (lambda m: track(m, [IDS], top_k=0), "top_k must be a whole number of at least 1, got 0; give a whole number"),
        (
            lambda m: probability_flow(m, [IDS], k=0),
            "k must be a whole number of at least 1, got 0; give a whole number",
        ),
        (
            lambda m: track(m, [IDS], candidates=[-1]),
            "targets must be a token id between 0 and d_vocab-1={}, got -1; negative ids do not count from the end",
        ),
    ],
)
def test_wrong_arguments_are_named(lens_model, call, message):
    with no_trace(lens_model), pytest.raises(ValueError) as error:
        call(lens_model)
    assert str(error.value) == message.replace("{}", str(lens_model.cfg.d_vocab - 1))


@pytest.mark.parametrize("grad", [True, False])
def test_no_trace_is_left(lens_model, grad):
    given = torch.tensor(BATCH)
    with torch.set_grad_enabled(grad), no_trace(lens_model, given):
        tracks, flow = track(lens_model, given), probability_flow(lens_model, given)
    assert not tracks.attribution.requires_grad and not flow.gained.requires_grad


def test_flow_frame_reads_in_order(lens_model):
    frame = probability_flow(lens_model, [IDS], k=2).to_dataframe()
    assert list(frame["rank"][:4]) == [1, 2, -1, -2] and len(frame) == 3 * 4
    assert frame["change"][0] >= frame["change"][1] and frame["change"][2] <= frame["change"][3]


def test_smollm2_shows_whom_the_answer_took_its_probability_from(smollm2):
    prompt = {"input": "The capital of France is", "prepend_bos": False}
    flow = probability_flow(smollm2, **prompt, k=3)
    assert flow.residue.abs().max() < 1e-5
    last = flow.to_dataframe()[lambda f: f["segment"] == "29_block"]
    assert last["changed"].iloc[0] == " Paris" and last["change"].iloc[0] > 0.6
    tracks = track(smollm2, **prompt, candidates=[" Paris", " the"])
    assert float(tracks.attribution[-1, 0, 0, 0]) == pytest.approx(float(flow.gained[-1, 0, 0, 0]), abs=2e-5)


def test_gemma_with_its_large_vocabulary(gemma):
    flow = probability_flow(gemma, "The capital of France is", k=3, layers=[0, 9, 17])
    assert flow.residue.abs().max() < 1e-5 and flow.gained.shape == (3, 1, 1, 3)
