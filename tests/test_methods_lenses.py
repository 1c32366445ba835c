"""Logit lens, tuned lens, Jacobian lens and embedding projection against independent computations."""

import importlib
import json
import random
import socket
import sys
import warnings

import pytest
import torch
from conftest import IDS, small_model
from fixtures import needs_bridge, no_trace

from tl_iglens import collect_states
from tl_iglens.compare import compare
from tl_iglens.methods.tuned_lens import TunedLens, _Training, divergence_and_gradient, generate_texts
from tl_iglens.readout import Readout

FAMILIES = (
    "gpt2-raw",
    "gpt2-compat",
    "gemma2-raw",
    "gemma2-compat",
    "cohere-raw",
    "cohere-compat",
    "neox_par-raw",
    "hooked-soft-cap",
)


def full_logits(model, states):
    """Logits of states through the model's own modules, all at once, in float64 scalars."""
    with torch.no_grad():
        readout = Readout(model)
        if states.output.bare_head:
            readout.use_bare_head()
        flat = states.resid.reshape(-1, 1, states.resid.shape[-1])
        normed = model.ln_final(flat) if hasattr(model, "ln_final") else flat
        return readout.transform(model.unembed(normed)).double().reshape(*states.resid.shape[:-1], -1)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_figures_of_the_stream_are_those_of_the_full_distributions(name):
    model = small_model(name)
    batch = [IDS, IDS[::-1]]
    lens = compare(model, batch, pos_slice=None, targets=7, methods={"logit_lens": {"top_k": 4}})["logit_lens"]
    log_p = full_logits(model, collect_states(model, batch, pos_slice=None)).log_softmax(-1)
    p = log_p.exp()
    torch.testing.assert_close(lens.values.double(), p[..., 7], atol=1e-6, rtol=1e-5)
    assert torch.equal(lens.extra["rank"], (log_p > log_p[..., 7:8]).sum(-1))
    torch.testing.assert_close(lens.extra["entropy"].double(), -(p * log_p).sum(-1), atol=1e-5, rtol=1e-5)
    kl = (p[-1:] * (log_p[-1:] - log_p)).sum(-1)
    torch.testing.assert_close(lens.extra["kl"].double(), kl, atol=1e-5, rtol=1e-4)
    values = p.topk(4, -1).values
    torch.testing.assert_close(lens.extra["top_values"].double(), values, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(p.gather(-1, lens.extra["top_ids"]), values, atol=1e-7, rtol=1e-5)
    assert set(lens.texts) == set(lens.extra["top_ids"].flatten().tolist())


def test_figures_do_not_depend_on_the_size_of_a_tile():
    model = small_model("gemma2-raw") if _has_bridge() else small_model("hooked-soft-cap")
    wide, narrow = (compare(model, [IDS], methods="logit_lens", tile_bytes=t)["logit_lens"] for t in (2**24, 64))
    for name, value in wide.extra.items():
        torch.testing.assert_close(value, narrow.extra[name], atol=1e-5, rtol=1e-5)


def _has_bridge():
    try:
        needs_bridge()
    except pytest.skip.Exception:
        return False
    return True


@pytest.mark.parametrize("name", [n for n in FAMILIES if not n.startswith("hooked")])
def test_transformer_lens_logit_lens_agrees(name):
    analysis = pytest.importorskip("transformer_lens.tools.analysis")
    if not hasattr(analysis, "logit_lens"):
        pytest.skip("logit_lens needs TransformerLens 4")
    model = small_model(name)
    ours = compare(model, [IDS], pos_slice=None, targets=7, methods={"logit_lens": {"top_k": 5}})["logit_lens"]
    theirs = analysis.logit_lens(model, torch.tensor([IDS]), positions=None, targets=[7], return_type="probs")
    assert ours.labels == tuple(theirs.labels)
    torch.testing.assert_close(ours.values, theirs.values[..., 0], atol=2e-5, rtol=0)
    assert torch.equal(ours.extra["rank"], theirs.rank_trajectory())
    torch.testing.assert_close(ours.extra["entropy"], theirs.readout.entropy, atol=1e-5, rtol=1e-5)


# --- tuned lens -----------------------------------------------------------------------------------------------------


def random_lens(model, scale=0.05, **config):
    n, d = model.cfg.n_layers, model.cfg.d_model
    return TunedLens(scale * torch.randn(n, d, d), scale * torch.randn(n, d), config)


@pytest.mark.parametrize("name", ["gpt2-raw", "gemma2-raw", "cohere-raw", "hooked-LN"])
def test_a_zero_lens_is_the_logit_lens(name):
    model = small_model(name)
    lens = TunedLens.zero(3, 32)
    comparison = compare(model, [IDS], pos_slice=None, methods={"logit_lens": {}, "tuned_lens": {"lens": lens}})
    torch.testing.assert_close(comparison["tuned_lens"].values, comparison["logit_lens"].values, atol=1e-7, rtol=0)
    table = comparison.additivity()
    assert set(table["kind"]) == {"level"} and set(table["sums_to"]) == {"nothing"}


def test_a_translator_adds_to_the_state_that_enters_its_block(lens_model):
    states, lens = collect_states(lens_model, [IDS], pos_slice=None), random_lens(lens_model)
    translated = lens.translate(states)
    for l in range(3):
        h = states.resid[l]
        torch.testing.assert_close(translated[l], h + h @ lens.weight[l].T + lens.bias[l])
    assert torch.equal(translated[3], states.resid[3])  # the final state has no translator
    value = compare(lens_model, [IDS], methods={"tuned_lens": {"lens": lens}})["tuned_lens"].values
    torch.testing.assert_close(value[3], compare(lens_model, [IDS], methods="logit_lens")["logit_lens"].values[3])


def test_save_and_load_write_the_published_layout(lens_model, tmp_path):
    lens = random_lens(lens_model, base_model_name_or_path="fx", unembed_hash="ignored")
    lens.save(tmp_path / "lens")
    config = json.loads((tmp_path / "lens" / "config.json").read_text())
    assert config["lens_type"] == "linear_tuned_lens" and config["d_model"] == 32 and config["num_hidden_layers"] == 3
    params = torch.load(tmp_path / "lens" / "params.pt", weights_only=True)
    assert set(params) == {f"{l}.{part}" for l in range(3) for part in ("weight", "bias")}
    again = TunedLens.load(tmp_path / "lens")
    assert torch.equal(again.weight, lens.weight) and torch.equal(again.bias, lens.bias)
    comparison = compare(lens_model, [IDS], methods={"tuned_lens": {"lens": str(tmp_path / "lens")}})
    assert "lens of fx, 3 translators" in comparison["tuned_lens"].notes


def test_loading_opens_no_socket(lens_model, tmp_path, monkeypatch):
    random_lens(lens_model).save(tmp_path)

    def refuse(*args, **options):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    assert TunedLens.load(tmp_path).n_layers == 3


def write_lens(folder, params, **config):
    folder.mkdir(exist_ok=True)
    torch.save(params, folder / "params.pt")
    base = {
        "base_model_name_or_path": "x",
        "d_model": 4,
        "num_hidden_layers": 2,
        "bias": True,
        "lens_type": "linear_tuned_lens",
    }
    (folder / "config.json").write_text(json.dumps({**base, **config}))


def params_of(d=4, n=2):
    return {f"{l}.weight": torch.zeros(d, d) for l in range(n)} | {f"{l}.bias": torch.zeros(d) for l in range(n)}


class Payload:
    """Something that only an unsafe unpickler would build."""

    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    ("params", "config", "message"),
    [
        (
            params_of() | {"unembedding.weight": torch.zeros(1)},
            {},
            "lens must be a flat state dict of <layer>.weight and <layer>.bias, got the older format that bundles the "
            "model's own head (unembedding.weight and 0 more); fit it again, or convert it to that layout",
        ),
        (
            params_of(n=1),
            {},
            "lens must be of 2 translators, as its config says, got 1.bias missing or too many; fit it again, or "
            "convert it to that layout",
        ),
        (
            params_of(d=5),
            {},
            "lens must be of d_model 4, as its config says, got 0.bias of shape (5,); fit it again, or convert it to "
            "that layout",
        ),
        (
            params_of(),
            {"lens_type": "affine"},
            "lens must be of type linear_tuned_lens, got 'affine'; give a folder with config.json and params.pt of a "
            "linear tuned lens",
        ),
        (
            {**params_of(), "0.bias": torch.full((4,), torch.nan)},
            {},
            "lens must be finite, got NaN or infinity in its parameters; fit it again, or convert it to that layout",
        ),
    ],
)
def test_files_that_are_no_lens_are_refused_by_name(tmp_path, params, config, message):
    write_lens(tmp_path, params, **config)
    with pytest.raises(ValueError) as error:
        TunedLens.load(tmp_path)
    assert str(error.value) == message


