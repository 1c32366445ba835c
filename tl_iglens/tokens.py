"""Prompts, real positions, targets and printable labels: everything between text and token ids."""

import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ._checks import fail
from .quantity import Objective

NO_POSITION = -1


class TokenSet(tuple[str | int, ...]):
    """Several single tokens whose probabilities are summed: ``TokenSet("Paris", " Paris")``."""

    def __new__(cls, *members: str | int) -> "TokenSet":
        if not members:
            fail("TokenSet", "at least one token", "none", 'for example TokenSet("Paris", " Paris")')
        return super().__new__(cls, members)

    def __repr__(self) -> str:
        return f"TokenSet({', '.join(map(repr, self))})"


@dataclass(frozen=True)
class Prompts:
    """Token ids as the caller laid them out, and which of them are real.

    ``ids`` and ``mask`` are ``[batch, ctx]``; a row's real tokens are those between its outermost ones in
    the mask, so padding may stand on either side. A real token that the caller masked stays masked.
    """

    ids: Int[Tensor, "batch ctx"]
    mask: Bool[Tensor, "batch ctx"]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Per row the first real place and the one after the last."""
        found = [row.nonzero()[:, 0].tolist() for row in self.mask]
        return [(row[0], row[-1] + 1) for row in found]

    def at(self, rows: slice) -> "Prompts":
        """A run of rows, without columns that none of them needs."""
        part = Prompts(self.ids[rows], self.mask[rows])
        first, last = min(s for s, _ in part.spans), max(e for _, e in part.spans)
        return Prompts(part.ids[:, first:last], part.mask[:, first:last])

    def right_padded(self) -> tuple["Prompts", Int[Tensor, "batch"]]:
        """The same rows pushed to the left edge, and by how much each moved.

        A causal model gives a row that starts at place 0 the numbers of its solo run, whatever stands
        behind it: no mask and no position ids have to reach the model for that.
        """
        spans = self.spans
        width = max(stop - start for start, stop in spans)
        ids, mask = self.ids.new_zeros(len(spans), width), self.mask.new_zeros(len(spans), width)
        for row, (start, stop) in enumerate(spans):
            ids[row, : stop - start] = self.ids[row, start:stop]
            ids[row, stop - start :] = self.ids[row, stop - 1]  # any valid id; the last real one is at hand
            mask[row, : stop - start] = self.mask[row, start:stop]
        return Prompts(ids, mask), torch.tensor([start for start, _ in spans])

    @property
    def has_gaps(self) -> bool:
        """Whether a token between a row's first and last real one is masked."""
        return any(not bool(self.mask[row, a:b].all()) for row, (a, b) in enumerate(self.spans))


def read_prompts(model: Any, input: Any, attention_mask: Any = None, prepend_bos: bool | None = None) -> Prompts:
    """Token ids and mask of text, a list of texts, or ids ``[pos]`` / ``[batch, pos]``.

    Text is tokenised row by row by the model's own ``to_tokens`` and padded on the right here. Raises
    ValueError for an empty prompt, one longer than the context, ids outside the vocabulary, or pad ids
    without a mask; warns about a repeated leading BOS and about a tokenizer larger than the vocabulary.
    """
    texts = [input] if isinstance(input, str) else input
    if isinstance(texts, list | tuple) and texts and all(isinstance(t, str) for t in texts):
        if attention_mask is not None:
            fail("attention_mask", "None for text input", "a mask", "pass token ids together with a mask")
        _warn_tokenizer(model)
        prompts = _ragged([tokenise(model, text, prepend_bos) for text in texts], texts)
    else:
        ids = _id_tensor(input)
        mask = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else _mask_tensor(attention_mask, ids)
        prompts = Prompts(ids, mask)
        if attention_mask is None:
            _check_pads(model, ids)
    _check_bounds(model, prompts)
    _warn_bos(model, prompts)
    return prompts


