"""Faults that users of neighbouring tools met, kinds K to T: each case of data/field_cases.json is a test.

Named by kind and id, as in ``test_field_cases_a_j.py``; the last test sees to it that no case is without one.
"""

import ast
import gc
import json
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import IS_4, close
from fixtures import (
    IDS_BR,
    bridge,
    hooked,
    identity_block,
    needs_bridge,
    no_trace,
    reference_states,
    shared_bridge,
    tokenizer,
)
from test_plotting import BLANK, DUPLICATES, MARKUP, NUMERIC, axis_labels, receipt

import tl_iglens
from tl_iglens import TunedLens, ablate, collect_states, compare, direct_probability_attribution, ig_lens, plotting
from tl_iglens.estimators import segment_credits
from tl_iglens.plotting._labels import shorten
from tl_iglens.tokens import visible

IDS = torch.tensor([IDS_BR])
PACKAGE = Path(tl_iglens.__file__).parent


def own(model, ids=IDS):
    """The model's own distribution behind the last token of every row."""
    with torch.no_grad():
        return model(ids, return_type="logits")[:, -1].double().softmax(-1)


# --- K: the state of the model ------------------------------------------------------------------------------


def test_K_C63_training_mode_is_refused_and_left_alone(gpt2):
    gpt2.train()
    try:
        with pytest.raises(ValueError, match=r"model must be in eval mode, got training mode at .*; call model\.eval\(\) first"):
            ig_lens(gpt2, IDS)
        assert gpt2.training
    finally:
        gpt2.eval()


@pytest.mark.parametrize("enabled", [True, False])
def test_K_C64_no_graph_is_kept_and_grad_mode_is_the_callers(gpt2, enabled):
    with torch.set_grad_enabled(enabled):
        result, states = ig_lens(gpt2, IDS), collect_states(gpt2, IDS)
        gradient = ig_lens(gpt2, IDS, estimator="gauss_legendre", n_steps=64)
        assert torch.is_grad_enabled() is enabled
    for tensor in (result.attribution, result.levels, states.resid, states.mean, gradient.attribution):
        assert not tensor.requires_grad and tensor.grad_fn is None
    close(gradient.attribution, result.attribution, 1e-5)
    assert all(parameter.grad is None for parameter in gpt2.parameters())


def test_K_C66_a_compiled_model_is_unwrapped(gpt2):
    compiled = torch.compile(gpt2, backend="eager")
    with torch.no_grad():
        compiled(IDS)
    close(ig_lens(compiled, IDS).attribution, ig_lens(gpt2, IDS).attribution, 1e-5)


# --- L: devices ---------------------------------------------------------------------------------------------


def test_L_C67_a_split_model_gives_the_same_numbers_on_one_device():
    from test_devices import spread

    needs_bridge()
    model = bridge("llama")
    alone, skip = ig_lens(model, IDS, targets=7), ablate(model, IDS, targets=7)
    with spread(model):
        split, skipped = ig_lens(model, IDS, targets=7), ablate(model, IDS, targets=7)
        assert all(t.device.type == "cpu" for t in (split.attribution, split.levels, skipped.p_ablated))
    close(split.attribution, alone.attribution, 1e-5)
    close(skipped.p_ablated, skip.p_ablated, 1e-5)


def test_L_C69_verify_repeats_the_levels_on_the_cpu(gpt2):
    good = ig_lens(gpt2, IDS, targets=7, verify=True)
    assert re.search(r"levels repeated on the CPU in float32 differ by at most \d\.\de", " ".join(good.info.notes))
    assert "verify=True" in (Path(__file__).parent.parent / "README.md").read_text("utf-8")


class Faulty:
    """A backend that computes wrongly: it adds to what a block returns. A copy of the model elsewhere is sound."""

    def __call__(self, module, args, output):
        return (output[0] + 0.5 * torch.sin(output[0]), *output[1:]) if isinstance(output, tuple) else output + 0.5 * torch.sin(output)

    def __deepcopy__(self, memo):
        return lambda module, args, output: None


def test_L_C69_verify_tells_of_a_backend_that_computes_wrongly():
    shared = {"targets": 7, "quantity": "log_prob"}
    model = bridge("gpt2") if IS_4 else hooked("LN", d_vocab=320, n_ctx=64)
    sound = ig_lens(model, IDS, **shared)
    handle = model.blocks[1].register_forward_hook(Faulty())
    try:
        wrong = ig_lens(model, IDS, **shared)  # its end is still the model's own output
        close(wrong.levels[-1, 0, 0], own(model)[0, 7].log(), 5e-6)
        gap = float((wrong.levels - sound.levels).abs().max())
        assert gap > 1e-2
        said = f"levels repeated on the CPU in float32 differ by at most {gap:.1e}"
        with pytest.warns(UserWarning, match=f"^{re.escape(said)}; do not trust what this device computes$"):
            result = ig_lens(model, IDS, verify=True, **shared)
    finally:
        handle.remove()
    assert said in result.info.notes


