"""The command iglens: its table, its JSON and its refusals."""

import functools
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from fixtures import hf_model, hooked, needs_bridge, shared_bridge, tokenizer

from tl_iglens import IGLensResult, cli, ig_lens
from tl_iglens.demo import demo_model_path, load_demo_model
from tl_iglens.generation import explain_generation

NUMBER = re.compile(r"[+-]\d\.\d{4}")
# "What is the capital of Vietnam?" through the chat template of SmolLM2-135M-Instruct.
PROMPT_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712),
    *(8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 10223, 47, 2, 198, 1, 520, 9531, 198),
]


@functools.cache
def demo():
    """The embedded model, loaded once for this file."""
    return load_demo_model()


@functools.cache
def small():
    """A small random model with a tokenizer: a bridge where there is one."""
    if importlib.util.find_spec("transformer_lens.model_bridge"):
        return shared_bridge("llama")
    return hooked(tokenizer=tokenizer(), d_vocab=291, n_ctx=64)


@pytest.fixture
def iglens(monkeypatch, capsys):
    """Run the command in this process: exit status, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr("tl_iglens.demo.load_demo_model", lambda progress: demo())

    def run(*words, stdin=""):
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def tiny(monkeypatch):
    """A small random model in place of the one that --model names."""
    model = small()
    monkeypatch.setattr(cli, "load_model", lambda name, progress: model)
    return model


def receipts(output):
    """The tables: per token {row label: cells}, every cell split from its level."""
    found = []
    for block in re.sub(r"\n +\n", "\n", output).split("\n\n"):  # a line of blanks precedes the totals
        lines = block.splitlines()
        if not lines or not lines[0].startswith("token "):
            continue
        starts = [m.start() for m in re.finditer(r"(?<=  )\S", lines[0])]
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            column = {"token": lines[0][start:stop].strip()}
            for line in lines[2:]:
                column[line[: starts[0]].strip()] = line[start:stop].strip()
            found.append(column)
    return found


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_every_receipt_adds_up_at_every_width(iglens, tiny, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, err = iglens("The cat", "--model", "tiny", "--max-new-tokens", "9", "--mid")
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    result = explain_generation(tiny, "The cat", max_new_tokens=9, incl_mid=True)
    columns = receipts(out)
    assert len(columns) == 9
    for p, column in enumerate(columns):
        for label in result.labels:
            credit = float(result.attribution[result.labels.index(label), 0, p])
            shown = column[label].split()
            assert shown == ["·"] if abs(credit) < 5e-5 else shown[0] == f"{credit:+.4f}"
        assert float(column["Σ"]) == pytest.approx(float(result.delta[0, p]), abs=1e-4)
        assert float(column["p of the model"]) == pytest.approx(float(result.model_level[0, p]), abs=1e-4)
        assert column["onset"] == result.onset().labels[0][p]
    assert max(map(len, out.splitlines())) <= width


def test_segments_without_mass_are_gathered_and_named(iglens):
    words = ("The capital of France is", "--target", " Paris")
    status, out, err = iglens(*words)
    assert (status, err) == (0, "")
    (column,) = receipts(out)
    assert column["token"] == "·Paris"
    rows = [label for label in column if label.endswith("_block")]
    assert rows == ["28_block", "29_block"]
    total = sum(float(NUMBER.match(column[label]).group()) for label in [*rows, "other"])
    assert total == pytest.approx(0.7725, abs=2e-4)
    assert column["Σ"] == column["Δp"] == "+0.7725"
    assert column["p of the model"] == "0.7725"
    assert column["onset"] == "29_block"
    largest = ig_lens(demo(), words[0], targets=" Paris", prepend_bos=False).attribution[:28].abs().max()
    assert f"other: 28 of 30 segments (0_block … 27_block), none beyond ±{largest:.4f}\n" in out
    assert "\nfed, 5 tokens: The capital of France is\nids: 504 3575 282 4649 314\n" in out


def test_markup_and_control_characters_in_tokens_are_shown_literally(iglens, tiny, monkeypatch):
    result = explain_generation(tiny, "The cat", max_new_tokens=3)
    names = (("[bold]", "[/]x", "\x1b[31m"),)
    object.__setattr__(result, "target_strings", names)
    monkeypatch.setattr(cli, "explain_generation", lambda *a, **k: result)
    status, out, _ = iglens("[red]The[/red] cat", "--model", "tiny")
    assert status == 0
    assert out.startswith("prompt: [red]The[/red] cat\n")
    assert [c["token"] for c in receipts(out)] == ["[bold]", "[/]x", r"\x1b[31m"]
    assert "\x1b" not in out


def test_the_onset_rule_and_the_path_are_those_asked_for(iglens, tiny):
    words = ("The cat", "--model", "tiny", "--max-new-tokens", "3", "--layers", "0,2", "--baseline", "zero")
    _, out, _ = iglens(*words, "--onset", "largest", "--estimator", "midpoint", "--n-steps", "4", "--json")
    answer = json.loads(out)
    result = explain_generation(
        tiny, "The cat", max_new_tokens=3, layers=[0, 2], baseline="zero", estimator="midpoint", n_steps=4
    )
    assert answer["segments"] == list(result.labels) == ["embed", "0-1_blocks", "2_block"]
    assert [c["onset"]["segment"] for c in answer["columns"]] == list(result.onset("largest").labels[0])
    assert [c["credits"] for c in answer["columns"]] == result.attribution[:, 0].T.tolist()
    assert (answer["info"]["estimator"], answer["info"]["n_steps"], answer["info"]["baseline"]) == (
        "midpoint",
        4,
        "zero",
    )


# --- JSON, chat and raw --------------------------------------------------------------------------


def test_json_is_one_object_whose_columns_add_up(iglens):
    status, out, err = iglens("What is the capital of Vietnam?", "--json", "--max-new-tokens", "4")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert out.count("\n") == 1
    assert answer["answer"] == "The capital of Vietnam"
    assert answer["prompt"] == "What is the capital of Vietnam?"
    assert answer["fed"].endswith(
        "<|im_start|>user\nWhat is the capital of Vietnam?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer["ids"] == [*PROMPT_IDS, 504, 3575, 282, 10223]
    assert answer["prompt_length"] == 37
    assert len(answer["segments"]) == len(answer["boundaries"]) == len(answer["points"]) - 1 == 30
    for column in answer["columns"]:
        assert sum(column["credits"]) == pytest.approx(column["delta"], abs=1e-6)
        assert column["levels"][-1] - column["levels"][0] == pytest.approx(column["delta"], abs=1e-6)
        assert column["levels"][-1] == pytest.approx(column["model"], abs=2e-5)


def test_chat_raw_bos_and_target_decide_what_is_fed(iglens):
    def fed(*words):
        status, out, err = iglens("Hi", "--json", "--max-new-tokens", "1", *words)
        assert (status, err) == (0, "")
        answer = json.loads(out)
        return answer["ids"][: answer["prompt_length"]], answer

    model = demo()
    plain = model.tokenizer("Hi", add_special_tokens=False)["input_ids"]
    chat = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert fed()[0] == fed("--chat")[0] == chat
    assert fed("--raw")[0] == fed("--no-bos")[0] == plain
    assert fed("--bos")[0] == [1, *plain]
    ids, answer = fed("--target", " there")
    assert ids == plain
    assert answer["ids"] == plain
    assert answer["answer"] == " there"
    ids, answer = fed("--target", "Hi", "--chat")
    assert ids == chat
    alone = ig_lens(model, chat, targets="Hi")
    assert answer["columns"][0]["credits"] == pytest.approx(alone.attribution[:, 0, 0].tolist(), abs=1e-6)


def test_a_dash_reads_standard_input(iglens, tiny):
    status, out, _ = iglens("-", "--model", "tiny", "--json", "--max-new-tokens", "2", stdin="The\n cat\n")
    assert status == 0
    assert json.loads(out)["prompt"] == "The\n cat"
    assert json.loads(out)["ids"][:-2] == ig_lens(tiny, "The\n cat").tokens[0].tolist()


def test_a_warning_about_the_prompt_is_one_line_on_standard_error(iglens, tiny):
    status, out, err = iglens("<s>The cat", "--model", "tiny", "--json", "--max-new-tokens", "1")
    assert status == 0
    assert json.loads(out)["ids"][:2] == [0, 0]
    assert err == (
        "iglens: note: row 0 of input starts with the BOS id 0 twice; "
        "pass prepend_bos=False if the text already has it\n"
    )


def test_save_writes_what_was_shown(iglens, tiny, tmp_path):
    file = tmp_path / "answer.safetensors"
    status, out, _ = iglens("The cat", "--model", "tiny", "--save", str(file), "--max-new-tokens", "2")
    assert status == 0
    assert f"saved to {file}" in out.replace("\n", " ")
    result = explain_generation(tiny, "The cat", max_new_tokens=2)
    assert torch.equal(IGLensResult.load(file).attribution, result.attribution)


# --- models --------------------------------------------------------------------------------------


def needs_folders():
    bridge = needs_bridge()
    if int(version("transformer-lens").split(".")[0]) < 3:
        pytest.skip("TransformerLens 2 cannot read local folders")
    return bridge


@pytest.fixture
def folder(tmp_path):
    needs_folders()
    hf_model("llama").save_pretrained(tmp_path / "tiny")
    tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_local_folder_is_the_model_in_it(iglens, folder):
    status, out, err = iglens("The cat", "--model", str(folder), "--json", "--max-new-tokens", "2")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    with torch.no_grad():
        logits = hf_model("llama")(torch.tensor([answer["ids"]])).logits[0]
    place = answer["prompt_length"] - 1
    for step, column in enumerate(answer["columns"]):
        assert column["id"] == int(logits[place + step].argmax())
        assert column["model"] == pytest.approx(float(logits[place + step].softmax(-1).max()), abs=1e-5)


def test_the_embedded_model_as_a_folder_gives_the_same_credits(iglens):
    needs_folders()
    words = ("The capital of France is", "--target", " Paris", "--json", "--no-bos")
    by_folder = json.loads(iglens(*words, "--model", str(demo_model_path()))[1])
    embedded = json.loads(iglens(*words)[1])
    assert by_folder["ids"] == embedded["ids"]
    assert by_folder["columns"][0]["credits"] == pytest.approx(embedded["columns"][0]["credits"], abs=2e-5)


def test_transformer_lens_2_refuses_folders_by_name(iglens, monkeypatch):
    def from_pretrained_no_processing(name):
        raise AssertionError("not reached")

    monkeypatch.setattr(cli, "_loader", lambda: from_pretrained_no_processing)
    folder = str(demo_model_path())
    assert iglens("Hi", "--model", folder) == (
        2,
        "",
        f"iglens: model must be a Hugging Face name, got the folder {folder!r} with TransformerLens "
        f'{version("transformer-lens")}; install "transformer-lens>=3.9" to read local folders\n',
    )


# --- refusals ------------------------------------------------------------------------------------

ESTIMATOR = (
    "estimator must be one of prediction_aware, midpoint, left, right, trapezoid, gauss_legendre, "
    "got 'exact'; check the spelling"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("",), "prompt must be some text, got ''; give it in quotes, or - to read standard input"),
        (("-",), "prompt must be some text, got ''; give it in quotes, or - to read standard input"),
        (
            ("Hi", "--layers", "0,x"),
            "layers must be whole numbers separated by commas, got '0,x'; for example 0,6,12",
        ),
        (("Hi", "--estimator", "exact"), ESTIMATOR),
        (
            ("Hi", "--baseline", "one"),
            "baseline must be one of embed, zero, mean, bos, got 'one'; check the spelling",
        ),
        (
            ("Hi", "--onset", "first"),
            "onset must be one of mass, largest, settled, got 'first'; check the spelling",
        ),
        (
            ("Hi", "--n-steps", "0"),
            "n-steps must be a whole number of at least 1, got 0; give a whole number",
        ),
        (
            ("Hi", "--max-new-tokens", "-1"),
            "max-new-tokens must be a whole number of at least 1, got -1; give a whole number",
        ),
        (
            ("Hi", "--save", "/nowhere/at/all"),
            "save must be a file in an existing folder that can be written, got '/nowhere/at/all'; "
            "choose another place",
        ),
        (
            ("Hi", "--model", "./nowhere"),
            "model must be a Hugging Face name or an existing folder, got './nowhere'; check the path",
        ),
    ],
)
def test_bad_input_is_one_line_before_any_model_is_loaded(iglens, monkeypatch, words, message):
    def never(name):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(cli, "_loader", lambda: never)
    monkeypatch.setattr("tl_iglens.demo.load_demo_model", never)
    assert iglens(*words) == (2, "", f"iglens: {message}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--layers", "0,99"),
            "layers must be strictly increasing boundaries between 0 and n_layers=3, got [0, 99]; "
            "boundary l is the state that enters block l, and boundary n_layers is always added",
        ),
        (
            ("--target", " Paris is"),
            "targets must be a single token, got ' Paris is', which is the 2 tokens [' Paris', ' is']; "
            "choose one piece, sum several with TokenSet(...), or use explain_generation for a whole answer",
        ),
        (
            ("--chat",),
            'chat must be "auto" or False where there is no chat template, got True for {tokenizer} that has '
            "none; use chat=False, or set tokenizer.chat_template",
        ),
    ],
)
def test_what_only_the_model_can_refuse_is_one_line_too(iglens, tiny, words, message):
    message = message.format(tokenizer=type(tiny.tokenizer).__name__)
    assert iglens("The cat", "--model", "tiny", *words) == (2, "", f"iglens: {message}\n")


def test_folders_without_a_model_and_unreachable_names_are_one_line(iglens, tmp_path, monkeypatch):
    assert iglens("Hi", "--model", str(tmp_path)) == (
        2,
        "",
        f"iglens: model must be a folder with config.json, weights and tokenizer, got {str(tmp_path)!r}; "
        "see save_pretrained of transformers\n",
    )

    def unreachable(name):
        print("talk that nobody needs")
        print("more of it", file=sys.stderr)
        raise OSError("We couldn't connect.\nCheck your internet connection.")

    monkeypatch.setattr(cli, "_loader", lambda: unreachable)
    assert iglens("Hi", "--model", "no/such") == (
        2,
        "",
        "iglens: model must be a Hugging Face name or a local folder that TransformerLens can load, "
        "got 'no/such'; check spelling and connection (We couldn't connect.)\n",
    )


@pytest.mark.parametrize("words", [(), ("Hi", "there"), ("Hi", "--nonsense"), ("Hi", "--n-steps", "x")])
def test_misuse_of_the_command_line_is_one_line_that_points_to_the_help(iglens, words):
    status, out, err = iglens(*words)
    assert (status, out) == (2, "")
    assert err.startswith("iglens: ")
    assert err.endswith("; see iglens --help\n")
    assert err.count("\n") == 1


def test_an_interrupt_is_130_and_a_fault_of_ours_is_no_bad_input(iglens, monkeypatch):
    def interrupted(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_model", interrupted)
    assert iglens("Hi") == (130, "", "")

    def faulty(*a, **k):
        raise KeyError("fault")

    monkeypatch.setattr(cli, "load_model", faulty)
    with pytest.raises(KeyError, match=r"^'fault'$"):
        cli.main(["Hi"])


def test_a_first_word_with_a_command_of_its_own_goes_there(iglens, monkeypatch):
    seen = []
    monkeypatch.setitem(cli.COMMANDS, "corpus", lambda words, **options: seen.append((words, options)))
    assert iglens("corpus", "x.jsonl")[0] == 0
    assert seen == [(["x.jsonl"], {"prog_name": "iglens corpus", "standalone_mode": False})]


# --- as a program --------------------------------------------------------------------------------


def test_help_and_version(iglens):
    status, out, err = iglens("--version")
    assert (status, err) == (0, "")
    assert out.startswith(f"iglens {version('tl-iglens')} (transformer-lens {version('transformer-lens')}, ")
    status, out, err = iglens("--help")
    assert (status, err) == (0, "")
    for option in (
        *("--model", "--chat", "--raw", "--max-new-tokens", "--layers", "--mid", "--baseline", "--estimator"),
        *("--n-steps", "--onset", "--target", "--save", "--json", "--version", "PROMPT"),
    ):
        assert option in out


def test_the_program_prints_its_table_to_a_pipe_and_nothing_else():
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    words = ("The capital of France is", "--raw", "--max-new-tokens", "1")
    run = subprocess.run(
        [sys.executable, "-m", "tl_iglens", *words], capture_output=True, text=True, env=environment
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "\x1b" not in run.stdout
    assert run.stdout.splitlines()[:2] == ["prompt: The capital of France is", "answer:  Paris"]
    assert 100 < max(map(len, run.stdout.splitlines())) <= 120
