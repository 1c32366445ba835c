"""Prompts, masks, positions, targets and printable token text."""

import numpy as np
import pytest
import torch
from conftest import small_model
from fixtures import bridge, tokenizer

try:
    from transformer_lens.utilities.slice import Slice
except ImportError:  # TransformerLens 2
    from transformer_lens.utils import Slice

from tl_iglens import TokenSet
from tl_iglens.tokens import (
    Prompts,
    is_next,
    next_tokens,
    read_prompts,
    resolve_objective,
    select_positions,
    token_label,
    token_text,
)


def prompts(*rows, side="right"):
    """Rows of token ids padded with 2, and their mask."""
    width = max(map(len, rows))
    filled = [([2] * (width - len(r)) + r) if side == "left" else (r + [2] * (width - len(r))) for r in rows]
    real = [([0] * (width - len(r)) + [1] * len(r)) if side == "left" else ([1] * len(r) + [0] * (width - len(r)))
            for r in rows]  # fmt: skip
    return Prompts(torch.tensor(filled), torch.tensor(real).bool())


@pytest.fixture
def br():
    """A bridge with the small byte-level tokenizer."""
    return small_model("gpt2-raw")


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        [0, 5, 40],
        (0, 5, 40),
        [[0, 5, 40]],
        torch.tensor([0, 5, 40]),
        torch.tensor([[0, 5, 40]], dtype=torch.int32),
        np.array([0, 5, 40]),
        np.array([[0, 5, 40]], dtype=np.uint16),
    ],
    ids=lambda g: f"{type(g).__name__}{getattr(g, 'dtype', '')}",
)
def test_ids_of_any_kind(lens_model, given):
    read = read_prompts(lens_model, given)
    assert read.ids.tolist() == [[0, 5, 40]] and read.ids.dtype == torch.int64
    assert read.mask.all() and read.spans == [(0, 3)] and not read.has_gaps


def test_ragged_text_is_padded_and_masked(br):
    read = read_prompts(br, ["The cat", "The capital of France is"])
    solo = [read_prompts(br, text).ids[0].tolist() for text in ("The cat", "The capital of France is")]
    assert [read.ids[b, s:e].tolist() for b, (s, e) in enumerate(read.spans)] == solo
    assert solo[0] == [0, 268, 282]
    assert read.mask.sum(1).tolist() == [len(solo[0]), len(solo[1])]


@pytest.mark.parametrize("side", ["left", "right"])
def test_text_is_read_alike_whatever_the_padding_side_of_the_tokenizer(side):
    model = bridge("gpt2", tokenizer=tokenizer(padding_side=side))
    read = read_prompts(model, ["The cat", "The capital of France is"])
    assert read.spans[0] == (0, 3)


@pytest.mark.parametrize(
    "prepend_bos, ids", [(None, [0, 268, 282]), (True, [0, 268, 282]), (False, [268, 282])]
)
def test_prepend_bos(br, prepend_bos, ids):
    assert read_prompts(br, "The cat", prepend_bos=prepend_bos).ids.tolist() == [ids]


def test_bos_alone_is_a_prompt(br):
    assert read_prompts(br, "").ids.tolist() == [[0]]
    assert read_prompts(br, ["", "The"]).spans == [(0, 1), (0, 2)]


def test_bos_that_is_the_eos():
    model = bridge("gpt2", tokenizer=tokenizer(bos=False))
    assert read_prompts(model, "The cat").ids.tolist() == model.to_tokens("The cat").tolist()


def test_mask_of_the_caller_is_kept(lens_model):
    read = read_prompts(lens_model, [[2, 2, 1, 5], [1, 5, 9, 3]], attention_mask=[[0, 0, 1, 1], [1, 0, 1, 1]])
    assert read.spans == [(2, 4), (0, 4)] and read.has_gaps
    assert read.mask.tolist() == [[False, False, True, True], [True, False, True, True]]


