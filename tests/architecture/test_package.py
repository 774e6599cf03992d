"""Contents of an installation: dependencies, types, and nothing else."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import patch
from toolkits.quickstart.workspace import prepare

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
QUIET = ["--quiet", "--no-deps"]


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def _project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def _pins(root: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (root / "requirements.txt").read_text().splitlines())
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def declared(root: Path) -> set[str]:
    """Return the packages that an installation requires."""
    return {_name(requirement) for requirement in _project(root)["dependencies"]}


def test_what_is_imported_is_declared(house, declared):
    """Triton comes with torch's CUDA build. DeepSpeed, PEFT and TRL are optional rivals in benchmarks.
    lm-eval is the extra `tasks`. Transformer Engine is in requirements-gpu.txt, and imported only on demand.
    """
    distributions = packages_distributions()
    known = sys.stdlib_module_names | {"patch", "toolkits", "examples", "triton", "deepspeed", "datasets"}
    known |= {"transformer_engine", "flash_attn", "peft", "trl", "lm_eval"}
    missing = set()
    for source in house:
        for node in ast.walk(source.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for package in {name.split(".")[0] for name in names} - known:
                if not declared & {_name(found) for found in distributions.get(package, [package])}:
                    missing.add(f"{source.path}: {package}")
    assert not missing


def test_what_a_run_needs_is_installed_without_what_only_tests_need(root, declared):
    """`make quickstart` installs requirements.txt. Each tested version is listed only once."""
    run, tests = _pins(root), _project(root)["optional-dependencies"]["test"]
    assert all("==" in pin for pin in (*run, *tests))
    needed = {_name(pin) for pin in run}
    assert needed == declared | {"pytest"} and {"torch", "megatron-core", "transformers"} <= needed
    assert needed.isdisjoint(map(_name, tests))


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(root, source, ignore=shutil.ignore_patterns(".*", "tests", "build", "*.egg-info"))
    subprocess.run(
        [*PIP, "wheel", *QUIET, "--no-build-isolation", "-w", folder, source], check=True, timeout=120
    )
    (found,) = folder.glob("*.whl")
    return found


INSIDE = "llama_megatron_patch"
MESSAGES = """import llama_megatron_patch
from patch.device import MachineFacts
from toolkits.doctor import check, messages
settings = check.Settings(MachineFacts(cuda_devices=0, cpu_cores=2), 2)
print(*[finding.name for finding in messages.measure_messages(settings)])
"""


def test_a_wheel_holds_one_package_with_all_that_programs_need(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {INSIDE}
    needed = "patch/py.typed patch/optimizer/kernels/adam.cpp patch/config/foreign_flags.txt"
    needed += " toolkits/command.py patch/families/config_keys.yaml examples/llama3_1/run_mcore_llama.sh"
    assert {f"{INSIDE}/{name}" for name in needed.split()} <= set(names)
    assert not [name for name in names if name.startswith(f"{INSIDE}/toolkits/benchmarks")]  # only in a clone


@pytest.mark.long
def test_an_installed_command_lists_plans_and_trains(root, wheel, tmp_path):
    """In a folder outside the repository, with files that have the names of modules."""
    installed = tmp_path / "installed"
    subprocess.run([*PIP, "install", *QUIET, "--target", installed, wheel], check=True, timeout=120)
    kernels = Path("patch/optimizer/kernels/build")  # compiling them would take seconds
    if (root / kernels).is_dir():
        shutil.copytree(root / kernels, installed / INSIDE / kernels)
    (installed / "patch.py").write_text("fromstring = 'of another program'")  # as on PyPI
    (installed / "toolkits").mkdir()
    (installed / "toolkits" / "__init__.py").write_text("own = 'of another program'")
    (tmp_path / "random.py").write_text("raise RuntimeError('not the standard library')")
    users = {name: text for name, text in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    environ = {**users, "PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def call(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [str(installed / "bin" / "llama-patch"), *map(str, arguments)]
        own = {**environ, **variables}
        return subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=200)

    commands = [line.split()[0] for line in call("--help").stdout.splitlines()[1:]]
    tools = "train migrate chat convert merge plan prove doctor preview preprocess inspect evaluate align"
    assert commands == ["quickstart", *tools.split()]
    assert call("--version").stdout.startswith(f"llama-patch {patch.__version__} (megatron-core ")
    wrong = call("plna")
    assert wrong.returncode == 2 and "did you mean plan?" in wrong.stderr
    planned = call("plan", "--machine", "h100", "--", "--model-size", "1B")
    assert planned.returncode == 0 and "8 x NVIDIA H100" in planned.stdout, planned.stderr
    searched = call("plan", "--machine", "h100", "--search", "--best=1", "--", "--model-size", "1B")
    script = tmp_path / re.search(r"bash (\S+run_mcore_llama.sh) ", searched.stdout)[1]
    assert script.is_file() and script.is_relative_to(installed / INSIDE)
    for program, expected in (
        ("import patch, toolkits; print(patch.fromstring, toolkits.own)", "of another program " * 2),
        ("import llama_megatron_patch, patch; print(patch.__file__)", str(installed / INSIDE / "patch")),
        (MESSAGES, "reduce-scatter latency"),
    ):
        command = [sys.executable, "-c", program]
        said = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=60)
        assert said.stdout.startswith(expected.strip()), said
    space, _ = prepare(tmp_path / "office", num_held_out=4, num_train=16)
    before = "dsw auto 2 4 1e-3 1e-4 64 48 fp32 1 1 1 false true true true none false 2".split()
    paths = [space.train_data, "none", space.model, "2", "1", space.run]
    trained = call("train", *before, *paths, MP_DATASET_TYPE="raw", NPROC_PER_NODE="1")
    assert trained.returncode == 0, trained.stderr
    assert len(space.losses()) == 2
