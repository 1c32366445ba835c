"""Prompts: what they hold, and that the demo models' tokenizers and probabilities fit what is claimed."""

import dataclasses
import itertools
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch

from tl_iglens import collect_states, ig_lens
from tl_iglens.demo import demo_model_path
from tl_iglens.prompts import FAMILIES, PROMPTS, Prompt, family, sample, texts

FACTS = [prompt for prompt in PROMPTS if prompt.source == "fact"]


@pytest.fixture(scope="module", params=["smollm2", "gemma"])
def tokenizer(request):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_path(request.param), local_files_only=True)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def message(call, *args):
    with pytest.raises(ValueError) as caught:
        call(*args)
    return str(caught.value)


def test_eight_families_of_the_same_size():
    assert FAMILIES == (
        "capitals", "facts", "arithmetic", "antonyms", "phrases", "grammar", "code", "continuation",
    )  # fmt: skip
    assert Counter(prompt.family for prompt in PROMPTS) == dict.fromkeys(FAMILIES, 35)


def test_source_follows_from_the_answer():
    assert Counter(prompt.source for prompt in PROMPTS) == {"fact": 233, "model": 47}
    assert all((prompt.source == "model") == (prompt.answer is None) for prompt in PROMPTS)
    assert {prompt.source for prompt in family("continuation")} == {"model"}
    for name in ("capitals", "facts", "arithmetic", "antonyms", "phrases"):
        assert {prompt.source for prompt in family(name)} == {"fact"}, name


def test_prompts_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROMPTS[0].answer = " Rome"
    assert PROMPTS[0] == Prompt("The capital of France is", "capitals", " Paris")


def test_texts_are_distinct_short_and_clean():
    # Case and spacing alone do not make another prompt.
    plain = [re.sub(r"\s+", " ", prompt.text.casefold()) for prompt in PROMPTS]
    assert len(set(plain)) == len(PROMPTS)
    for prompt in PROMPTS:
        assert prompt.text == prompt.text.strip(), prompt
        assert prompt.text.isascii() and "{}" not in prompt.text, prompt
        assert len(prompt.text) <= 100, prompt


def test_answers_are_one_word_that_the_text_does_not_end_with():
    for prompt in FACTS:
        word = prompt.answer.removeprefix(" ")
        assert word and word == word.strip() and word.isalnum(), prompt
        assert not prompt.text.endswith(prompt.answer), prompt
        # No space is missing: behind a letter or digit only another digit may follow without one.
        glued = not prompt.answer.startswith(" ") and prompt.text[-1].isalnum()
        assert not glued or prompt.answer.isdigit(), prompt


def test_families_are_not_all_of_one_shape():
    for name in FAMILIES:
        starts = Counter(prompt.text[:12] for prompt in family(name))
        assert starts.most_common(1)[0][1] <= 17, name  # fewer than one half
        assert len(starts) >= 9, name


def test_sums_are_right():
    sums = [prompt for prompt in family("arithmetic") if prompt.text.endswith("=")]
    assert len(sums) == 16
    for prompt in sums:
        for left, right in re.findall(r"([\d+*-]+)=(\d)", prompt.text + prompt.answer):
            a, sign, b = re.fullmatch(r"(\d)([+*-])(\d)", left).groups()
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(right), (
                prompt
            )


def test_number_sequences_are_right():
    words = "one two three four five six seven eight nine ten".split()
    number = {word: n for n, word in enumerate(words, 1)} | {str(n): n for n in range(1, 10)}
    number |= {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50}
    number |= {"third": 3, "fourth": 4, "fifth": 5, "sixth": 6}
    sequences = [prompt for prompt in family("arithmetic") if prompt.text.endswith(",")]
    assert len(sequences) == 12
    for prompt in sequences:
        terms = [number[word] for word in re.findall(r"\w+", (prompt.text + prompt.answer).lower())]
        assert len({b - a for a, b in itertools.pairwise(terms)}) == 1, prompt


