"""What an ablation replaces, and by what: sites of a model, reference prompts, and the replacement's values.

No hook here: ``ablation`` puts the values in place.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._checks import check_choice, check_model, fail, unwrap
from ._types import compute_dtype
from .collect import collect_states
from .tokens import Prompts, select_positions

UNITS: tuple[str, ...] = ("block", "attn", "mlp", "head")
MODES: tuple[str, ...] = ("skip", "zero", "mean", "resample", "noise")
NEEDS_REFERENCE = ("mean", "resample")
_HOOKS = {"attn": "hook_attn_out", "mlp": "hook_mlp_out", "head": "attn.hook_z"}


@dataclass(frozen=True)
class Part:
    """One contribution that a site replaces: of a whole block, or of its attention, MLP or one head."""

    block: int
    unit: str
    head: int | None = None

    @property
    def hook(self) -> str:
        """The hook point that carries the contribution; the key of a block's update is the block itself."""
        return f"blocks.{self.block}" + (f".{_HOOKS[self.unit]}" if self.unit != "block" else "")

    @property
    def start(self) -> int:
        """The boundary up to which the run is still the clean one."""
        return self.block + 1 if self.unit == "block" else self.block


@dataclass(frozen=True)
class Site:
    """What one ablation replaces, how and where: its parts go together, in one run."""

    label: str
    parts: tuple[Part, ...]
    mode: str
    at: Any

    @property
    def start(self) -> int:
        return min(part.start for part in self.parts)

    @property
    def block(self) -> int:
        return min(part.block for part in self.parts)


@dataclass(frozen=True)
class Reference:
    """Contributions of reference prompts, for ``mean`` and ``resample``; made by ``collect_reference``.

    ``contributions[hook]`` is ``[ref, ctx, ...]`` from each prompt's first real token on, ``mean[hook]`` the
    mean over real positions of all of them.
    """

    contributions: Mapping[str, Tensor]  # of every hook point, [ref, ctx, ...]
    mean: Mapping[str, Tensor]  # over real positions, [...]
    ids: tuple[tuple[int, ...], ...]


def resolve_sites(model: Any, unit: str, mode: str, at: Any, sites: Sequence[Any] | None) -> list[Site]:
    """The sites of one condition, checked against the hooks that the model has."""
    n_layers, n_heads = int(model.cfg.n_layers), int(getattr(model.cfg, "n_heads", 0) or 0)
    every = [(b, h) for b in range(n_layers) for h in (range(n_heads) if unit == "head" else (None,))]
    known = {_label(unit, b, h): Part(b, unit, h) for b, h in every}
    if sites is None:
        groups: list[Any] = list(known)
    elif isinstance(sites, str) or not isinstance(sites, Sequence) or not len(sites):
        fail("sites", "a list of blocks or labels", repr(sites), f"for example [0, {list(known)[-1]!r}]")
    else:
        groups = list(sites)
    chosen = []
    for group in groups:
        members = list(group) if isinstance(group, tuple | list) else [group]
        found = {_part(member, known, unit, n_layers) for member in members}
        parts = sorted(found, key=lambda part: (part.block, part.head or 0))
        for part in parts:
            if unit != "block" and part.hook not in model.hook_dict:
                rule, todo = f"one that blocks.{part.block} has", "whole blocks work: use unit='block'"
                fail("unit", rule, f"{unit!r} without {part.hook}", todo)
        label = "+".join(_label(unit, part.block, part.head) for part in parts)
        chosen.append(Site(label, tuple(w for part in parts for w in _writers(model, part, mode)), mode, at))
    return chosen


def _label(unit: str, block: int, head: int | None) -> str:
    """The label of ``ig_lens``' segment, or TransformerLens' name of the head."""
    return f"L{block}H{head}" if unit == "head" else f"{block}_{unit}" + ("" if unit == "block" else "_out")


def _part(member: Any, known: Mapping[str, Part], unit: str, n_layers: int) -> Part:
    numbered = isinstance(member, int) and not isinstance(member, bool) and unit != "head"
    label = _label(unit, member % n_layers, None) if numbered and -n_layers <= member < n_layers else member
    if not isinstance(label, str) or label not in known:
        names = list(known)
        rule = f"made of {'' if unit == 'head' else 'block numbers or '}labels from {names[0]} to {names[-1]}"
        fail("sites", rule, repr(member), "leave it out for all of them")
    return known[label]


def _writers(model: Any, part: Part, mode: str) -> tuple[Part, ...]:
    """What is replaced for a part: itself, or the two outputs of a block that is set to zero."""
    parts = (Part(part.block, "attn"), Part(part.block, "mlp"))
    kinds = model.layer_types()[part.block] if callable(getattr(model, "layer_types", None)) else "attn+mlp"
    hybrid = not {"attn", "mlp"} >= {kind for kind in kinds.split("+") if not kind.startswith("hook_")}
    whole = all(p.hook in model.hook_dict for p in parts) and not hybrid
    return parts if part.unit == "block" and mode == "zero" and whole else (part,)


# --- reference prompts --------------------------------------------------------------------------


def collect_reference(
    model: Any,
    prompts: Any,
    units: Sequence[str] = ("block",),
    *,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
) -> Reference:
    """Contributions of reference prompts at all their real positions, for many calls of ``ablate``."""
    model = unwrap(model)
    check_model(model)
    for unit in units:
        check_choice("units", unit, UNITS)
    n_layers = int(model.cfg.n_layers)
    names = [Part(b, unit).hook for unit in units if unit != "block" for b in range(n_layers)]
    names = [name for name in names if name in model.hook_dict]
    states = collect_states(
        model, prompts, pos_slice=None, extra=names, attention_mask=attention_mask, prepend_bos=prepend_bos
    )
    found = dict(states.extra)
    if "block" in units:
        found |= {Part(b, "block").hook: states.resid[b + 1] - states.resid[b] for b in range(n_layers)}
    mean = {}
    for name, contribution in found.items():
        real = contribution[states.present.to(contribution.device)]
        mean[name] = real.to(compute_dtype(real.dtype)).mean(0).to(real.dtype)
    return Reference(found, mean, _real_ids(states.prompts))


