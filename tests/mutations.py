"""Find one-line mutations that the tests do not notice: `python tests/mutations.py`, 45 minutes at most.

Each mutation changes one comparison, sum, condition or number of a module of `patch/`, in a copy of this
clone. Tests stop at the first failure: first the files named like the module, then its package, then the
other packages, then the long tests of its package. Mutations are drawn evenly over the packages from a seed.

    python tests/mutations.py --number 60 --seed 0 --json before.json
    python tests/mutations.py --number 4 --rooms plan config --first-only

A survivor is only a hint: some mutations have no visible effect (a limit, a speed).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 45 * 60
TEST_S = 600
"""Time limit of a mutation's tests. A mutation that hangs counts as noticed."""
COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ADDED: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*"}


class Mutation(NamedTuple):
    """A line of a module and its replacement."""

    path: str
    line: int
    before: str
    after: str

    @property
    def room(self) -> str:
        """Package below patch/, or "" for a module of its own."""
        parts = Path(self.path).parts
        return parts[1] if len(parts) > 2 else ""


def mutations_of(path: Path) -> Iterator[Mutation]:
    """Yield the mutations of a module that change a single line."""
    text = path.read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    for node in ast.walk(tree):
        found = _replaced(node)
        if found is None:
            continue
        old, new = found
        if old.lineno != old.end_lineno:
            continue
        line = lines[old.lineno - 1].encode()
        after = (line[: old.col_offset] + new.encode() + line[old.end_col_offset :]).decode()
        try:
            ast.parse("\n".join([*lines[: old.lineno - 1], after, *lines[old.lineno :]]))
        except SyntaxError:
            continue
        if after != line.decode():
            yield Mutation(str(path.relative_to(ROOT)), old.lineno, line.decode(), after)


def _replaced(node: ast.AST) -> tuple[ast.expr, str] | None:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in COMPARED:
            return node, f"({ast.unparse(left)} {COMPARED[type(operator)]} {ast.unparse(right)})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ADDED:
            if any(isinstance(side, (ast.JoinedStr, ast.List, ast.Tuple)) for side in (left, right)):
                return None
            return node, f"({ast.unparse(left)} {ADDED[type(operator)]} {ast.unparse(right)})"
        case ast.If(test=test) | ast.IfExp(test=test) if "TYPE_CHECKING" not in ast.unparse(test):
            return test, f"(not ({ast.unparse(test)}))"
        case ast.Constant(value=int() as number) if not isinstance(number, bool) and number < 100:
            return node, str(number + 1)
    return None


def drawn(number: int, seed: int, rooms: Sequence[str]) -> list[Mutation]:
    """Return mutations of the packages in turns, drawn from the lines of all modules of a package."""
    pick, by_room = random.Random(seed), {}
    for path in sorted((ROOT / "patch").rglob("*.py")):
        for mutation in mutations_of(path):
            if not rooms or mutation.room in rooms:
                by_room.setdefault(mutation.room, []).append(mutation)
    for found in by_room.values():
        pick.shuffle(found)
    chosen: list[Mutation] = []
    while len(chosen) < number and any(by_room.values()):
        chosen += [found.pop() for found in by_room.values() if found]
    return chosen[:number]


def killer(copy: Path, mutation: Mutation, end: float, *, first_only: bool) -> str | None:
    """Return the first test that fails with the mutation, or None.

    Args:
        copy: copy of the clone. The mutation is made there and undone.
        end: time limit on the clock of time.monotonic().
        first_only: whether only the tests of the package run.
    """
    file = copy / mutation.path
    text = file.read_text(encoding="utf-8")
    lines = text.split("\n")
    assert lines[mutation.line - 1] == mutation.before, mutation
    lines[mutation.line - 1] = mutation.after
    file.write_text("\n".join(lines), encoding="utf-8")
    room = f"tests/unit/{mutation.room}"
    try:
        own = room if mutation.room and (copy / room).is_dir() else "tests/unit"
        named = sorted(str(test) for test in (copy / own).glob(f"**/test_*{Path(mutation.path).stem}*.py"))
        found = _failed(copy, [*named, own], end)
        if found is None and not first_only and own != "tests/unit":
            found = _failed(copy, ["tests", f"--ignore={room}"], end)
        return found or _failed(copy, [own], end, marked="long and not gpu")
    finally:
        file.write_text(text, encoding="utf-8")


def _failed(
    copy: Path, arguments: list[str], end: float, marked: str = "not gpu and not long"
) -> str | None:
    command = [
        str(ROOT / ".venv/bin/python"), "-m", "pytest", "-x", "-m", marked, "-p", "no:cacheprovider",
        *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    seconds = min(TEST_S, end - time.monotonic())
    if seconds <= 0:
        raise TimeoutError
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:.0f} s"
    if done.returncode in (0, 5):  # 5: no test has this mark
        return None
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return said[0] if said else f"exit code {done.returncode}: {done.stdout[-200:]}"


def main(argv: Sequence[str]) -> int:
    """Make the mutations one by one; return 0, even if some survive."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=60, help="mutations (60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=[], help="packages below patch/ (all)")
    parser.add_argument("--first-only", action="store_true", help="the tests of the mutation's room alone")
    parser.add_argument("--json", type=Path, help="also write what was found")
    options = parser.parse_args(argv)
    found: list[dict[str, object]] = []
    end = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "*_output"))
        for mutation in drawn(options.number, options.seed, options.rooms):
            begin = time.monotonic()
            try:
                by = killer(copy, mutation, end, first_only=options.first_only)
            except TimeoutError:
                print(f"the time is over after {len(found)} mutations")
                break
            found.append({**mutation._asdict(), "killer": by})
            place = f"{mutation.path}:{mutation.line}"
            print(f"{'killed' if by else 'SURVIVED':9} {time.monotonic() - begin:5.0f} s {place}")
            print(f"    {mutation.before.strip()}\n    {mutation.after.strip()}", flush=True)
    killed = sum(one["killer"] is not None for one in found)
    print(f"{killed} of {len(found)} mutations were noticed")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