def test_a_file_with_code_in_it_is_not_run(tmp_path, capsys):
    write_lens(tmp_path, {"0.weight": Payload()})
    with pytest.raises(ValueError, match=r"^lens must be a plain state dict of tensors, got .*params\.pt"):
        TunedLens.load(tmp_path)
    assert "unpickled" not in capsys.readouterr().out


def test_a_folder_without_the_files_is_refused(tmp_path):
    with pytest.raises(ValueError) as error:
        TunedLens.load(tmp_path / "gone")
    assert str(error.value) == (
        f"lens must be a local folder with config.json and params.pt, got {tmp_path / 'gone'} without config.json; "
        "give a folder with config.json and params.pt of a linear tuned lens"
    )


@pytest.mark.parametrize(
    ("shape", "got"), [((2, 32), "2 of d_model 32"), ((3, 16), "3 of d_model 16"), ((4, 32), "4 of d_model 32")]
)
def test_a_lens_of_another_model_is_refused(lens_model, shape, got):
    lens = TunedLens.zero(*shape)
    with no_trace(lens_model), pytest.raises(ValueError) as error:
        compare(lens_model, [IDS], methods={"tuned_lens": {"lens": lens}})
    assert str(error.value) == (
        f"lens must be of 3 translators of d_model 32 for this model, got {got}; fit a lens on this model with "
        "TunedLens.fit(model, texts)"
    )


