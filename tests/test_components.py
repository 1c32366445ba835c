"""Direct probability attribution: exact sums, the Aumann–Shapley laws, and an integral written out by hand."""

import copy
import re
import warnings

import pandas as pd
import pytest
import torch
from conftest import IDS, small_model
from conftest import close_or_nan as close
from fixtures import bridge, hooked, needs_bridge, no_trace, reference_states, references
from fixtures.families import SPECS

from tl_iglens import IGLensResult, TokenSet, collect_states, compare, ig_lens, windows
from tl_iglens.adaptive import step_gradients
from tl_iglens.component_result import ComponentResult
from tl_iglens.components import direct_probability_attribution as dpa
from tl_iglens.estimators import gauss_legendre
from tl_iglens.quantity import Objective
from tl_iglens.readout import Readout
from tl_iglens.writers import UNITS, component_hooks

BOTH = ("layers", "straight")
TARGETS = torch.tensor([3, 7, 11, 2, 30, 4, 8])
RAGGED = {"input": [IDS, [1, 7, 9, 11, 3, 3, 3]], "attention_mask": [[1] * 7, [1] * 5 + [0] * 2]}


def message(error, model, *args, **options):
    """The whole text of the error of a call that must fail."""
    with pytest.raises(error) as caught:
        dpa(model, *args, **options)
    return str(caught.value)


# --- the sum ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
def test_components_of_a_segment_sum_to_its_credit(model, unit):
    whole = ig_lens(model, pos_slice=None, **RAGGED)
    for path in BOTH:
        for n_nodes in (1, 8):
            parts = dpa(model, pos_slice=None, unit=unit, path=path, n_nodes=n_nodes, **RAGGED)
            assert parts.completeness_gap.abs().nan_to_num().max() <= 1e-6
            close(parts.attribution.double().sum(0), whole.delta, 1e-6)
            if path == "layers":
                close(parts.segment_attribution, whole.attribution, 1e-6)
            assert torch.equal(parts.attribution.isnan().any(0), ~whole.present)


@pytest.mark.parametrize("path", BOTH)
def test_a_double_model_sums_to_rounding(double_model, path):
    for quantity in ("prob", "log_prob", "logit"):
        for unit in UNITS:
            parts = dpa(double_model, IDS, pos_slice=None, unit=unit, path=path, quantity=quantity, n_nodes=2)
            assert parts.attribution.dtype == torch.float64
            assert parts.completeness_gap.abs().max() <= 1e-12


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("path", BOTH)
def test_smollm2_sums_to_the_change(smollm2, unit, path):
    about = {"targets": " Paris", "prepend_bos": False}
    whole = ig_lens(smollm2, "The capital of France is", **about)
    parts = dpa(smollm2, "The capital of France is", unit=unit, path=path, **about)
    close(parts.attribution.double().sum(0), whole.delta, 1e-6)
    if path == "layers":
        close(parts.segment_attribution, whole.attribution, 1e-6)
    assert parts.quadrature_error.sum() <= 1e-5
    count = {"component": 2, "head": 9 + 1, "neuron": 1536 + 1}[unit]
    assert len(parts.labels) == 30 * count and parts.info.analysis == "direct_probability_attribution"


@pytest.mark.parametrize(("unit", "path", "n_nodes"), [("head", "layers", 2), ("neuron", "straight", 1)])
def test_gemma_sums_to_the_change(gemma, unit, path, n_nodes):
    whole = ig_lens(gemma, "The capital of France is", targets=" Paris")
    parts = dpa(gemma, "The capital of France is", targets=" Paris", unit=unit, path=path, n_nodes=n_nodes)
    close(parts.attribution.double().sum(0), whole.delta, 1e-6)
    if path == "layers":
        close(parts.segment_attribution, whole.attribution, 1e-6)


# --- the integral, written out ----------------------------------------------------------------------