def test_right_padded_rows_start_at_the_left_edge():
    packed, moved = prompts([7, 8], [4, 5, 6, 7], side="left").right_padded()
    assert packed.ids[0, :2].tolist() == [7, 8] and packed.ids[1].tolist() == [4, 5, 6, 7]
    assert packed.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert moved.tolist() == [2, 0]


def test_rows_keep_the_columns_they_need():
    part = prompts([7, 8], [4, 5, 6, 7], side="left").at(slice(0, 1))
    assert part.ids.tolist() == [[7, 8]] and part.mask.tolist() == [[True, True]]


# --- positions ------------------------------------------------------------------------------------

SLICES = [
    -1, 0, 2, -3, None, (1, 3), (-2, None), (None, -1), (None, None, 2), (0, 5, 2), slice(1, None), slice(None, 2),
    [0, 2], np.array([1, -1]), torch.tensor([2, 0]), [-1],
]  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pos_slice", SLICES, ids=str)
def test_slices_are_those_of_transformer_lens_on_the_real_tokens(pos_slice, side):
    rows = [[10, 11, 12, 13, 14], [20, 21, 22]]
    batch = prompts(*rows, side=side)
    found = select_positions(batch, pos_slice)
    for b, row in enumerate(rows):
        given = pos_slice.numpy() if isinstance(pos_slice, torch.Tensor) else pos_slice
        theirs = Slice(list(given) if isinstance(given, np.ndarray) else given).apply(
            torch.tensor(row), dim=0
        )
        mine = [int(batch.ids[b, p]) for p in found[b] if p >= 0]
        assert mine == torch.atleast_1d(theirs).tolist()
    assert torch.equal(select_positions(batch, Slice(-1)), select_positions(batch, -1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_shorter_rows_are_filled(side):
    batch = prompts([10, 11, 12, 13], [20, 21], side=side)
    positions = select_positions(batch, None)
    assert positions.shape == (2, 4)
    assert (positions >= 0).sum(1).tolist() == [4, 2]
    assert positions[1].tolist() == ([2, 3, -1, -1] if side == "left" else [0, 1, -1, -1])


@pytest.mark.parametrize(
    ("pos_slice", "message"),
    [
        (2, "pos_slice must be within the 2 real tokens of row 1, got 2; count from -1 at the end"),
        (-3, "pos_slice must be within the 2 real tokens of row 1, got -3; count from -1 at the end"),
        ([0, 7], "pos_slice must be within the 4 real tokens of row 0, got [0, 7]; count from -1 at the end"),
        ((9, None), "pos_slice must be a selection of at least one real token, got (9, None); "
                    "the prompts are shorter than that"),
        *(
            (value, f"pos_slice must be an int, a tuple (start, stop), a list of ints, or None, got {value!r}; "
                    "-1 is the last real token, None all of them")
            for value in ("last", 1.5, True, [0.5])
        ),
    ],
)  # fmt: skip
def test_wrong_positions(pos_slice, message):
    with pytest.raises(ValueError) as error:
        select_positions(prompts([10, 11, 12, 13], [20, 21]), pos_slice)
    assert str(error.value) == message


@pytest.mark.parametrize("side", ["left", "right"])
def test_next_tokens_follow_their_position(side):
    batch = prompts([10, 11, 12, 13], [20, 21], side=side)
    positions, ids = next_tokens(batch, select_positions(batch, None))
    assert positions.shape == (2, 3)
    for b in range(2):
        for place, target in zip(positions[b].tolist(), ids[b].tolist(), strict=True):
            if place >= 0:
                assert target == int(batch.ids[b, place + 1])
    assert (positions >= 0).sum(1).tolist() == [3, 1]


def test_the_last_token_has_no_next():
    batch = prompts([10, 11, 12], [20, 21])
    with pytest.raises(ValueError) as error:
        next_tokens(batch, select_positions(batch, -1))
    assert str(error.value) == (
        "pos_slice must be positions that a token follows when targets='next', got only the last one; "
        "use pos_slice=None"
    )


def test_next_is_a_word_of_its_own():
    assert is_next("next") and not is_next(" next") and not is_next(TokenSet("next")) and not is_next(None)


# --- targets --------------------------------------------------------------------------------------


def resolved(model, targets, shape, incorrect=None):
    return resolve_objective(model, 320, targets, incorrect, "prob", shape)


@pytest.mark.parametrize("target", [7, np.int64(7), torch.tensor(7), np.array(7)], ids=type)
def test_one_id_for_all(br, target):
    assert resolved(br, target, (3, 2)).ids.tolist() == [[[7]] * 2] * 3


@pytest.mark.parametrize(
    "targets",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1], [2], [3]]),
        torch.tensor([1, 2, 3], dtype=torch.int16),
    ],
)
def test_one_id_per_row(br, targets):
    assert resolved(br, targets, (3, 1)).ids[:, :, 0].tolist() == [[1], [2], [3]]
    if isinstance(targets, list | tuple) or targets.ndim == 2:
        assert resolved(br, targets, (3, 3)).ids[:, :, 0].tolist() == [[1] * 3, [2] * 3, [3] * 3]