# --- M: memory ----------------------------------------------------------------------------------------------


def test_M_C70_only_the_asked_residual_states_are_kept(gpt2):
    n_layers, width = gpt2.cfg.n_layers, gpt2.cfg.d_model
    states = collect_states(gpt2, IDS)
    assert states.resid.shape == (n_layers + 1, 1, 1, width) and states.extra == {}
    assert states.resid.untyped_storage().nbytes() == (n_layers + 1) * width * 4


def test_M_C72_results_keep_no_model_alive():
    needs_bridge()
    model = bridge("gpt2")
    alive = weakref.ref(model)
    kept = [
        ig_lens(model, IDS, pos_slice=None), direct_probability_attribution(model, IDS), ablate(model, IDS),
        compare(model, IDS, methods=("ig_lens", "logit_lens", "dla")), collect_states(model, IDS), tl_iglens.track(model, IDS),
    ]  # fmt: skip
    del model
    gc.collect()
    assert alive() is None and len(kept) == 6


def test_M_C73_a_large_heatmap_stays_small():
    figure = plotting.heatmap(receipt([f"token {i}" for i in range(2048)], n_blocks=80))
    grid = next(trace for trace in figure.data if trace.type == "heatmap")
    assert np.asarray(grid.z).shape == (80, 2048) and np.asarray(grid.z).dtype == np.float32
    assert grid.text is None or np.asarray(grid.text).size == 0
    assert len(figure.layout.annotations) < 10
    assert np.asarray(grid.z).nbytes <= 1.5e6


# --- N: models that are not decoders with one stream --------------------------------------------------------


@pytest.mark.skipif(not IS_4, reason="the bridge of an encoder-decoder")
def test_N_C74_encoder_decoders_are_refused_before_any_forward():
    from fixtures import FAMILIES

    if "t5" not in FAMILIES:
        pytest.skip("no encoder-decoder among the fixtures")
    model = bridge("t5")
    model.forward = None  # would fail if it were called
    with pytest.raises((NotImplementedError, ValueError), match=r"model must be .*T5"):
        ig_lens(model, IDS)


def test_N_C76_a_quantised_unembedding_is_refused_by_name():
    needs_bridge()
    model = bridge("gpt2")
    model.unembed.original_component.weight = torch.nn.Parameter(
        torch.zeros(320, 8, dtype=torch.uint8), requires_grad=False
    )
    with pytest.raises(NotImplementedError, match=r"model must be one with a readable unembedding matrix .* got "):
        ig_lens(model, IDS)


def test_N_C77_a_foreign_tokenizer_warns_and_labels_do_not_crash():
    model = hooked("LN", d_vocab=100, n_ctx=64, tokenizer=tokenizer()) if not IS_4 else bridge("gpt2")
    larger = tokenizer()
    larger.add_tokens([f"<new{i}>" for i in range(100)])
    model.tokenizer = larger
    with pytest.raises(ValueError, match=r"^input must be token ids between 0 and d_vocab-1=\d+, got 350"):
        ig_lens(model, [[0, 350, 7]])  # a bridge takes the tokenizer's size for its own
    with pytest.warns(UserWarning, match=r"model\.tokenizer knows \d+ tokens and the model \d+"):
        ig_lens(model, "a", targets=7)
    result = ig_lens(model, [[0, 5, 40, 7]], targets=7)
    close(result.levels[-1, 0, 0], own(model, torch.tensor([[0, 5, 40, 7]]))[0, 7], 1e-6)


# --- O: integrated gradients and methods beside them --------------------------------------------------------


def jump(h):
    """A jump of width 0.01 at 0.97, as a step with straight sides; d_model is 1."""
    return ((h[..., 0] - 0.965) / 0.01).clamp(0, 1)