def tokenise(model: Any, text: str, prepend_bos: bool | None) -> list[int]:
    """The ids of a text by the model's own ``to_tokens``; ``prepend_bos`` None is the model's own default."""
    if model.tokenizer is None:
        fail("input", "token ids for a model without a tokenizer", repr(text), "set one, or pass ids [batch, pos]")
    options = {} if prepend_bos is None else {"prepend_bos": prepend_bos}
    return [int(i) for i in model.to_tokens(text, truncate=False, **options)[0]]


def _d_vocab(model: Any) -> int:
    """The tokens the model has; a bridge's ``cfg.d_vocab`` follows whatever tokenizer is put on it.

    A packed matrix has another shape and says nothing; the readout refuses it by name.
    """
    shape = tuple(getattr(getattr(model, "W_U", None), "shape", ()))
    d_vocab = int(model.cfg.d_vocab)
    return min(d_vocab, shape[1]) if len(shape) == 2 and shape[0] == int(model.cfg.d_model) else d_vocab


def _warn_tokenizer(model: Any) -> None:
    """A tokenizer of another model gives other ids without a word."""
    size, d_vocab = 0 if model.tokenizer is None else len(model.tokenizer), _d_vocab(model)
    if size > d_vocab:
        warnings.warn(
            f"model.tokenizer knows {size} tokens and the model {d_vocab}; it may belong to another model, so compare "
            "result.tokens with the ids you expect",
            stacklevel=4,
        )


def _ragged(rows: list[list[int]], texts: Sequence[str]) -> Prompts:
    for row, text in zip(rows, texts, strict=True):
        if not row:
            fail("input", "a prompt of at least one token", repr(text), "give some text, or prepend_bos=True")
    width = max(map(len, rows))
    ids = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows])
    mask = torch.tensor([[place < len(row) for place in range(width)] for row in rows])
    return Prompts(ids, mask)


def _id_tensor(input: Any) -> Int[Tensor, "batch ctx"]:
    rule, todo = "text, a list of texts, or integer ids [pos] or [batch, pos]", "see model.to_tokens"
    if input is None or (isinstance(input, list | tuple) and len(input) == 0):
        fail("input", rule, "None" if input is None else "an empty list", "give a prompt of at least one token")
    if not isinstance(input, list | tuple | int | np.generic | np.ndarray | Tensor):
        fail("input", rule, type(input).__name__, todo, TypeError)
    try:
        ids = input.detach() if isinstance(input, Tensor) else torch.as_tensor(np.asarray(input))
    except (ValueError, TypeError):
        fail("input", rule, f"{type(input).__name__} of unequal or mixed rows", "pad ids and pass attention_mask")
    if ids.numel() == 0:
        fail("input", "a prompt of at least one token", f"ids of shape {tuple(ids.shape)}", "give some token ids")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        fail("input", rule, f"dtype {ids.dtype}", "convert token ids to integers", TypeError)
    if ids.ndim not in (1, 2):
        fail("input", rule, f"shape {tuple(ids.shape)}", todo)
    return torch.atleast_2d(ids).to("cpu", torch.int64)


def _mask_tensor(mask: Any, ids: Tensor) -> Bool[Tensor, "batch ctx"]:
    rule, todo = f"0 or 1 at every place of the ids, shape {tuple(ids.shape)}", "1 marks real tokens"
    try:
        mask = torch.atleast_2d(mask.detach().cpu() if isinstance(mask, Tensor) else torch.as_tensor(np.asarray(mask)))
    except (ValueError, TypeError):
        fail("attention_mask", rule, f"{type(mask).__name__} of something else", todo)
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        shown = f"shape {tuple(mask.shape)}" if mask.shape != ids.shape else "other values"
        fail("attention_mask", rule, shown, todo)
    empty = (~mask.bool().any(1)).nonzero()[:, 0].tolist()
    if empty:
        fail("attention_mask", "1 at least once in every row", f"all 0 in row {empty[0]}", "drop that row")
    return mask.bool()


