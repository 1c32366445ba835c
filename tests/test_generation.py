"""explain_generation: greedy answers, chat templates, stops, and columns that equal ig_lens."""

import functools
import importlib.util
import re

import pytest
import torch
from fixtures import bridge, hooked, needs_bridge, no_trace, shared_bridge, tokenizer

from tl_iglens import ig_lens
from tl_iglens.demo import load_demo_model
from tl_iglens.generation import end_ids, explain_generation, render_prompt

IDS = [0, 5, 40, 77, 100, 33, 61]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<pad>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


# SmolLM2-135M-Instruct on "What is the capital of Vietnam?", from the reference implementation of the paper.
PROMPT_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712),
    *(8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 10223, 47, 2, 198, 1, 520, 9531, 198),
]
ANSWER_IDS = [504, 3575, 282, 10223, 314, 15795, 89, 1117, 30]
P_MODEL = [0.575625, 0.984558, 0.965879, 0.987523, 0.930738, 0.452772, 0.725641, 0.802727, 0.457335]


def chat_tokenizer():
    built = tokenizer()
    built.chat_template = TEMPLATE
    return built


@functools.cache
def small():
    """A small random model with a tokenizer: a bridge where there is one."""
    if importlib.util.find_spec("transformer_lens.model_bridge"):
        return shared_bridge("llama")
    return hooked(tokenizer=tokenizer(), d_vocab=291, n_ctx=64)


def greedy(model, ids, n):
    """The reference: n times the argmax of a whole forward pass."""
    ids = list(ids)
    for _ in range(n):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), return_type="logits")[0, -1].argmax()))
    return ids


@pytest.fixture(params=["bridge llama", "bridge gpt2", "bridge gemma2", "hooked"])
def model(request):
    kind, _, family = request.param.partition(" ")
    if kind == "bridge":
        return shared_bridge(family)
    return hooked(tokenizer=tokenizer(), d_vocab=291, n_ctx=64)


def test_the_answer_is_the_argmax_of_full_passes_and_of_the_explained_one(model):
    result = explain_generation(model, IDS, max_new_tokens=6)
    expected = greedy(model, IDS, 6)
    assert result.tokens[0].tolist() == expected
    assert result.targets[0].tolist() == expected[len(IDS) :]
    assert result.positions[0].tolist() == list(range(len(IDS) - 1, len(IDS) + 5))
    with torch.no_grad():
        logits = model(result.tokens, return_type="logits")[0]
    assert torch.equal(logits[len(IDS) - 1 : -1].argmax(-1), result.targets[0])
    probs = logits.softmax(-1)[len(IDS) - 1 : -1].gather(1, result.targets[0][:, None])[:, 0]
    torch.testing.assert_close(result.model_level[0], probs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers": [0, 2], "baseline": "mean", "estimator": "midpoint", "n_steps": 3},
        {"quantity": "log_prob", "baseline": "zero", "incl_mid": True, "n_steps": 2},
        {"incorrect_targets": 7, "baseline": "bos"},
    ],
)
def test_every_column_equals_ig_lens_on_the_same_ids(model, options):
    result = explain_generation(model, IDS, max_new_tokens=4, **options)
    for column, target in enumerate(result.targets[0].tolist()):
        place = len(IDS) - 1 + column
        alone = ig_lens(model, result.tokens, targets=target, pos_slice=place, **options)
        torch.testing.assert_close(
            result.attribution[..., column], alone.attribution[..., 0], atol=1e-6, rtol=0
        )
        torch.testing.assert_close(result.levels[..., column], alone.levels[..., 0], atol=1e-6, rtol=0)
    assert result.labels == alone.labels
    if options.get("estimator") is None:
        assert float(result.completeness_gap.abs().max()) <= 1e-6


def test_interventions_hold_for_the_answer_and_for_its_explanation(model):
    def silence(act, hook):
        act = act.clone()
        act[:, 2] = 0.0  # a fixed place: a cached step that sees one token alone would fail here
        return act

    hooks = [("blocks.1.hook_resid_post", silence)]
    result = explain_generation(model, IDS, max_new_tokens=3, fwd_hooks=hooks)
    ids = list(IDS)
    for _ in range(3):
        with torch.no_grad():
            ids.append(int(model.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)[0, -1].argmax()))
    assert result.tokens[0].tolist() == ids
    alone = ig_lens(
        model, ids, targets=result.targets, pos_slice=(len(IDS) - 1, len(ids) - 1), fwd_hooks=hooks
    )
    torch.testing.assert_close(result.attribution, alone.attribution, atol=1e-6, rtol=0)