# family -> output projections of attention and MLP in Hugging Face's model, and the norms behind them
PROJECTIONS = {
    "gpt2": ("attn.c_proj", "mlp.c_proj", None, None),
    "llama": ("self_attn.o_proj", "mlp.down_proj", None, None),
    "qwen2": ("self_attn.o_proj", "mlp.down_proj", None, None),
    "granite": ("self_attn.o_proj", "mlp.down_proj", None, None),
    "neox_par": ("attention.dense", "mlp.dense_4h_to_h", None, None),
    "olmo2": ("self_attn.o_proj", "mlp.down_proj", "post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma2": ("self_attn.o_proj", "mlp.down_proj", "post_attention_layernorm", "post_feedforward_layernorm"),
}


def writes(model, family, position, unit):
    """What every component of Hugging Face's float64 model wrote at a position: [(label, δ)] per block."""
    hf = references._pristine(SPECS[model])
    blocks, seen, handles = [], {}, []
    for index, layer in enumerate(references._layers(hf)):
        for name in PROJECTIONS[family][:2]:

            def keep(module, args, output, at=(index, name)):
                seen[at] = args[0][0, position], output[0, position]

            handles.append(layer.get_submodule(name).register_forward_hook(keep))
    try:
        with torch.no_grad():
            hf(torch.tensor([IDS]))
    finally:
        for handle in handles:
            handle.remove()
    for index, layer in enumerate(references._layers(hf)):
        block = []
        for part, (name, norm) in enumerate(
            zip(PROJECTIONS[family][:2], PROJECTIONS[family][2:], strict=True)
        ):
            module, (features, output) = layer.get_submodule(name), seen[index, name]
            weight = (
                module.weight if type(module).__name__ == "Conv1D" else module.weight.T
            )  # [feature, d_model]
            gain = torch.full_like(output, getattr(hf.config, "residual_multiplier", 1.0))
            if norm is not None:
                behind = layer.get_submodule(norm)
                own = 1 + behind.weight if family == "gemma2" else behind.weight
                eps = getattr(behind, "eps", None) or behind.variance_epsilon
                gain = own / (output.square().mean() + eps).sqrt()
            kind = ("attn", "mlp")[part]
            if (kind, unit) == ("attn", "head"):
                for head, rows in enumerate((features[:, None] * weight).reshape(4, -1, len(output))):
                    block.append((f"L{index}H{head}", gain * rows.sum(0)))
            elif (kind, unit) == ("mlp", "neuron"):
                block += [(f"L{index}N{i}", gain * row) for i, row in enumerate(features[:, None] * weight)]
            else:
                block.append((f"{index}_{kind}_out", gain * output))
                continue
            if module.bias is not None:
                block.append((f"{index}_{kind}_bias", gain * module.bias))
        blocks.append([(label, delta.detach()) for label, delta in block])
    return blocks


def integrals(model, path, position, target, blocks):
    """∫ ∇f·δ dα of every component by autograd and 4,096 midpoints a segment, in float64."""
    hf = references._pristine(SPECS[model])
    states = reference_states(model, IDS)[:, 0, position]
    if path == "straight":
        states, blocks = states[[0, -1]], [[pair for block in blocks for pair in block]]
    credits = {}
    alphas = (torch.arange(4096, dtype=torch.float64) + 0.5)[:, None] / 4096
    for a, b, block in zip(states[:-1], states[1:], blocks, strict=True):
        with torch.enable_grad():
            h = (a + alphas * (b - a)).requires_grad_(True)
            logits = hf.get_output_embeddings()(references._final_norm(hf)(h))
            p = references._output_transform(hf.config, logits).softmax(-1)[:, target]
            (gradient,) = torch.autograd.grad(p.sum(), h)
        credits |= {label: float(gradient.mean(0) @ delta) for label, delta in block}
    return credits


@pytest.mark.parametrize("family", PROJECTIONS)
def test_credits_are_the_integral(family):
    needs_bridge()
    model = small_model(f"{family}-raw") if family not in ("granite", "olmo2") else bridge(family)
    for position, target in ((-1, 7), (2, 40)):
        for unit in UNITS:
            blocks = writes(model, family, position, unit)
            for path in BOTH:
                ours = dpa(model, IDS, targets=target, pos_slice=position, unit=unit, path=path)
                expected = integrals(model, path, position, target, blocks)
                assert ours.labels == tuple(expected)
                close(ours.attribution[:, 0, 0], torch.tensor(list(expected.values())), 5e-6)
                assert ours.attribution.abs().max() > 2e-5  # something to be wrong about


@pytest.mark.parametrize("name", ["hooked-LN", "hooked-soft-cap"])
def test_credits_of_a_hooked_transformer_are_the_integral(name):
    model = small_model(name, torch.float64)
    _, cache = model.run_with_cache(torch.tensor([IDS]))
    heads = cache.stack_head_results(layer=-1)[:, 0, -1].reshape(3, 4, -1)
    for path in BOTH:
        ours = dpa(model, IDS, targets=7, unit="head", path=path).attribution[:, 0, 0]
        at = torch.tensor(
            [6 * b + h for b in range(3) for h in range(4)]
        )  # four heads, a bias and an MLP each
        states = torch.stack(
            [cache["resid_pre", b][0, -1] for b in range(3)] + [cache["resid_post", 2][0, -1]]
        )
        spans = [(0, 1), (1, 2), (2, 3)] if path == "layers" else [(0, 3)] * 3
        expected = []
        for (a, b), own in zip(spans, heads, strict=True):
            with torch.enable_grad():
                alphas = (torch.arange(4096, dtype=torch.float64) + 0.5)[:, None] / 4096
                h = (states[a] + alphas * (states[b] - states[a])).detach().requires_grad_(True)
                logits = model.unembed(model.ln_final(h[None]))[0]
                cap = model.cfg.output_logits_soft_cap
                logits = cap * torch.tanh(logits / cap) if cap > 0 else logits
                (gradient,) = torch.autograd.grad(logits.softmax(-1)[:, 7].sum(), h)
            expected.append(own @ gradient.mean(0))
        close(ours[at], torch.cat(expected).detach(), 1e-5)


def test_units_refine_each_other(lens_model):
    about = {"pos_slice": None, "n_nodes": 16}
    for path in BOTH:
        coarse = dpa(lens_model, IDS, path=path, **about)
        heads = dpa(lens_model, IDS, path=path, unit="head", **about)
        neurons = dpa(lens_model, IDS, path=path, unit="neuron", **about)
        for b in range(3):
            attn = [i for i, n in enumerate(heads.labels) if n.startswith((f"L{b}H", f"{b}_attn"))]
            mlp = [i for i, n in enumerate(neurons.labels) if n.startswith((f"L{b}N", f"{b}_mlp"))]
            close(heads.attribution[attn].sum(0), coarse.attribution[2 * b], 2e-6)
            close(neurons.attribution[mlp].sum(0), coarse.attribution[2 * b + 1], 2e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "neox_par"])
