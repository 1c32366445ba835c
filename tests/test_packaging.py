"""What a build contains. Installing the wheel into an empty environment is left to the test matrix."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist names, wheel names, wheel metadata) of a build without isolation or network."""
    pytest.importorskip("build", reason="python -m build is part of the dev extra")
    pytest.importorskip("hatchling", reason="building without isolation needs hatchling beside it")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    with tarfile.open(sdist) as archive:
        source = {"/".join(Path(name).parts[1:]) for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    return source, names, metadata, entry_points


def modules():
    return {str(file.relative_to(ROOT)) for file in (ROOT / "tl_iglens").rglob("*.py")}


def test_the_wheel_holds_every_module_and_the_typing_marker(built):
    _, wheel, _, _ = built
    assert modules() | {"tl_iglens/py.typed"} <= wheel
    assert all(name.startswith(("tl_iglens/", "tl_iglens-")) for name in wheel)
    assert not any("test" in name or "__pycache__" in name for name in wheel)
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_the_sdist_can_be_built_and_tested_from(built):
    source, _, _, _ = built
    assert modules() <= source
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "tests/conftest.py",
        "tests/data/golden_smollm2.json",
    } <= source


def test_metadata(built):
    _, _, metadata, entry_points = built
    assert "Requires-Python: >=3.10" in metadata and "License-Expression: MIT" in metadata
    assert "Requires-Dist: transformer-lens<5,>=2.18" in metadata
    for extra in ("demo", "captum", "ray", "notebooks", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    pinned = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "<" in line]
    assert [line.split()[1].split("<")[0] for line in pinned] == ["transformer-lens"]
    assert "iglens = tl_iglens.cli:main" in entry_points
