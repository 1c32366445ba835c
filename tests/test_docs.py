"""What is public is documented: every parameter, shapes, units, errors, and where a method comes from.

The walk reads signatures and docstrings. A parameter counts as documented where the function names it, where it
says ``as for`` another function and that function documents it, or where the docstring of its module does.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing

import pytest
from torch import Tensor

import tl_iglens
from tl_iglens import plotting
from tl_iglens.methods import METHODS

UNITS = re.compile(r"prob|logit|quantity|nats|unit|pixels|norm|credit|level|effect|Levels", re.I)
ERRORS = re.compile(r"Raises|\w+Error\b")
SHAPE = re.compile(r"\[[^\]]*\b(batch|pos|segment|point|component|row|cell|site|d_model|prompt|layer|ctx|candidate)\b")
AS_FOR = re.compile(r"as\s+for\s+:?(?:func:)?`+([\w.]+)`+")

# Where a method comes from: what its own docstring or that of its module has to name.
SOURCES = {
    "ig_lens": r"2606\.29693",
    "explain_generation": r"2606\.29693",
    "estimators.segment_credits": r"IDGI.*Yang|Yang.*IDGI",
    "result.IGLensResult.onset": r"paper",
    "methods.ig_lens.credits": r"2606\.29693|ig_lens",
    "methods.logit_lens.logit_lens": r"nostalgebraist",
    "methods.tuned_lens.tuned_lens": r"Belrose",
    "methods.tuned_lens.fit_tuned_lens": r"published recipe",
    "methods.jacobian.jacobian": r"transformer_lens\.tools\.analysis",
    "methods.logit_attribution.logit_attribution": r"direct logit attribution|Direct logit attribution",
    "methods.layer_gradients.layer_ig": r"Captum|Sundararajan",
    "methods.layer_gradients.layer_conductance": r"Captum|Dhamdhere",
    "methods.embedding_projection.embedding_projection": r"Dar|Geva",
    "validation.validate_onset": r"Holm",
}


def modules():
    names = [m.name for m in pkgutil.walk_packages(tl_iglens.__path__, "tl_iglens.") if not m.name.endswith("__main__")]
    return [tl_iglens, *(importlib.import_module(name) for name in names)]


def own(module):
    """Public functions and classes that a module defines, by dotted name."""
    for name, thing in vars(module).items():
        plain = inspect.isfunction(thing) or inspect.isclass(thing)
        if plain and not name.startswith("_") and thing.__module__ == module.__name__:
            yield f"{module.__name__.removeprefix('tl_iglens').lstrip('.')}.{name}".lstrip("."), thing


def methods_of(cls):
    """Public functions and properties that a class defines itself, as (name, function)."""
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


PUBLIC = dict(pair for module in modules() for pair in own(module))
EXPORTED = {name: getattr(tl_iglens, name) for name in tl_iglens.__all__ if name != "plotting"}
CALLS = (
    {name: thing for name, thing in EXPORTED.items() if inspect.isfunction(thing)}
    | {f"plotting.{name}": getattr(plotting, name) for name in plotting.__all__}
    | {f"METHODS[{name!r}]": method.run for name, method in METHODS.items()}
    | {
        f"{cls}.{name}": function
        for cls, thing in EXPORTED.items()
        if inspect.isclass(thing)
        for name, function in methods_of(thing)
    }
)


def doc(thing):
    return inspect.getdoc(inspect.unwrap(thing)) or ""


def around(thing):
    """The docstring of the module, and of the package a plotting or method module belongs to."""
    module = importlib.import_module(inspect.unwrap(thing).__module__)
    package = importlib.import_module(module.__name__.rpartition(".")[0] or "tl_iglens")
    return f"{module.__doc__ or ''}\n{package.__doc__ or ''}"


def parameters(function):
    given = inspect.signature(inspect.unwrap(function)).parameters
    return [name for name in given if name not in ("self", "cls", "question")]


def referred(thing):
    """The functions whose documentation a docstring points to."""
    for name in AS_FOR.findall(doc(thing)):
        found = (
            EXPORTED.get(name)
            or PUBLIC.get(name)
            or next((f for n, f in CALLS.items() if n.endswith(f".{name}")), None)
        )
        found = found or next((f for n, f in PUBLIC.items() if n.endswith(f".{name}")), None)
        if found is None and name.startswith("result."):
            found = getattr(tl_iglens.IGLensResult, name.removeprefix("result."), None)
        if found is not None and found is not thing:
            yield found


def described(thing, seen=()):
    """All text in which a parameter of a function may be explained."""
    texts = [doc(thing), around(thing)]
    for other in referred(thing):
        if other not in seen:
            texts.append(described(other, (*seen, thing, other)))
    return "\n".join(texts)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_things_have_a_docstring(name):
    thing = PUBLIC[name]
    text = inspect.unwrap(thing).__doc__ or ""
    automatic = dataclasses.is_dataclass(thing) and text.startswith(f"{thing.__name__}(")
    assert text.strip() and not automatic, f"{name} has no docstring"
    assert len(text.split()) >= 3, f"{name} says only {text!r}"


@pytest.mark.parametrize("name", [n for n, cls in EXPORTED.items() if inspect.isclass(cls)])
def test_members_of_public_classes_have_a_docstring(name):
    missing = [member for member, function in methods_of(EXPORTED[name]) if not function.__doc__]
    assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("name", CALLS)
def test_every_parameter_is_explained(name):
    text = described(CALLS[name])
    missing = [p for p in parameters(CALLS[name]) if not re.search(rf"(?<![\w.]){re.escape(p)}\b", text)]
    assert not missing, f"{name} says nothing of {missing}"


@pytest.mark.parametrize("name", [name for name in CALLS if "." not in name])
def test_functions_state_shapes_units_and_errors(name):
    function = CALLS[name]
    text, all_text = doc(function), described(function)
    assert UNITS.search(text), f"{name} names no unit or quantity"
    assert ERRORS.search(all_text), f"{name} names no error"
    returns = typing.get_type_hints(inspect.unwrap(function)).get("return")
    shaped = inspect.isclass(returns) and any(SHAPE.search(f"[{s}]") for s in shapes_of(returns))
    assert SHAPE.search(all_text) or shaped, f"{name} names no shape"


def shapes_of(cls):
    """The shapes in the annotations of a dataclass's fields."""
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        yield from (part.dim_str for part in leaves(field.type) if hasattr(part, "dim_str"))


