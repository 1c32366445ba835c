"""What goes wrong around an analysis: memory, disk, interrupts, broken rows, odd models. Each fault is named, nothing
half-written or half-hooked stays behind, and what is not concerned comes out right."""

import dataclasses
import errno
import json
import os
import resource
import signal
import threading
import time
import warnings

import pytest
import torch
from conftest import IDS, IS_4
from conftest import close_or_nan as close
from fixtures import bridge, hooked, needs_bridge, no_trace, shared_bridge, tokenizer
from safetensors.torch import load_file, save_file

from tl_iglens import (
    AblationResult,
    IGLensResult,
    NonFiniteStateError,
    ReadoutMismatchError,
    TunedLens,
    ablate,
    collect_states,
    compare,
    demo,
    direct_probability_attribution,
    explain_generation,
    ig_lens,
    probability_flow,
    track,
    write_report,
)
from tl_iglens.readout import Readout

POST1 = "blocks.1.hook_resid_post"
ROWS = [IDS, [*IDS[1:], 12], IDS[::-1]]


@pytest.fixture(scope="module")
def model():
    """A small random model with a tokenizer, of whichever class this TransformerLens has."""
    try:
        needs_bridge()
    except pytest.skip.Exception:
        return hooked("LN", d_vocab=320, n_ctx=64, tokenizer=tokenizer())
    return shared_bridge("gpt2")


@pytest.fixture(scope="module")
def results(model):
    return {
        "credits": ig_lens(model, torch.tensor([IDS]), pos_slice=None),
        "effects": ablate(model, torch.tensor([IDS])),
        "components": direct_probability_attribution(model, torch.tensor([IDS])),
    }


ANALYSES = {
    "ig_lens": lambda model, **o: ig_lens(model, torch.tensor(ROWS), **o),
    "gradients": lambda model, **o: ig_lens(model, torch.tensor(ROWS), estimator="midpoint", n_steps=2, **o),
    "collect_states": lambda model, **o: collect_states(model, torch.tensor(ROWS), **o),
    "components": lambda model, **o: direct_probability_attribution(model, torch.tensor(ROWS), **o),
    "compare": lambda model, **o: compare(model, torch.tensor(ROWS), **o),
    "track": lambda model, **o: track(model, torch.tensor(ROWS), **o),
    "flow": lambda model, **o: probability_flow(model, torch.tensor(ROWS), **o),
    "ablate": lambda model, **o: ablate(model, torch.tensor(ROWS), **o),
    "answer": lambda model, **o: explain_generation(model, IDS, max_new_tokens=3, **o),
}


# --- hooks that break off -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError], ids=["interrupt", "exception"])
@pytest.mark.parametrize("name", ANALYSES)
def test_a_forward_that_breaks_off_leaves_no_trace(model, name, error):
    def breaks_off(act, hook):
        raise error("from the caller's hook")

    with no_trace(model), pytest.raises(error, match="from the caller's hook"):
        ANALYSES[name](model, fwd_hooks=[(POST1, breaks_off)])


# --- memory -------------------------------------------------------------------------------------------


class Memory:
    """Tiles of more than so many logits do not fit, as torch would say it on one device or another."""

    def __init__(self, monkeypatch, limit, error):
        self.limit, self.error, self.sizes = limit, error, []
        inherited = Readout._tile
        monkeypatch.setattr(Readout, "_tile", lambda readout, *args: self.tile(inherited, readout, *args))

    def tile(self, inherited, readout, x, start, stop, buffer):
        if len(x) * (stop - start) > self.limit:
            raise self.error
        self.sizes.append((len(x), stop - start))
        return inherited(readout, x, start, stop, buffer)


ERRORS = {
    "cuda": torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation"),
    "linux": RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
    "windows": RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate"),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB)"),
}


@pytest.mark.parametrize("system", ERRORS)
@pytest.mark.parametrize("limit", [7 * 64, 5 * 64, 64])
def test_a_tile_that_does_not_fit_is_halved(model, monkeypatch, system, limit):
    options = {"pos_slice": None, "targets": 7}
    usual = ig_lens(model, torch.tensor(ROWS), **options)
    memory = Memory(monkeypatch, limit, ERRORS[system])
    close(ig_lens(model, torch.tensor(ROWS), **options).attribution, usual.attribution, 1e-6)
    widths = {width for _, width in memory.sizes}
    assert widths <= {320, 256, 128, 64} and min(widths) == 64  # 84 states × 320 tokens: both were cut
    assert max(rows for rows, _ in memory.sizes) <= limit // 64