def test_processed_weights_give_the_same_sublayers(family):
    raw, processed = small_model(f"{family}-raw"), small_model(f"{family}-compat")
    for path in BOTH:
        ours, theirs = (dpa(m, IDS, targets=7, pos_slice=None, path=path) for m in (raw, processed))
        assert ours.labels == theirs.labels
        close(ours.attribution, theirs.attribution, 1e-5)


# --- Aumann–Shapley ----------------------------------------------------------------------------------


def displacement(model):
    """From the embedding to the final state at the last position, and over block 1."""
    resid = collect_states(model, IDS).resid[:, 0, 0]
    return resid[-1] - resid[0], resid[2] - resid[1]


@pytest.mark.parametrize("path", BOTH)
def test_laws_of_the_value(lens_model, path):
    whole = displacement(lens_model)[BOTH.index("straight") - BOTH.index(path)]
    one, other = 0.4 * whole + torch.randn_like(whole), torch.randn_like(whole)
    part = torch.randn_like(whole)
    given = {"1_a": one, "1_same": one.clone(), "1_zero": torch.zeros_like(one), "1_b": other}

    def credits(components):
        found = dpa(lens_model, IDS, targets=7, path=path, components=components)
        assert found.completeness_gap.abs().max() <= 1e-6
        return dict(zip(found.labels, found.attribution[:, 0, 0].tolist(), strict=True))

    found = credits(given)
    assert found["1_a"] == found["1_same"] != 0  # symmetry
    assert found["1_zero"] == 0  # null player
    shuffled = credits(dict(reversed(given.items())))
    assert all(abs(found[label] - shuffled[label]) <= 1e-6 for label in found)  # order
    for first in (0.3 * other, part):  # splitting, in proportion and at random
        split = credits({**given, "1_b": first, "1_c": other - first})
        assert abs(split["1_b"] + split["1_c"] - found["1_b"]) <= 1e-6
        assert abs(split["1_a"] - found["1_a"]) <= 1e-6
    rest = "other" if path == "straight" else "1_other"
    all_of_it = credits({"1_all": whole})
    assert abs(all_of_it[rest]) <= 1e-6 and list(all_of_it)[-1] == ("2_block" if path == "layers" else rest)


def test_an_early_writer_is_paid_on_the_straight_line():
    """f flat while a direction is written, lifted later: nothing on the layers, a share on the straight line."""
    states = torch.tensor([[0.0, 0.0], [4.0, 0.0], [4.0, 8.0]])[:, None].double()  # [point, cell, d_model]

    def f(h, cell):
        return torch.sigmoid(h.sum(-1) - 9)

    totals = []
    for points in (states, states[[0, 2]]):
        levels = f(points, None)
        steps = list(step_gradients(f, gradient_of(f), points, levels, n_nodes=8, max_rows=200))
        written = sum(s.gradient.sum(0) for s in steps) * torch.tensor([4.0, 8.0])
        if len(points) == 3:
            first = sum(s.gradient[s.segment == 0].sum(0) for s in steps)[0] * 4.0
            assert abs(first - (levels[1] - levels[0])) < 1e-5 and first < 0.01
        totals.append(written)
    close(totals[1], (f(states[2], None) - f(states[0], None)) * torch.tensor([1 / 3, 2 / 3]), 1e-5)


# --- where the gradients are taken -----------------------------------------------------------------


def gradient_of(f):
    def value_and_grad(h, cell):
        with torch.enable_grad():
            x = h.detach().requires_grad_(True)
            value = f(x, cell)
            return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    return value_and_grad


def walk(f, states, **options):
    options = {"n_nodes": 8, "max_rows": 400} | options
    levels = f(states.flatten(0, 1), None).reshape(states.shape[:2])
    steps = list(step_gradients(f, gradient_of(f), states, levels, **options))
    return levels, steps