def leaves(annotation):
    """An annotation and what it is made of; a jaxtyping array is a leaf."""
    parts = () if hasattr(annotation, "dim_str") else typing.get_args(annotation)
    return [annotation] if not parts else [leaf for part in parts for leaf in leaves(part)]


@pytest.mark.parametrize("name", [n for n, cls in PUBLIC.items() if dataclasses.is_dataclass(cls)])
def test_tensors_of_dataclasses_have_shapes(name):
    cls = PUBLIC[name]
    comments = inspect.getsource(cls)
    for field in dataclasses.fields(cls):
        if Tensor in leaves(field.type):
            line = next(line for line in comments.splitlines() if re.match(rf"\s+{field.name}:", line))
            assert "[" in line.partition("#")[2], f"{name}.{field.name} is a Tensor of no stated shape"


@pytest.mark.parametrize("name", PUBLIC)
def test_bare_tensors_are_described(name):
    """A public function that takes or gives a Tensor without a shape in its signature states one in words."""
    thing = PUBLIC[name]
    for label, function in [(name, thing)] if inspect.isfunction(thing) else methods_of(thing):
        function = inspect.unwrap(function)
        hints = {k: v for k, v in function.__annotations__.items() if Tensor in leaves(v)}
        if hints:
            assert "[" in doc(function) + doc(thing), f"{name} {label}: {sorted(hints)} have no shape"


@pytest.mark.parametrize("name", SOURCES)
def test_methods_from_the_literature_name_their_source(name):
    found = EXPORTED.get(name)
    if found is None:
        *path, last = name.split(".")
        owner = tl_iglens
        for part in path:
            owner = getattr(owner, part, None) or importlib.import_module(f"{owner.__name__}.{part}")
        owner = importlib.import_module(f"tl_iglens.{'.'.join(path)}") if inspect.isfunction(owner) else owner
        found = getattr(owner, last)
    module = importlib.import_module(inspect.unwrap(found).__module__)
    assert re.search(SOURCES[name], f"{doc(found)}\n{module.__doc__}", re.S), f"{name} names no source"


def test_every_module_says_what_it_is():
    for module in modules():
        tree = ast.parse(inspect.getsource(module))
        assert len((ast.get_docstring(tree) or "").split()) >= 5, module.__name__


def test_documented_options_exist():
    """``Args`` blocks name parameters that the function has."""
    for name, function in CALLS.items():
        text, known = doc(function), set(inspect.signature(inspect.unwrap(function)).parameters)
        block = re.search(r"Args:\n(.*?)(?:\n\n|\Z)", text, re.S)
        lines = re.findall(r"^ {4}([\w, \n]+?):", block.group(1), re.M) if block else []
        for word in (word.strip() for line in lines for word in line.split(",")):
            assert word in known, f"{name} documents {word!r}, which it does not take"