@pytest.mark.parametrize("n", [1, 10, 50, 200])
def test_O_C78_the_exact_credit_does_not_depend_on_the_steps(n):
    line = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    exact = segment_credits(jump, line, n_steps=n)
    assert float(exact.attribution.sum()) == pytest.approx(1, abs=1e-12)
    midpoint = segment_credits(jump, line, estimator="midpoint", n_steps=n)
    nodes = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    by_hand = float(((nodes > 0.965) & (nodes < 0.975)).sum()) * 100 / n  # slope 100 inside
    assert float(midpoint.attribution.sum()) == pytest.approx(by_hand, abs=1e-9)


def test_O_C78_a_gradient_rule_that_misses_warns(gpt2):
    with pytest.warns(UserWarning, match=r"^credits of midpoint with n_steps=1 miss up to \S+ of the change, as "):
        result = ig_lens(gpt2, IDS, estimator="midpoint", n_steps=1)
    assert result.info.estimator == "midpoint" and not result.info.exact
    assert float(result.completeness_gap.abs().max()) > 1e-7  # a gradient rule says what it misses


def test_O_C79_the_way_back_is_the_negative():
    torch.manual_seed(0)
    weight, path = torch.randn(6, 9, dtype=torch.float64), torch.randn(5, 1, 6, dtype=torch.float64)

    def f(h):
        return (h @ weight).softmax(-1)[..., 2]

    there, back = segment_credits(f, path), segment_credits(f, path.flip(0))
    close(there.attribution, -back.attribution.flip(0), 1e-9)
    rules = [segment_credits(f, p, estimator="midpoint", n_steps=3) for p in (path, path.flip(0))]
    missed = sum((r.attribution.sum(0) - (r.levels[-1] - r.levels[0])).abs().max() for r in rules)
    assert (rules[0].attribution.sum(0) + rules[1].attribution.sum(0)).abs().max() <= missed + 1e-9


@pytest.mark.parametrize(("n_steps", "chunk"), [(51, 50), (3, 50), (1, 1), (7, 2)])
@pytest.mark.parametrize("estimator", ["prediction_aware", "trapezoid", "midpoint"])
def test_O_C81_no_step_is_lost_between_chunks(n_steps, chunk, estimator):
    torch.manual_seed(0)
    weight, path = torch.randn(6, 9, dtype=torch.float64), torch.randn(4, 2, 6, dtype=torch.float64)

    def f(h):
        return (h @ weight).softmax(-1)[..., 2]

    whole = segment_credits(f, path, estimator=estimator, n_steps=n_steps)
    parts = segment_credits(f, path, estimator=estimator, n_steps=n_steps, max_nodes=chunk)
    close(parts.attribution, whole.attribution, 1e-7)


def test_O_C83_a_block_that_returns_a_tuple_is_read():
    """Bloom's blocks return tuples; the states are the tensors in them, and the last of them gives the model's output."""
    model = shared_bridge("bloom")
    kinds, first = [], model.blocks[0].original_component
    handle = first.register_forward_hook(lambda module, args, output: kinds.append(type(output)))
    try:
        states = collect_states(model, IDS, pos_slice=None)
    finally:
        handle.remove()
    assert kinds == [tuple]
    close(states.resid, reference_states(model, IDS), 1e-5)
    close(ig_lens(model, IDS, targets=7).levels[-1, 0, 0], own(model)[0, 7], 1e-6)


def test_O_C84_every_column_has_its_unit_and_only_probabilities_sum_to_the_change(gpt2):
    found = compare(gpt2, IDS, methods=("ig_lens", "logit_lens", "dla"))
    units = {name: found[name].unit for name in found.methods}
    assert units == {"ig_lens": "probability", "logit_lens": "probability", "dla": "logit"}
    sums = found.additivity().set_index("method")
    assert abs(sums.loc["ig_lens", "sum"] - sums.loc["ig_lens", "delta_p"]) < 1e-6
    assert abs(sums.loc["dla", "gap"]) < 1e-4 * max(1, abs(sums.loc["dla", "expected"]))
    assert found["logit_lens"].sums_to == "nothing"


# --- P: ablations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "bloom", "falcon_h1", "lfm2", "mamba"])
def test_P_C85_two_blocks_skipped_together_are_two_identities(family):
    model = shared_bridge(family)
    target = int(own(model).argmax())
    both = ablate(model, IDS, targets=target, at="all", sites=[(1, 2)])
    turned = ablate(model, IDS, targets=target, at="all", sites=[(2, 1)])
    with identity_block(model, 1), identity_block(model, 2):
        theirs = own(model)[0, target]
    close(both.p_ablated[0, 0], theirs, 1e-6)
    assert torch.equal(both.p_ablated, turned.p_ablated)