def test_steep_and_flat_segments():
    """Two cells: one that jumps in its second segment of four, one that never moves."""
    states = torch.zeros(5, 2, 3, dtype=torch.float64)
    states[:, 0] = torch.arange(5.0)[:, None] * torch.tensor([1.0, 2.0, -0.5])

    def f(h, cell):
        return torch.sigmoid(60 * (h @ torch.tensor([0.4, 0.3, 0.0]).double() - 1.4))

    levels, steps = walk(f, states)
    spent = steps[-1].spent
    assert spent[1] == 4 and spent[0] > 20
    for s, segment in enumerate(levels.diff(dim=0)[:, 0]):
        own = torch.cat([x.gradient[(x.segment == s) & (x.cell == 0)] for x in steps]).sum(0)
        share = own * torch.tensor(
            [1.0, 2.0, -0.5]
        )  # f depends on h through one number: shares of its change
        close(share, segment * torch.tensor([0.4, 0.6, 0.0]).double(), 2e-6)
    covered = torch.cat([x.change[x.cell == 0] for x in steps]).sum()
    assert abs(covered - (levels[-1, 0] - levels[0, 0])) < 1e-12


def test_rows_never_exceed_the_budget():
    states = torch.zeros(3, 1, 2, dtype=torch.float64)
    states[1:] = torch.tensor([1.0, 0.3])

    def f(h, cell):
        return torch.sin(400 * h.sum(-1))

    for n_nodes, max_rows in ((1, 8), (4, 32), (8, 64), (8, 1000)):
        levels, steps = walk(f, states, n_nodes=n_nodes, max_rows=max_rows)
        assert n_nodes * 4 * 0.5 < steps[-1].spent[0] <= max_rows
        assert abs(sum(s.change.sum() for s in steps) - (levels[-1, 0] - levels[0, 0])) < 1e-12


def test_a_bump_between_the_probes_is_found():
    states = torch.ones(9, 1, 2, dtype=torch.float64)
    states[:5, 0, 0] = 0.0

    def f(h, cell):
        return torch.exp(-(((h[:, 0] - 0.5) / 0.08) ** 2)) * (1 + h[:, 1])

    _, steps = walk(f, states)
    assert steps[-1].spent[0] > 8 + 20
    up = torch.cat([x.gradient[x.segment == 4] for x in steps]).sum(0)[1]
    assert abs(up - 0.08 * torch.pi**0.5) < 1e-5  # ∫ of the bump


def test_smollm2_needs_half_of_the_rows_of_a_fixed_grid(smollm2):
    """At the error of eight Gauss–Legendre nodes in every segment, and never above float32's own."""
    text, n = "The capital of France is", 30
    names = component_hooks(smollm2, "component")
    states = collect_states(smollm2, text, prepend_bos=False, extra=names)
    ours = dpa(smollm2, states=states, targets=" Paris")
    target = Objective("prob", ours.targets[0][:, None], torch.ones(1, 1).double())
    readout, points = Readout(smollm2), states.resid[:, 0]
    delta = torch.stack([states.extra[name][0, 0] for name in names]).reshape(n, 2, -1)

    def fixed(n_nodes):
        total = torch.zeros(n, 2, dtype=torch.float64)
        for alpha, weight in zip(*gauss_legendre(n_nodes), strict=True):
            h = torch.lerp(points[:-1], points[1:], alpha.float())
            total += weight * (readout.value_and_grad(h, target)[1] * delta).sum(-1).double()
        miss = ours.segment_attribution[:, 0, 0] - total.sum(1)
        return total + miss[:, None] * total.abs() / total.abs().sum(1, keepdim=True)

    truth = fixed(16)
    credits = ours.attribution[:, 0, 0].reshape(n, 2)
    error, error_of_8 = ((c - truth).abs().max().item() for c in (credits, fixed(8)))
    assert error <= max(error_of_8, 2e-6)
    assert int(ours.n_rows[0, 0]) + n <= 8 * n / 2  # gradients, and the probes that placed them


# --- what the rows are -----------------------------------------------------------------------------


def test_rows_and_their_places(lens_model):
    bias = ("0_attn_bias", "0_mlp_bias")
    heads = dpa(lens_model, IDS, unit="head")
    assert heads.labels[:6] == ("L0H0", "L0H1", "L0H2", "L0H3", bias[0], "0_mlp_out")
    assert heads.boundaries == (1,) * 6 + (2,) * 6 + (3,) * 6
    assert heads.segment_of == (0,) * 6 + (1,) * 6 + (2,) * 6
    neurons = dpa(lens_model, IDS, unit="neuron")
    width = lens_model.cfg.d_mlp
    assert neurons.labels[: width + 2] == ("0_attn_out", *(f"L0N{i}" for i in range(width)), bias[1])
    whole = dpa(lens_model, IDS, path="straight")
    assert whole.labels == tuple(f"{b}_{part}_out" for b in range(3) for part in ("attn", "mlp"))
    assert whole.point_labels == ("0_pre", "final_post") and whole.boundaries == (1, 1, 2, 2, 3, 3)
    assert whole.info.path == "0_pre final_post" and whole.info.notes == ("unit=component", "path=straight")


