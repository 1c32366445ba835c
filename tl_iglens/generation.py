"""Explaining a whole answer: greedy decoding, then one teacher-forced pass with a column per answer token."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from ._checks import check_choice, check_model, check_positive, fail, unwrap
from ._types import BASELINES, ESTIMATORS, QUANTITIES, Hooks
from .collect import collect_prompts, only_rows, run
from .lens import ig_lens
from .path import resolve_path
from .result import IGLensResult
from .tokens import Prompts, read_prompts, token_text

# Arguments of ig_lens that the answer itself decides.
_DECIDED = ("input", "targets", "pos_slice", "attention_mask", "states")


def explain_generation(
    model: Any,
    prompt: Any,
    *,
    max_new_tokens: int = 80,
    chat: Any = "auto",
    stop: Any = None,
    **ig_lens_options: Any,
) -> IGLensResult:
    """One column of credits per token of the model's greedy answer.

    The answer is y_t = argmax p(· | prompt, y_<t). One pass over prompt and answer then gives every column:
    column t has the target y_t and is read at the position that predicts it, so it equals ``ig_lens`` on the
    same ids at that position.

    Args:
        model: a HookedTransformer or TransformerBridge in eval mode.
        prompt: one text, a list of chat messages ``{"role": ..., "content": ...}``, or token ids ``[pos]``.
        max_new_tokens: length of the answer at most; prompt and answer together also stay within the context.
        chat: ``"auto"`` renders a text as the user's message where the tokenizer has a chat template, True
            requires one, False feeds the text as ``ig_lens`` does. Token ids are never rendered.
        stop: text or token id, or a list of them, that ends the answer besides the model's own end tokens:
            those of the tokenizer, of the generation config, and what ends a turn in the chat template. The
            answer ends before the first token that belongs to a stop.
        ig_lens_options: passed on to :func:`ig_lens`; ``prepend_bos`` applies to text without a template,
            ``fwd_hooks`` also hold while the answer is decoded, ``progress`` shows a bar on stderr.

    Returns: an :class:`IGLensResult` of batch 1. ``tokens`` are the ids fed, prompt and answer without the
    final stop; ``info.notes`` says how the prompt was rendered and what ended the answer.

    Every answer token costs one full forward pass. No key-value cache is used: TransformerLens' cached
    generation on a bridge leaves the greedy answer of the full pass with current transformers, and a hook at
    a fixed position would not see what it expects.

    Raises: ValueError for an empty answer, a prompt that fills the context, or ``chat=True`` without a
    template; TypeError for an option that ``ig_lens`` lacks or the answer decides; the errors of ``ig_lens``.

    Source: arXiv 2606.29693, the table of answer tokens and layers.
    """
    model = unwrap(model)
    check_model(model)
    check_positive("max_new_tokens", max_new_tokens)
    _check_options(model, ig_lens_options)
    prompt_ids, rendered = render_prompt(model, prompt, chat, ig_lens_options.pop("prepend_bos", None))
    room = _room(model, len(prompt_ids), max_new_tokens)
    stops = _Stops.of(model, stop)

    hooks, progress = ig_lens_options.pop("fwd_hooks", ()), ig_lens_options.pop("progress", False)
    steps = tqdm(greedy_tokens(model, prompt_ids, hooks), "answer", room, unit="token", disable=not progress)
    answer: list[int] = []
    ended = f"cut off at {'max_new_tokens' if room == max_new_tokens else 'the end of the context'}"
    for token in steps:
        answer.append(token)
        if (found := stops.find(answer)) is not None:
            length, name = found
            answer, ended = answer[:length], f"ended by {name}"
            break
        if len(answer) == room:
            break
    steps.close()
    if not answer:
        rule, todo = (
            "one that the model answers with a token at least",
            "rephrase it, or ask ig_lens about one position",
        )
        fail("prompt", rule, f"an answer {ended} at once", todo)

    ids = torch.tensor([prompt_ids + answer])
    first = len(prompt_ids) - 1  # the position that predicts the first answer token
    positions = torch.arange(first, first + len(answer))[None]
    incl_mid = ig_lens_options.get("incl_mid", False)
    prompts = Prompts(ids, torch.ones_like(ids, dtype=torch.bool))
    states = collect_prompts(model, prompts, positions, incl_mid, None, hooks)
    where = (first, first + len(answer))
    result = ig_lens(model, states=states, targets=torch.tensor([answer]), pos_slice=where, **ig_lens_options)
    notes = (f"prompt of {_count(prompt_ids)}, {rendered}", f"greedy answer of {_count(answer)}, {ended}")
    return replace(result, info=replace(result.info, notes=(*notes, *result.info.notes)))


def render_prompt(
    model: Any, prompt: Any, chat: Any = "auto", prepend_bos: bool | None = None
) -> tuple[list[int], str]:
    """The ids of one prompt as they will be fed, and in words how they came about."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    messages = _messages(prompt)
    if not _uses_template(tokenizer, prompt, messages, chat):
        prompts = read_prompts(model, prompt, None, prepend_bos)
        if len(prompts.ids) != 1:
            rule = "one text, one list of messages or ids [pos]"
            fail("prompt", rule, f"{len(prompts.ids)} rows", "call it once per prompt")
        return prompts.ids[0].tolist(), "without a chat template" if isinstance(
            prompt, str
        ) else "given as ids"
    if prepend_bos is not None:
        todo = "the template decides; use chat=False to choose"
        fail("prepend_bos", "left out where the chat template is used", prepend_bos, todo)
    messages = messages or [{"role": "user", "content": prompt}]
    # The template writes the special tokens itself; encoding its text as ordinary text would double the BOS.
    ids = list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    )
    return read_prompts(model, [ids], [[1] * len(ids)]).ids[0].tolist(), "through the chat template"


