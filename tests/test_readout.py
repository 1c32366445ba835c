"""The readout against definitions: float64 rows of logits, autograd, central differences."""

import pytest
import torch
from conftest import DOUBLE, IDS, IS_4, SMALL, close, small_model
from fixtures import bridge, hooked, no_trace, reference_readout

from tl_iglens import ig_lens
from tl_iglens._types import QUANTITIES
from tl_iglens.quantity import Objective
from tl_iglens.readout import Readout

IDS_OF_A_SET, SIGNS = [7, 3, 11, 48], [1, 1, -1, 0]


def objective(quantity, cells, ids=(7,), sign=(1,)):
    return Objective(
        quantity,
        torch.tensor(ids).expand(cells, -1),
        torch.tensor(sign, dtype=torch.float64).expand(cells, -1),
    )


def fully(model, h):
    """Logits of every state by the model's own modules, with autograd."""
    x = h if model.cfg.normalization_type is None else model.ln_final(h)
    logits = model.unembed(x)
    adapter = getattr(model, "adapter", None)
    if adapter is not None:
        return adapter.apply_output_logits_transform(logits)
    cap = model.cfg.output_logits_soft_cap
    return cap * torch.tanh(logits / cap) if cap > 0 else logits


def applies_transform_twice(name):
    """TransformerLens 3.9 folds the scale of Cohere into the weights and declares it all the same."""
    return not IS_4 and name == "cohere-compat"


def some_states(model, dtype=torch.float32, n=5):
    return 3 * torch.randn(n, 2, model.cfg.d_model, dtype=dtype)


@pytest.mark.parametrize("tile_bytes", [None, 1, 64 * 10 * 4 * 3])
@pytest.mark.parametrize("name", SMALL)
def test_value_is_the_softmax_of_the_models_modules(name, tile_bytes):
    model = small_model(name)
    h = some_states(model)
    readout = Readout(model, tile_bytes)
    with torch.no_grad():
        logits = fully(model, h).double()
    close(readout.value(h, objective("prob", 2)), logits.softmax(-1)[..., 7], 1e-6)
    close(readout.value(h, objective("log_prob", 2)), logits.log_softmax(-1)[..., 7], 1e-5)
    close(readout.value(h, objective("logit", 2)), logits[..., 7], 1e-5)
    close(readout.model_logits(h.flatten(0, 1)), logits.flatten(0, 1), 1e-5)


@pytest.mark.parametrize(
    "name", ["hooked-LN", "hooked-soft-cap", "hooked-eps", "gemma2-raw", "phi-raw", "gpt2-raw"]
)
def test_value_is_the_float64_reference(name):
    model = small_model(name)
    h = some_states(model)
    expected = reference_readout(model, h).softmax(-1)[..., 7]
    close(Readout(model).value(h, objective("prob", 2)), expected, 1e-6)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("name", SMALL)
def test_gradient_is_that_of_autograd(name, quantity):
    if applies_transform_twice(name):
        pytest.skip("the declared transform is not the one of the model")
    model = small_model(name)
    f = objective(quantity, 2, IDS_OF_A_SET, SIGNS)
    h = some_states(model).requires_grad_(True)
    logits = fully(model, h)
    value = f.value(logits.gather(-1, f.ids.expand(5, -1, -1)), logits.logsumexp(-1))
    (expected,) = torch.autograd.grad(value.sum(), h)
    for tile_bytes in (None, 1):
        ours, gradient = Readout(model, tile_bytes).value_and_grad(h.detach(), f)
        close(ours, value.detach(), 1e-5)
        close(gradient, expected, 1e-4 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("name", DOUBLE)
def test_gradient_is_that_of_central_differences(name, quantity):
    if applies_transform_twice(name):
        pytest.skip("the declared transform is not the one of the model")
    model = small_model(name, torch.float64)
    readout, f = Readout(model), objective(quantity, 2, IDS_OF_A_SET, SIGNS)
    h = some_states(model, torch.float64, n=2)
    _, gradient = readout.value_and_grad(h, f)
    # Hugging Face computes RMSNorm in float32 even in a float64 model
    step, tolerance = (3e-3, 1e-3) if name.startswith("gemma2") else (1e-5, 1e-7)
    for _ in range(4):
        direction = torch.randn_like(h)
        change = readout.value(h + step * direction, f) - readout.value(h - step * direction, f)
        close((gradient * direction).sum(-1), change / (2 * step), tolerance)


@pytest.mark.parametrize("name", ["hooked-RMS", "hooked-LN", "gpt2-raw", "neox_par-raw"])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3])
def test_gradient_at_states_of_any_size(name, scale):
    """Near zero the epsilon of the norm decides; far out the norm makes it small."""
    model = small_model(name, torch.float64)
    readout, f = Readout(model), objective("log_prob", 2)
    h = scale * some_states(model, torch.float64, n=2)
    _, gradient = readout.value_and_grad(h, f)
    direction = torch.randn_like(h)
    step = 1e-4 * scale
    change = readout.value(h + step * direction, f) - readout.value(h - step * direction, f)
    slope = (gradient * direction).sum(-1)
    torch.testing.assert_close(slope, change / (2 * step), rtol=1e-4, atol=1e-6 / scale)