@pytest.mark.parametrize("name", ["gradients", "compare", "track", "flow", "components"])
def test_other_readings_fit_too(model, monkeypatch, name):
    usual = ANALYSES[name](model, pos_slice=None)
    Memory(monkeypatch, 64 * 9, ERRORS["linux"])
    again = ANALYSES[name](model, pos_slice=None)
    if name == "compare":
        for key in ("rank", "entropy", "kl", "top_values"):
            close(again["logit_lens"].extra[key], usual["logit_lens"].extra[key], 1e-5)
        return
    first = "gained" if name == "flow" else "attribution"
    close(getattr(again, first), getattr(usual, first), 1e-6)


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_gradients_of_capped_and_scaled_heads_fit_too(monkeypatch, family):
    model = shared_bridge(family)
    options = {"estimator": "midpoint", "n_steps": 2, "pos_slice": None}
    usual = ig_lens(model, torch.tensor(ROWS), **options)
    Memory(monkeypatch, 64 * 9, ERRORS["cuda"])
    close(ig_lens(model, torch.tensor(ROWS), **options).attribution, usual.attribution, 1e-6)


@pytest.mark.parametrize(("system", "kind"), [("cuda", torch.cuda.OutOfMemoryError), ("linux", RuntimeError)])
def test_no_memory_at_all_is_named(model, monkeypatch, system, kind):
    Memory(monkeypatch, 0, ERRORS[system])
    first_line = str(ERRORS[system]).splitlines()[0]
    with no_trace(model), pytest.raises(RuntimeError) as caught:
        ig_lens(model, torch.tensor(ROWS))
    assert type(caught.value) is kind and str(caught.value) == (
        f"model must be readable in the free memory of cpu, got none left for 1 × 64 logits ({first_line}); "
        "free some, or analyse fewer tokens"
    )


def test_another_error_in_a_tile_is_passed_on(model, monkeypatch):
    memory = Memory(monkeypatch, 0, RuntimeError("something else"))
    with no_trace(model), pytest.raises(RuntimeError, match="something else"):
        ig_lens(model, torch.tensor(ROWS))
    assert not memory.sizes


# --- rows that are not finite -------------------------------------------------------------------------


def spoils(row, value=torch.nan, place=POST1):
    """A hook that makes one row of the batch not finite, at its third and all later positions."""

    def spoil(act, hook):
        act = act.clone()
        act[row, 2:, 5] = value
        return act

    return [(place, spoil)]