def test_merged_segments_hold_the_components_of_their_blocks(lens_model):
    merged = dpa(lens_model, IDS, layers=[0, 2, 3], pos_slice=None)
    whole = ig_lens(lens_model, IDS, layers=[0, 2, 3], pos_slice=None)
    assert merged.segment_of == (0, 0, 0, 0, 1, 1) and merged.boundaries == (1, 1, 2, 2, 3, 3)
    close(merged.segment_attribution, whole.attribution, 1e-6)
    skipped = dpa(lens_model, IDS, layers=[2], pos_slice=None)
    assert skipped.labels == merged.labels and skipped.point_labels == ("0_pre", "2_pre", "final_post")


@pytest.mark.parametrize("path", BOTH)
def test_baselines_add_what_the_embedding_is_made_of(lens_model, path):
    tensor, states = torch.randn(32), collect_states(lens_model, IDS, pos_slice=None)
    corrupted = collect_states(lens_model, IDS[::-1], pos_slice=None)
    for baseline in ("mean", "bos", tensor, torch.randn(1, 7, 32), corrupted):
        parts = dpa(lens_model, states=states, pos_slice=None, path=path, baseline=baseline)
        assert parts.labels[:4] == ("embed", "pos_embed", "base", "0_attn_out")
        assert parts.boundaries[:4] == (0, 0, 0, 1)
        whole = ig_lens(lens_model, states=states, pos_slice=None, baseline=baseline)
        close(parts.attribution.double().sum(0), whole.delta, 1e-6)
        if path == "layers":
            close(parts.segment_attribution, whole.attribution, 1e-6)
    late = dpa(lens_model, states=states, path="layers", layers=[2], baseline="mean")
    assert late.labels == ("embed", "pos_embed", "base", *dpa(lens_model, IDS).labels)
    assert late.segment_of == (0,) * 7 + (1,) * 2 and late.point_labels == ("base", "2_pre", "final_post")


@pytest.mark.parametrize("path", BOTH)
def test_the_jump_at_the_origin_is_resolved(path):
    """∇f falls like 1/α towards the origin until ε ends it: midpoints in log α see all of it."""
    needs_bridge()
    model = small_model("llama-raw")
    hf, states = references._pristine(SPECS[model]), reference_states(model, IDS)[:, 0, -1]
    embed, end = states[0], states[-1] if path == "straight" else states[0]
    logs = torch.linspace(-26, 0, 60_001, dtype=torch.float64)
    with torch.enable_grad():
        alpha = ((logs[1:] + logs[:-1]) / 2).exp()[:, None]
        h = (alpha * end).requires_grad_(True)
        p = hf.get_output_embeddings()(references._final_norm(hf)(h)).softmax(-1)[:, 7]
        (gradient,) = torch.autograd.grad(p.sum(), h)
    expected = float((gradient * alpha * logs.diff()[:, None]).sum(0) @ embed)
    with pytest.warns(UserWarning, match="^baseline is the origin"):
        ours = dpa(model, IDS, targets=7, path=path, baseline="zero")
    assert ours.labels[0] == "embed" and abs(float(ours.attribution[0, 0, 0]) - expected) < 1e-5
    assert abs(expected) > 1e-3 and ours.quadrature_error.sum() < 1e-5


def test_embedding_is_one_row_where_positions_are_not_added():
    parts = dpa(small_model("llama-raw"), IDS, baseline="mean")
    assert parts.labels[:3] == ("embed", "base", "0_attn_out")


def test_shortformer_positions_are_no_row():
    parts = dpa(hooked(positional_embedding_type="shortformer"), IDS, baseline="mean")
    assert parts.labels[:3] == ("embed", "base", "0_attn_out")