@pytest.mark.parametrize("name", ["gpt2-compat", "hooked-LNPre"])
def test_processed_weights_are_warned_about(name):
    model = small_model(name)
    with pytest.warns(UserWarning) as caught:
        compare(model, [IDS], methods={"tuned_lens": {"lens": TunedLens.zero(3, 32)}})
    assert str(caught[0].message) == (
        "lens must be used on the weights it was fitted on, got a model with processed weights; published lenses are "
        "fitted on raw Hugging Face states, so load the model without compatibility mode or "
        "from_pretrained_no_processing"
    )


def test_raw_weights_are_not_warned_about(lens_model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(lens_model, [IDS], methods={"tuned_lens": {"lens": TunedLens.zero(3, 32)}})


def texts_of(n=12, length=10, d_vocab=45):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, d_vocab, (length,), generator=generator).tolist() for _ in range(n)]


@pytest.mark.parametrize("name", ["gpt2-raw", "gemma2-raw", "cohere-raw"])
def test_the_streamed_gradient_is_the_one_of_autograd(name):
    model = small_model(name)
    states = collect_states(model, texts_of(2), pos_slice=None)
    readout = Readout(model)
    rows = (states.resid[0] + 0.1 * torch.randn_like(states.resid[0])).reshape(-1, 32)
    kl, x, gradient = divergence_and_gradient(readout, rows, states.resid[-1].reshape(-1, 32), 1)
    leaf = x.detach().clone().requires_grad_(True)
    log_q = readout.transform(model.unembed(leaf[None])[0]).log_softmax(-1)
    log_p = full_logits(model, states)[-1].reshape(len(rows), -1).log_softmax(-1)
    want = (log_p.exp() * (log_p - log_q)).sum(-1)
    (want_gradient,) = torch.autograd.grad(want.sum(), leaf)
    torch.testing.assert_close(kl, want.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, want_gradient.to(gradient), atol=1e-6, rtol=1e-4)


def test_descent_is_torch_sgd_with_nesterov_momentum(lens_model):
    state = _Training.start(lens_model, {}, None)
    parameter = torch.nn.Parameter(torch.zeros(3, 32, 32))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True, weight_decay=1e-3)
    for step in range(4):
        gradient = 1e-4 * torch.randn(3, 32, 32)
        for group in sgd.param_groups:
            group["lr"] = 0.7 * (1 - step / 4)
        parameter.grad = gradient.clone()
        sgd.step()
        state.descend(gradient, torch.zeros(3, 32), 0.7 * (1 - step / 4), 0.9, 1e-3, 1.0)
    torch.testing.assert_close(state.weight, parameter.detach(), atol=1e-7, rtol=1e-5)


