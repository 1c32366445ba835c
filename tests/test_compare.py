"""compare: one question, one forward, aligned rows, and the table that says what sums to what."""

import gc
import weakref

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import has_mid, small_model
from fixtures import bridge, no_trace

from tl_iglens import TokenSet, collect_states, ig_lens
from tl_iglens.compare import compare
from tl_iglens.methods import METHODS, MethodResult, hooks_of, register_method
from tl_iglens.methods.base import ends_of

ALWAYS = ("ig_lens", "logit_lens", "dla", "embedding_projection")


@pytest.fixture
def ids():
    """Token ids every small model knows."""
    return [1, 5, 40, 17, 20, 33, 9]


def test_the_additivity_table_says_what_the_paper_says(model, ids):
    comparison = compare(model, [ids], methods=ALWAYS)
    table = comparison.additivity().set_index("method")
    receipt = ig_lens(model, [ids])
    p_start, p_end = float(receipt.levels[0]), float(model(torch.tensor([ids]))[0, -1].softmax(-1).max())
    assert list(table.index) == list(ALWAYS)
    # IG-Lens sums to the change of the model's own probability
    assert table.loc["ig_lens", "sum"] == pytest.approx(p_end - p_start, abs=1e-6)
    assert table.loc["ig_lens", "delta_p"] == pytest.approx(p_end - p_start, abs=1e-6)
    assert table.loc["ig_lens", "kind"] == "additive" and table.loc["ig_lens", "unit"] == "probability"
    # levels sum to nothing
    lens = table.loc["logit_lens"]
    assert (
        lens["kind"] == "level"
        and lens["sums_to"] == "nothing"
        and np.isnan(lens["expected"])
        and np.isnan(lens["gap"])
    )
    assert lens["sum"] == pytest.approx(float(receipt.levels.sum()), abs=1e-6)
    # DLA and its bias sum to the logit
    dla = table.loc["dla"]
    assert abs(dla["gap"]) <= 1e-3 * abs(dla["expected"]) and dla["unit"].startswith("logit")
    assert dla["total"] == pytest.approx(dla["sum"] + dla["offset"])
    if dla["unit"] == "logit":
        assert dla["total"] == pytest.approx(float(model(torch.tensor([ids]))[0, -1].max()), rel=1e-3)


def test_delta_logit_is_the_difference_of_two_logit_lens_readings(model, ids):
    comparison = compare(model, [ids], methods="ig_lens", targets=3)
    for quantity in ("prob", "log_prob", "logit"):
        levels = ig_lens(model, [ids], targets=3, quantity=quantity).levels
        torch.testing.assert_close(comparison.delta[quantity], levels[-1] - levels[0], atol=2e-6, rtol=1e-5)


def test_every_method_speaks_about_the_same_cells(lens_model, ids):
    model = lens_model
    batch = [ids, ids[::-1]]
    comparison = compare(model, batch, pos_slice=(2, 5), targets="next", methods=ALWAYS)
    receipt = ig_lens(model, batch, pos_slice=(2, 5), targets="next")
    assert torch.equal(comparison.targets, receipt.targets)
    for name in ALWAYS:
        assert comparison[name].values.shape[1:] == (2, 3), name
    torch.testing.assert_close(comparison["ig_lens"].values, receipt.attribution)
    torch.testing.assert_close(comparison["logit_lens"].values, receipt.levels, atol=1e-7, rtol=0)