def test_the_origin_warns_and_still_sums(lens_model):
    text = (
        "baseline is the origin, where a readout behind a norm jumps: the first step of the path holds all of that "
        "jump, and quadrature_error says how well it was resolved; 'embed' and 'mean' start from a real state"
    )
    whole = ig_lens(lens_model, IDS, baseline="zero")
    for baseline in ("zero", torch.zeros(32)):
        with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
            parts = dpa(lens_model, IDS, baseline=baseline)
        assert parts.labels[:3] == ("embed", "pos_embed", "0_attn_out")  # nothing to take away
        close(parts.attribution.double().sum(0), whole.delta, 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpa(lens_model, IDS)


def test_attention_only_models():
    model = hooked(attn_only=True)
    assert dpa(model, IDS).labels == ("0_attn_out", "1_attn_out", "2_attn_out")
    close(dpa(model, IDS, unit="head").segment_attribution, ig_lens(model, IDS).attribution, 1e-6)


@pytest.mark.parametrize(
    "config",
    [{"n_key_value_heads": 2}, {"gated_mlp": True}, {"parallel_attn_mlp": True},
     {"normalization_type": "RMS", "use_normalization_before_and_after": True}],
    ids=lambda config: next(iter(config)),
)  # fmt: skip
def test_kinds_of_hooked_blocks(config):
    model = hooked(**({"normalization_type": "LN"} | config))
    whole = ig_lens(model, IDS, pos_slice=None)
    for unit in UNITS:
        parts = dpa(model, IDS, pos_slice=None, unit=unit)
        close(parts.segment_attribution, whole.attribution, 1e-6)


@pytest.mark.parametrize(
    "family", ["gemma3", "granite", "olmo2", "bloom", "gptj", "falcon", "mixtral", "starcoder2"]
)
def test_families_of_bridges(family):
    needs_bridge()
    model = bridge(family)
    whole = ig_lens(model, pos_slice=None, **RAGGED)
    for unit in UNITS[: 2 if family == "mixtral" else 3]:
        parts = dpa(model, pos_slice=None, unit=unit, **RAGGED)
        close(parts.segment_attribution, whole.attribution, 1e-6)
        assert parts.quadrature_error.nan_to_num().max() < 1e-4


def test_half_precision(lens_model):
    needs_bridge()
    model = bridge("llama", dtype=torch.bfloat16)
    for unit in UNITS:
        parts = dpa(model, IDS, unit=unit, pos_slice=None)
        assert parts.attribution.dtype == torch.float32
        assert parts.completeness_gap.abs().max() <= 1e-6
    lifted = dpa(model, IDS, head="float32")
    assert lifted.completeness_gap.abs().max() <= 1e-6


# --- the same answer however it is asked --------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
def test_rows_of_a_batch_equal_their_solo_runs(lens_model, unit):
    both = dpa(lens_model, unit=unit, **RAGGED)
    for row, ids in enumerate((IDS, [1, 7, 9, 11, 3])):
        solo = dpa(lens_model, ids, unit=unit)
        close(both.attribution[:, row], solo.attribution[:, 0], 1e-6)


@pytest.mark.parametrize("path", BOTH)
def test_windows_and_batches_change_nothing(lens_model, path, monkeypatch):
    about = {"pos_slice": None, "path": path, "unit": "head", "baseline": torch.randn(2, 7, 32)} | RAGGED
    whole = dpa(lens_model, **about)
    found = [dpa(lens_model, batch_size=1, **about), dpa(lens_model, tile_bytes=1, **about)]
    monkeypatch.setattr(windows, "BUDGET", 1)
    found.append(dpa(lens_model, **about))
    states = collect_states(lens_model, pos_slice=None, **RAGGED)
    asked = {name: value for name, value in about.items() if name not in RAGGED}
    found.append(dpa(lens_model, states=states, **asked))
    for other in found:
        assert other.labels == whole.labels
        close(other.attribution, whole.attribution, 1e-6)
        close(other.levels, whole.levels, 1e-6)
        assert torch.equal(other.targets[whole.present], whole.targets[whole.present])


def test_states_serve_again(lens_model):
    names = component_hooks(lens_model, "head")
    states = collect_states(lens_model, IDS, pos_slice=None, extra=names)
    fresh = dpa(lens_model, IDS, unit="head", pos_slice=(2, 5), targets=7)
    for given in (states, collect_states(lens_model, IDS, pos_slice=None)):
        again = dpa(lens_model, states=given, unit="head", pos_slice=(2, 5), targets=7)
        close(again.attribution, fresh.attribution, 1e-6)
    one = dpa(lens_model, states=collect_states(lens_model, IDS, extra=names), unit="head", targets=7)
    close(one.attribution, dpa(lens_model, IDS, unit="head", targets=7).attribution, 1e-6)


def test_interventions(lens_model):
    hooks = [("blocks.1.hook_attn_out", lambda act, hook: 0 * act)]
    if "blocks.1.hook_attn_out" not in lens_model.hook_dict:
        pytest.skip("no such hook")
    parts = dpa(lens_model, IDS, fwd_hooks=hooks, pos_slice=None)
    whole = ig_lens(lens_model, IDS, fwd_hooks=hooks, pos_slice=None)
    close(parts.segment_attribution, whole.attribution, 1e-6)
    assert (parts.attribution[2] == 0).all()
    states = collect_states(lens_model, IDS, fwd_hooks=hooks)  # its component outputs were not kept
    assert re.fullmatch(
        r"unit must be one whose outputs add up to what every block wrote, got 'component' with hook_attn_out \+ "
        r"hook_mlp_out that miss the change over blocks\.[12] by [\d.]+%; whole blocks work: use ig_lens, or give the "
        r"directions with components=",
        message(ValueError, lens_model, states=states),
    )


def test_targets_and_quantities(lens_model):
    for options in (
        {"targets": "next", "pos_slice": None},
        {"targets": TokenSet(7, 9), "incorrect_targets": [3, 4]} | RAGGED,
        {"targets": TARGETS, "pos_slice": None, "quantity": "log_prob"},
        {"incorrect_targets": 9, "quantity": "logit"},
        {"pos_slice": (1, 4), "targets": [7, 9]} | RAGGED,
    ):
        options = {"input": IDS} | options
        whole, parts = ig_lens(lens_model, **options), dpa(lens_model, **options)
        scale = max(1.0, float(whole.levels.nan_to_num().abs().max()))
        close(parts.segment_attribution, whole.attribution, 1e-6 * scale)
        close(parts.model_level, whole.model_level, 1e-6)
        assert torch.equal(parts.targets, whole.targets) and parts.target_strings == whole.target_strings
        assert torch.equal(parts.positions, whole.positions)


@pytest.mark.parametrize("path", BOTH)
def test_top_k_folds_the_rest_into_a_row_per_block(lens_model, path, monkeypatch):
    about = {"unit": "neuron", "path": path, "pos_slice": None} | RAGGED
    full = dpa(lens_model, **about)
    size = full.attribution.nan_to_num().abs().sum((1, 2))
    best = {full.labels[i] for i in size.topk(5).indices.tolist()}
    for budget in (windows.BUDGET, 1):
        monkeypatch.setattr(windows, "BUDGET", budget)
        few = dpa(lens_model, top_k=5, **about)
        assert {label for label in few.labels if not label.endswith("_other")} == best
        assert few.labels[-1] == "2_other" and len(few.labels) == 8
        for label in best:
            close(few.attribution[few.labels.index(label)], full.attribution[full.labels.index(label)], 1e-6)
        close(few.attribution.sum(0), full.delta, 2e-6)
        close(few.segment_attribution, full.segment_attribution, 2e-6)
    assert dpa(lens_model, IDS, top_k=100).labels == dpa(lens_model, IDS).labels


def test_directions(lens_model):
    states = collect_states(lens_model, IDS, pos_slice=None)
    feature = torch.randn(1, 7, 32)
    parts = dpa(
        lens_model, states=states, pos_slice=None, components={"L1F12": feature, "2_x": feature[0, 0]}
    )
    assert parts.labels == ("0_block", "L1F12", "1_other", "2_x", "2_other")
    assert parts.segment_of == (0, 1, 1, 2, 2) and parts.boundaries == (1, 2, 2, 3, 3)
    whole = ig_lens(lens_model, states=states, pos_slice=None)
    close(parts.segment_attribution, whole.attribution, 1e-6)
    close(parts.attribution[0], whole.attribution[0], 1e-6)
    line = dpa(lens_model, states=states, components={"sentiment": feature[0, 0]}, path="straight")
    assert line.labels == ("sentiment", "other") and line.boundaries == (3, 3)
    merged = dpa(lens_model, IDS, layers=[0, 2], components={"L1F12": feature[0, 0]})
    assert merged.labels == ("L1F12", "0-1_other", "2_block")


def test_directions_work_where_blocks_have_no_sublayers():
    needs_bridge()
    model = bridge("mamba")
    parts = dpa(model, IDS, components={"L1F0": torch.randn(32)})
    close(parts.segment_attribution, ig_lens(model, IDS).attribution, 1e-6)


# --- the result ----------------------------------------------------------------------------------------


def test_result_methods(lens_model, tmp_path):
    parts = dpa(lens_model, unit="head", **RAGGED)
    assert isinstance(parts, IGLensResult)
    frame = parts.to_dataframe()
    assert len(frame) == 2 * 18 and frame.loc[4, "segment"] == "0_attn_bias"
    within = frame.groupby(["batch", "level_before", "level_after"])["credit"].sum().reset_index()
    close(
        torch.tensor(within["credit"].to_numpy()),
        torch.tensor((within["level_after"] - within["level_before"]).to_numpy()),
        1e-6,
    )
    best = parts.top(3, batch=1)
    assert isinstance(best, pd.DataFrame) and len(best) == 3
    assert best["credit"].abs().is_monotonic_decreasing
    assert parts.onset("largest").labels[0][0] in parts.labels
    assert "L" in parts._repr_html_() and "prob" in parts.caption()
    back = ComponentResult.load(parts.save(tmp_path / "parts.safetensors"))
    assert torch.equal(back.attribution, parts.attribution) and back.segment_of == parts.segment_of
    assert torch.equal(back.quadrature_error, parts.quadrature_error) and torch.equal(
        back.n_rows, parts.n_rows
    )
    assert back.info == parts.info and back.labels == parts.labels
    assert torch.equal(IGLensResult.load(tmp_path / "parts.safetensors").attribution, parts.attribution)


@pytest.mark.parametrize("unit", UNITS)
def test_no_trace(lens_model, unit):
    model, ids, direction = copy.copy(lens_model), torch.tensor([IDS]), torch.randn(32, requires_grad=True)
    with no_trace(model, ids, direction):
        dpa(model, ids, unit=unit, baseline="mean")
        dpa(model, ids, components={"1_x": direction})
        with pytest.raises(ValueError):
            dpa(model, ids, unit=unit, fwd_hooks=[("blocks.1.hook_resid_post", lambda act, hook: act + 1)])


def test_gradient_mode_does_not_matter(lens_model):
    with torch.enable_grad():
        on = dpa(lens_model, IDS)
    with torch.inference_mode():
        off = dpa(lens_model, IDS)
    assert torch.equal(on.attribution, off.attribution) and not on.attribution.requires_grad


# --- beside the other methods ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", BOTH)
def test_compare_has_a_row_beside_dla(lens_model, path):
    both = compare(
        lens_model,
        IDS,
        methods={"dpa": {"unit": "head", "path": path}, "dla": {"unit": "head"}},
        targets=TARGETS,
        pos_slice=None,
    )
    ours, theirs = both["dpa"], both["dla"]
    alone = dpa(lens_model, IDS, targets=TARGETS, pos_slice=None, unit="head", path=path)
    close(ours.values, alone.attribution, 1e-6)
    close(ours.total, alone.delta, 1e-6)
    assert ours.unit == "probability" and ours.sums_to == "Δ" and ours.gap.abs().max() <= 2e-6
    heads = [label for label in theirs.labels if label.startswith("L")]
    assert [label for label in ours.labels if label.startswith("L")] == heads
    ends = dict(zip(theirs.labels, theirs.ends, strict=True))
    assert all(ends[n] == end for n, end in zip(ours.labels, ours.ends, strict=True) if n in heads)


def test_compare_needs_a_baseline_with_a_name(lens_model):
    with pytest.raises(ValueError) as caught:
        compare(lens_model, IDS, methods=("dpa",), baseline=torch.ones(32))
    assert str(caught.value) == (
        "baseline must be one of embed, zero, mean, bos for the method dpa, got a tensor; call "
        "direct_probability_attribution with the baseline itself"
    )
    named = compare(lens_model, IDS, methods=("dpa",), baseline="mean", layers=[1, 3])["dpa"]
    assert named.labels[:3] == ("embed", "pos_embed", "base") and named.gap.abs().max() <= 2e-6


# --- refusals -----------------------------------------------------------------------------------------


def test_arguments(lens_model):
    assert message(ValueError, lens_model, IDS, unit="layer") == (
        "unit must be one of component, head, neuron, got 'layer'; check the spelling"
    )
    assert message(ValueError, lens_model, IDS, path="curved") == (
        "path must be one of layers, straight, got 'curved'; check the spelling"
    )
    for name in ("n_nodes", "top_k"):
        assert message(ValueError, lens_model, IDS, **{name: 0}) == (
            f"{name} must be a whole number of at least 1, got 0; give a whole number"
        )
    assert message(TypeError, lens_model, IDS, components={}) == (
        "components must be a mapping from labels to tensors, got {}; for example {'L3F12': activation * decoder_row}"
    )
    assert message(TypeError, lens_model, IDS, components={"L1F0": [1.0]}) == (
        "components must be floating-point tensors [..., d_model], got list for 'L1F0'; use torch.as_tensor"
    )
    assert message(ValueError, lens_model, IDS, components={"L1F0": torch.zeros(5)}) == (
        "components must be broadcastable to [batch, pos, d_model]=[1, 1, 32], got shape [5] for 'L1F0'; take it at "
        "the analysed positions"
    )
    for label in ("feature", "L3F0", "12"):
        assert message(ValueError, lens_model, IDS, components={label: torch.zeros(32)}) == (
            f"components must be labelled with their block on path='layers', got {label!r}; write L3F12 or 3_name, or "
            "use path='straight'"
        )
    assert message(ValueError, lens_model, IDS, baseline=torch.zeros(2, 1, 32)) == (
        "baseline must be broadcastable to [batch, pos, d_model]=[1, 1, 32], got shape [2, 1, 32]; take it at "
        "the analysed positions"
    )


def test_blocks_without_sublayers_are_refused():
    needs_bridge()
    kinds = {"mamba": "mixer", "lfm2": "conv, mlp"}
    for family, kind in kinds.items():
        for unit in UNITS:
            assert message(ValueError, bridge(family), IDS, unit=unit) == (
                f"unit must be one whose outputs every block has, got {unit!r} with no blocks.0.hook_attn_out (a block "
                f"of {kind}); whole blocks work: use ig_lens, or give the directions with components="
            )


def test_mixtures_of_experts_have_no_neurons():
    needs_bridge()
    assert message(ValueError, bridge("mixtral"), IDS, unit="neuron") == (
        "unit must be 'component' or 'head' where mlp has no readable output weights, got 'neuron' with blocks.0 "
        "(MoEBridge) that has no W_out; whole sublayers work"
    )


def test_blocks_that_do_more_than_their_sublayers_are_refused():
    needs_bridge()
    assert re.fullmatch(
        r"unit must be one whose outputs add up to what every block wrote, got 'component' with hook_attn_out \+ "
        r"hook_mlp_out that miss the change over blocks\.0 by [\d.]+%; whole blocks work: use ig_lens, or give the "
        r"directions with components=",
        message(ValueError, bridge("falcon_h1"), IDS),
    )


def test_heads_that_do_not_add_up_are_refused(lens_model):
    hooks = [("blocks.1.hook_attn_out", lambda act, hook: act.flip(-1))]
    assert message(ValueError, lens_model, IDS, unit="head", fwd_hooks=hooks) == (
        "unit must be 'component' where heads do not add up to their sublayer, got 'head' with blocks.1.hook_attn_out; "
        "its output passes something this package does not know; whole sublayers work"
    )
