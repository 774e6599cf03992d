"""Rules of imports: the order of packages, packages without torch, and one module for private names."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from architecture.conftest import Source

ROWS = {
    "patch.errors": -1,
    "patch.logger": 0,
    "patch.text": 0,
    "patch.flag_field": 0,
    "patch.device": 0,
    "patch.fp8": 0,
    "patch.amax": 0,
    "patch.progress": 1,
    "patch.storage": 1,
    "patch.families": 1,
    "patch.layout": 1,
    "patch.config": 2,
    "patch.features": 3,
    "patch.compat": 3,
    "patch.checks": 4,
    "patch.preflight": 5,
    "patch.plan": 6,
    "patch.launch": 7,
    "patch.distributed": 8,
    "patch.memory": 8,
    "patch.model": 9,
    "patch.optimizer": 9,
    "patch.data": 9,
    "patch.checkpoint": 10,
    "patch.convert": 11,
    "patch.alignment": 12,
    "patch.training": 12,
    "examples": 14,
    "toolkits": 13,
}


LIGHT = tuple(f"patch.{name}" for name in "families layout config features checks preflight plan".split())
"""Packages that work without torch and megatron-core."""


def _package(module: str) -> str | None:
    """Return the product's package of a dotted name, or None for other packages."""
    return next((name for name in ROWS if f"{module}.".startswith(f"{name}.")), None)


def _imports(source) -> list[tuple[int, str]]:
    """Return (line, absolute dotted name) of every import, including those within functions."""
    found = []
    here = source.path.with_suffix("").parts
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) + "." if node.level else ""
            found += [(node.lineno, f"{base}{node.module or ''}.{a.name}".strip(".")) for a in node.names]
    return found


def test_packages_import_only_from_rows_above(house):
    wrong = []
    for source in house:
        own = _package(source.module)
        for line, name in _imports(source):
            other = _package(name)
            if own and other and other != own and ROWS[other] >= ROWS[own]:
                wrong.append(
                    f"{source.path}:{line}: {own} (row {ROWS[own]}) imports {name} (row {ROWS[other]})"
                )
    assert not wrong, "\n".join(wrong)


def test_every_package_has_a_row(house):
    lost = {each.module for each in house if not _package(each.module)} - {"patch"}
    assert not lost, f"no row for {lost}"


def test_nothing_imports_the_tests(house):
    wrong = [f"{s.path}:{line}" for s in house for line, name in _imports(s) if name.split(".")[0] == "tests"]
    assert not wrong


def test_light_rows_name_neither_torch_nor_megatron(house):
    heavy = {"torch", "megatron", "transformers"}
    wrong = [
        f"{source.path}:{line}: {name}"
        for source in house
        if _package(source.module) in LIGHT
        for line, name in _imports(source)
        if name.split(".")[0] in heavy
    ]
    assert not wrong


def test_light_packages_load_no_torch(house, root):
    light = [source.module for source in house if _package(source.module) in LIGHT]
    light += ["patch.launch.launcher", "patch.training.forwarder", "toolkits._start"]
    heavy = "{'torch', 'megatron', 'transformers'}"
    command = [sys.executable, "-c", f"import sys, {', '.join(light)}; print({heavy} & {{*sys.modules}})"]
    loaded = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert loaded.stdout == "set()\n"


def _without_types(tree: ast.Module) -> ast.Module:
    """Return a module without its `if TYPE_CHECKING` blocks."""
    kept = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test))]
    return ast.Module(kept, [])


def test_no_module_imports_itself_by_way_of_others(house):
    """Also within functions, except for types. Modules of a package must not import its __init__."""
    modules = {source.module: source for source in house}
    graph = {
        name: {
            found
            for _, imported in _imports(source._replace(tree=_without_types(source.tree)))
            if (found := imported if imported in modules else imported.rpartition(".")[0]) in modules
        }
        for name, source in modules.items()
    }
    TopologicalSorter(graph).prepare()


def test_packages_that_other_programs_use_take_sections_of_a_run(house):
    """A program without a run uses these packages, and must not need a whole run's configuration.

    Not `model`: it needs five sections and what RunConfig derives from them; `RunConfig.of_model` makes one.
    """
    open_packages = ("optimizer", "data", "memory", "checkpoint")
    wrong = [
        f"{source.path}:{line}"
        for source in house
        if source.path.parts[0] == "patch" and source.path.parts[1] in open_packages
        for line, name in _imports(source)
        if name.endswith(".RunConfig")
    ]
    assert not wrong


def test_packages_for_a_gpu_are_imported(house, root):
    """A user may build them for an hour, so each listed package must be used."""
    imported = {name.split(".")[0] for source in house for _, name in _imports(source)}
    lines = (line.split("#")[0] for line in (root / "requirements-gpu.txt").read_text().splitlines())
    listed = [re.match(r"[\w.-]+", line)[0].replace("-", "_") for line in lines if line.strip()]
    assert not [name for name in listed if name not in imported]


def test_every_thread_is_on_the_device_of_the_one_that_starts_it(house):
    """A thread without a device creates a context of half a GB on GPU 0 for its first operation or free."""
    wrong = []
    for source in house:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call) or source.path == Path("patch/device.py"):
                continue
            name = ast.unparse(node.func).split(".")[-1]
            is_initialized = any(keyword.arg == "initializer" for keyword in node.keywords)
            if name in ("Thread", "Timer") or (name == "ThreadPoolExecutor" and not is_initialized):
                wrong.append(f"{source.path}:{node.lineno}: {name}, expected start_thread or same_device")
    assert not wrong, "\n".join(wrong)


def test_streams_are_taken_for_a_purpose(house):
    """A new stream for each call would soon be the stream of a communicator."""
    calls = [
        f"{source.path}:{node.lineno}"
        for source in house
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".Stream")
        if str(source.path) != "patch/device.py"
    ]
    assert not calls, f"expected stream_of: {calls}"


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _parsed(path: str, text: str):
    return Source(Path(path), text, ast.parse(text))


def test_imports_inside_functions_are_seen():
    source = _parsed(
        "patch/data/x.py", "def f():\n    from ..training import run\n    import patch.model.norm\n"
    )
    assert _imports(source) == [(2, "patch.training.run"), (3, "patch.model.norm")]


@pytest.mark.parametrize(
    "text",
    [
        "from megatron.core.x import _reduce",
        "import megatron.core._rank as rank",
        "from megatron.core import mappings\nmappings._reduce(1)",
        "import megatron.core\nmegatron.core.mappings._reduce = 1",
        "from torch.distributed.checkpoint.filesystem import _StorageInfo",
        "import torch\ntorch._foreach_norm([])",
    ],
)
def test_private_uses_are_seen(text):
    assert _private_uses(_parsed("patch/model/x.py", text))


def test_private_upstream_names_come_through_compat_only(house):
    wrong = []
    for source in house:
        if source.path.parts[:2] == ("patch", "compat"):
            continue
        wrong += [f"{source.path}:{line}: {what}" for line, what in _private_uses(source)]
    assert not wrong, "\n".join(wrong)


def _private_uses(source) -> list[tuple[int, str]]:
    """Return private names imported from megatron and torch, and private attributes reached through them."""
    bound, found = set(), []
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        module = getattr(node, "module", None) or ""
        for alias in node.names:
            dotted = f"{module}.{alias.name}".strip(".")
            if dotted.split(".")[0] in ("megatron", "torch"):
                bound.add(alias.asname or alias.name.split(".")[0])
                found += [(node.lineno, dotted)] if any(map(_private, dotted.split("."))) else []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                found.append((node.lineno, ast.unparse(node)))
    return found