def test_gradient_of_a_capped_head():
    for cap in (0.5, 3.0, 50.0):
        model = (
            bridge("gemma2", final_logit_softcapping=cap)
            if IS_4
            else hooked("RMS", output_logits_soft_cap=cap)
        )
        h = some_states(model).requires_grad_(True)
        (expected,) = torch.autograd.grad(fully(model, h).log_softmax(-1)[..., 7].sum(), h)
        _, gradient = Readout(model).value_and_grad(h.detach(), objective("log_prob", 2))
        close(gradient, expected, 2e-4)


def test_a_norm_without_a_closed_form_is_differentiated_by_autograd():
    class Odd(torch.nn.Module):
        def forward(self, h):
            return torch.tanh(h) + h.abs().amax(-1, keepdim=True)

    model = small_model("gpt2-raw" if IS_4 else "hooked-LN")
    norm = model._modules["ln_final"]
    h = some_states(model).requires_grad_(True)
    try:
        model._modules["ln_final"] = Odd()
        (expected,) = torch.autograd.grad(fully(model, h).log_softmax(-1)[..., 7].sum(), h)
        _, gradient = Readout(model).value_and_grad(h.detach(), objective("log_prob", 2))
    finally:
        model._modules["ln_final"] = norm
    close(gradient, expected, 1e-4 * float(expected.abs().max()))


def test_another_output_transform_has_no_gradient_but_a_value():
    if not IS_4:
        pytest.skip("HookedTransformer knows one transform only, and 3.9 declares the same on a bridge")
    model = bridge("llama")
    model.adapter.apply_output_logits_transform = lambda logits: logits.sinh()
    h = some_states(model)
    readout = Readout(model)
    with torch.no_grad():
        expected = model.unembed(model.ln_final(h)).double().sinh().softmax(-1)[..., 7]
    close(readout.value(h, objective("prob", 2)), expected, 1e-5)
    with pytest.raises(NotImplementedError) as error:
        readout.value_and_grad(h, objective("prob", 2))
    assert str(error.value) == (
        "model must be one with a scaled or soft-capped output, got another output transform; "
        "use estimator='prediction_aware', which needs no gradient"
    )