def _check_bounds(model: Any, prompts: Prompts) -> None:
    d_vocab = _d_vocab(model)
    real = prompts.ids[prompts.mask]
    if int(real.min()) < 0 or int(real.max()) >= d_vocab:
        bad = int(real.min()) if int(real.min()) < 0 else int(real.max())
        fail("input", f"token ids between 0 and d_vocab-1={d_vocab - 1}", bad, "use the model's own tokenizer")
    n_ctx, longest = getattr(model.cfg, "n_ctx", None), max(stop - start for start, stop in prompts.spans)
    if n_ctx and n_ctx > 0 and longest > n_ctx:
        fail("input", f"a prompt of at most n_ctx={n_ctx} tokens", f"{longest} tokens", "shorten the prompt")


def _special_ids(model: Any) -> tuple[int | None, int | None, int | None]:
    tokenizer = getattr(model, "tokenizer", None)
    pad, bos, eos = (getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "bos", "eos"))
    return pad, bos, eos


def _check_pads(model: Any, ids: Int[Tensor, "batch ctx"]) -> None:
    """Pad ids at the edge of a row without a mask: refused where the id is only for padding, else a warning."""
    pad, bos, eos = _special_ids(model)
    if pad is None:
        return
    at = ids == pad
    leading = at.long().cumprod(1).sum(1)
    trailing = at.flip(1).long().cumprod(1).sum(1)
    if pad not in (bos, eos) and bool((at[:, 0] | at[:, -1]).any()):
        row = int((at[:, 0] | at[:, -1]).nonzero()[0])
        todo = "pass attention_mask=(ids != pad_id) so that pads are not read as text"
        fail("attention_mask", f"given when rows begin or end with the pad id {pad}", f"None with row {row} of input", todo)
    shared_lead = int(leading.max()) >= (2 if pad == bos else 1)
    if pad in (bos, eos) and (shared_lead or int(trailing.max()) >= 2):
        warnings.warn(
            f"attention_mask is None and rows of input begin or end with id {pad}, which is also the pad id; they are "
            "read as real tokens, pass attention_mask if they are padding",
            stacklevel=4,
        )


def _warn_bos(model: Any, prompts: Prompts) -> None:
    _, bos, _ = _special_ids(model)
    if bos is None:
        return
    for row, (start, stop) in enumerate(prompts.spans):
        if stop - start > 1 and bool((prompts.ids[row, start : start + 2] == bos).all()):
            warnings.warn(
                f"row {row} of input starts with the BOS id {bos} twice; pass prepend_bos=False if the text already has it",
                stacklevel=4,
            )
            return


def select_positions(prompts: Prompts, pos_slice: Any) -> Int[Tensor, "batch pos"]:
    """Places of the asked tokens in every row, −1 where a shorter row has none.

    ``pos_slice`` has TransformerLens' ``Slice`` semantics over the *real* tokens of each row: an int, a
    tuple ``(start, stop[, step])``, a slice, an array of ints, or None for all of them.
    """
    picked = []
    for row, (start, stop) in enumerate(prompts.spans):
        real = np.arange(start, stop)
        picked.append(real[_local_positions(pos_slice, stop - start, row)])
    width = max(map(len, picked))
    if width == 0:
        fail("pos_slice", "a selection of at least one real token", repr(pos_slice), "the prompts are shorter than that")
    positions = torch.full((len(picked), width), NO_POSITION)
    for row, places in enumerate(picked):
        positions[row, : len(places)] = torch.from_numpy(places)
    return positions


def _local_positions(pos_slice: Any, length: int, row: int) -> Any:
    value = getattr(pos_slice, "slice", pos_slice)  # a TransformerLens Slice carries its own
    if value is None:
        return slice(None)
    if isinstance(value, slice):
        return value
    if isinstance(value, tuple):
        return slice(*value)
    try:
        index = np.atleast_1d(value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value))
        whole = index.dtype.kind in "iu" and not isinstance(value, bool)
    except (ValueError, TypeError):
        whole = False
    if not whole:
        todo = "-1 is the last real token, None all of them"
        fail("pos_slice", "an int, a tuple (start, stop), a list of ints, or None", repr(pos_slice), todo)
    if bool(((index >= length) | (index < -length)).any()):
        fail("pos_slice", f"within the {length} real tokens of row {row}", repr(pos_slice), "count from -1 at the end")
    return index % length