def test_no_trace_is_left_even_after_an_error(model):
    explain_generation(model, IDS, max_new_tokens=1)
    with no_trace(model):
        explain_generation(model, IDS, max_new_tokens=3)
    with no_trace(model), pytest.raises(ZeroDivisionError):
        explain_generation(model, IDS, fwd_hooks=[("blocks.0.hook_resid_post", lambda act, hook: 1 / 0)])


def test_text_is_fed_raw_as_ig_lens_does(model):
    for bos in (None, False):
        result = explain_generation(model, "The cat", max_new_tokens=2, prepend_bos=bos)
        fed = ig_lens(model, "The cat", prepend_bos=bos).tokens[0].tolist()
        assert result.tokens[0, :-2].tolist() == fed
    assert result.info.notes == (
        "prompt of 2 tokens, without a chat template",
        "greedy answer of 2 tokens, cut off at max_new_tokens",
    )


@pytest.fixture
def chatty():
    if importlib.util.find_spec("transformer_lens.model_bridge"):
        return bridge("llama", tokenizer=chat_tokenizer())
    return hooked(tokenizer=chat_tokenizer(), d_vocab=291, n_ctx=64)


def test_a_text_goes_through_the_chat_template_with_one_bos(chatty):
    rendered = chatty.tokenizer("<s>user:The catassistant:", add_special_tokens=False)["input_ids"]
    assert rendered.count(0) == 1
    for prompt, chat in [
        ("The cat", "auto"),
        ("The cat", True),
        ([{"role": "user", "content": "The cat"}], "auto"),
        ([{"role": "user", "content": "The cat"}], True),
    ]:
        result = explain_generation(chatty, prompt, max_new_tokens=2, chat=chat)
        assert result.tokens[0, :-2].tolist() == rendered
        assert result.info.notes[0] == f"prompt of {len(rendered)} tokens, through the chat template"
    conversation = [{"role": "system", "content": "sat"}, {"role": "user", "content": "on"}]
    ids, _ = render_prompt(chatty, conversation)
    assert chatty.tokenizer.decode(ids) == "<s>system:satuser:onassistant:"
    raw = explain_generation(chatty, "The cat", max_new_tokens=2, chat=False)
    assert raw.tokens[0, :-2].tolist() == [0, 268, 282]
    as_ids = explain_generation(chatty, [0, 268, 282], max_new_tokens=2)
    assert torch.equal(as_ids.tokens, raw.tokens)
    assert as_ids.info.notes[0] == "prompt of 3 tokens, given as ids"


def test_end_tokens_come_from_tokenizer_generation_config_and_template(chatty):
    assert end_ids(chatty) == {1, 2}  # </s>, and <pad>, with which the template ends a turn
    needs_bridge()  # a HookedTransformer has no generation config
    chatty.original_model.generation_config.eos_token_id = [1, 77]
    assert end_ids(chatty) == {1, 2, 77}
    chatty.tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert end_ids(chatty) == {1, 77}


def test_the_models_own_end_token_ends_the_answer_and_is_no_column():
    model = bridge("llama")
    answer = greedy(model, IDS, 3)[len(IDS) :]
    assert answer[2] not in answer[:2]
    model.original_model.generation_config.eos_token_id = [1, answer[2]]
    result = explain_generation(model, IDS)
    assert result.tokens[0].tolist() == IDS + answer[:2]
    assert result.targets[0].tolist() == answer[:2]
    assert result.info.notes[1].startswith("greedy answer of 2 tokens, ended by ")


def test_extra_stops_end_the_answer_before_their_first_token():
    model = small()
    answer = greedy(model, IDS, 8)[len(IDS) :]
    n = next(i for i in range(1, 8) if answer[i] not in answer[:i])
    for stop in (answer[n], [answer[n]], [answer[n], "never"]):
        assert explain_generation(model, IDS, stop=stop).targets[0].tolist() == answer[:n]