def _real_ids(prompts: Prompts) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(prompts.ids[row, a:b].tolist()) for row, (a, b) in enumerate(prompts.spans))


def resolve_reference(
    model: Any, given: Any, prompts: Prompts, sites: Sequence[Site], prepend_bos: bool | None
) -> Reference | None:
    """The contributions that the modes draw on, collected where only prompts are given."""
    needing = [site for site in sites if site.mode in NEEDS_REFERENCE]
    if not needing:
        return None
    rows = _real_ids(prompts)
    if given is None and len(set(rows)) < 2:
        rule = f"given for mode={needing[0].mode!r} of a single prompt"
        fail("reference", rule, "None", "pass other prompts, reference=[...]")
    if isinstance(given, Reference):
        reference = given
    else:
        units = tuple(dict.fromkeys(part.unit for site in needing for part in site.parts))
        if given is None:
            reference = collect_reference(model, prompts.ids, units, attention_mask=prompts.mask)
        else:
            reference = collect_reference(model, given, units, prepend_bos=prepend_bos)
    missing = next((p.hook for site in needing for p in site.parts if p.hook not in reference.mean), None)
    if missing is not None:
        todo = "collect_reference(model, prompts, units) with that unit"
        fail("reference", f"one that holds {missing}", "one without it", todo)
    drawing = any(site.mode == "resample" for site in needing)
    lonely = next((row for row, ids in enumerate(rows) if set(reference.ids) <= {ids}), None)
    if drawing and lonely is not None:
        fail(
            "reference",
            "a prompt other than the row it serves",
            f"only row {lonely} itself",
            "pass other prompts",
        )
    return reference


# --- what is put in place -----------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """The prompts, the analysed place of each, and what the modes put in place of a contribution."""

    prompts: Prompts
    targets: Int[Tensor, "batch"]  # places in ``prompts.ids``
    reference: Reference | None
    seed: int

    def __len__(self) -> int:
        return len(self.targets)

    def start(self, row: int) -> int:
        return self.prompts.spans[row][0]

    def length(self, row: int) -> int:
        """Real tokens up to the analysed one."""
        return int(self.targets[row]) + 1 - self.start(row)

    def solo(self, row: int) -> Prompts:
        """One prompt up to its analysed token: later ones cannot reach it."""
        cut = slice(self.start(row), int(self.targets[row]) + 1)
        return Prompts(self.prompts.ids[row : row + 1, cut], self.prompts.mask[row : row + 1, cut])

    def columns(self, row: int, at: Any) -> Int[Tensor, "k"]:
        """The ablated places of a row, counted from its first real token."""
        last = self.length(row) - 1
        if isinstance(at, str):
            check_choice("at", at, ("target", "all"))
            return torch.arange(0 if at == "all" else last, last + 1)
        own = Prompts(self.prompts.ids[row : row + 1], self.prompts.mask[row : row + 1])
        found = select_positions(own, at)[0] - self.start(row)
        found = found[found <= last]
        if not len(found):
            todo = "later tokens cannot reach it"
            fail(
                "at",
                f"a selection that reaches position {last} of row {row} or an earlier one",
                repr(at),
                todo,
            )
        return found

    def replacement(
        self, site: Site, part: Part, row: int, own: Float[Tensor, "k ..."]
    ) -> Float[Tensor, "k ..."]:
        """What stands for the contribution ``own`` of a part at the ablated places of a row."""
        if site.mode in ("skip", "zero"):
            return torch.zeros_like(own)
        if site.mode == "noise":
            noise = torch.randn(own.shape, generator=self._generator(row, part), dtype=torch.float64)
            scale = _norm(own.double().cpu()) / _norm(noise)
            return (noise * scale).to(own)
        assert self.reference is not None
        if site.mode == "mean":
            value = self.reference.mean[part.hook]
            return (value if part.head is None else value[part.head]).to(own).expand_as(own)
        other, places = self._draw(row, self.columns(row, site.at))
        value = self.reference.contributions[part.hook][other, places]
        return (value if part.head is None else value[:, part.head]).to(own)

    def _draw(self, row: int, columns: Int[Tensor, "k"]) -> tuple[int, Int[Tensor, "k"]]:
        """Another prompt and its places: the first for the first, the others from the end backwards."""
        assert self.reference is not None
        own = _real_ids(self.prompts)[row]
        others = [i for i, ids in enumerate(self.reference.ids) if ids != own]
        other = others[int(torch.randint(len(others), (), generator=self._generator(row)))]
        length = len(self.reference.ids[other])
        back = length - self.length(row) + columns
        return other, torch.where(columns == 0, 0, back.clamp(min(1, length - 1), length - 1))

    def _generator(self, row: int, *more: Any) -> torch.Generator:
        """Draws that depend on the seed and on the row's own tokens, never on its neighbours."""
        ids = self.prompts.ids[row, self.start(row) : int(self.targets[row]) + 1].tolist()
        digest = hashlib.sha256(repr((self.seed, ids, *more)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _norm(x: Float[Tensor, "k ..."]) -> Float[Tensor, "k ..."]:
    """Euclidean norm of every row, with axes of length one so that it broadcasts."""
    return x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1))
