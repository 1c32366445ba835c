"""Many prompts to Parquet: equal to ig_lens row by row, resumable after any interruption, bad rows set aside."""

import errno
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from fixtures import hooked, no_trace, shared_bridge, tokenizer

from tl_iglens import AblationResult, TokenSet, ablate, corpus, direct_probability_attribution, ig_lens, plotting
from tl_iglens.corpus import PromptTooLongError, token_class
from tl_iglens.corpus.sources import Columns, open_source
from tl_iglens.corpus.store import Folder
from tl_iglens.corpus.tables import Ready
from tl_iglens.corpus.worker import batches

WORDS = ("The", " capital", " of", " France", " is", " Paris", " sat", " on", " cat", ", ", "1", " the")


def texts(n: int, longest: int = 12) -> list[str]:
    """``n`` different texts of 2 to ``longest`` words, in no order of length."""
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(WORDS, 2 + i * 7 % (longest - 1))).strip() + f" {i}" for i in range(n)]


@functools.cache
def small():
    """A small random model with a tokenizer: a bridge where there is one."""
    if importlib.util.find_spec("transformer_lens.model_bridge"):
        return shared_bridge("llama")
    return hooked(tokenizer=tokenizer(), d_vocab=291, n_ctx=64)


def run(source, analysis="ig_lens", out=None, **options):
    return corpus.run(small(), source, analysis, out, **options)


def files(out: Path) -> dict[str, str]:
    """Every partition and its SHA-256."""
    found = sorted([*out.glob("rows/**/*"), *out.glob("errors/**/*")])
    return {str(f.relative_to(out)): hashlib.sha256(f.read_bytes()).hexdigest() for f in found if f.is_file()}


def lists(frame: pd.DataFrame, column: str) -> torch.Tensor:
    return torch.tensor(np.stack(frame[column].tolist()))


@pytest.fixture(scope="module")
def prompts():
    return texts(60)


@pytest.fixture(scope="module")
def made(tmp_path_factory, prompts):
    """Sixty prompts, four of them bad, in shards of seven."""
    source = [*prompts[:20], "", None, *prompts[20:40], "word " * 90, 7.5, *prompts[40:]]
    return source, run(source, out=tmp_path_factory.mktemp("corpus") / "out", shard_size=7, batch_tokens=60)


# --- the numbers ---------------------------------------------------------------------------------


def test_rows_are_those_of_ig_lens_on_each_prompt_alone(made):
    source, table = made
    frame = table.to_pandas()
    good = [i for i in range(len(source)) if i not in (20, 21, 42, 43)]
    assert frame["prompt_id"].tolist() == good
    for i in good[::6]:
        solo, row = ig_lens(small(), source[i]), frame[frame["prompt_id"] == i].iloc[0]
        assert np.abs(row["credits"] - solo.attribution[:, 0, 0].numpy()).max() < 1e-6
        assert np.abs(row["levels"] - solo.levels[:, 0, 0].numpy()).max() < 1e-6
        for name, value in {
            "p_model": solo.model_level, "delta": solo.delta, "completeness_gap": solo.completeness_gap,
            "readout_gap": solo.readout_gap,
        }.items():  # fmt: skip
            assert abs(row[name] - float(value)) < 1e-6, name
        assert row["cancellation"] == pytest.approx(float(solo.cancellation), rel=1e-4)
        assert (row["pos"], row["token"]) == (int(solo.positions[0, 0]), solo.token_strings[0][-1])
        assert (row["target_id"], row["target"]) == (int(solo.targets), solo.target_strings[0][0])
        assert row["n_tokens"] == solo.tokens.shape[1] and not row["truncated"]
        assert "".join(solo.token_strings[0]).endswith(row["context"].lstrip("…"))
        for rule in ("mass", "largest", "settled"):
            onset = solo.onset(rule)
            assert row[f"onset_{rule}"] == onset.labels[0][0]
            assert row[f"onset_{rule}_boundary"] == int(onset.boundary)


