"""The published matrix of model families: complete, nothing wrong in it, and a sample of it measured again."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks import matrix

TEXT = (Path(__file__).parent.parent / "docs" / "MATRIX.md").read_text("utf-8")
PAGE = matrix.read_page(TEXT)
SAMPLE = ("GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "GPTNeoXForCausalLM", "MambaForCausalLM")

pytestmark = pytest.mark.skipif(
    not version("transformer-lens").startswith("4."), reason="the page was made with TransformerLens 4"
)


def test_no_cell_is_wrong_and_every_refusal_has_a_reason():
    assert len(PAGE) > 100
    for name, row in PAGE.items():
        cells = [text for column, text in row.items() if column != "notes"]
        assert set(cells) <= {"exact", "blocks only", "refused"}, name
        assert "refused" not in cells or len(row["notes"]) > 20, name


def test_the_count_at_the_top_is_that_of_the_table():
    said = [int(n) for n in re.findall(r"\d+", next(line for line in TEXT.splitlines() if "decoder-only" in line))]
    raw = [row["float32 raw"] for row in PAGE.values() if "float32 compatibility mode" in row]
    exact, blocks, refused = (raw.count(verdict) for verdict in ("exact", "blocks only", "refused"))
    assert said[:2] == [exact + blocks, len(raw)] and said[3:6] == [exact, blocks, refused] and said[6] == 0


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_measured_again(name):
    row = matrix.bridge_cells([name])[name]
    assert {column: cell.verdict for column, cell in row.items()} == {c: PAGE[name][c] for c in row}


def test_a_broken_law_is_called_wrong(monkeypatch):
    """The checker can fail: a readout that is off by a thousandth at one boundary is noticed."""
    honest = matrix.ig_lens

    def off(*args, **options):
        result = honest(*args, **options)
        result.levels[1] += 1e-3
        return result

    monkeypatch.setattr(matrix, "ig_lens", off)
    cell = matrix.bridge_cells(["GPT2LMHeadModel"])["GPT2LMHeadModel"]["float32 raw"]
    assert cell.verdict == "wrong" and "level 1" in cell.reason
