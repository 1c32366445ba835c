"""Imports go one way, down the list of modules; no module of the package knows one below it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tl_iglens"

# A module may import those above it. Names with a trailing slash are folders: anything inside.
ORDER = (
    "_types", "_checks", "path", "estimators", "adaptive", "quantity", "tokens", "_html", "prompts", "files", "head", "readout", "output", "watchers",
    "collect", "windows", "result", "component_result", "lens", "generation", "writers", "components", "track",
    "methods/", "compare", "sites", "ablation", "ranking", "validation", "plotting/", "report", "corpus/", "demo", "_console", "cli_corpus", "cli",
    "__main__", "__init__",
)  # fmt: skip

# Optional packages, and those of the command line, that a plain `import tl_iglens` must not bring.
OPTIONAL = ("captum", "gguf", "ray", "nbformat", "typer")


def place(module: str) -> int:
    """Where a dotted module of the package stands in the list."""
    head = module.split(".")[0]
    name = head if head in ORDER else f"{head}/"
    assert name in ORDER, f"{head} has no place in ORDER"
    return ORDER.index(name)


def modules():
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), file


def imported(module: str, file: Path):
    """The modules of the package that a file imports anywhere, functions included."""
    folder = [] if "/" not in str(file.relative_to(PACKAGE)) else list(file.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - (node.level - 1)]
            if node.module:
                yield ".".join([*base, node.module])
            else:
                yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tl_iglens":
            yield node.module.removeprefix("tl_iglens").lstrip(".") or "__init__"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tl_iglens":
                    yield alias.name.removeprefix("tl_iglens").lstrip(".") or "__init__"


@pytest.mark.parametrize(("module", "file"), list(modules()), ids=[name for name, _ in modules()])
def test_imports_point_upward(module, file):
    head = module.split(".")[0]
    for other in imported(module, file):
        same_folder = other.split(".")[0] == head and f"{head}/" in ORDER
        assert same_folder or place(other) < place(module), f"{module} imports {other}"


def test_the_walk_sees_imports():
    assert {"_checks", "path", "estimators", "readout", "collect"} <= set(
        imported("lens", PACKAGE / "lens.py")
    )


def test_hooks_are_added_in_two_modules():
    for module, file in modules():
        if module not in ("collect", "ablation", "readout"):
            names = {
                n.attr for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.Attribute)
            }
            assert names.isdisjoint({"register_forward_hook", "register_forward_pre_hook", "add_hook"}), (
                module
            )


@pytest.mark.parametrize("banned", ["print", "breakpoint"])
def test_the_library_writes_nothing(banned):
    for module, file in modules():
        if module not in ("cli", "__main__", "demo"):
            calls = (n.func for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.Call))
            assert banned not in {f.id for f in calls if isinstance(f, ast.Name)}, module


def test_a_plain_import_brings_nothing_optional_and_changes_nothing():
    code = (
        "import sys, logging, torch, random\n"
        "before = (torch.get_rng_state().tolist(), random.getstate(), torch.is_grad_enabled(),\n"
        "          torch.get_default_dtype(), torch.get_num_threads(), logging.root.level)\n"
        "import tl_iglens\n"
        "after = (torch.get_rng_state().tolist(), random.getstate(), torch.is_grad_enabled(),\n"
        "         torch.get_default_dtype(), torch.get_num_threads(), logging.root.level)\n"
        "assert before == after\n"
        f"print([name for name in {OPTIONAL!r} if name in sys.modules])\n"
        "assert all(hasattr(tl_iglens, name) for name in tl_iglens.__all__)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"