@pytest.mark.parametrize(
    ("start", "closing", "holds"),
    [
        ("def double(", "", "double(4) == 8"),
        ("def multiply(", "", "multiply(3, 4) == 12"),
        ("def area(", "", "area(3, 4) == 12"),
        ("def average(", ")", "average([1, 2, 6]) == 3"),
        ("def first(", "]", "first([7, 8, 9]) == 7"),
        ("def last(", "]", "last([7, 8, 9]) == 9"),
        ("def positive(", "", "positive(1) is True and positive(-1) is False"),
        ("def maximum(", "", "maximum(1, 2) == maximum(2, 1) == 2"),
        ("class Cat", "", "Cat('Tom').name == 'Tom'"),
        ("a = 1", "", "(a, b) == (2, 1)"),
    ],
)
def test_programs_do_what_they_say(start, closing, holds):
    (prompt,) = (prompt for prompt in family("code") if prompt.text.startswith(start))
    values = {}
    exec(prompt.text + prompt.answer + closing, values)
    assert eval(holds, values)


def test_every_answer_is_one_token(tokenizer):
    assert [(p.text, p.answer) for p in FACTS if len(ids(tokenizer, p.answer)) != 1] == []


def test_an_answer_stays_that_token_behind_its_text(tokenizer):
    for prompt in FACTS:
        text, answer = ids(tokenizer, prompt.text), ids(tokenizer, prompt.answer)
        assert ids(tokenizer, prompt.text + prompt.answer) == text + answer, prompt


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_both_models_expect_the_answers(name, request):
    model, weak, hits = request.getfixturevalue(name), {}, {}
    by_length = sorted(FACTS, key=lambda prompt: len(prompt.text))  # little padding
    for part in (by_length[i : i + 40] for i in range(0, len(FACTS), 40)):
        states = collect_states(model, texts(part))
        result = ig_lens(model, states=states, targets=[prompt.answer for prompt in part], layers=[0])
        top = ig_lens(model, states=states, layers=[0]).targets
        assert [row[0] for row in result.target_strings] == [prompt.answer for prompt in part]
        for prompt, level, hit in zip(part, result.model_level[:, 0], result.targets == top, strict=True):
            hits.setdefault(prompt.family, []).append(bool(hit))
            if level < 0.05:
                weak[prompt.text] = float(level)
    assert weak == {}
    share = {key: sum(found) / len(found) for key, found in hits.items()}
    assert min(share, key=share.get) == "arithmetic"
    assert 0.87 <= sum(map(sum, hits.values())) / len(FACTS) <= 0.93


def test_family_gives_its_prompts_in_order():
    assert tuple(prompt for name in FAMILIES for prompt in family(name)) == PROMPTS
    known = "capitals, facts, arithmetic, antonyms, phrases, grammar, code, continuation"
    assert message(family, "sums") == f"name must be one of {known}, got 'sums'; check the spelling"


@pytest.mark.parametrize("n", [1, 7, 8, 24, 100, 279])
def test_a_sample_is_stratified_and_without_repeats(n):
    drawn = sample(n, seed=3)
    counts = Counter(prompt.family for prompt in drawn)
    assert len(drawn) == len(set(drawn)) == n
    assert max(counts.values()) - min(counts[name] for name in FAMILIES) <= 1
    assert set(drawn) <= set(PROMPTS)


def test_a_sample_depends_on_its_seed_alone():
    assert sample(40) == sample(40, seed=0) != sample(40, seed=1)
    assert sample(100, seed=5)[:40] == sample(40, seed=5)
    assert set(sample(len(PROMPTS), seed=2)) == set(PROMPTS)
    code = "from tl_iglens.prompts import sample, texts; print(repr(texts(sample(20, seed=7))))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == repr(
        texts(sample(20, seed=7))
    )  # another process hashes strings differently


def test_every_prompt_of_a_family_can_come_first():
    drawn = {prompt for seed in range(400) for prompt in sample(8, seed)}
    assert drawn == set(PROMPTS)


def test_a_sample_leaves_the_global_random_state():
    random.seed(11)
    before, torch_before = random.getstate(), torch.get_rng_state()
    sample(30, seed=4)
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), torch_before)


def test_sample_refuses_impossible_sizes():
    assert message(sample, 281) == (
        "n must be at most the 280 prompts there are, got 281; add prompts of your own"
    )
    for n in (0, -1, True):
        assert message(sample, n) == (
            f"n must be a whole number of at least 1, got {n!r}; give a whole number"
        )


def test_texts_keep_the_order():
    assert texts() == [prompt.text for prompt in PROMPTS]
    assert texts(family("code")[:2]) == ["import numpy as", "import pandas as"]
    assert texts(()) == []
