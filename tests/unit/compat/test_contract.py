"""Names of megatron-core that this project uses, by release: bases, arguments, overridden methods.

contract.txt has all lines of the first release, and of each later one those that changed ("-": it is gone). A
release is described from its sources, without an import: the installed one, and those whose unzipped wheels
are in a folder `MEGATRON_WHEELS`, each called by its version. RENEW_GOLDEN=1 writes the file anew from these;
for a release that the file does not know, the test shows what has changed since the last one.
"""

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

FILE, ROOT = Path(__file__).with_name("contract.txt"), Path(__file__).parents[3]
GONE = "-"


def used() -> dict[tuple[str, str], set[str]]:
    """(module, name) -> names of methods that classes of ours override in it."""
    found: dict[tuple[str, str], set[str]] = {}
    for folder in ("patch", "toolkits"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text())
            imports = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
                    imports |= {each.asname or each.name: (node.module, each.name) for each in node.names}
            for name in imports.values():
                found.setdefault(name, set())
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                    for base in node.bases:
                        if isinstance(base, ast.Name) and base.id in imports:
                            found[imports[base.id]] |= own
    return found


@cache
def parsed(root: Path, module: str) -> ast.Module | None:
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text()) if file.is_file() else None


def definition(root: Path, module: str, name: str) -> tuple[str, ast.stmt] | None:
    """The statement that defines a name, and its module; imports are followed."""
    if parsed(root, f"{module}.{name}"):
        return module, ast.Pass()
    tree = parsed(root, module)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                return module, node
        if not isinstance(node, ast.ImportFrom):
            continue
        names = {each.asname or each.name: each.name for each in node.names}
        if name in names:
            is_package = root.joinpath(*module.split(".")).is_dir()
            parts = (
                module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            )
            if found := definition(root, ".".join([*parts, node.module or ""]).strip("."), names[name]):
                return found
    return None


def described(root: Path) -> dict[str, str]:
    """`module:name` or `module:class.method` -> bases or arguments, or what else it is."""
    lines = {}
    for (module, name), methods in used().items():
        found = definition(root, module, name)
        lines[f"{module}:{name}"] = GONE if found is None else _signature(found[1])
        for method in sorted(methods) if found else ():
            if (own := next(_methods(root, *found, method), None)) is not None:
                lines[f"{module}:{name}.{method}"] = _signature(own)
    return lines


def _methods(root: Path, module: str, node: ast.stmt, name: str) -> Iterator[ast.FunctionDef]:
    """A method in a class, else in its bases."""
    if not isinstance(node, ast.ClassDef):
        return
    yield from (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name)
    for base in node.bases:
        if isinstance(base, ast.Name) and (found := definition(root, module, base.id)):
            yield from _methods(root, *found, name)


def _signature(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        init = next((each for each in node.body if getattr(each, "name", "") == "__init__"), None)
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class({bases}){_signature(init) if isinstance(init, ast.FunctionDef) else ''}"
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
        names += [f"{each.arg}=" for each in arguments.kwonlyargs]
        return f"({', '.join([*names, *([f'**{arguments.kwarg.arg}'] if arguments.kwarg else [])])})"
    return "module" if isinstance(node, ast.Pass) else "value"


def releases() -> dict[str, Path]:
    """Version -> the folder that holds the package `megatron`."""
    (installed,) = find_spec("megatron").submodule_search_locations
    found = {version("megatron-core"): Path(installed).parent}
    if folder := os.environ.get("MEGATRON_WHEELS"):
        found |= {each.name: each for each in Path(folder).iterdir() if (each / "megatron").is_dir()}
    return dict(sorted(found.items(), key=lambda each: _number(each[0])))


def _number(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def on_file() -> dict[str, dict[str, str]]:
    """Release -> all its lines."""
    found: dict[str, dict[str, str]] = {}
    for line in FILE.read_text().splitlines():
        if line.startswith("# "):
            found[line[2:]] = dict(found[[*found][-1]]) if found else {}
        else:
            key, _, signature = line.partition(" ")
            found[[*found][-1]][key] = signature
    return found


def test_what_is_used_is_there_as_it_is_on_file() -> None:
    there = {release: described(root) for release, root in releases().items()}
    if os.environ.get("RENEW_GOLDEN"):
        lines, before = [], {}
        for release, own in there.items():
            changed = [f"{key} {text}" for key, text in sorted(own.items()) if before.get(key) != text]
            changed += [f"{key} {GONE}" for key in sorted(before) if key not in own]
            lines, before = [*lines, f"# {release}", *changed], own
        FILE.write_text("\n".join(lines) + "\n")
        pytest.fail("contract.txt is written anew: read it")
    known = on_file()
    for release, own in there.items():
        nearest = max((each for each in known if _number(each) <= _number(release)), key=_number)
        expected = known[nearest]
        now = {key: text for key, text in own.items() if text != GONE}
        expected = {key: text for key, text in expected.items() if text != GONE}
        assert now == expected, f"megatron-core {release} has other names than contract.txt"


def test_private_methods_that_subclasses_override_are_named_in_compat() -> None:
    private = {
        key.partition(":")[2] for lines in on_file().values() for key in lines if re.search(r"\._(?!_)", key)
    }
    assert private and private <= {*re.findall(r"`([\w.]+)`", (ROOT / "patch/compat/README.md").read_text())}