def is_next(targets: Any) -> bool:
    """Whether the caller asks for the token that follows in the input."""
    return isinstance(targets, str) and not isinstance(targets, TokenSet) and targets == "next"


def next_tokens(
    prompts: Prompts, positions: Int[Tensor, "batch pos"]
) -> tuple[Int[Tensor, "batch kept"], Int[Tensor, "batch kept"]]:
    """The positions that have a following real token, and those tokens.

    Columns are dropped only together with a position, so the rows of a micro-batch keep the width of the whole.
    """
    ends = torch.tensor([stop for _, stop in prompts.spans])[:, None]
    kept = torch.where((positions >= 0) & (positions + 1 < ends), positions, NO_POSITION)
    if not torch.equal(kept, positions):
        if not bool((kept >= 0).any()):
            todo = "use pos_slice=None"
            fail("pos_slice", "positions that a token follows when targets='next'", "only the last one", todo)
        while bool((kept[:, -1] < 0).all()):
            kept = kept[:, :-1]
    ids = prompts.ids.gather(1, (kept + 1).clamp(0, prompts.ids.shape[1] - 1))
    return kept, torch.where(kept >= 0, ids, 0)


def resolve_objective(
    model: Any, d_vocab: int, targets: Any, incorrect: Any, quantity: str, shape: tuple[int, int]
) -> Objective:
    """Targets and incorrect targets of every cell ``[batch, pos]`` as one objective."""
    groups = [_cell_ids(model, d_vocab, targets, shape, "targets")]
    if incorrect is not None:
        groups.append(_cell_ids(model, d_vocab, incorrect, shape, "incorrect_targets"))
    signs = [(ids >= 0).double() * (-1 if turn else 1) for turn, ids in enumerate(groups)]
    return Objective(quantity, torch.cat(groups, -1).clamp_min(0), torch.cat(signs, -1))


def _cell_ids(
    model: Any, d_vocab: int, targets: Any, shape: tuple[int, int], argument: str
) -> Int[Tensor, "batch pos id"]:
    """Token ids of every cell, −1 for empty places in a set."""
    if isinstance(targets, Tensor | np.ndarray) and np.ndim(targets) > 0:
        return _tensor_targets(targets, d_vocab, shape, argument)[..., None]
    if isinstance(targets, str | TokenSet) or not isinstance(targets, Sequence):
        sets = [_token_ids(model, d_vocab, targets, argument)] * shape[0]
    else:
        if len(targets) != shape[0]:
            rule = f"one token, or one per row ({shape[0]})"
            fail(argument, rule, f"{len(targets)} tokens", "pass an integer tensor [batch, pos] for one per position")
        sets = [_token_ids(model, d_vocab, target, argument) for target in targets]
    width = max(map(len, sets))
    rows = torch.tensor([list(ids) + [-1] * (width - len(ids)) for ids in sets])
    return rows[:, None, :].expand(*shape, width)


def _tensor_targets(targets: Any, d_vocab: int, shape: tuple[int, int], argument: str) -> Int[Tensor, "batch pos"]:
    ids = targets.detach().cpu() if isinstance(targets, Tensor) else torch.from_numpy(np.asarray(targets))
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        fail(argument, "integer token ids", f"dtype {ids.dtype}", "convert the tensor to integers", TypeError)
    if ids.ndim == 1 and len(ids) == shape[0] and len(ids) != shape[1]:
        ids = ids[:, None]  # one per row
    if ids.ndim > 2 or any(have not in (1, want) for have, want in zip(ids.shape[::-1], shape[::-1], strict=False)):
        rule = f"right-aligned to [batch, pos]={list(shape)}"
        fail(argument, rule, f"shape {tuple(ids.shape)}", "give one id per analysed position, or one per row")
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= d_vocab):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        fail(argument, f"token ids between 0 and d_vocab-1={d_vocab - 1}", bad, "use the model's own tokenizer")
    return ids.long().expand(shape)


