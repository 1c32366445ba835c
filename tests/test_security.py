"""Nothing executable is read or written, nothing goes to the network unasked, and token text is never markup."""

import ast
import re
import socket
from pathlib import Path

import pytest
import torch
from fixtures import shared_bridge

import tl_iglens
from tl_iglens import corpus, plotting
from tl_iglens.tokens import visible

PACKAGE = Path(tl_iglens.__file__).parent
NEVER = {"eval", "exec", "compile", "__import__"}
# Ray moves everything between its processes pickled; these are messages in memory, never a file or a download.
BETWEEN_ACTORS = Path("corpus/ray_engine.py")
MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def calls():
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                yield file.relative_to(PACKAGE), node, ast.unparse(node.func)


def test_no_code_is_evaluated_or_unpickled():
    for file, node, name in calls():
        assert name not in NEVER, f"{file}:{node.lineno} calls {name}"
        if file != BETWEEN_ACTORS:
            assert not re.search(r"\b(c?[pP]ickle|dill|joblib|shelve|marshal)\.", name), f"{file}:{node.lineno} calls {name}"
        assert not (name.startswith("yaml.") and name != "yaml.safe_load"), f"{file}:{node.lineno}"
        options = {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert name != "torch.load" or options.get("weights_only") == "True", f"{file}:{node.lineno}"
        assert options.get("shell") != "True" and options.get("trust_remote_code") != "True", f"{file}:{node.lineno}"


def test_the_walk_sees_calls():
    names = [name for _, _, name in calls()]
    pickled = {name for file, _, name in calls() if file == BETWEEN_ACTORS and "pickle" in name}
    assert pickled == {"pickle.dumps", "pickle.loads"}  # bytes, not pickle.load of a file
    assert "torch.load" in names and "save_file" in names


@pytest.fixture
def no_sockets(monkeypatch):
    """Any connection is an error."""

    def refuse(*args, **options):
        raise AssertionError(f"a connection was tried: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def test_the_main_paths_open_no_connection(no_sockets, tmp_path):
    model, ids = shared_bridge("gpt2"), [[3, 1, 4, 1, 5]]
    with pytest.raises(AssertionError, match="a connection was tried"):
        socket.create_connection(("example.org", 80))
    result = tl_iglens.ig_lens(model, ids, pos_slice=None)
    again = type(result).load(result.save(tmp_path / "result.safetensors"))
    assert torch.equal(again.levels, result.levels)
    assert tl_iglens.compare(model, ids, methods=("ig_lens", "logit_lens", "dla")).methods[0] == "ig_lens"
    assert tl_iglens.direct_probability_attribution(model, ids).labels
    assert tl_iglens.ablate(model, ids).labels and tl_iglens.track(model, ids).labels
    assert tl_iglens.probability_flow(model, ids).labels
    lens = tl_iglens.TunedLens.zero(model.cfg.n_layers, model.cfg.d_model)
    loaded = tl_iglens.TunedLens.load(lens.save(tmp_path / "lens"))
    assert loaded.n_layers == model.cfg.n_layers
    assert plotting.heatmap(result).data and plotting.waterfall(result, pos=-1).data
    page = tl_iglens.write_report(result, tmp_path / "page.html").read_text("utf-8")
    assert not re.search(r"""(?:src|href)\s*=\s*["']\s*(?:https?:)?//""", page)
    table = corpus.run(model, ["one text", "another"], "ig_lens", tmp_path / "study")
    assert len(table.to_pandas()) == 2


def test_a_lens_with_code_in_it_is_refused(tmp_path):
    """A pickled object in place of tensors must not be run."""
    mark = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (Path.touch, (mark,))

    folder = tmp_path / "lens"
    tl_iglens.TunedLens.zero(2, 4).save(folder)
    torch.save({"0.weight": Payload()}, folder / "params.pt")
    with pytest.raises(Exception, match=r"(?s)weights_only|Unsupported|lens"):
        tl_iglens.TunedLens.load(folder)
    assert not mark.exists()


def test_token_text_is_never_markup(tmp_path):
    model = shared_bridge("gpt2")
    result = tl_iglens.ig_lens(model, [[3, 1, 4]], pos_slice=None)
    words = tuple(tuple(MARKUP for _ in row) for row in result.token_strings)
    targets = tuple(tuple(MARKUP for _ in row) for row in result.target_strings)
    hostile = type(result)(**{**vars(result), "token_strings": words, "target_strings": targets})
    for page in (hostile._repr_html_(), tl_iglens.write_report(hostile, tmp_path / "p.html", title=MARKUP).read_text("utf-8")):
        assert MARKUP not in page and "<img src=x" not in page
    assert "<U+202E>" in visible("a\u202eb")


def test_a_lens_is_read_from_the_named_folder_alone(tmp_path):
    """A folder named with .. is that folder; no name inside the files leads to another."""
    lens = tl_iglens.TunedLens.zero(2, 4)
    inner = tmp_path / "inner"
    inner.mkdir()
    lens.save(inner / ".." / "lens")
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()) == ["lens/config.json", "lens/params.pt"]
    config = tmp_path / "lens" / "config.json"
    config.write_text(config.read_text().replace('"base_model_name_or_path": ""', '"base_model_name_or_path": "../../etc/passwd"'))
    assert tl_iglens.TunedLens.load(inner / ".." / "lens").n_layers == 2
    with pytest.raises(ValueError, match=r"lens must be a local folder with config\.json and params\.pt"):
        tl_iglens.TunedLens.load(inner / ".." / "other")


def test_no_module_that_unpickles_is_imported_under_another_name():
    """The walk over calls goes by name, so those names have to be the modules' own."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}, file
            if isinstance(node, ast.Import):
                assert not any("pickle" in a.name and a.asname for a in node.names), file
            if isinstance(node, ast.Call):
                assert not ast.unparse(node.func).endswith("read_pickle"), file
                assert not any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords), file


@pytest.mark.parametrize("name", ["../outside.safetensors", "a/../../outside.safetensors"])
def test_only_the_named_file_is_written(name, tmp_path):
    """A result goes exactly where it was told to, whole, and leaves nothing beside it."""
    inner = tmp_path / "inner"
    (inner / "a").mkdir(parents=True)
    result = tl_iglens.ig_lens(shared_bridge("gpt2"), [[3, 1, 4]])
    result.save(inner / name)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["outside.safetensors"]


def test_prompt_ids_are_data_not_file_names(tmp_path):
    """A prompt that calls itself ../../x is a value in a row, never part of a path."""
    out = tmp_path / "deep" / "study"
    rows = [{"text": "one text", "id": "../../evil"}, {"text": "another", "id": "/evil"}]
    out.parent.mkdir()
    table = corpus.run(shared_bridge("gpt2"), rows, "ig_lens", out, id_column="id")
    kept = table.to_pandas().astype(str)
    assert all((kept == row["id"]).any().any() for row in rows)  # as they are
    assert not [p for p in tmp_path.rglob("*evil*")] and not Path("/evil").exists()