def test_a_stop_text_may_span_tokens(monkeypatch):
    model = small()
    said = model.tokenizer("The cat sat on the cat", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr("tl_iglens.generation.greedy_tokens", lambda *a: iter(said))
    pieces = [model.tokenizer.decode([i]) for i in said]
    kept = explain_generation(model, IDS, stop=[" sat on"]).targets[0].tolist()
    assert "".join(pieces[: len(kept)]) == "The cat"
    inside = explain_generation(model, IDS, stop="at o").targets[0].tolist()
    assert len(inside) == next(
        i for i in range(len(said)) if len("".join(pieces[: i + 1])) > len("The cat s")
    )
    first = explain_generation(model, IDS, stop=["the", "sat"]).info.notes[1]
    assert first == "greedy answer of 2 tokens, ended by 'sat'"


def test_prompt_and_answer_stay_within_the_context(model):
    n_ctx = int(model.cfg.n_ctx)
    prompt = (IDS * n_ctx)[: n_ctx - 2]
    result = explain_generation(model, prompt)
    assert result.tokens.shape[1] <= n_ctx
    if result.tokens.shape[1] == n_ctx:
        assert result.info.notes[1] == "greedy answer of 2 tokens, cut off at the end of the context"
    full = (IDS * n_ctx)[:n_ctx]
    message = (
        f"prompt must be shorter than n_ctx={n_ctx} tokens, to leave room for an answer, got {n_ctx} tokens; "
        "shorten it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        explain_generation(model, full)


USER = [{"role": "user", "content": "on"}]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        (
            "The cat",
            {"chat": True},
            ValueError,
            'chat must be "auto" or False where there is no chat template, got True for {tokenizer} that has '
            "none; use chat=False, or set tokenizer.chat_template",
        ),
        (
            USER,
            {},
            ValueError,
            "prompt must be a text where there is no chat template, got messages for {tokenizer} that has "
            "none; give a text, or set tokenizer.chat_template",
        ),
        (
            USER,
            {"chat": False},
            ValueError,
            'chat must be "auto" or True for a list of messages, got False; '
            "give the prompt as text to feed it raw",
        ),
        (
            IDS,
            {"chat": True},
            ValueError,
            'chat must be "auto" or False for token ids, got True; '
            "ids are fed as they are; give a text to render it",
        ),
        (
            "The cat",
            {"chat": "yes"},
            ValueError,
            "chat must be \"auto\", True or False, got 'yes'; False feeds the text without a template",
        ),
        (
            [{"role": "user"}],
            {},
            ValueError,
            "prompt must be messages with role and content, got keys ['role']; "
            'for example [{{"role": "user", "content": "Hi"}}]',
        ),
        (
            ["The", " cat"],
            {},
            ValueError,
            "prompt must be one text, one list of messages or ids [pos], got 2 rows; call it once per prompt",
        ),
        (
            IDS,
            {"max_new_tokens": 0},
            ValueError,
            "max_new_tokens must be a whole number of at least 1, got 0; give a whole number",
        ),
        (
            IDS,
            {"stop": ["x", 1.5]},
            ValueError,
            'stop must be text, a token id, or a list of them, got 1.5; for example stop=["\\n", 13]',
        ),
        (
            IDS,
            {"targets": "next"},
            TypeError,
            "targets must be left out, got a value; the answer decides it; use ig_lens to choose it",
        ),
        (
            IDS,
            {"layer": 3},
            TypeError,
            "ig_lens_options must be options of ig_lens, got layer; check the spelling",
        ),
        (
            IDS,
            {"estimator": "exact"},
            ValueError,
            "estimator must be one of prediction_aware, midpoint, left, right, trapezoid, gauss_legendre, "
            "got 'exact'; check the spelling",
        ),
        (
            IDS,
            {"layers": [0, 9]},
            ValueError,
            "layers must be strictly increasing boundaries between 0 and n_layers=3, got [0, 9]; "
            "boundary l is the state that enters block l, and boundary n_layers is always added",
        ),
    ],
)
def test_bad_input_is_refused_before_the_first_forward(prompt, options, error, message, monkeypatch):
    model = small()
    monkeypatch.setattr("tl_iglens.generation.run", lambda *a: pytest.fail("a forward pass ran"))
    message = message.format(tokenizer=type(model.tokenizer).__name__)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        explain_generation(model, prompt, **options)


def test_an_empty_answer_and_a_bos_beside_the_template_are_named_errors(chatty):
    first = greedy(chatty, IDS, 1)[-1]
    name = ig_lens(chatty, IDS, targets=first).target_strings[0][0]
    message = (
        "prompt must be one that the model answers with a token at least, "
        f"got an answer ended by {name} at once; "
        "rephrase it, or ask ig_lens about one position"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        explain_generation(chatty, IDS, stop=first)
    message = (
        "prepend_bos must be left out where the chat template is used, got True; "
        "the template decides; use chat=False to choose"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        explain_generation(chatty, "The cat", prepend_bos=True)


def test_the_real_model_gives_the_published_answer():
    result = explain_generation(load_demo_model(), "What is the capital of Vietnam?")
    assert result.tokens[0].tolist() == PROMPT_IDS + ANSWER_IDS
    assert result.target_strings[0] == ("The", " capital", " of", " Vietnam", " is", " Ho", "i", " An", ".")
    torch.testing.assert_close(result.model_level[0], torch.tensor(P_MODEL), atol=2e-5, rtol=0)
    assert float(result.completeness_gap.abs().max()) <= 1e-6
    assert float(result.readout_gap.abs().max()) <= 2e-5
    assert result.info.notes == (
        "prompt of 37 tokens, through the chat template",
        "greedy answer of 9 tokens, ended by <|im_end|>",
    )
