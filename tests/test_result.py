"""Results: derived figures, onset rules, data frame, files, notebook view."""

import dataclasses
import json

import pandas as pd
import pytest
import torch
from conftest import IDS
from safetensors.torch import load_file, save_file

from tl_iglens import IGLensResult, RunInfo, ig_lens


def made(credits, *, start=0.1, labels=None, token="a", target="b"):
    """A result with given credits ``[segment]`` or ``[segment][pos]``."""
    attribution = torch.tensor(credits)
    attribution = attribution[:, None, None] if attribution.ndim == 1 else attribution[:, None, :]
    n, _, width = attribution.shape
    levels = torch.cat([torch.full((1, 1, width), start), start + attribution.cumsum(0)])
    return IGLensResult(
        attribution=attribution,
        levels=levels,
        labels=labels or tuple(f"{s}_block" for s in range(n)),
        point_labels=(*(f"{s}_pre" for s in range(n)), "final_post"),
        boundaries=tuple(range(1, n + 1)),
        targets=torch.full((1, width), 3),
        target_strings=((target,) * width,),
        tokens=torch.arange(width)[None],
        token_strings=((token,) * width,),
        attention_mask=torch.ones(1, width, dtype=torch.bool),
        positions=torch.arange(width)[None],
        model_level=levels[-1] + 1e-7,
        info=RunInfo("m", "float32", "0", "raw", "prediction_aware", 1, "embed", "prob", "0_pre", n),
    )


# --- onset ---------------------------------------------------------------------------------------------

ONSETS = [
    # credits, rule, fraction, segment
    ([0.1, 0.2, 0.3], "mass", 0.5, 1),  # 0.3 of 0.6 is reached exactly
    ([0.1, 0.1, 0.3], "mass", 0.5, 2),
    ([0.4, -0.3, 0.2], "mass", 0.5, 1),  # signs do not matter
    ([0.4, -0.3, 0.2], "mass", 0.4, 0),
    ([0.1, 0.2, 0.3], "mass", 1.0, 2),
    ([0.3, 0.2, 0.0], "mass", 1.0, 1),  # nothing happens at the end
    ([-0.1, -0.2, -0.05], "mass", 0.5, 1),
    ([0.1, 0.5, 0.2], "largest", 0.5, 1),
    ([0.1, -0.5, 0.6], "largest", 0.5, 2),
    ([0.2, -0.5, 0.1], "largest", 0.5, 1),  # Δ is negative: towards the target is down
    ([0.3, 0.3, 0.1], "largest", 0.5, 0),  # the earlier of two equals
    ([0.1, 0.2, 0.3], "settled", 0.5, 1),
    ([0.5, -0.4, 0.3, 0.1], "settled", 0.5, 2),  # 0.5 is left again
    ([0.5, -0.1, 0.1], "settled", 0.5, 0),
    ([-0.1, -0.3, -0.2], "settled", 0.5, 1),
    ([0.1, 0.2, 0.3], "settled", 1.0, 2),
    ([0.5, 0.4, -0.3], "settled", 1.0, 1),  # above its end ever after
    ([0.7, 0.2, -0.3], "settled", 1.0, 0),
]


@pytest.mark.parametrize(("credits", "rule", "fraction", "segment"), ONSETS)
def test_onset(credits, rule, fraction, segment):
    onset = made(credits).onset(rule, fraction)
    assert onset.index.tolist() == [[segment]]
    assert onset.labels == ((f"{segment}_block",),)
    assert onset.boundary.tolist() == [[segment + 1]]


def test_onset_defaults_to_the_papers_rule():
    result = made([[0.4, 0.1], [-0.3, 0.2], [0.2, 0.7]])
    assert result.onset().index.tolist() == result.onset("mass", 0.5).index.tolist() == [[1, 2]]


@pytest.mark.parametrize("rule", ["mass", "largest", "settled"])
def test_undefined_onsets_say_so(rule):
    onset = made([[1e-8, 0.2], [-1e-8, 0.1]]).onset(rule)
    assert onset.labels == (("undefined", "0_block"),)
    assert onset.index.tolist() == [[-1, 0]] and onset.boundary.tolist() == [[-1, 1]]


@pytest.mark.parametrize("rule", ["largest", "settled"])
def test_credits_that_cancel_have_no_direction(rule):
    onset = made([0.5, -0.5]).onset(rule)
    assert onset.labels == (("undefined",),)