def said_of(row, position=6, point="2_pre"):
    return (
        f"model must be finite on the residual stream, got NaN or infinity at {point}, row {row}, position {position} "
        "(float32); that row is left out of the result and the others stand, look at that layer, or load the model in "
        "a wider dtype"
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("pos_slice", [-1, None])
def test_a_row_that_is_not_finite_leaves_the_others_right(model, value, pos_slice):
    clean = ig_lens(model, torch.tensor(ROWS), pos_slice=pos_slice, targets=7)
    with no_trace(model), pytest.warns(UserWarning) as caught:
        result = ig_lens(model, torch.tensor(ROWS), pos_slice=pos_slice, targets=7, fwd_hooks=spoils(1, value))
    assert [str(w.message) for w in caught] == [said_of(1, 6 if pos_slice == -1 else 2)]
    for row in (0, 2):
        close(result.attribution[:, row], clean.attribution[:, row], 1e-6)
        close(result.levels[:, row], clean.levels[:, row], 1e-6)
    assert result.attribution[:, 1].isnan().all() and result.model_level[1].isnan().all()
    frame = result.to_dataframe()
    assert set(frame["batch"]) == {0, 2} and not frame.isna().any().any()
    assert "undefined" in result.onset().labels[1] and result.tokens.tolist() == ROWS
    assert "nan" not in result._repr_html_()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_rows_keep_their_numbers_across_micro_batches(model, batch_size):
    seen = []

    def spoil(act, hook):
        """Only the prompt that begins with the second row's token."""
        seen.append(len(act))
        act = act.clone()
        for row in range(len(act)):
            if sum(seen[:-1]) + row == 1:
                act[row] = torch.nan
        return act

    clean = ig_lens(model, torch.tensor(ROWS), targets=7)
    with pytest.warns(UserWarning) as caught:
        result = ig_lens(
            model, torch.tensor(ROWS), targets=7, batch_size=batch_size, fwd_hooks=[("blocks.0.hook_resid_pre", spoil)]
        )
    assert [str(w.message) for w in caught] == [said_of(1, point="0_pre")]
    close(result.attribution[:, [0, 2]], clean.attribution[:, [0, 2]], 1e-6)
    assert result.attribution[:, 1].isnan().all()


def test_no_row_left_is_an_error(model):
    for rows, batch_size in ((ROWS, None), (ROWS, 1), (ROWS[:1], None)):
        with no_trace(model), pytest.raises(NonFiniteStateError) as caught:
            ig_lens(model, torch.tensor(rows), batch_size=batch_size, fwd_hooks=spoils(slice(None)))
        assert str(caught.value) == (
            "model must be finite on the residual stream, got NaN or infinity at 2_pre, row 0, position 6 (float32); "
            "look at that layer, or load the model in a wider dtype"
        )


@pytest.mark.filterwarnings("ignore:model must be finite on the residual stream")
@pytest.mark.parametrize("name", ["compare", "track", "flow", "components", "gradients"])
def test_every_analysis_leaves_such_a_row_out(model, name):
    first = {"flow": "gained", "compare": "values"}.get(name, "attribution")
    for pos_slice in (-1, None):
        clean, spoiled = (
            ANALYSES[name](model, pos_slice=pos_slice, fwd_hooks=hooks) for hooks in ((), spoils(1))
        )
        if name == "compare":
            clean, spoiled = clean["logit_lens"], spoiled["logit_lens"]
        ours, theirs = getattr(spoiled, first), getattr(clean, first)
        close(ours[:, [0, 2]], theirs[:, [0, 2]], 1e-6)
        assert ours[:, 1].isnan().all()


@pytest.mark.filterwarnings("ignore:model must be finite on the residual stream")
def test_states_without_a_row_serve_again(model):
    states = collect_states(model, torch.tensor(ROWS), pos_slice=None, fwd_hooks=spoils(1))
    assert states.left_out.tolist() == [False, True, False] and states.positions[1].tolist() == [-1] * 7
    clean = collect_states(model, torch.tensor(ROWS), pos_slice=None)
    for options in ({"pos_slice": -1}, {"pos_slice": None, "targets": "next"}, {"pos_slice": (0, 3), "baseline": "bos"}):
        ours, theirs = (ig_lens(model, states=s, **options) for s in (states, clean))
        close(ours.attribution[:, [0, 2]], theirs.attribution[:, [0, 2]], 1e-6)
        assert ours.attribution[:, 1].isnan().all()


def test_logits_that_overflow_are_named():
    """The stream is finite and the head is not: no level may come out blank."""
    model = bridge("llama") if IS_4 else hooked("RMS", d_vocab=320)
    with torch.no_grad():
        (model.original_model.lm_head.weight if IS_4 else model.unembed.W_U).mul_(3e38)
    with no_trace(model), pytest.raises(NonFiniteStateError) as caught:
        ig_lens(model, IDS)
    assert str(caught.value) == (
        "model must be finite on the residual stream, got NaN or infinity at logits, row 0, position 6 (float32); look "
        "at that layer, or load the model in a wider dtype"
    )


def test_a_token_that_cannot_come_has_no_log_probability(model):
    name = "unembed.hook_out"
    if not IS_4:
        pytest.skip("the head of a HookedTransformer is its matrix and bias")
    bias = model.unembed.b_U
    assert name in model.hook_dict and bias.shape == (320,)
    with torch.no_grad():
        before = bias.clone()
        bias[7] = -torch.inf
    try:
        assert float(ig_lens(model, IDS, targets=7).levels.abs().max()) == 0  # its probability is 0 everywhere
        with no_trace(model), pytest.raises(NonFiniteStateError) as caught:
            ig_lens(model, IDS, targets=7, quantity="log_prob")
    finally:
        with torch.no_grad():
            bias.copy_(before)
    assert str(caught.value) == (
        "quantity must be finite along the path, got a log_prob that is not at 0_pre; use quantity='prob', or load the "
        "model in a wider dtype"
    )


# --- files --------------------------------------------------------------------------------------------


@pytest.fixture
def little_disk():
    """Files may not grow beyond 4 kB while this is open; what writes more meets the error of a full disk."""
    inherited = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full:
        def __enter__(self):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

        def __exit__(self, *error):
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    yield Full()
    signal.signal(signal.SIGXFSZ, inherited)


@pytest.mark.parametrize("name", ["credits", "effects", "components", "report", "before"])
def test_a_full_disk_leaves_nothing_half_written(results, tmp_path, little_disk, name):
    path = tmp_path / ("r.html" if name == "report" else "r.safetensors")
    large = dataclasses.replace(results["credits"], token_strings=(("x" * 2000,) * 7,))
    if name == "before":
        large.save(path)
        before = path.read_bytes()
    write = {
        "credits": lambda: large.save(path),
        "before": lambda: large.save(path),
        "effects": lambda: dataclasses.replace(results["effects"], token_strings=large.token_strings).save(path),
        "components": lambda: dataclasses.replace(results["components"], token_strings=large.token_strings).save(path),
        "report": lambda: write_report(large, path),
    }[name]
    with pytest.raises(OSError) as caught, little_disk:
        write()
    if name == "report":
        assert caught.value.errno == errno.EFBIG
    else:
        assert str(caught.value).startswith(f"path must be a place that can be written to, got {path} (")
        assert str(caught.value).endswith("); free some space, or choose another place")
    assert [file.name for file in tmp_path.iterdir()] == (["r.safetensors"] if name == "before" else [])
    if name == "before":
        assert path.read_bytes() == before
    write()
    assert path.stat().st_size > 4096


def test_a_checkpoint_of_a_lens_is_whole_or_not_there(model, tmp_path, little_disk):
    texts = [[5, 9, 20, 33, 40, 17]] * 8
    about = {"n_steps": 2, "tokens_per_step": 12, "lr": 0.1, "checkpoint": tmp_path / "fit", "progress": False}
    with pytest.raises(OSError, match=r"^path must be a place that can be written to, got .*fit \("), little_disk:
        TunedLens.fit(model, texts, **about)
    assert not list(tmp_path.iterdir())


def test_places_that_are_no_file(results, tmp_path):
    for path in ("", tmp_path):
        shown = "." if path == "" else str(path)
        with pytest.raises(ValueError) as caught:
            results["credits"].save(path)
        assert str(caught.value) == (
            f"path must be a file to write, got {shown!r}, a folder; name a file in it, such as result.safetensors"
        )
    with pytest.raises(OSError, match="path must be a place that can be written to, got "):
        results["effects"].save(tmp_path / "absent" / "r.safetensors")
    assert not list(tmp_path.iterdir())


def rewritten(path, **changes):
    """The same file with other metadata; a function changes what is there, None takes it away."""
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        meta = file.metadata()
    for name, change in changes.items():
        meta[name] = change(meta.get(name)) if callable(change) else change
    save_file(load_file(path), str(path), metadata={name: value for name, value in meta.items() if value is not None})
    return path


KINDS = {"credits": IGLensResult, "effects": AblationResult}


@pytest.mark.parametrize("name", KINDS)
def test_damaged_and_foreign_files_are_named(results, tmp_path, name):
    kind = KINDS[name]
    other = KINDS["effects" if name == "credits" else "credits"]
    todo = f"; give a file written by {kind.__name__}.save"
    path = results[name].save(tmp_path / "r")
    whole = path.read_bytes()
    for content in (whole[:-9], whole[:40], b"", b"words", b"\xff" * 64, json.dumps({"a": 1}).encode()):
        path.write_bytes(content)
        with pytest.raises(ValueError) as caught:
            kind.load(path)
        assert str(caught.value).startswith(f"path must be a result file, got {path} (")
        assert str(caught.value).endswith(")" + todo)
    path.write_bytes(whole)
    with pytest.raises(ValueError) as caught:
        other.load(path)
    assert str(caught.value) == (
        f"path must be a result file, got {path}, a safetensors file of something else; give a file written by "
        f"{other.__name__}.save"
    )
    for changes in ({"fields": "{"}, {"fields": "[]"}, {"fields": None}, {"fields": "{}"}, {"info": '{"model": 3}'}, {"info": "[]"}):
        path.write_bytes(whole)
        with pytest.raises(ValueError) as caught:
            kind.load(rewritten(path, **changes))
        assert str(caught.value).startswith(f"path must be a result file, got {path} (")
    with pytest.raises(FileNotFoundError):
        kind.load(tmp_path / "absent")


@pytest.mark.parametrize("name", KINDS)
def test_files_of_other_versions(results, tmp_path, name):
    kind, result = KINDS[name], results[name]

    def lacks(words):
        """A file of an earlier version has not the fields that came later."""
        known = json.loads(words)
        return json.dumps({key: value for key, value in known.items() if key not in ("notes", "analysis", "step_attribution")})

    def adds(words):
        """One of a later version of the same format has fields this one does not know."""
        return json.dumps(json.loads(words) | {"later": [1, {"a": 2}]})

    for change in (lacks, adds):
        path = rewritten(result.save(tmp_path / "r"), fields=change, info=change)
        again = kind.load(path)
        assert again.info == result.info and again.labels == result.labels and again.token_strings == result.token_strings
        first = "attribution" if name == "credits" else "p_ablated"
        assert torch.equal(getattr(again, first), getattr(result, first))
    # before fields were written apart, `info` stood among them
    info = json.dumps(dataclasses.asdict(result.info))
    path = rewritten(result.save(tmp_path / "r"), info=None, fields=lambda w: json.dumps(json.loads(w) | {"info": json.loads(info)}))
    assert kind.load(path).info == result.info
    with pytest.raises(ValueError) as caught:
        kind.load(rewritten(result.save(tmp_path / "r"), format="2"))
    assert str(caught.value) == "path must be a result file of format 1 or older, got format 2; update tl-iglens"


# --- the cache of the embedded model ------------------------------------------------------------------

SOURCE = dataclasses.replace(demo._SOURCES["smollm2"], title="Tiny")


def builds(folder, pause=0.0):
    """A stand-in for conversion: two files, a pause between them."""
    (folder / "model.safetensors").write_bytes(b"half")
    time.sleep(pause)
    (folder / "model.safetensors").write_bytes(b"the whole of it")
    (folder / "config.json").write_text("{}")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_fetch_gguf", lambda source, work, stages: work / "model.gguf")
    monkeypatch.setattr(demo, "_convert", lambda gguf, folder, source: builds(folder))
    return tmp_path / "cache" / "Tiny"


def whole(target):
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert (target / "model.safetensors").read_bytes() == b"the whole of it"
    assert {path.name for path in target.parent.iterdir()} <= {"Tiny", "Tiny.lock"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=["interrupt", "disk"])
@pytest.mark.parametrize("stage", ["_fetch_gguf", "_convert", "_seal"])
def test_a_cache_that_breaks_off_is_built_anew(cache, monkeypatch, stage, error):
    def breaks_off(first, folder, *rest):
        if stage != "_seal":
            (folder / "half").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(demo, stage, breaks_off)
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else OSError):
            demo._prepare(SOURCE, cache, progress=False)
    assert not cache.exists() and {path.name for path in cache.parent.iterdir()} <= {"Tiny.lock"}
    demo._prepare(SOURCE, cache, progress=False)
    whole(cache)