def _uses_template(tokenizer: Any, prompt: Any, messages: list[Any] | None, chat: Any) -> bool:
    """Whether the prompt goes through the chat template; ValueError where that is impossible."""
    if not isinstance(chat, bool) and chat != "auto":
        fail("chat", '"auto", True or False', repr(chat), "False feeds the text without a template")
    available = getattr(tokenizer, "chat_template", None) is not None
    lacking = (
        f"{type(tokenizer).__name__} that has none" if tokenizer is not None else "a model without tokenizer"
    )
    if messages is not None:
        if chat is False:
            fail(
                "chat",
                '"auto" or True for a list of messages',
                chat,
                "give the prompt as text to feed it raw",
            )
        if not available:
            todo = "give a text, or set tokenizer.chat_template"
            fail("prompt", "a text where there is no chat template", f"messages for {lacking}", todo)
        return True
    if chat is True and not isinstance(prompt, str):
        fail(
            "chat", '"auto" or False for token ids', chat, "ids are fed as they are; give a text to render it"
        )
    if chat is True and not available:
        todo = "use chat=False, or set tokenizer.chat_template"
        fail("chat", '"auto" or False where there is no chat template', f"True for {lacking}", todo)
    return available and chat is not False and isinstance(prompt, str)


def greedy_tokens(model: Any, prompt_ids: Sequence[int], fwd_hooks: Hooks = ()) -> Iterator[int]:
    """The model's most probable next token, again and again; one full forward pass each."""
    ids = torch.tensor([list(prompt_ids)])
    while True:
        prompts = Prompts(ids, torch.ones_like(ids, dtype=torch.bool))
        with only_rows(model.unembed, torch.tensor([[ids.shape[1] - 1]])) as last:
            logits = run(model, prompts, fwd_hooks)
        token = int(last.rows_of(logits)[0, 0].argmax())
        yield token
        ids = torch.cat([ids, torch.tensor([[token]])], 1)