def test_P_C86_zero_is_the_contribution_not_the_stream(gpt2):
    zero, skip = (ablate(gpt2, IDS, targets=7, at="all", mode=mode) for mode in ("zero", "skip"))
    close(zero.p_ablated, skip.p_ablated, 1e-6)
    result = ig_lens(gpt2, IDS, targets=7)
    close(ablate(gpt2, IDS, targets=7).p_ablated[-1, 0], result.levels[-2, 0, 0], 1e-6)
    assert "output to zero" in ablate.__doc__


def test_P_C87_draws_have_a_seed_and_do_not_depend_on_the_batch(gpt2):
    rows = torch.tensor([IDS_BR, IDS_BR[::-1]])
    others = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11, 12, 13, 14, 15, 16, 17], [3, 4, 6, 8, 10, 12, 14]]
    shared = {"targets": 7, "mode": "resample", "reference": torch.tensor(others)}
    state = torch.random.get_rng_state()
    first, again, other = (ablate(gpt2, rows, seed=seed, **shared) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.p_ablated, again.p_ablated) and not torch.equal(first.p_ablated, other.p_ablated)
    for row in range(2):
        close(ablate(gpt2, rows[row : row + 1], seed=0, **shared).p_ablated[:, 0], first.p_ablated[:, row], 1e-6)
    with pytest.raises(ValueError, match="reference must be"):
        ablate(gpt2, IDS, mode="resample")


# --- Q: tuned lens ------------------------------------------------------------------------------------------


def test_Q_C90_a_zero_lens_is_the_logit_lens_and_the_last_state_has_no_translator(gpt2):
    lens = TunedLens.zero(gpt2.cfg.n_layers, gpt2.cfg.d_model)
    found = compare(gpt2, IDS, targets=7, methods={"logit_lens": {}, "tuned_lens": {"lens": lens}})
    close(found["tuned_lens"].values, found["logit_lens"].values, 1e-7)
    wild = TunedLens(torch.randn_like(lens.weight), lens.bias)
    last = compare(gpt2, IDS, targets=7, methods={"tuned_lens": {"lens": wild}})["tuned_lens"].values[-1, 0, 0]
    close(last, own(gpt2)[0, 7], 1e-6)


def test_Q_C92_a_lens_of_another_shape_or_other_weights_is_named(gpt2):
    n, d = gpt2.cfg.n_layers, gpt2.cfg.d_model
    for lens in (TunedLens.zero(n + 1, d), TunedLens.zero(n, d + 1)):
        with pytest.raises(ValueError, match="lens must be"):
            compare(gpt2, IDS, methods={"tuned_lens": {"lens": lens}})
    if IS_4:
        processed = shared_bridge("gpt2", compat=True)
        with pytest.warns(UserWarning, match="lens"):
            compare(processed, IDS, methods={"tuned_lens": {"lens": TunedLens.zero(n, d)}})


# --- R: text of tokens in figures ---------------------------------------------------------------------------


def columns_of(tokens, template=None):
    figure = plotting.heatmap(receipt(tokens), template=template)
    grid = next(trace for trace in figure.data if trace.type == "heatmap")
    return figure, grid


def test_R_C93_repeated_tokens_keep_their_columns():
    _, grid = columns_of(DUPLICATES)
    assert np.asarray(grid.z).shape[1] == 4
    assert grid.x is None or len(set(map(float, grid.x))) == 4


def test_R_C94_shortened_names_do_not_collide():
    tokens = tuple("the same beginning of a very long token " + str(i) for i in range(4))
    figure, grid = columns_of(tokens)
    axis = next(axis for axis in figure.select_xaxes() if axis.ticktext)
    assert len(set(axis.ticktext)) < 4  # equal once they are shortened
    assert len(set(axis.tickvals)) == 4 and np.asarray(grid.z).shape[1] == 4
    assert all(token.replace(" ", "·") in figure.to_json() or token in figure.to_json() for token in tokens)  # in the hover


@pytest.mark.parametrize("template", [None, "none", "plotly_dark"])
def test_R_C95_numbers_are_labels(template):
    figure, _ = columns_of(NUMERIC, template)
    axes = [axis for axis in figure.select_xaxes() if axis.ticktext or axis.labelalias]
    assert axes and all(axis.type == "linear" for axis in axes)
    assert any(list(axis_labels(axis).values()) == [visible(t) for t in NUMERIC] for axis in axes)