def test_a_fit_brings_the_held_out_divergence_below_the_logit_lens(lens_model):
    with no_trace(lens_model):
        lens = TunedLens.fit(lens_model, texts_of(24), n_steps=25, tokens_per_step=80, progress=False)
    report = lens.report
    assert (report.kl < report.logit_lens_kl).all() and report.losses[-1] < report.losses[0]
    assert list(report.to_dataframe().columns) == ["layer", "tuned_lens", "logit_lens"]
    assert report.n_held_out == 2 * 10 and report.n_trained == 25 * 80
    # the report's logit lens figure is the KL that logit_lens reports at the same states
    held = _shuffled(texts_of(24))[:2]
    kl = compare(lens_model, held, pos_slice=None, methods="logit_lens")["logit_lens"].extra["kl"]
    torch.testing.assert_close(report.logit_lens_kl, kl[:-1].mean((1, 2)), atol=1e-5, rtol=1e-4)


def _shuffled(texts):
    pieces = [tuple(text) for text in texts]
    random.Random(0).shuffle(pieces)
    return [list(piece) for piece in pieces]


def test_a_fit_that_was_interrupted_ends_in_the_same_lens(lens_model, tmp_path, monkeypatch):
    module = importlib.import_module("tl_iglens.methods.tuned_lens")
    options = {"n_steps": 6, "tokens_per_step": 20, "progress": False}
    whole = TunedLens.fit(lens_model, texts_of(), **options)
    gradients, calls = module._gradients, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return gradients(*args)

    monkeypatch.setattr(module, "_gradients", interrupted)
    file = tmp_path / "fit.safetensors"
    with pytest.raises(KeyboardInterrupt):
        TunedLens.fit(lens_model, texts_of(), checkpoint=file, checkpoint_every=2, **options)
    monkeypatch.setattr(module, "_gradients", gradients)
    resumed = TunedLens.fit(lens_model, texts_of(), checkpoint=file, checkpoint_every=2, **options)
    assert torch.equal(whole.weight, resumed.weight) and torch.equal(whole.bias, resumed.bias)
    assert whole.report.losses == resumed.report.losses
    with pytest.raises(ValueError) as error:
        TunedLens.fit(lens_model, texts_of(), checkpoint=file, **{**options, "n_steps": 7})
    assert str(error.value) == (
        "checkpoint must be of this fit (n_steps=7), got one with n_steps=6; use another file, or the same settings"
    )


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("one text", {}, "texts must be a list of texts or of token ids, got str; one entry per document"),
        ([[1, 2]], {}, "texts must be at least two pieces of two tokens, got 1; give more text, or a smaller context"),
        (
            texts_of(),
            {"held_out": 1.5},
            "held_out must be between 0 and 1, got 1.5; 0.1 keeps a tenth of the text for measuring",
        ),
        (texts_of(), {"n_steps": 0}, "n_steps must be a whole number of at least 1, got 0; give a whole number"),
    ],
)
def test_a_fit_names_what_is_wrong(lens_model, texts, options, message):
    with pytest.raises(ValueError) as error:
        TunedLens.fit(lens_model, texts, progress=False, **options)
    assert str(error.value) == message


def test_texts_of_the_model_itself_are_the_same_for_the_same_seed():
    model = small_model("gpt2-raw") if _has_bridge() else pytest.skip("needs a tokenizer")
    with no_trace(model):
        first = generate_texts(model, ["The", " Paris", "The cat"], n_tokens=4, seed=3)
    assert first == generate_texts(model, ["The", " Paris", "The cat"], n_tokens=4, seed=3)
    assert first != generate_texts(model, ["The", " Paris", "The cat"], n_tokens=4, seed=4)
    assert sorted(map(len, first)) == [6, 6, 7]


# --- Jacobian lens ----------------------------------------------------------------------------------------------------


def jacobian_lens():
    analysis = pytest.importorskip("transformer_lens.tools.analysis")
    if not hasattr(analysis, "JacobianLens"):
        pytest.skip("JacobianLens needs TransformerLens 3.9")
    matrices = {l: torch.eye(32) + 0.1 * torch.randn(32, 32) for l in range(2)}
    return analysis.JacobianLens(matrices, n_prompts=3, d_model=32)