def test_every_token_options_and_targets_of_a_row(tmp_path, prompts):
    source = [
        {"text": prompts[0], "answer": " Paris", "name": "a"},
        {"text": prompts[1], "answer": None, "name": "b"},
        {"text": prompts[2], "answer": ["Paris", " Paris"], "name": 3},
        {"text": prompts[3], "answer": 17, "name": None},
    ]
    options = {"pos_slice": None, "incl_mid": True, "quantity": "log_prob", "baseline": "zero"}
    table = run(source, out=tmp_path / "out", id_column="name", target_column="answer", **options)
    frame = table.to_pandas()
    assert frame.groupby("prompt_id")["id"].first().fillna("none").tolist() == ["a", "b", "3", "none"]
    for i, target in enumerate([" Paris", None, TokenSet("Paris", " Paris"), 17]):
        solo, rows = ig_lens(small(), source[i]["text"], targets=target, **options), frame[frame["prompt_id"] == i]
        assert rows["pos"].tolist() == list(range(solo.tokens.shape[1]))
        assert (lists(rows, "credits").T - solo.attribution[:, 0]).abs().max() < 2e-6
        assert (torch.tensor(rows["log_p_model"].to_numpy()) - solo.model_level[0]).abs().max() < 2e-6
        assert rows["target"].tolist() == list(solo.target_strings[0])
    assert table.segments == solo.labels and table.points == solo.point_labels and table.boundaries == solo.boundaries
    assert table.info.quantity == "log_prob" and table.info.baseline == "zero"


def test_undefined_onsets_and_cancellations_are_null(tmp_path, prompts):
    table = run(prompts[:3], out=tmp_path / "out", targets=5, incorrect_targets=5)  # p − p = 0 everywhere
    frame = table.to_pandas(["onset_mass", "onset_settled_boundary", "cancellation", "delta"])
    assert frame["delta"].abs().max() == 0
    assert frame[["onset_mass", "onset_settled_boundary", "cancellation"]].isna().all(axis=None)
    assert table.onset_histogram().iloc[-1].tolist()[0] == "undefined"
    assert table.onset_histogram().iloc[-1]["count"] == 3


def test_component_credits(tmp_path, prompts):
    table = run(prompts[:5], "direct_probability_attribution", tmp_path / "out", unit="component", n_nodes=2)
    frame = table.to_pandas()
    for i in range(5):
        solo = direct_probability_attribution(small(), prompts[i], unit="component", n_nodes=2)
        assert np.abs(frame["credits"][i] - solo.attribution[:, 0, 0].numpy()).max() < 1e-6
    assert table.segments == solo.labels and abs(frame["completeness_gap"]).max() < 1e-6


def test_ablations(tmp_path, prompts):
    table = run(prompts[:5], ablate, tmp_path / "out", mode="zero", unit="attn")
    frame = table.to_pandas()
    for i in range(5):
        solo = ablate(small(), prompts[i], mode="zero", unit="attn")
        assert isinstance(solo, AblationResult)
        assert np.abs(frame["p_ablated"][i] - solo.p_ablated[:, 0].numpy()).max() < 1e-6
        assert np.abs(frame["effects"][i] - solo.effect[:, 0].numpy()).max() < 1e-6
        assert frame["strongest"][i] == solo.labels[int(solo.effect[:, 0].argmax())]
    assert table.info.mode == "zero" and table.segments == solo.labels


def test_a_function_of_the_users_own(tmp_path, prompts):
    def lengths(model, batch, *, scale):
        return pd.DataFrame({"length": [scale * len(text) for text in batch], "note": [None] * len(batch)})

    def by_segment(model, batch):
        return ig_lens(model, list(batch)).to_dataframe()

    one = run(prompts, lengths, tmp_path / "one", scale=2, shard_size=25).to_pandas()
    assert one["length"].tolist() == [2 * len(text) for text in prompts]
    many = run(prompts[:8], by_segment, tmp_path / "many", batch_tokens=40).to_pandas()
    whole = ig_lens(small(), prompts[:8]).to_dataframe()
    assert many["prompt_id"].tolist() == whole["batch"].tolist()
    assert np.abs(many["credit"] - whole["credit"]).max() < 1e-6


def test_the_model_is_left_as_it_was(tmp_path, prompts):
    with no_trace(small()):
        run(prompts[:6], out=tmp_path / "out")


# --- sources -------------------------------------------------------------------------------------