def test_wide_frame_has_one_row_per_point_and_the_results_values(lens_model, ids):
    comparison = compare(lens_model, [ids], methods=("ig_lens", "logit_lens", "dla"))
    wide = comparison.to_dataframe(wide=True)
    assert list(wide["point"]) == ["0_pre", "1_pre", "2_pre", "final_post"]
    assert list(wide["boundary"]) == [0, 1, 2, 3]
    assert list(wide.columns[-3:]) == ["ig_lens [probability]", "logit_lens [probability]", "dla [logit]"]
    assert np.isnan(wide["ig_lens [probability]"][0])
    np.testing.assert_allclose(wide["ig_lens [probability]"][1:], comparison["ig_lens"].values[:, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(wide["logit_lens [probability]"], comparison["logit_lens"].values[:, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(wide["dla [logit]"], comparison["dla"].values[:, 0, 0], rtol=1e-6)


def test_long_frame_carries_unit_kind_and_the_figures_of_a_method(lens_model, ids):
    comparison = compare(lens_model, [ids], methods=("ig_lens", "logit_lens"))
    long = comparison.to_dataframe()
    assert len(long) == 3 + 4
    lens = long[long["method"] == "logit_lens"]
    assert set(lens["kind"]) == {"level"} and set(lens["unit"]) == {"probability"}
    np.testing.assert_allclose(lens["kl"], comparison["logit_lens"].extra["kl"][:, 0, 0], rtol=1e-6)
    assert long[long["method"] == "ig_lens"]["kl"].isna().all()


def test_heads_that_end_at_one_point_are_summed_in_the_wide_frame(lens_model, ids):
    model = lens_model
    head = compare(model, [ids], methods={"dla": {"unit": "head"}})
    n_heads = model.cfg.n_heads
    wide = head.to_dataframe(wide=True)
    want = head["dla"].values[:-1, 0, 0].reshape(3, n_heads).sum(1)
    np.testing.assert_allclose(wide["dla [logit]"], want, rtol=1e-5, atol=1e-6)
    assert head["dla"].labels[:2] == ("L0H0", "L0H1") and head["dla"].labels[-1] == "remainder"


def test_sublayer_rows_align_where_the_path_has_them(model, ids):
    if not has_mid(model):
        pytest.skip("no state between attention and MLP")
    comparison = compare(model, [ids], incl_mid=True, methods=ALWAYS)
    assert comparison["ig_lens"].ends == comparison["logit_lens"].ends[1:] == comparison["dla"].ends[1:]
    assert comparison["dla"].labels[1:] == comparison["ig_lens"].labels
    assert list(comparison.to_dataframe(wide=True)["point"]) == list(comparison["logit_lens"].ends)


def test_skipped_layers_merge_in_every_method(lens_model, ids):
    comparison = compare(lens_model, [ids], layers=[0, 2], methods=ALWAYS)
    whole = compare(lens_model, [ids], methods=ALWAYS)
    assert comparison["dla"].labels == ("embed", "0-1_blocks", "2_block")
    assert comparison["ig_lens"].labels == ("0-1_blocks", "2_block")
    for name in ("dla", "embedding_projection"):
        merged, fine = comparison[name].values[:, 0, 0], whole[name].values[:, 0, 0]
        torch.testing.assert_close(merged, torch.stack([fine[0], fine[1] + fine[2], fine[3]]), atol=1e-5, rtol=1e-5)


def test_a_baseline_of_its_own_changes_the_credits_and_not_the_levels(lens_model, ids):
    zero = compare(lens_model, [ids], baseline="zero", methods=ALWAYS)
    embed = compare(lens_model, [ids], methods=ALWAYS)
    assert zero["ig_lens"].labels == ("embed", *embed["ig_lens"].labels)
    torch.testing.assert_close(zero["logit_lens"].values, embed["logit_lens"].values)
    table = zero.additivity().set_index("method")
    assert table.loc["ig_lens", "sum"] == pytest.approx(table.loc["ig_lens", "delta_p"], abs=1e-6)
    assert table.loc["dla", "total"] == pytest.approx(float(embed["dla"].total), rel=1e-5)


def test_one_forward_serves_every_method_that_reads_states(lens_model, ids):
    calls = []
    with lens_model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda act, hook: calls.append(1))]):
        compare(lens_model, [ids, ids[::-1]], methods=ALWAYS)
    assert len(calls) == 1


def test_states_collected_before_are_enough(lens_model, ids):
    model = lens_model
    methods = {"ig_lens": {}, "logit_lens": {}, "dla": {"unit": "head"}}
    states = collect_states(model, [ids], extra=hooks_of(model, methods))
    again = compare(model, states=states, methods=methods)
    torch.testing.assert_close(again["dla"].values, compare(model, [ids], methods=methods)["dla"].values)
    bare = collect_states(model, [ids])
    assert torch.equal(
        compare(model, states=bare, methods="dla")["dla"].values, compare(model, [ids], methods="dla")["dla"].values
    )
    with pytest.raises(ValueError) as error:
        compare(model, states=bare, methods=methods)
    assert str(error.value) == (
        "states must be collected with blocks.0.hook_attn_out for unit='head', got states without it; "
        "collect them with extra=methods.hooks_of(model, {'dla': {'unit': 'head'}})"
    )


def test_rows_of_a_padded_batch_equal_their_solo_runs(lens_model, ids):
    model = lens_model
    short = ids[:4]
    batch = torch.tensor([ids, [*short, 2, 2, 2]])
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    both = compare(model, batch, attention_mask=mask, pos_slice=None, methods=ALWAYS)
    solo = compare(model, [short], pos_slice=None, methods=ALWAYS)
    for name in ALWAYS:
        torch.testing.assert_close(both[name].values[:, 1, :4], solo[name].values[:, 0], atol=2e-6, rtol=2e-5)
        assert both[name].values[:, 1, 4:].isnan().all()
    assert len(both.additivity()) == len(ALWAYS) * (7 + 4)
    assert not both.to_dataframe()["value"].isna().any()


def test_a_new_method_is_one_registered_function(lens_model, ids, monkeypatch):
    monkeypatch.setattr("tl_iglens.methods.METHODS", METHODS)
    before = dict(METHODS)

    @register_method("update_norm")
    def update_norm(question):
        states = question.at(question.path.states)
        sizes = question.cells((states[1:] - states[:-1]).norm(dim=-1))
        where = ends_of(question.path.states[1:], question.n_layers)
        return MethodResult("update_norm", sizes, question.path.labels, **where, kind="level", unit="norm")

    try:
        comparison = compare(lens_model, [ids], methods=("ig_lens", "update_norm"))
        resid = collect_states(lens_model, [ids]).resid[:, 0, 0]
        torch.testing.assert_close(comparison["update_norm"].values[:, 0, 0], (resid[1:] - resid[:-1]).norm(dim=-1))
        assert "update_norm [norm]" in comparison.to_dataframe(wide=True)
        with pytest.raises(ValueError) as error:
            register_method("update_norm")
        assert str(error.value) == (
            "name must be new to the table of methods, got 'update_norm'; choose another, or del METHODS[name] first"
        )
    finally:
        del METHODS["update_norm"]
    assert METHODS == before


def test_the_example_of_the_documentation_runs_as_it_is_printed(lens_model, ids):
    import textwrap

    import tl_iglens.methods as package

    lines = package.__doc__.split("::\n", 1)[1].split("\nafter which")[0]
    try:
        exec(compile(textwrap.dedent(lines), "example", "exec"), {})
        assert compare(lens_model, [ids], methods="update_norm")["update_norm"].values.shape == (3, 1, 1)
    finally:
        METHODS.pop("update_norm", None)
    assert len([line for line in textwrap.dedent(lines).splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "shapley"}, f"methods must be one of {', '.join(METHODS)}, got 'shapley'; check the spelling"),
        ({"methods": ()}, f"methods must be at least one name, got none; choose from {', '.join(METHODS)}"),
        (
            {"methods": {"dla": {"unit": "layer"}}},
            "unit must be one of block, component, head, got 'layer'; check the spelling",
        ),
        (
            {"methods": "dla", "targets": TokenSet(3, 4)},
            "targets must be single tokens for dla, got a TokenSet; a set of tokens has no single direction; ask for "
            "one of them",
        ),
        (
            {"methods": "tuned_lens"},
            "lens must be a TunedLens or its folder for tuned_lens, got None; fit a lens on this model with "
            "TunedLens.fit(model, texts)",
        ),
    ],
)
def test_wrong_arguments_are_named(lens_model, ids, options, message):
    with no_trace(lens_model), pytest.raises(ValueError) as error:
        compare(lens_model, [ids], **options)
    assert str(error.value) == message