def _token_ids(model: Any, d_vocab: int, target: Any, argument: str) -> tuple[int, ...]:
    """The ids of one target: a token as text or id, or a set of them."""
    if isinstance(target, TokenSet):
        ids = [_single_id(model, d_vocab, member, argument) for member in target]
        return tuple(dict.fromkeys(ids))
    return (_single_id(model, d_vocab, target, argument),)


def _single_id(model: Any, d_vocab: int, target: Any, argument: str) -> int:
    if isinstance(target, str):
        return _single_token(model, target, argument)
    if isinstance(target, Tensor | np.ndarray) and np.ndim(target) == 0:
        target = target.item()
    if isinstance(target, bool) or not isinstance(target, int | np.integer):
        todo = "see model.to_single_token"
        fail(argument, "a token id, a single token as text, or a TokenSet", repr(target), todo, TypeError)
    if not 0 <= target < d_vocab:
        fail(argument, f"a token id between 0 and d_vocab-1={d_vocab - 1}", int(target), "negative ids do not count from the end")
    return int(target)


def _single_token(model: Any, text: str, argument: str) -> int:
    if model.tokenizer is None:
        fail(argument, "token ids for a model without a tokenizer", repr(text), "pass the id")
    ids = list(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(ids) != 1:
        pieces = [token_text(model.tokenizer, i) for i in ids]
        todo = "choose one piece, sum several with TokenSet(...), or use explain_generation for a whole answer"
        fail(argument, "a single token", f"{text!r}, which is the {len(ids)} tokens {pieces}", todo)
    return int(ids[0])


def token_text(tokenizer: Any, token_id: int) -> str:
    """The text of one token as it stands in the prompt: leading space kept, partial UTF-8 as ``<0xE6>``."""
    if tokenizer is None:
        return f"<{token_id}>"
    try:
        piece = tokenizer.convert_ids_to_tokens(int(token_id))
    except (IndexError, OverflowError, TypeError):
        piece = None
    if piece is None:
        return f"<{token_id}>"
    piece = piece.decode("utf-8", "backslashreplace") if isinstance(piece, bytes) else str(piece)
    if piece in (getattr(tokenizer, "all_special_tokens", None) or ()):
        return piece
    if _is_byte_level(tokenizer) and all(c in _BYTES for c in piece):
        return _utf8(bytes(_BYTES[c] for c in piece))
    return piece.replace("▁", " ")


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether pieces are written in the byte alphabet rather than as text."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return "ByteLevel" in f"{type(decoder).__name__} {decoder!r}" or hasattr(tokenizer, "byte_decoder")


def _utf8(raw: bytes) -> str:
    """Bytes as text; bytes that are not whole characters as <0x..>."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(chr(b) if b < 0x80 else f"<0x{b:02X}>" for b in raw)


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level tokenizers (GPT-2 and its descendants) write for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTES = _byte_alphabet()


_VISIBLE = {"\n": "⏎", "\r": "␍", "\t": "⇥", "\u200b": "␣", "\u00a0": "⍽"}


def token_label(text: str) -> str:
    """Token text that can be seen: ``·`` for outer spaces, ``⏎`` for a line break, ``∅`` for nothing."""
    if text == "":
        return "∅"
    shown = "".join(_VISIBLE.get(c, c) for c in text)
    body = shown.strip(" ")
    lead, trail = len(shown) - len(shown.lstrip(" ")), len(shown) - len(shown.rstrip(" "))
    if not body:
        return "·" * len(shown)
    return "·" * lead + body + "·" * trail


_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")  # controls, formats, surrogates, rare spaces


def visible(text: str) -> str:
    """A token label in which every character can be seen: controls and bidi marks as ``<U+202E>``."""
    shown = []
    for place, char in enumerate(token_label(text)):
        kind = unicodedata.category(char)
        if kind in _UNSEEN and char != " ":
            shown.append(f"<U+{ord(char):04X}>")
        else:  # a mark that would sit on the character before it gets a place of its own
            shown.append("◌" + char if place == 0 and kind.startswith("M") else char)
    return "".join(shown)