def test_all_sources_give_the_same_rows(tmp_path):
    rows = [
        {"text": "The cat, on", "answer": " Paris"},
        {"text": 'line one\nline "two"', "answer": " the"},
        {"text": "1", "answer": " is"},
        {"text": "long " * 40_000, "answer": " is"},
    ]
    frame = pd.DataFrame(rows)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    columns = Columns("text", None, "answer")
    sources = [rows, frame, *(tmp_path / f"a.{kind}" for kind in ("csv", "parquet", "jsonl"))]
    if importlib.util.find_spec("datasets"):
        import datasets

        sources += [datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows).to_iterable_dataset()]
    for source in sources:
        opened = open_source(source, columns)
        found = list(opened)
        assert [(row.number, row.prompt, row.target) for row in found] == [
            (i, row["text"], row["answer"]) for i, row in enumerate(rows)
        ]
        assert opened.length in (None, 4)
        assert next(opened.shards(4)).digest == next(open_source(rows, columns).shards(4)).digest


def test_a_generator_is_streamed(tmp_path, prompts):
    seen, folder = [], tmp_path / "out"

    def source():
        for text in prompts:
            seen.append(len(list(folder.glob("rows/shard=*/part.parquet"))))
            yield text

    run(source(), out=folder, shard_size=20)
    assert seen[0] == 0 and seen[-1] == 2  # the third shard is read when two are written


def test_token_ids_are_prompts(tmp_path):
    rows = [[1, 5, 40], torch.tensor([1, 5, 40, 17]), np.array([9, 9])]
    frame = run(rows, out=tmp_path / "out").to_pandas()
    for i, ids in enumerate(rows):
        solo = ig_lens(small(), torch.as_tensor(ids))
        assert np.abs(frame["credits"][i] - solo.attribution[:, 0, 0].numpy()).max() < 1e-6


@pytest.mark.parametrize(
    ("source", "options", "kind", "message"),
    [
        (
            "prompts.txt", {}, ValueError,
            "source must be an iterable of texts, a .jsonl, .csv or .parquet file, or a datasets.Dataset, got 'prompts.txt'; "
            "put single prompts in a list, or name the file after its format",
        ),
        ("no.jsonl", {}, FileNotFoundError, "source must be an existing file, got 'no.jsonl'; check the path"),
        (
            17, {}, TypeError,
            "source must be an iterable of texts, a .jsonl, .csv or .parquet file, or a datasets.Dataset, got int; "
            "put single prompts in a list",
        ),
        (
            [{"prompt": "a"}], {}, ValueError,
            "column must be a column of the first row of list ('prompt'), got 'text'; choose one with column=",
        ),
        (
            [{"text": "a"}], {"id_column": "key"}, ValueError,
            "id_column must be a column of the first row of list ('text'), got 'key'; choose one with id_column=",
        ),
        ([], {}, ValueError, "source must be at least one row, got none from list; a generator can be read only once"),
    ],
)  # fmt: skip
def test_wrong_sources_are_named(tmp_path, source, options, kind, message):
    with pytest.raises(kind) as refused:
        run(source, out=tmp_path / "out", **options)
    assert str(refused.value) == message


def test_a_file_without_the_column(tmp_path):
    frame = pd.DataFrame({"prompt": ["a"], "n": [1]})
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    for name in ("a.parquet", "a.csv"):
        with pytest.raises(ValueError) as refused:
            run(tmp_path / name, out=tmp_path / "out")
        assert str(refused.value) == (
            f"column must be a column of {tmp_path / name} ('prompt', 'n'), got 'text'; choose one with column="
        )
    assert not (tmp_path / "out").exists()


# --- bad rows ------------------------------------------------------------------------------------


def test_bad_rows_are_collected_with_their_reason(made):
    source, table = made
    errors = table.errors()
    assert errors["prompt_id"].tolist() == [20, 21, 42, 43]
    assert errors["kind"].tolist() == ["empty", "not text", "too long", "not text"]
    n = small().cfg.n_ctx
    long = small().to_tokens(source[42], truncate=False).shape[1]
    assert errors["message"].tolist() == [
        "prompt must be some text, got white space or nothing",
        "prompt must be text or a list of token ids, got NoneType",
        f"prompt must be at most {n} tokens, got {long} in row 42",
        "prompt must be text or a list of token ids, got float",
    ]
    assert errors["prompt"].tolist() == ["", "None", ("word " * 90)[:200], "7.5"]
    assert table.summary()["errors"] == {"empty": 1, "not text": 2, "too long": 1}