def test_an_argument_of_one_method_is_not_an_argument_of_all(lens_model, ids):
    with pytest.raises(TypeError) as error:
        compare(lens_model, [ids], unit="head")
    assert str(error.value).startswith("shared must be arguments of ig_lens (attention_mask, baseline, ")
    assert str(error.value).endswith(", got 'unit'; options of one method go into methods={name: {option: value}}")


def test_a_method_that_was_not_asked_for_is_an_error(lens_model, ids):
    comparison = compare(lens_model, [ids], methods="ig_lens")
    with pytest.raises(KeyError) as error:
        comparison["dla"]
    assert error.value.args[0] == "method must be one of ig_lens, got 'dla'; name it in methods="


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["hooked-LNPre", "gpt2-raw", "gemma2-compat", "cohere-raw"])
def test_no_trace_is_left(name, ids, grad):
    model, given = small_model(name), torch.tensor([ids])
    with torch.set_grad_enabled(grad), no_trace(model, given):
        comparison = compare(model, given, methods=ALWAYS)
    assert not any(result.values.requires_grad for result in comparison.results.values())


def test_a_result_keeps_no_model_alive(ids):
    model = bridge("llama")
    kept = compare(model, [ids], methods=ALWAYS)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None and kept["dla"].values.isfinite().all()


