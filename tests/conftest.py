"""What every test module shares: one thread, no network, one seed, and the real models once per session."""

import contextlib
import functools
import importlib
import os
import random
from importlib.metadata import version

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its pool

import numpy as np
import pytest
import torch
from fixtures import bridge, hooked, needs_bridge, needs_hooked, shared_bridge, tokenizer

# Small products gain nothing from threads, and threads that outnumber the free cores wait for each other.
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# beartype draws an index for every sequence it checks; with a generator of its own it leaves Python's alone,
# so that law 8 can watch that one. The package is imported after this.
with contextlib.suppress(ImportError, AttributeError):
    checker = importlib.import_module("beartype._check.code.codemain")
    assert checker.getrandbits
    checker.getrandbits = random.Random(0).getrandbits

IS_4 = version("transformer-lens").startswith("4.")

IDS = [1, 5, 40, 17, 20, 33, 9]  # every small model knows them

HOOKED = {
    "LN": {"normalization_type": "LN"},
    "LNPre": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS"},
    "RMSPre": {"normalization_type": "RMSPre"},
    "no-norm": {"normalization_type": None},
    "soft-cap": {"normalization_type": "RMS", "output_logits_soft_cap": 2.0},
    "eps": {"normalization_type": "RMS", "eps": 0.1},
}
BRIDGED = ("gpt2", "llama", "gemma2", "gemma3", "neox_seq", "neox_par", "qwen2", "phi", "cohere")
SMALL = [f"hooked-{name}" for name in HOOKED] + [f"{f}-{kind}" for f in BRIDGED for kind in ("raw", "compat")]
DOUBLE = ["hooked-LN", "hooked-soft-cap", "gpt2-raw", "gemma2-raw", "neox_par-raw", "cohere-compat"]


def close(ours, theirs, tolerance, equal_nan=False):
    """Two sets of numbers of one shape differ nowhere by more than the tolerance; NaN equals NaN only where asked."""
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, equal_nan=equal_nan)


close_or_nan = functools.partial(close, equal_nan=True)  # cells that are not analysed are NaN on both sides


@pytest.fixture(scope="module")
def gpt2():
    """A random model with the small byte-level tokenizer: GPT-2, of whichever class there is."""
    try:
        return shared_bridge("gpt2")
    except pytest.skip.Exception:
        return hooked("LN", d_vocab=320, n_ctx=64, tokenizer=tokenizer())


@functools.cache
def small_model(name: str, dtype: torch.dtype = torch.float32):
    """A random model by name, shared by all tests that leave it as it is; skips where it does not exist."""
    if name.startswith("hooked-"):
        needs_hooked()
        return hooked(dtype=dtype, **HOOKED[name.removeprefix("hooked-")])
    family, kind = name.rsplit("-", 1)
    needs_bridge()
    return bridge(family, dtype=dtype, compat=kind == "compat")


def has_mid(model) -> bool:
    return "blocks.0.hook_resid_mid" in model.hook_dict


@pytest.fixture(params=SMALL)
def model(request):
    """Every small random model in float32: HookedTransformers, and bridges raw and in compatibility mode."""
    return small_model(request.param)


@pytest.fixture(params=DOUBLE)
def double_model(request):
    """Some of them in float64."""
    return small_model(request.param, torch.float64)


@pytest.fixture
def lens_model():
    """One small model for tests of arguments and results, of whichever class this TransformerLens has."""
    try:
        needs_bridge()
    except pytest.skip.Exception:
        return small_model("hooked-LN")
    return small_model("gpt2-raw")


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in every test, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _real(load, **options):
    """A real model, or a skip that says how to get it; CI has both."""
    if os.environ.get("TL_IGLENS_SKIP_REAL"):
        pytest.skip("TL_IGLENS_SKIP_REAL is set")
    return load(**options)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct: a bridge where this TransformerLens has one, else a HookedTransformer."""
    from tl_iglens.demo import load_demo_model

    return _real(load_demo_model)


@pytest.fixture(scope="session")
def gemma():
    """Gemma-3-270M, a second real family."""
    from tl_iglens.demo import load_gemma

    return _real(load_gemma)