def test_a_half_written_cache_is_not_used(cache):
    cache.mkdir(parents=True)
    builds(cache)  # everything but the manifest that vouches for it
    (cache / "model.safetensors").write_bytes(b"half")
    leftover = cache.parent / "Tiny.tmp-of-a-run-that-was-killed"
    leftover.mkdir()
    demo._prepare(SOURCE, cache, progress=False)
    whole(cache)


def test_two_at_once_build_it_once(cache, monkeypatch):
    count = []
    monkeypatch.setattr(demo, "_convert", lambda gguf, folder, source: (count.append(1), builds(folder, pause=0.3)))
    both = [threading.Thread(target=demo._prepare, args=(SOURCE, cache, False)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(30)
    assert len(count) == 1
    whole(cache)


# --- odd models ---------------------------------------------------------------------------------------


class Packed(torch.nn.Module):
    """A linear map whose weight is bytes, as quantisation leaves it; only its forward knows what they mean."""

    def __init__(self, weight, bias=None):
        super().__init__()
        self.step = float(weight.abs().max()) / 127
        self.weight = torch.nn.Parameter((weight / self.step).round().add(128).to(torch.uint8), requires_grad=False)
        self.bias = bias

    def unpacked(self):
        return (self.weight.float() - 128) * self.step

    def forward(self, x):
        return torch.nn.functional.linear(x, self.unpacked(), self.bias)


def packed(family="llama", part="mlp"):
    """A bridge around a model in which one linear map of a block, or the head, is quantised."""
    needs_bridge()
    from fixtures import hf_model
    from transformer_lens.model_bridge import TransformerBridge

    hf = hf_model(family)
    owner, name = (hf, "lm_head") if part == "head" else (hf.model.layers[1].mlp, "down_proj")
    linear = getattr(owner, name)
    setattr(owner, name, Packed(linear.weight.detach(), linear.bias))
    return TransformerBridge.boot_transformers("fx", hf_model=hf, tokenizer=tokenizer(), dtype=torch.float32, device="cpu")


def test_quantised_blocks_are_read_and_only_their_matrices_refused():
    model = packed()
    result = ig_lens(model, torch.tensor([IDS]))
    with torch.no_grad():
        own = model(torch.tensor([IDS]), return_type="logits")[0, -1].double().softmax(-1)
    close(result.levels[-1, 0, 0], own[int(result.targets)], 1e-6)
    assert result.completeness_gap.abs().max() <= 1e-6
    parts = direct_probability_attribution(model, torch.tensor([IDS]))
    close(parts.attribution[2:4].sum(0), result.attribution[1], 1e-6)
    with no_trace(model), pytest.raises(Exception, match=r"W_out.* torch\.uint8|unit must be .*hook_mlp_out"):
        direct_probability_attribution(model, torch.tensor([IDS]), unit="neuron")


def test_a_quantised_head_is_named():
    model = packed(part="head")
    for call in (ig_lens, direct_probability_attribution, compare, ablate, track):
        with no_trace(model), pytest.raises(NotImplementedError) as caught:
            call(model, torch.tensor([IDS]))
        assert str(caught.value) == (
            "model must be one with a readable unembedding matrix [32, d_vocab], got W_U of dtype torch.uint8; load the "
            "model without quantising or offloading its unembedding"
        )


@pytest.mark.parametrize(
    ("weight", "got"),
    [
        (torch.zeros(32, 320, dtype=torch.float8_e4m3fn), "W_U of dtype torch.float8_e4m3fn"),
        (torch.zeros(10240 // 2, 1), "W_U of shape (5120, 1)"),
        (torch.zeros(32, 320, device="meta"), "W_U on the meta device"),
        (None, "NoneType in its place"),
    ],
    ids=["float8", "packed", "offloaded", "absent"],
)
def test_a_head_without_a_matrix_is_named(weight, got):
    head = type("Head", (), {"cfg": type("Config", (), {"d_model": 32, "normalization_type": None}), "W_U": weight, "unembed": None})
    with pytest.raises(NotImplementedError) as caught:
        Readout(head())
    assert str(caught.value) == (
        f"model must be one with a readable unembedding matrix [32, d_vocab], got {got}; load the model without "
        "quantising or offloading its unembedding"
    )


@pytest.mark.parametrize("name", ["ig_lens", "ablate", "answer"])
def test_compiled_models(model, name):
    compiled = torch.compile(model, backend="eager")
    first = "p_ablated" if name == "ablate" else "attribution"
    close(getattr(ANALYSES[name](compiled), first), getattr(ANALYSES[name](model), first), 1e-5)


@pytest.mark.parametrize("name", ["ig_lens", "gradients", "components", "ablate", "compare"])
def test_models_made_in_inference_mode(name):
    with torch.inference_mode():
        model = bridge("gpt2") if IS_4 else hooked("LN", d_vocab=320)
    assert next(model.parameters()).is_inference()
    usual = bridge("gpt2") if IS_4 else hooked("LN", d_vocab=320)
    first = "p_ablated" if name == "ablate" else "attribution"
    ours, theirs = ANALYSES[name](model), ANALYSES[name](usual)
    if name == "compare":
        ours, theirs, first = ours["dla"], theirs["dla"], "values"
    close(getattr(ours, first), getattr(theirs, first), 1e-6)


@pytest.mark.parametrize("size", [1.0, 30.0, 3e3, 6e4])
def test_half_precision_is_right_or_refused(size):
    """A float16 model whose stream grows: named as soon as something overflows, its own output as long as not."""
    model = bridge("llama", dtype=torch.float16) if IS_4 else hooked("RMS", d_vocab=320, dtype=torch.float16)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(0))
    hooks = [(f"blocks.{b}.hook_resid_post", lambda act, hook: act + (size * direction).to(act)) for b in (0, 1)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = ig_lens(model, IDS, targets=7, fwd_hooks=hooks)
    except (NonFiniteStateError, ReadoutMismatchError) as error:
        assert size > 1e3 and "float16" in str(error)
        return
    with torch.no_grad():
        own = model.run_with_hooks(torch.tensor([IDS]), fwd_hooks=hooks)[0, -1].double().softmax(-1)[7]
    assert result.attribution.isfinite().all() and size < 6e4
    close(result.levels[-1, 0, 0], own, 1e-3)
