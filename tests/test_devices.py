"""A model spread over two devices: the states of every block are read where the head is, and nothing meets its like
from another device. There is one device here, so two are made believe: every tensor carries the name of the device it
would be on, and an operation on tensors of two devices fails as it would there.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from fixtures import bridge, needs_bridge
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_map

from tl_iglens import ablate, collect_states, compare, direct_probability_attribution, explain_generation, ig_lens
from tl_iglens.corpus import run

HERE = torch.device("cpu")
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


def on(tensor: torch.Tensor) -> torch.device:
    return tensor.__dict__.get("made_believe", HERE)


def put(value, device):
    if isinstance(value, torch.Tensor):
        value.__dict__["made_believe"] = device
    return value


class TwoDevices(TorchFunctionMode):
    """Tensors remember a device; operations refuse to mix two, and results are where their operands are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = resolve_name(func) or getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if name.endswith("Tensor.device.__get__"):
            return on(args[0])
        if name.endswith("Tensor.cpu"):
            return put(args[0].detach().clone(), HERE)
        if name.endswith(("Tensor.to", "Tensor.cuda")):
            return self._moved(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = HERE
            return put(func(*args, **kwargs), torch.device(device))
        where = self._place(name, args, tensors)
        out = func(*args, **kwargs)
        return out if name.endswith("__setitem__") else tree_map(lambda leaf: put(leaf, where), out)

    def _moved(self, func, args, kwargs):
        wanted = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.device | str | torch.Tensor)]
        target = wanted[0] if wanted else on(args[0])
        target = on(target) if isinstance(target, torch.Tensor) else torch.device(target)
        dtypes = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)]
        dtypes += [a.dtype for a in args[1:] if isinstance(a, torch.Tensor)]
        if target == on(args[0]) and not dtypes:
            return args[0]
        return put(func(args[0].clone(), *dtypes[:1]), target)

    def _place(self, name, args, tensors):
        """The device of the operands; numbers (tensors without axes) and indices on the CPU go with any."""
        if name.endswith("copy_"):
            return on(args[0])
        if name.endswith(("__getitem__", "__setitem__")):
            index = [leaf for leaf in tree_flatten(args[1])[0] if isinstance(leaf, torch.Tensor)]
            mixed = [leaf for leaf in index if on(leaf) not in (HERE, on(args[0]))]
            if name.endswith("__setitem__") and index and isinstance(args[2], torch.Tensor) and args[2].ndim:
                mixed += [args[2]] if on(args[2]) != on(args[0]) else []
            assert not mixed, f"{name} mixes {on(args[0])} and {[on(leaf) for leaf in mixed]}"
            return on(args[0])
        places = {on(tensor) for tensor in tensors if tensor.ndim}
        if len(places) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {places} in {name}")
        return next(iter(places), on(tensors[0]) if tensors else HERE)


@contextlib.contextmanager
def spread(model) -> Iterator[None]:
    """The model as accelerate would spread it: block 0 and the embedding on one device, the rest on another."""
    hf, handles = model.original_model, []
    first = {id(t) for m in (hf.model.embed_tokens, hf.model.layers[0], hf.model.rotary_emb) for t in _tensors(m)}
    for tensor in _tensors(hf):
        put(tensor, FIRST if id(tensor) in first else SECOND)

    def brings_to(device):
        def hook(module, args, kwargs):
            move = lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
            return tree_map(move, args), tree_map(move, kwargs)

        return hook

    for i, layer in enumerate(hf.model.layers):
        handles.append(layer.register_forward_pre_hook(brings_to(SECOND if i else FIRST), with_kwargs=True))
    for module in (hf.model.norm, hf.lm_head):
        handles.append(module.register_forward_pre_hook(brings_to(SECOND), with_kwargs=True))
    before = model.cfg.device
    model.cfg.device = "cuda:0"
    try:
        with TwoDevices():
            yield
    finally:
        model.cfg.device = before
        for handle in handles:
            handle.remove()
        for tensor in _tensors(hf):
            put(tensor, HERE)


def _tensors(module):
    return [*module.parameters(), *module.buffers()]


@pytest.fixture(scope="module")
def model():
    needs_bridge()
    return bridge("llama")


PROMPTS = ["The capital of France is", "The cat sat", " Paris"]


def test_the_pretence_notices_a_mixture():
    with TwoDevices():
        a, b = torch.ones(2).to(FIRST), torch.ones(2).to(SECOND)
        assert (a + 1).device == FIRST and (a.to(SECOND) + b).device == SECOND
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            a + b


def test_the_states_of_both_devices_are_read_at_the_head(model):
    with spread(model):
        states = collect_states(model, PROMPTS)
        assert states.resid.device == SECOND and model.W_U.device == SECOND


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pos_slice": None, "incl_mid": True, "baseline": "mean"},
        {"baseline": "bos", "estimator": "gauss_legendre", "n_steps": 2},
        {"targets": "next", "pos_slice": None, "quantity": "log_prob"},
        {"batch_size": 1},
    ],
    ids=str,
)
def test_credits_are_the_same(model, options):
    prompts = PROMPTS[:2] if options.get("targets") else PROMPTS
    whole = ig_lens(model, prompts, **options)
    with spread(model):
        parts = ig_lens(model, prompts, **options)
    gap = torch.nan_to_num(parts.attribution - whole.attribution).abs().max()
    assert gap < 1e-6 and parts.attribution.device == HERE


WAYS = ({}, {"unit": "mlp", "mode": "zero", "at": "all"}, {"mode": "resample", "reference": ["The cat is", "on", "of"]})


def ablated(model, options):
    return ablate(model, PROMPTS, **options)


def test_components_ablations_and_a_corpus(model, tmp_path):
    whole = direct_probability_attribution(model, PROMPTS, n_nodes=2), *map(ablated, [model] * 3, WAYS)
    table = run(model, PROMPTS, "ig_lens", tmp_path / "whole").to_pandas()
    with spread(model):
        parts = direct_probability_attribution(model, PROMPTS, n_nodes=2), *map(ablated, [model] * 3, WAYS)
        again = run(model, PROMPTS, "ig_lens", tmp_path / "parts").to_pandas()
    assert (parts[0].attribution - whole[0].attribution).abs().max() < 1e-6
    for part, one in zip(parts[1:], whole[1:], strict=True):
        assert (part.p_ablated - one.p_ablated).abs().max() < 1e-6
    assert again["p_model"].sub(table["p_model"]).abs().max() < 1e-6


def test_answers_and_comparisons(model):
    def both():
        return explain_generation(model, "The cat", max_new_tokens=3, chat=False), compare(model, PROMPTS[0], methods=("ig_lens", "logit_lens"))

    whole = both()
    with spread(model):
        parts = both()
    assert parts[0].target_strings == whole[0].target_strings
    assert (parts[0].attribution - whole[0].attribution).abs().max() < 1e-6
    assert (parts[1]["logit_lens"].values - whole[1]["logit_lens"].values).abs().max() < 1e-6