def test_R_C97_markup_is_literal():
    figure, _ = columns_of(MARKUP)
    labels = [list(axis_labels(axis).values()) for axis in figure.select_xaxes() if axis.ticktext or axis.labelalias]
    assert [shorten(visible(t), 16) for t in MARKUP] in labels
    assert "<b>x" not in "".join(str(text) for axis in figure.select_xaxes() for text in axis.ticktext or ())


def test_R_C100_pieces_of_a_character_are_told_apart():
    own_tokenizer = tokenizer()
    names = [tl_iglens.tokens.token_text(own_tokenizer, i) for i in own_tokenizer.encode("né 日", add_special_tokens=False)]
    assert len(set(names)) == len(names) and not any("\ufffd" in name for name in names)
    assert names == ["n", "<0xC3>", "<0xA9>", " ", "<0xE6>", "<0x97>", "<0xA5>"]


def test_R_C101_blank_tokens_can_be_seen():
    shown = [visible(token) for token in BLANK]
    assert all(text.strip() and "\n" not in text and "\t" not in text for text in shown)
    assert len(set(shown)) == len(BLANK)


# --- S: figures as files and data ---------------------------------------------------------------------------


def test_S_C102_figures_embed_no_script():
    figure = plotting.heatmap(receipt(DUPLICATES))
    assert len(figure.to_json()) < 50_000 and "Plotly.newPlot" not in figure.to_json()


def test_S_C103_the_page_needs_no_network(tmp_path):
    page = tl_iglens.write_report(receipt(DUPLICATES), tmp_path / "page.html").read_text("utf-8")
    assert not re.search(r"""<(?:script|link|img)[^>]+(?:src|href)\s*=\s*["'](?:https?:)?//""", page)


def test_S_C105_any_tensor_is_plotted_without_a_warning():
    half = receipt(DUPLICATES, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grid = next(t for t in plotting.heatmap(half).data if t.type == "heatmap")
    assert np.asarray(grid.z).dtype in (np.float32, np.float64)


def test_S_C107_nothing_shows_itself():
    for file in (PACKAGE / "plotting").glob("*.py"):
        called = {ast.unparse(n.func) for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.Call)}
        assert not any(name.endswith((".show", "init_notebook_mode", "iplot")) for name in called), file.name
    assert plotting.heatmap(receipt(DUPLICATES)).data


# --- T: environment and versions ----------------------------------------------------------------------------


def test_T_C108_no_upper_pin_but_transformer_lens():
    text = (PACKAGE.parent / "pyproject.toml").read_text("utf-8")
    pins = re.findall(r'"([\w-]+)[^"]*<[^"]*"', text.partition("[project.optional-dependencies]")[0])
    assert set(pins) <= {"transformer-lens"}


def test_T_C110_no_class_of_transformer_lens_is_imported_with_the_package():
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {"HookedTransformer", "TransformerBridge"} & set(names), file.name


@pytest.mark.parametrize("form", ["list", "numpy", "one row", "tensor"])
def test_T_C112_ids_of_any_layout_are_read_or_named(gpt2, form):
    ids = {"list": [IDS_BR], "numpy": np.array([IDS_BR]), "one row": torch.tensor(IDS_BR), "tensor": IDS}[form]
    close(ig_lens(gpt2, ids, targets=7).attribution, ig_lens(gpt2, IDS, targets=7).attribution, 1e-6)
    for wrong in (IDS[None], IDS.float(), torch.zeros(1, 3, 4)):
        with pytest.raises((TypeError, ValueError), match=r"^input must be"):
            ig_lens(gpt2, wrong)


def test_T_C113_nothing_asks_the_network(tmp_path):
    """In a process of its own: sockets refuse, the hub is offline, a folder holds the lens."""
    lens = TunedLens.zero(2, 8).save(tmp_path / "lens")
    code = (
        "import socket\n"
        "def refuse(*a, **k): raise SystemExit('a connection was tried')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
        f"import tl_iglens; lens = tl_iglens.TunedLens.load({str(lens)!r}); print(lens.n_layers)\n"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "2", done.stderr


def test_no_trace_is_left_by_any_of_it(gpt2):
    with no_trace(gpt2):
        ig_lens(gpt2, IDS, verify=True)


def test_every_case_has_a_test():
    folder = Path(__file__).parent
    cases = json.loads((folder / "data" / "field_cases.json").read_text("utf-8"))["cases"]
    text = "".join(file.read_text("utf-8") for file in folder.glob("test_field_cases_*.py"))
    missing = [f"{case['kind']}_{case['id']}" for case in cases if f"def test_{case['kind']}_{case['id']}_" not in text]
    assert not missing and len(cases) >= 76