def test_unreadable_lines_and_wrong_targets(tmp_path):
    lines = ['{"text": "The cat", "t": " is"}', "{broken", '{"t": " is"}', '{"text": "a\\ud800", "t": " is"}']
    lines += ['{"text": "The cat", "t": " Berlin"}', '{"text": "The cat", "t": 100000}', '{"text": [3, 9999999], "t": 5}']
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}\n')
    table = run(tmp_path / "a.jsonl", out=tmp_path / "out", target_column="t")
    assert table.to_pandas()["prompt_id"].tolist() == [0]
    errors = table.errors()
    assert errors["prompt_id"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    kinds = ["unreadable", "unreadable", "not text", "target", "target", "model", "unreadable"]
    assert errors["kind"].tolist() == kinds
    assert errors["message"][1] == "the row has no 'text'"
    assert errors["message"][3].startswith("targets must be a single token, got ' Berlin', which is the ")


def test_positions_that_a_row_does_not_have(tmp_path, prompts):
    short, long = "The", prompts[1]
    for pos_slice in ((5, None), 5, [0, 5]):
        table = run([short, long], out=tmp_path / str(pos_slice), pos_slice=pos_slice)
        assert table.to_pandas()["prompt_id"].unique().tolist() == [1]
        assert table.errors()["kind"].tolist() == ["no position"]


@pytest.mark.parametrize("n", [1, 7])
def test_a_row_the_model_fails_on_costs_only_itself(tmp_path, prompts, n):
    bad = set(range(3, 3 + n))

    def analysis(model, batch):
        if any(prompts.index(text) in bad for text in batch):
            raise RuntimeError("out of memory")
        return pd.DataFrame({"length": [len(text) for text in batch]})

    table = run(prompts[:30], analysis, tmp_path / "out")
    assert table.to_pandas()["prompt_id"].tolist() == [i for i in range(30) if i not in bad]
    errors = table.errors()
    assert errors["prompt_id"].tolist() == sorted(bad)
    assert set(zip(errors["kind"], errors["error"], errors["message"], strict=True)) == {
        ("model", "RuntimeError", "out of memory")
    }


def test_rows_that_are_not_finite(tmp_path, prompts):
    def poison(act, hook):
        act = act.clone()
        act[act.shape[1] > 7 and 2 % len(act)] = torch.nan  # one row of each batch
        return act

    hooks = [("blocks.1.hook_resid_post", poison)]
    table = run(prompts[:8], out=tmp_path / "out", fwd_hooks=hooks, batch_tokens=500)
    errors = table.errors()
    assert 1 <= len(errors) < 8 and set(errors["error"]) == {"NonFiniteStateError"}
    assert len(table) + len(errors) == 8


def test_long_rows_truncated_or_refused(tmp_path):
    source = ["The cat sat on", "The capital of France is Paris the cat sat on"]
    table = run(source, out=tmp_path / "cut", max_tokens=6, too_long="truncate")
    frame = table.to_pandas()
    assert frame["truncated"].tolist() == [False, True] and frame["n_tokens"].tolist() == [5, 6]
    solo = ig_lens(small(), small().to_tokens(source[1])[:, :6])
    assert np.abs(frame["credits"][1] - solo.attribution[:, 0, 0].numpy()).max() < 1e-6
    assert table.summary()["truncated"] == 1
    with pytest.raises(PromptTooLongError) as refused:
        run(source, out=tmp_path / "stop", max_tokens=6, too_long="error", shard_size=1)
    assert str(refused.value) == (
        "prompt must be at most 6 tokens, got 11 in row 1; set too_long=\"skip\" or \"truncate\", or max_tokens"
    )
    assert Folder(tmp_path / "stop").finished() == [0]


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("analysis", "options", "kind", "message"),
    [
        (
            "igs", {}, ValueError,
            "analysis must be one of ig_lens, direct_probability_attribution, ablate, got 'igs'; check the spelling",
        ),
        ("ig_lens", {"quantitty": "prob"}, TypeError, "options must be arguments of ig_lens, got quantitty; did you mean quantity?"),
        (
            "ig_lens", {"targets": [" Paris", " is"]}, ValueError,
            "targets must be one for all prompts, got 2 of them; put one per prompt in the source: target_column",
        ),
        ("ig_lens", {"states": 1}, ValueError, "states must be left out of a corpus, got 1; states are collected batch by batch"),
        ("ig_lens", {"targets": 1, "target_column": "t"}, ValueError,
         "target_column must be None where targets is given, got 't'; give one of the two"),
        ("ig_lens", {"too_long": "cut"}, ValueError, "too_long must be one of skip, truncate, error, got 'cut'; check the spelling"),
        ("ig_lens", {"shard_size": 0}, ValueError, "shard_size must be a whole number of at least 1, got 0; give a whole number"),
        ("ig_lens", {"layers": [0, 99]}, ValueError, None),
        ("ig_lens", {"targets": " Berlin"}, ValueError, None),
        ("ig_lens", {"targets": "next"}, ValueError,
         "pos_slice must be positions that a token follows when targets='next', got only the last one; use pos_slice=None"),
        ("ig_lens", {"engine": "ray"}, ValueError, None),
    ],
)  # fmt: skip
def test_wrong_options_stop_the_run_at_once(tmp_path, prompts, analysis, options, kind, message):
    with pytest.raises(kind) as refused:
        run(prompts, analysis, tmp_path / "out", **options)
    assert message is None or str(refused.value) == message
    assert not list((tmp_path / "out").glob("rows/**/*.parquet"))