def test_the_jacobian_lens_reads_as_transformer_lens_reads_it(tmp_path):
    lens = jacobian_lens()
    model = small_model("llama-raw")
    found = compare(model, [IDS], pos_slice=None, targets=7, methods={"jacobian": {"lens": lens}})["jacobian"]
    theirs = lens.readout(model, torch.tensor([IDS]), return_full_logits=True)
    for row, layer in enumerate((0, 1)):
        want = theirs.lens_logits[layer].softmax(-1)[:, 7]
        torch.testing.assert_close(found.values[row, 0], want, atol=2e-5, rtol=0)
    assert found.labels == ("1_pre", "2_pre", "final_post") and found.boundaries == (1, 2, 3)
    plain = compare(model, [IDS], pos_slice=None, targets=7, methods="logit_lens")["logit_lens"]
    torch.testing.assert_close(found.values[-1], plain.values[-1])
    lens.save(str(tmp_path / "j.pt"), dtype=torch.float32)
    again = compare(model, [IDS], pos_slice=None, targets=7, methods={"jacobian": {"lens": tmp_path / "j.pt"}})
    torch.testing.assert_close(again["jacobian"].values, found.values)


def test_the_jacobian_lens_refuses_processed_weights():
    with pytest.raises(ValueError, match="raw"):
        compare(small_model("llama-compat"), [IDS], methods={"jacobian": {"lens": jacobian_lens()}})


def test_the_jacobian_lens_has_to_be_given():
    model = small_model("llama-raw")
    with pytest.raises(ValueError) as error:
        compare(model, [IDS], methods="jacobian")
    assert str(error.value) == (
        "lens must be a JacobianLens or its file for jacobian, got None; fit one with JacobianLens.fit(model, prompts)"
    )


def test_old_versions_of_transformer_lens_are_told_which_one_has_it(lens_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_lens.tools.analysis", None)
    with pytest.raises(ImportError) as error:
        compare(lens_model, [IDS], methods="jacobian")
    assert str(error.value) == ('jacobian needs transformer-lens 3.9 or later; run pip install "transformer-lens>=3.9"')


# --- embedding projection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gpt2-raw", "gemma3-raw", "llama-raw", "cohere-compat", "hooked-LN", "hooked-no-norm"]
)
def test_embedding_projection_is_the_product_with_the_unembedding(name):
    model = small_model(name)
    states = collect_states(model, [IDS])
    found = compare(model, [IDS], targets=7, methods={"embedding_projection": {"top_k": 3}})["embedding_projection"]
    h = states.resid[:, 0, 0].double()
    parts = torch.cat([h[:1], h.diff(dim=0)])
    norm = getattr(model, "ln_final", None)
    if norm is not None and "LN" in str(model.cfg.normalization_type):
        parts = parts - parts.mean(-1, keepdim=True)
    gain = torch.ones(32).double()
    weight = next((getattr(norm, n) for n in ("weight", "w") if isinstance(getattr(norm, n, None), torch.Tensor)), None)
    if weight is not None:
        gain = weight.detach().double() + (1 if name.startswith("gemma") else 0)
    z = (parts * gain) @ model.W_U.detach().double()
    torch.testing.assert_close(found.values[:, 0, 0].double(), z[:, 7], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.extra["top_values"][:, 0, 0].double(), z.topk(3, -1).values, atol=1e-4, rtol=1e-4)
    lowest = z.topk(3, -1, largest=False).values
    torch.testing.assert_close(found.extra["bottom_values"][:, 0, 0].double(), lowest, atol=1e-4, rtol=1e-4)
    assert float(found.gap.abs()) <= 1e-3 * float(found.expected.abs())


def test_tokens_names_what_each_row_promotes():
    model = small_model("llama-raw")
    found = compare(model, [IDS], methods={"embedding_projection": {"top_k": 2}})["embedding_projection"]
    named = found.tokens("bottom_ids")
    assert list(named) == list(found.labels) and all(len(row) == 2 for row in named.values())
    top = found.top(2)
    assert list(top.columns) == ["label", "boundary", "value"] and abs(top["value"][0]) >= abs(top["value"][1])


def test_smollm2_lens_figures(smollm2):
    lens = compare(smollm2, "The capital of France is", targets=" Paris", prepend_bos=False, methods="logit_lens")[
        "logit_lens"
    ]
    assert lens.tokens("top_ids")["final_post"][0] == " Paris" and int(lens.extra["rank"][-1]) == 0
    assert float(lens.extra["kl"][-1]) < 1e-5 and (lens.extra["kl"] >= 0).all()
