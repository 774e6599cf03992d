"""What another program gets that installs the package: its dependencies, its types, and nothing else."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


@pytest.fixture(scope="module")
def declared(root: Path) -> set[str]:
    """The packages that an installation of this one brings."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return {_name(requirement) for requirement in project["dependencies"]}


def test_what_is_imported_is_declared(house, declared):
    """Triton comes with torch's CUDA build; DeepSpeed is a benchmark's rival where it is installed.

    Transformer Engine is in requirements-gpu.txt, and imported only where a user asks for its layers.
    """
    distributions = packages_distributions()
    known = sys.stdlib_module_names | {"patch", "toolkits", "examples", "triton", "deepspeed", "datasets"}
    known |= {"transformer_engine"}
    missing = set()
    for source in house:
        for node in ast.walk(source.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for package in {name.split(".")[0] for name in names} - known:
                if not declared & {_name(found) for found in distributions.get(package, [package])}:
                    missing.add(f"{source.path}: {package}")
    assert not missing


def test_what_is_declared_is_tested(root, declared):
    lines = (line.split("#")[0].strip() for line in (root / "requirements.txt").read_text().splitlines())
    assert declared <= {_name(line) for line in lines if line}


def test_a_wheel_holds_the_two_packages_their_types_and_the_kernels_source(root, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(root, source, ignore=shutil.ignore_patterns(".*", "tests", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "-w", tmp_path, source], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"patch", "toolkits"}
    assert {"patch/py.typed", "patch/optimizer/kernels/adam.cpp", "patch/optimizer/__init__.py"} <= set(names)