def test_onset_of_filled_cells_is_undefined(lens_model):
    batch, mask = torch.tensor([IDS, IDS[:3] + [2] * 4]), [[1] * 7, [1] * 3 + [0] * 4]
    result = ig_lens(lens_model, batch, attention_mask=mask, pos_slice=None)
    for rule in ("mass", "largest", "settled"):
        assert result.onset(rule).labels[1][3:] == ("undefined",) * 4


def test_wrong_onset_options():
    with pytest.raises(ValueError) as error:
        made([0.1, 0.2]).onset("first")
    assert str(error.value) == "rule must be one of mass, largest, settled, got 'first'; check the spelling"
    for fraction in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError) as error:
            made([0.1, 0.2]).onset(fraction=fraction)
        assert (
            str(error.value) == f"fraction must be above 0 and at most 1, got {fraction}; 0.5 is the paper's"
        )


# --- derived figures -----------------------------------------------------------------------------------


def test_derived_figures():
    result = made([[0.4, 0.1], [-0.3, 0.2], [0.2, 0.3]])
    torch.testing.assert_close(result.delta, torch.tensor([[0.3, 0.6]]))
    torch.testing.assert_close(result.cancellation, torch.tensor([[3.0, 1.0]]))
    assert result.completeness_gap.abs().max() < 1e-6
    torch.testing.assert_close(result.readout_gap, torch.full((1, 2), -1e-7), rtol=0, atol=1e-7)
    assert made([0.5, -0.5]).cancellation.isnan().all()


def test_results_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        made([0.1]).labels = ()


def test_top_orders_by_size():
    top = made([0.1, -0.4, 0.2, 0.05]).top(3)
    assert top["segment"].tolist() == ["1_block", "2_block", "0_block"]
    assert top["boundary"].tolist() == [2, 3, 1]
    assert top["credit"].tolist() == pytest.approx([-0.4, 0.2, 0.1])
    assert top["level_before"].tolist() == pytest.approx([0.2, -0.2, 0.1])
    assert len(made([0.1, -0.4]).top(10)) == 2


def test_data_frame():
    result = made([[0.4, 0.1], [-0.3, 0.2]])
    frame = result.to_dataframe()
    assert list(frame.columns) == [
        "batch", "column", "pos", "token", "target_id", "target", "index", "segment", "boundary", "credit",
        "level_before", "level_after", "model",
    ]  # fmt: skip
    assert len(frame) == 4 and frame["segment"].tolist() == ["0_block", "1_block"] * 2
    assert frame["boundary"].tolist() == [1, 2, 1, 2]
    pd.testing.assert_series_equal(
        frame["level_after"] - frame["level_before"], frame["credit"], check_names=False, atol=1e-7
    )
    sums = frame.groupby(["batch", "column"])["credit"].sum()
    assert sums.tolist() == pytest.approx(result.delta[0].tolist(), abs=1e-6)


def test_data_frame_of_a_ragged_batch(lens_model):
    batch, mask = torch.tensor([IDS, [2] * 4 + IDS[:3]]), [[1] * 7, [0] * 4 + [1] * 3]
    result = ig_lens(lens_model, batch, attention_mask=mask, pos_slice=(-4, None))
    frame = result.to_dataframe()
    assert frame.groupby("batch")["pos"].unique().map(list).tolist() == [[3, 4, 5, 6], [4, 5, 6]]
    assert not frame.isna().any().any() and len(frame) == 7 * 3


# --- files ---------------------------------------------------------------------------------------------


def same(a, b):
    for field in dataclasses.fields(IGLensResult):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and torch.equal(
                torch.nan_to_num(x, nan=7.0), torch.nan_to_num(y, nan=7.0)
            )
            assert torch.equal(x.isnan(), y.isnan())
        else:
            assert x == y and type(x) is type(y), field.name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_steps": 3, "pos_slice": None},
        {"estimator": "midpoint", "baseline": "mean", "quantity": "logit", "layers": [1]},
        {"targets": 7, "incorrect_targets": 3, "pos_slice": None},
    ],
    ids=str,
)
def test_round_trip(lens_model, tmp_path, options):
    batch, mask = torch.tensor([IDS, [2] * 4 + IDS[:3]]), [[1] * 7, [0] * 4 + [1] * 3]
    result = ig_lens(lens_model, batch, attention_mask=mask, **options)
    path = result.save(tmp_path / "receipt.safetensors")
    same(IGLensResult.load(path), result)
    same(IGLensResult.load(str(path)), result)
    assert [p.name for p in tmp_path.iterdir()] == ["receipt.safetensors"]
    assert load_file(path)["attribution"].shape == result.attribution.shape  # an ordinary safetensors file