def test_very_large_and_equal_logits():
    """The running maximum and sum stay finite where exp alone would not, also when a later tile is larger."""
    model = bridge("llama") if IS_4 else hooked("LN", d_vocab=320)
    with torch.no_grad():
        model.W_U[:, 200] *= 100
    h = 50 * some_states(model)
    with torch.no_grad():
        logits = fully(model, h).double()
    assert logits.amax(-1).max() > 100  # exp(100) is beyond float32
    for ids in ((200,), (7,), (319,)):
        value = Readout(model, 1).value(h, objective("log_prob", 2, ids))
        torch.testing.assert_close(value, logits.log_softmax(-1)[..., ids[0]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_reads_in_its_own_dtype_and_sums_in_float32(dtype):
    model = bridge("gpt2", dtype=dtype) if IS_4 else hooked("LN", dtype=dtype)
    h = some_states(model).to(dtype)
    with torch.no_grad():
        expected = fully(model, h).float().log_softmax(-1)[..., 7]
    value = Readout(model).value(h, objective("log_prob", 2))
    assert value.dtype == torch.float64
    close(value, expected, 2e-2)
    reference = reference_readout(model, h.double()).log_softmax(-1)[..., 7]
    # a HookedTransformer's norm rounds its own output to the dtype of the model
    tolerance = 2e-3 if IS_4 else {torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    close(Readout(model, head="float32").value(h, objective("log_prob", 2)), reference, tolerance)


def test_float16_states_whose_squares_overflow_stay_finite():
    model = bridge("gpt2", dtype=torch.float16) if IS_4 else hooked("LN", dtype=torch.float16)
    h = 300 * torch.randn(4, 2, model.cfg.d_model).sign().to(torch.float16)
    value, gradient = Readout(model).value_and_grad(h, objective("prob", 2))
    assert value.isfinite().all() and gradient.isfinite().all()
    close(value, reference_readout(model, h.double()).softmax(-1)[..., 7], 2e-3)


def test_small_probabilities_of_a_half_precision_model_are_kept():
    model = (
        hooked("LN", dtype=torch.float16)
        if not IS_4
        else bridge("gpt2", dtype=torch.float16, tie_word_embeddings=False)
    )
    with torch.no_grad():
        model.W_U.mul_(3)
    ids = IDS
    logits = model(torch.tensor([ids]), return_type="logits")[0, -1].double().log_softmax(-1).detach()
    rare = int(logits.argmin())
    assert logits[rare] < -8
    for quantity in ("prob", "log_prob"):
        result = ig_lens(model, ids, targets=rare, quantity=quantity)
        level = float(result.levels[-1])
        assert abs(level - float(logits[rare] if quantity == "log_prob" else logits[rare].exp())) < 2e-2
        assert level != 0 and result.attribution.dtype == torch.float32
    tiny = ig_lens(model, ids, targets=rare, layers=[3], baseline=torch.zeros(model.cfg.d_model))
    assert tiny.attribution.isfinite().all() and not tiny.cancellation.isinf().any()


def test_tied_and_absent_biases():
    tied = bridge("gpt2") if IS_4 else hooked("LN")
    assert Readout(tied).b_U is None or not IS_4
    zero = hooked("LN") if not IS_4 else bridge("phi")
    bias = zero.b_U if not IS_4 else zero.unembed.original_component.bias
    with torch.no_grad():
        bias.zero_()
    result = ig_lens(zero, IDS, targets=7)
    own = zero(torch.tensor([IDS]), return_type="logits")[0, -1].softmax(-1)[7]
    close(result.levels[-1, 0, 0], own.detach(), 1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_a_readout_leaves_no_trace(name):
    model = small_model(name)
    h = some_states(model)
    with no_trace(model, h):
        readout = Readout(model)
        readout.value(h, objective("prob", 2))
        if not applies_transform_twice(name):
            readout.value_and_grad(h, objective("prob", 2))


def test_hooks_of_the_caller_are_set_aside_and_put_back():
    model = small_model("gpt2-raw" if IS_4 else "hooked-LN")
    seen = []
    handle = model.ln_final.register_forward_hook(lambda *args: seen.append("torch"))
    model.add_hook(
        next(n for n in model.hook_dict if n.startswith("ln_final.")), lambda act, hook: seen.append("tl")
    )
    h = some_states(model)
    try:
        with no_trace(model):
            Readout(model).value(h, objective("prob", 2))
        assert seen == []
        model(torch.tensor([IDS]))
        assert sorted(set(seen)) == ["tl", "torch"]
    finally:
        handle.remove()
        model.reset_hooks()


def test_weights_are_views():
    model = small_model("llama-raw" if IS_4 else "hooked-LN")
    assert Readout(model).W_U.data_ptr() == model.W_U.data_ptr()