def test_incorrect_targets_make_every_method_answer_the_difference(lens_model, ids):
    model = lens_model
    a, b, both = (
        compare(model, [ids], methods=ALWAYS, targets=t, incorrect_targets=i) for t, i in ((3, None), (8, None), (3, 8))
    )
    for name in ALWAYS:
        difference = a[name].values - b[name].values
        torch.testing.assert_close(both[name].values, difference, atol=1e-5, rtol=1e-4)


def test_float64_models_keep_their_precision(double_model, ids):
    comparison = compare(double_model, [ids], methods=ALWAYS)
    for name in ALWAYS:
        assert comparison[name].values.dtype == torch.float64
    assert abs(float(comparison["ig_lens"].gap)) < 1e-12
    assert abs(float(comparison["dla"].gap)) < 1e-6  # Gemma normalises in float32


def test_smollm2_additivity(smollm2):
    comparison = compare(smollm2, "The capital of France is", targets=" Paris", prepend_bos=False)
    table = comparison.additivity().set_index("method")
    assert table.loc["ig_lens", "sum"] == pytest.approx(0.7725, abs=1e-3)
    assert abs(table.loc["ig_lens", "gap"]) < 2e-5
    assert abs(table.loc["dla", "gap"]) < 1e-3 * table.loc["dla", "expected"]
    assert table.loc["logit_lens", "sum"] != pytest.approx(table.loc["ig_lens", "delta_p"], abs=1e-2)
    assert (
        isinstance(comparison.to_dataframe(wide=True), pd.DataFrame) and len(comparison.to_dataframe()) == 30 + 31 + 31
    )


def test_gemma_additivity(gemma):
    comparison = compare(gemma, "The capital of France is", targets=" Paris", incl_mid=True)
    table = comparison.additivity().set_index("method")
    assert abs(table.loc["ig_lens", "gap"]) < 2e-5
    assert abs(table.loc["dla", "gap"]) < 1e-3 * abs(table.loc["dla", "expected"])
    assert len(comparison["dla"].labels) == 1 + 2 * 18