def test_a_function_that_never_works_stops_the_run(tmp_path, prompts):
    for analysis, got in (
        (lambda model, batch: 1 / 0, "ZeroDivisionError on each of 4: division by zero"),
        (
            lambda model, batch: pa.table({"x": [1] * 9}),
            "ValueError on each of 4: analysis must be a function that returns a pandas DataFrame or a pyarrow Table with one row "
            "per prompt, got 9 rows for 1 prompts; add a column batch that says which prompt a row belongs to",
        ),
    ):
        with pytest.raises(ValueError) as refused:
            run(prompts[:4], analysis, tmp_path / "out")
        assert str(refused.value) == (
            f"analysis must be a function that works on some prompt of the first shard, got {got}; call it with the model and a "
            "few prompts to see why"
        )


def test_batches_hold_like_lengths_within_the_budget():
    lengths = [3, 50, 4, 9, 3, 10, 200, 8, 9]
    ready = [Ready(row, (0,) * n) for row, n in zip(open_source(["x"] * 9, Columns("text")), lengths, strict=True)]
    found = [[len(one.ids) for one in batch] for batch in batches(ready, 40)]
    assert found == [[3, 3, 4, 8], [9, 9, 10], [50], [200]]


# --- interruptions -------------------------------------------------------------------------------


def test_a_second_run_computes_nothing(tmp_path, prompts, monkeypatch):
    out = tmp_path / "out"
    first = run(prompts, out=out, shard_size=16)
    before = files(out)

    def never():
        raise AssertionError("the model was loaded")

    again = corpus.run(never, iter(prompts), "ig_lens", out, shard_size=16, batch_tokens=10)
    assert files(out) == before and len(again) == len(first) == 60
    assert again.complete and again.manifest["complete"]["prompts"] == 60


_KILLED = """
import os, random, sys, time
sys.path.insert(0, {tests!r})
from test_corpus import shards_in, OPTIONS, small, texts
from tl_iglens import corpus

rng, out = random.Random(0), sys.argv[1]
model = small()
for _ in range(5):
    before = shards_in(out)
    child = os.fork()
    if not child:
        corpus.run(model, (time.sleep(0.001) or text for text in texts({n})), "ig_lens", out, **OPTIONS)
        os._exit(0)
    while shards_in(out) < before + 1:
        time.sleep(0.002)  # it is at work
    time.sleep(rng.uniform(0, 0.1))
    os.kill(child, 9)
    assert os.waitpid(child, 0)[1] == 9  # it was killed, it did not end
    print(shards_in(out))
"""
OPTIONS = {"shard_size": 4, "batch_tokens": 64}


def shards_in(out) -> int:
    return len(Folder(out).finished())