def test_text_survives_a_file(tmp_path):
    result = made([0.1, 0.2], token="<0xE6>né日\n\x00\U0001f600", target=' "</b>\\')
    same(IGLensResult.load(result.save(tmp_path / "r")), result)


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = made([0.1]).save(tmp_path / "r.safetensors")

    def breaks_off(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("tl_iglens.files.save_file", breaks_off)
    with pytest.raises(OSError, match="disk full"):
        made([0.1, 0.2]).save(path)
    same(IGLensResult.load(path), made([0.1]))
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]


@pytest.mark.parametrize("damage", ["half", "empty", "text", "pickle"])
def test_damaged_files(tmp_path, damage):
    path = made([0.1, 0.2]).save(tmp_path / "r.safetensors")
    if damage == "pickle":
        torch.save({"attribution": torch.zeros(3)}, path)
    else:
        content = {"half": path.read_bytes()[:-20], "empty": b"", "text": b"not a result at all, but words"}
        path.write_bytes(content[damage])
    with pytest.raises(ValueError) as error:
        IGLensResult.load(path)
    message = str(error.value)
    assert message.startswith(f"path must be a result file, got {path} (")
    assert message.endswith("); give a file written by IGLensResult.save")


def test_files_that_are_something_else(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(2)}, str(path))
    with pytest.raises(ValueError) as error:
        IGLensResult.load(path)
    assert str(error.value) == (
        f"path must be a result file, got {path}, a safetensors file of something else; "
        "give a file written by IGLensResult.save"
    )
    with pytest.raises(FileNotFoundError) as missing:
        IGLensResult.load(tmp_path / "none")
    assert str(missing.value) == (
        f"path must be an existing file, got {tmp_path / 'none'}; give a file written by IGLensResult.save"
    )


def rewrite(path, **changes):
    """The same file with other metadata."""
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        meta = file.metadata()
    save_file(
        load_file(path), str(path), metadata={k: v for k, v in (meta | changes).items() if v is not None}
    )


def test_newer_files(tmp_path):
    path = made([0.1, 0.2]).save(tmp_path / "r.safetensors")
    rewrite(path, format="99")
    with pytest.raises(ValueError) as error:
        IGLensResult.load(path)
    assert str(error.value) == (
        "path must be a result file of format 1 or older, got format 99; update tl-iglens"
    )


def test_unknown_fields_of_a_file_are_ignored(tmp_path):
    path = made([0.1, 0.2]).save(tmp_path / "r.safetensors")
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        words = json.loads(file.metadata()["fields"])
    rewrite(path, fields=json.dumps(words | {"later": [1, 2]}))
    same(IGLensResult.load(path), made([0.1, 0.2]))


@pytest.mark.parametrize("changes", [{"fields": "{"}, {"fields": "{}"}, {"info": "{}"}], ids=str)
def test_damaged_metadata(tmp_path, changes):
    path = made([0.1, 0.2]).save(tmp_path / "r.safetensors")
    rewrite(path, **changes)
    with pytest.raises(
        ValueError, match=r"^path must be a result file, got .*r\.safetensors \(.*\); give a file"
    ):
        IGLensResult.load(path)


# --- notebook ------------------------------------------------------------------------------------------


def test_text_in_the_notebook_view_is_escaped():
    evil = "</td><script>alert(1)</script>&<b>"
    page = made([0.1, 0.2], labels=("<i>0</i>", "1_block"), token=evil, target=evil)._repr_html_()
    assert "<script>" not in page and "<b>" not in page and "<i>" not in page
    assert "&lt;script&gt;" in page and "&amp;" in page and "&lt;i&gt;0&lt;/i&gt;" in page


def test_the_notebook_view_is_a_receipt():
    result = made([[0.4, 0.1], [-0.3, 0.2]])
    page = result._repr_html_()
    assert page.count("<table") == 2
    for figure in ("0.100000", "+0.400000", "−0.300000", "0.200000", "onset 0_block"):
        assert figure in page
    assert "prob · baseline embed · prediction_aware · m · |Σ − Δ| ≤" in page


def test_long_results_are_cut_in_the_notebook_view():
    page = made([[0.01] * 30] * 20)._repr_html_()
    assert page.count("<table") == 12 and "… and 18 earlier tokens" in page
    assert page.count("other, 12 segments") == 12 and "+0.120000" in page
