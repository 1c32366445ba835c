"""A corpus over two Ray workers, one of which is killed in the middle, gives the files of a run without Ray."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from test_corpus import files, small, texts

from tl_iglens import corpus, ig_lens
from tl_iglens.corpus.store import Folder

pytest.importorskip("ray.data", reason="the ray extra is not installed")

SHARD = 3
SOURCE = [*texts(60)[:10], "", None, *texts(60)[10:60]]


@pytest.fixture(scope="module")
def cluster():
    """A local cluster of two workers that can import the tests."""
    import ray

    saved = dict(os.environ)
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, saved.get("PYTHONPATH")]))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(saved)


def at_work(model, prompts):
    """An analysis that takes its time."""
    time.sleep(0.15)
    return ig_lens(model, prompts).to_dataframe()


def kill_one(pids: Path, out: Path, killed: list[int]) -> None:
    """Kill one of two workers when both have a model and some shards are done."""
    while len(list(pids.iterdir())) < 2 or len(Folder(out).finished()) < 4:
        time.sleep(0.02)
    killed.append(int(next(pids.iterdir()).name))
    os.kill(killed[0], signal.SIGKILL)


def test_a_worker_killed_in_the_middle_costs_nothing(cluster, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()

    def factory():
        (pids / str(os.getpid())).write_text(str(torch.get_num_threads()))
        return small()

    out, killed = tmp_path / "ray", []
    killer = threading.Thread(target=kill_one, args=(pids, out, killed), daemon=True)
    killer.start()
    table = corpus.run(factory, SOURCE, at_work, out, shard_size=SHARD, engine="ray", num_actors=2)
    killer.join(1)
    assert killed and len(list(pids.iterdir())) >= 3  # one was killed, another took its place
    assert {file.read_text() for file in pids.iterdir()} == {"1"}  # thread
    assert str(os.getpid()) not in {file.name for file in pids.iterdir()}
    corpus.run(small(), SOURCE, at_work, tmp_path / "local", shard_size=SHARD)
    assert files(out) == files(tmp_path / "local")
    assert table.complete and table.errors()["prompt_id"].tolist() == [10, 11]


def test_built_in_analyses_are_equal_and_resumed(cluster, tmp_path):
    for name in ("ray", "local"):
        corpus.run(small, SOURCE[:20], "ig_lens", tmp_path / name, shard_size=SHARD)
    before = files(tmp_path / "local")
    for number in (1, 4):
        Folder(tmp_path / "ray").part("rows", number).unlink()
    said = []

    class Source(list):
        def __iter__(self):
            said.append("read")
            return super().__iter__()

    table = corpus.run(small, Source(SOURCE[:20]), "ig_lens", tmp_path / "ray", shard_size=SHARD, engine="ray")
    assert files(tmp_path / "ray") == before and said == ["read"]
    assert table.manifest["request"] == corpus.load(tmp_path / "local").manifest["request"]

    def broken():
        raise FileNotFoundError("weights.safetensors is gone")

    with pytest.raises(FileNotFoundError) as refused:
        corpus.run(broken, SOURCE[:4], "ig_lens", tmp_path / "none", engine="ray")
    assert str(refused.value) == "weights.safetensors is gone"
    assert not Folder(tmp_path / "none").finished()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_actors": 0}, "num_actors must be a whole number of at least 1, got 0; give a whole number"),
        ({"num_gpus_per_actor": -1}, "num_gpus_per_actor must be a number of at least 0, got -1; 0 runs on the CPU"),
    ],
)
def test_wrong_pools_are_named(tmp_path, options, message):
    with pytest.raises(ValueError) as refused:
        corpus.run(small, SOURCE, "ig_lens", tmp_path / "out", engine="ray", **options)
    assert str(refused.value) == message and not (tmp_path / "out").exists()


def test_a_model_in_memory_is_not_sent_around(tmp_path):
    with pytest.raises(ValueError) as refused:
        corpus.run(small(), SOURCE, "ig_lens", tmp_path / "out", engine="ray")
    assert str(refused.value) == (
        f"model must be a function without arguments that loads the model where engine='ray', got {type(small()).__name__}; "
        "every actor loads its own: pass load_demo_model, not load_demo_model()"
    )