def test_killed_five_times_and_resumed_equals_uninterrupted(tmp_path):
    """SIGKILL at random moments; a run that is continued each time leaves the same files, byte for byte."""
    n, out = 200, tmp_path / "killed"
    run(texts(n), out=tmp_path / "whole", **OPTIONS)
    code = _KILLED.format(tests=str(Path(__file__).parent), n=n)
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reached = list(map(int, done.stdout.split()))
    assert len(reached) == 5 and reached == sorted(set(reached)) and reached[-1] < n // OPTIONS["shard_size"]
    table = run(texts(n), out=out, **OPTIONS)
    assert files(out) == files(tmp_path / "whole")
    assert table.to_pandas()["prompt_id"].tolist() == list(range(n))


@pytest.mark.parametrize("at", range(6))
def test_a_full_disk_loses_nothing(tmp_path, prompts, monkeypatch, at):
    """The at-th time that something is brought to the disk it is full."""
    out, real, calls = tmp_path / "out", os.fsync, itertools.count()

    def full(handle):
        if next(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    source = ["", *prompts[:15]]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as refused:
        run(source, out=out, shard_size=8)
    assert refused.value.errno == errno.ENOSPC
    assert str(refused.value).startswith("[Errno 28] out must be a folder that can be written, got 'No space left on device' at ")
    assert str(refused.value).endswith("make room there and run again: finished shards are kept and not computed twice")
    assert not list(out.rglob("*.partial"))
    monkeypatch.setattr(os, "fsync", real)
    run(source, out=out, shard_size=8)
    run(source, out=tmp_path / "whole", shard_size=8)
    assert files(out) == files(tmp_path / "whole")


def test_folders_of_others_are_refused(tmp_path, prompts):
    out = tmp_path / "out"
    run(prompts[:10], out=out, shard_size=4)
    before, other = files(out), "choose another folder, or run again as before to continue"

    def refusal(*arguments, **options):
        with pytest.raises(ValueError) as refused:
            corpus.run(*arguments, **options)
        assert files(out) == before
        return str(refused.value)

    assert refusal(small(), prompts[:10], "ablate", out, shard_size=4) == (
        f"out must be the folder of a run with analysis='ablate', got {out} with analysis='ig_lens'; {other}"
    )
    assert refusal(small(), prompts[:10], "ig_lens", out, shard_size=4, baseline="zero") == (
        f"out must be the folder of a run with options={{'baseline': 'zero'}}, got {out} with options={{}}; {other}"
    )
    assert refusal(small(), prompts[:10], "ig_lens", out, shard_size=5) == (
        f"out must be the folder of a run with shard_size=5, got {out} with shard_size=4; {other}"
    )
    same = "give the same source, or choose another folder"
    assert refusal(small(), [*prompts[:5], "x", *prompts[6:10]], "ig_lens", out, shard_size=4) == (
        f"source must be the one that {out} was made from, got other rows between 4 and 7; {same}"
    )
    assert refusal(small(), prompts[:4], "ig_lens", out, shard_size=4) == (
        f"source must be the one that {out} was made from, got 4 rows where the folder holds shard 1; "
        "give the whole source, or choose another folder"
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    assert refusal(small(), prompts[:4], "ig_lens", tmp_path / "mine") == (
        f"out must be a new or empty folder, or one of this run, got {tmp_path / 'mine'} with other files; {other}"
    )


def test_another_model_is_refused_and_the_same_one_is_not(tmp_path, prompts):
    out = tmp_path / "out"
    run(prompts[:10], out=out, shard_size=4)
    (out / "rows" / "shard=000001" / "part.parquet").unlink()
    manifest = json.loads((out / "manifest.json").read_text())
    changed = [value + 0.5 for value in manifest["model"]["log_probs"]]
    (out / "manifest.json").write_text(json.dumps(manifest | {"model": manifest["model"] | {"log_probs": changed}}))
    with pytest.raises(ValueError) as refused:
        run(prompts[:10], out=out, shard_size=4)
    name = manifest["model"]["name"]
    assert str(refused.value) == (
        f"model must be the one {out} was begun with ({name}), got {name} with other weights; load the same model, or choose "
        "another folder"
    )
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert run(prompts[:10], out=out, shard_size=4).to_pandas()["prompt_id"].tolist() == list(range(10))


def test_two_runs_at_once_are_refused(tmp_path, prompts):
    out = tmp_path / "out"

    def source():
        yield prompts[0]
        with pytest.raises(ValueError) as refused:
            run(prompts[:1], out=out)
        assert str(refused.value) == (
            f"out must be a folder that no other run writes to now, got {out}; wait for that run to end"
        )
        yield prompts[1]

    assert len(run(source(), out=out)) == 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the size of a process is read from /proc")
def test_memory_does_not_grow_with_the_source(tmp_path):
    """Seven hundred rows of 100 kB take no more than the first three hundred; `benchmarks` has the long comparison."""
    sizes = []

    def source():
        for i in range(1000):
            if i in (300, 999):
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                sizes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
            yield {"text": f"The cat {i}", "id": f"{i:05d}" * 20_000}

    table = run(source(), out=tmp_path / "out", shard_size=50, id_column="id")
    assert len(table) == 1000 and sizes[1] - sizes[0] < 35  # MiB; one shard is 5


# --- reading back --------------------------------------------------------------------------------


def test_the_dataset_is_plain_parquet_with_provenance(made):
    _, table = made
    plain = ds.dataset(table.path / "rows", partitioning="hive")
    assert plain.count_rows() == len(table) == 60
    schema = pq.read_schema(table.path / "rows" / "shard=000000" / "part.parquet")
    assert pa.types.is_fixed_size_list(schema.field("credits").type)
    assert schema.field("credits").type.list_size == len(table.segments) == small().cfg.n_layers
    words = json.loads(schema.metadata[b"tl_iglens"])
    assert words["analysis"] == "ig_lens" and words["info"]["quantity"] == "prob" and words["prompts"] == 7
    assert set(words["versions"]) == {"tl-iglens", "transformer-lens", "torch"} and len(words["digest"]) == 64
    assert table.info == ig_lens(small(), "The cat").info
    assert repr(table).startswith(f"Corpus({str(table.path)!r}; ig_lens · prob · baseline embed · prediction_aware · ")


def test_columns_and_filters(made):
    _, table = made
    some = table.to_pandas(["prompt_id", "delta"], filter=ds.field("prompt_id") < 10)
    assert list(some) == ["prompt_id", "delta"] and len(some) == 10
    with pytest.raises(ValueError, match=r"^columns must be a column of the table \(prompt_id, id, .*\), got 'p'; check the spelling$"):
        table.to_pandas(["p"])


def test_summaries_against_plain_pandas(made):
    _, table = made
    frame = table.to_pandas()
    for rule in ("mass", "largest", "settled"):
        counts = table.onset_histogram(rule).set_index("segment")["count"]
        assert counts.drop("undefined").to_dict() == {
            name: int((frame[f"onset_{rule}"] == name).sum()) for name in table.segments
        }
        assert counts.sum() == 60
    credit = pd.DataFrame(lists(frame, "credits").double().numpy(), columns=table.segments)
    for by, key in (("position", frame["pos"]), ("token class", frame["token"].map(token_class)),
                    ("target class", frame["target"].map(token_class))):  # fmt: skip
        found = table.mean_credit(by)
        wanted = credit.groupby(key.to_numpy()).mean()
        assert (found.drop(columns="count").loc[wanted.index] - wanted).abs().max(axis=None) < 1e-9
        assert found["count"].to_dict() == key.value_counts().to_dict()
    wanted = frame.sort_values("cancellation", ascending=False, kind="stable")["prompt_id"][:5].tolist()
    assert table.top("cancellation", 5)["prompt_id"].tolist() == wanted
    summary = table.summary()
    assert (summary["prompts"], summary["rows"], summary["complete"]) == (60, 60, True)
    assert summary["median delta"] == pytest.approx(frame["delta"].median())
    assert summary["largest |completeness_gap|"] == pytest.approx(frame["completeness_gap"].abs().max())


def test_token_classes():
    kinds = [" Paris", "Paris", "ing", " 12", "7", ",", " (", "\n", " ", "<s>", "<|im_end|>", "<0xE6>", "2nd"]
    assert [token_class(text) for text in kinds] == [
        "word", "word", "word piece", "number", "number", "punctuation", "punctuation", "space", "space",
        "special", "special", "special", "word piece",
    ]  # fmt: skip


def test_wrong_questions_of_a_table(made, tmp_path, prompts):
    _, table = made
    with pytest.raises(ValueError) as refused:
        table.mean_credit("colour")
    assert str(refused.value) == "by must be one of token class, target class, position, got 'colour'; check the spelling"
    with pytest.raises(ValueError, match=r"^by must be a column of numbers \(prompt_id, .*\), got 'token'; choose one of them$"):
        table.top("token")
    other = run(prompts[:3], "ablate", tmp_path / "out")
    with pytest.raises(ValueError) as refused:
        other.onset_histogram()
    assert str(refused.value) == (
        "analysis must be ig_lens or direct_probability_attribution for onset_histogram, got ablate; use to_pandas for this one"
    )
    for folder, kind, message in (
        (tmp_path / "none", FileNotFoundError, "out must be an existing folder, got {}; give a folder that corpus.run wrote"),
        (tmp_path, ValueError, "out must be a folder of corpus.run, got {} without a manifest.json; give a folder that corpus.run wrote"),
    ):
        with pytest.raises(kind) as refused:
            corpus.load(folder)
        assert str(refused.value) == message.format(folder)


def test_figures(made):
    _, table = made
    for figure in (
        plotting.onset_histogram(table),
        plotting.mean_credit(table),
        plotting.mean_credit(table, by="position", template="plotly_dark"),
        plotting.top_prompts(table, n=5),
    ):
        assert isinstance(figure, go.Figure) and figure.data and "baseline embed" in figure.layout.title.text
        gap = table.to_pandas(["completeness_gap"])["completeness_gap"].abs().max()
        assert f"|Σ − Δ| ≤ {gap:.1e}" in figure.layout.title.text
    onsets = plotting.onset_histogram(table, rules="mass").data[0]
    assert np.allclose(onsets.y, table.onset_histogram("mass")["share"], atol=1e-6)
    grid = plotting.mean_credit(table, by="target class").data[0]
    assert np.allclose(grid.z, table.mean_credit("target class").iloc[:, 1:], atol=1e-6)
    bars = plotting.top_prompts(table, n=5).data[0]
    assert np.allclose(bars.x, table.top(n=5)["cancellation"])


def test_many_positions_are_joined(made):
    class Long:
        info = made[1].info

        def mean_credit(self, by):
            frame = pd.DataFrame({"count": [1] * 100, "0_block": range(100)}, index=range(100))
            return frame.astype({"0_block": float})

        def caption(self):
            return "caption"

    grid = plotting.mean_credit(Long(), by="position").data[0]
    assert grid.z.shape == (34, 1) and grid.z[0, 0] == 1.0 and grid.z[-1, 0] == 99.0


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def iglens(monkeypatch, capsys):
    """Run the command in this process: exit status, standard output, standard error."""
    from tl_iglens import cli

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("tl_iglens.demo.load_demo_model", lambda progress: small())

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(list(map(str, words)))
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_the_commands(iglens, tmp_path, prompts):
    source, out = tmp_path / "a.csv", tmp_path / "out"
    pd.DataFrame({"prompt": [*prompts[:12], ""], "key": range(13)}).to_csv(source, index=False)
    words = ("corpus", source, "--out", out, "--column", "prompt", "--id-column", "key", "--mid", "--every", "--bos")
    status, said, _ = iglens(*words)
    assert status == 0 and "1 empty" in said and "onset (mass)" in said
    table = corpus.load(out)
    assert table.segments[0] == "0_attn_out" and table.manifest["request"]["options"] == {"incl_mid": True, "pos_slice": None}
    assert len(table) == sum(small().to_tokens(text).shape[1] for text in prompts[:12])
    status, said, _ = iglens("summary", out, "--onset", "settled", "--top", 3)
    assert status == 0 and "onset (settled)" in said and f"{len(table)}" in said
    assert iglens(*words[:-1])[0] == 2
    status, said, complaint = iglens("summary", tmp_path / "none")
    assert (status, said) == (2, "")
    assert complaint == (
        f"iglens: out must be an existing folder, got {tmp_path / 'none'}; give a folder that corpus.run wrote\n"
    )