def test_tensors_align_to_the_right(br):
    assert resolved(br, torch.tensor([1, 2]), (3, 2)).ids[:, :, 0].tolist() == [[1, 2]] * 3
    grid = torch.arange(6).reshape(3, 2)
    assert torch.equal(resolved(br, grid, (3, 2)).ids[:, :, 0], grid)
    assert torch.equal(resolved(br, grid[:1], (3, 2)).ids[:, :, 0], grid[:1].expand(3, 2))


def test_text_is_not_trimmed(br):
    paris, space_paris = (int(resolved(br, text, (1, 1)).ids) for text in ("Paris", " Paris"))
    assert paris != space_paris
    assert [token_text(br.tokenizer, i) for i in (paris, space_paris)] == ["Paris", " Paris"]


def test_sets_sum_their_members_once(br):
    objective = resolved(br, TokenSet("Paris", " Paris", "Paris"), (1, 1))
    assert objective.ids.shape == (1, 1, 2) and objective.sign.tolist() == [[[1, 1]]]
    assert repr(TokenSet("Paris", 5)) == "TokenSet('Paris', 5)"


def test_sets_of_different_size_one_per_row(br):
    objective = resolved(br, [TokenSet("Paris", " Paris"), TokenSet(" the"), 5], (3, 1))
    assert objective.sign[:, 0].tolist() == [[1, 1], [1, 0], [1, 0]]
    assert int(objective.ids[2, 0, 0]) == 5


def test_incorrect_targets_count_against(br):
    objective = resolved(br, 7, (2, 1), incorrect=[8, TokenSet(9, 10)])
    assert objective.sign.tolist() == [[[1, -1, 0]], [[1, -1, -1]]]
    assert objective.ids[1, 0].tolist() == [7, 9, 10]


# --- text -----------------------------------------------------------------------------------------


def test_pieces_as_they_stand_in_the_prompt():
    tok = tokenizer()
    ids = tok("né 日 cat", add_special_tokens=False)["input_ids"]
    texts = [token_text(tok, i) for i in ids]
    assert texts == ["n", "<0xC3>", "<0xA9>", " ", "<0xE6>", "<0x97>", "<0xA5>", " cat"]
    assert token_text(tok, 0) == "<s>" and token_text(tok, 5000) == "<5000>" and token_text(None, 3) == "<3>"


def test_sentencepiece_pieces():
    tok = tokenizer(style="sentencepiece")
    ids = tok("The cat", add_special_tokens=False)["input_ids"]
    assert "".join(token_text(tok, i) for i in ids) == " The cat"


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (" cat", "·cat"), ("cat", "cat"), (" ", "·"), ("  ", "··"), ("\n", "⏎"), ("\t", "⇥"), ("\u200b", "␣"),
        ("", "∅"), ("a b ", "a b·"), ("<0xE6>", "<0xE6>"),
    ],
)  # fmt: skip
def test_labels_can_be_seen(text, label):
    assert token_label(text) == label