@dataclass(frozen=True)
class _Stops:
    """What ends an answer."""

    tokenizer: Any
    ids: frozenset[int]
    texts: tuple[str, ...]

    @classmethod
    def of(cls, model: Any, stop: Any) -> "_Stops":
        """The model's own end tokens and the caller's stops."""
        tokenizer = getattr(model, "tokenizer", None)
        given = [] if stop is None else [stop] if isinstance(stop, str | int) else list(stop)
        for item in given:
            if isinstance(item, bool) or not isinstance(item, str | int) or item == "":
                todo = 'for example stop=["\\n", 13]'
                fail("stop", "text, a token id, or a list of them", repr(item), todo)
        texts = tuple(item for item in given if isinstance(item, str))
        if texts and tokenizer is None:
            fail("stop", "token ids for a model without a tokenizer", repr(texts[0]), "pass the id")
        return cls(tokenizer, frozenset([*end_ids(model), *(i for i in given if isinstance(i, int))]), texts)

    def find(self, answer: Sequence[int]) -> tuple[int, str] | None:
        """How many leading tokens precede the stop that the answer now ends with, and the stop's name."""
        if answer[-1] in self.ids:
            return len(answer) - 1, token_text(self.tokenizer, answer[-1])
        if not self.texts:
            return None
        text = self._decode(answer)
        starts = {text.find(stop): stop for stop in self.texts if stop in text}
        if not starts:
            return None
        start = min(starts)
        length = next(n for n in range(len(answer)) if len(self._decode(answer[: n + 1])) > start)
        return length, repr(starts[start])

    def _decode(self, ids: Sequence[int]) -> str:
        return decode(self.tokenizer, ids)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of some ids, special tokens included and spaces untouched."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def end_ids(model: Any) -> set[int]:
    """The model's own end tokens: of tokenizer, configs, generation config and the chat template's turns."""
    tokenizer, hf_model = getattr(model, "tokenizer", None), getattr(model, "original_model", None)
    owners = (
        tokenizer,
        model.cfg,
        getattr(hf_model, "config", None),
        getattr(hf_model, "generation_config", None),
    )
    found = [getattr(owner, "eos_token_id", None) for owner in owners] + [_turn_end(tokenizer)]
    flat = (i for ids in found for i in (ids if isinstance(ids, list | tuple) else [ids]))
    return {int(i) for i in flat if i is not None}


def _turn_end(tokenizer: Any) -> int | None:
    """The special token that follows an assistant's message in the chat template, if one does."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    said = "tl-iglens"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # templates may refuse any conversation; the other end tokens remain
        return None
    after = text.rpartition(said)[2].lstrip()
    name = next((token for token in tokenizer.all_special_tokens if after.startswith(token)), None)
    return None if name is None else int(tokenizer.convert_tokens_to_ids(name))


def _messages(prompt: Any) -> list[Mapping[str, Any]] | None:
    """The prompt as chat messages, or None where it is something else."""
    if not isinstance(prompt, list | tuple) or not any(isinstance(item, Mapping) for item in prompt):
        return None
    for item in prompt:
        if not isinstance(item, Mapping) or not {"role", "content"} <= set(item):
            got = f"keys {sorted(item)}" if isinstance(item, Mapping) else type(item).__name__
            todo = 'for example [{"role": "user", "content": "Hi"}]'
            fail("prompt", "messages with role and content", got, todo)
    return list(prompt)


def _check_options(model: Any, options: Mapping[str, Any]) -> None:
    """What ig_lens would refuse after the answer, refused before it."""
    for name in _DECIDED:
        if name in options:
            fail(name, "left out", "a value", "the answer decides it; use ig_lens to choose it", TypeError)
    unknown = sorted(set(options) - set(inspect.signature(ig_lens).parameters))
    if unknown:
        fail("ig_lens_options", "options of ig_lens", ", ".join(unknown), "check the spelling", TypeError)
    check_choice("estimator", options.get("estimator", "prediction_aware"), ESTIMATORS)
    check_choice("quantity", options.get("quantity", "prob"), QUANTITIES)
    check_positive("n_steps", options.get("n_steps", 1))
    baseline = options.get("baseline", "embed")
    if isinstance(baseline, str):
        check_choice("baseline", baseline, BASELINES)
    from_embed = isinstance(baseline, str) and baseline == "embed"
    resolve_path(
        int(model.cfg.n_layers),
        options.get("layers"),
        incl_mid=options.get("incl_mid", False),
        from_embed=from_embed,
    )


def _room(model: Any, used: int, max_new_tokens: int) -> int:
    n_ctx = getattr(model.cfg, "n_ctx", None)
    if not n_ctx or n_ctx < 0:
        return max_new_tokens
    if used >= n_ctx:
        rule = f"shorter than n_ctx={n_ctx} tokens, to leave room for an answer"
        fail("prompt", rule, f"{used} tokens", "shorten it")
    return min(max_new_tokens, int(n_ctx) - used)


def _count(ids: Sequence[int]) -> str:
    return f"{len(ids)} token{'s' if len(ids) != 1 else ''}"
