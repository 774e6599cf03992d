"""Limits on the size of files, functions, argument lists, and the whole project.

BUDGET limits the lines of code of the product (patch, toolkits, examples, the C++ kernel) and of the tests.
It only falls; an issue may raise it only by the allowance written in it. Code that moves to another package
takes its lines along. Never set it to today's count. Data files (.txt, .yaml) are printed separately.
"""

import ast
import io
import re
import tokenize
from collections import Counter

FILE_LINES = 500
FUNCTION_LINES = 60
POSITIONAL_ARGUMENTS = 8
SMALL_LINES = 45
BUDGET = {"product": 40_750, "tests": 34_950}
"""Lines of code, without docstrings, comments and blank lines."""
SMALL_MODULES_PERCENT, FILES_IN_A_ROOM = 15, 45
DATA = (".txt", ".yaml", ".jinja")
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def _functions(source):
    return [n for n in ast.walk(source.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def test_files_stay_below_the_wall(all_sources):
    long = {str(s.path): n for s in all_sources if (n := s.text.count("\n")) > FILE_LINES}
    assert not long


def _lines_of_code(source) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    lines = {n for t in tokens if t.type not in NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(source.tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def _lines_of_cpp(text: str) -> int:
    lines = re.sub(r"/\*.*?\*/", "", text, flags=re.S).splitlines()
    return sum(bool(line.partition("//")[0].strip()) for line in lines)


def test_the_whole_stays_within_its_budget(all_sources, root):
    sizes = {source.path.parts: _lines_of_code(source) for source in all_sources}
    there = [file for folder in ("patch", "toolkits") for file in (root / folder).rglob("*.*")]
    kernels = [file for file in there if file.suffix == ".cpp"]
    sizes |= {file.relative_to(root).parts: _lines_of_cpp(file.read_text()) for file in kernels}
    rooms, data = Counter(), Counter()
    for parts, lines in sizes.items():
        rooms["/".join(parts[: 1 + (len(parts) > 2 and parts[0] != "tests")])] += lines
    for file in (file for file in there if file.suffix in DATA):
        data[str(file.relative_to(root))] = file.read_text().count("\n")
    found = {"product": rooms.total() - rooms["tests"], "tests": rooms["tests"]}
    print(found, *sorted(rooms.items()), "data:", *sorted(data.items()), sep="\n")
    assert not {name: lines for name, lines in found.items() if lines > BUDGET[name]}


def test_rooms_have_few_files_and_few_small_ones(house):
    installed = [source for source in house if source.path.parts[0] != "examples"]
    rooms = Counter(source.path.parts[:2] for source in installed if len(source.path.parts) > 2)
    assert max(rooms.values()) <= FILES_IN_A_ROOM, rooms.most_common(1)
    small = sum(0 < _lines_of_code(source) < SMALL_LINES for source in installed)
    assert round(100 * small / len(installed)) <= SMALL_MODULES_PERCENT


def test_functions_stay_below_the_wall(all_sources):
    long = {
        f"{source.path}:{function.lineno} {function.name}": lines
        for source in all_sources
        for function in _functions(source)
        if (lines := function.end_lineno - function.lineno + 1) > FUNCTION_LINES
    }
    assert not long


def test_arguments_beyond_eight_are_keywords(house):
    many = {
        f"{source.path}:{function.lineno} {function.name}": names
        for source in house
        for function in _functions(source)
        if len(names := _positional(function)) > POSITIONAL_ARGUMENTS
    }
    assert not many


def _positional(function) -> list[str]:
    if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
        return []  # Triton has no keyword-only arguments
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return [name for name in names if name not in ("self", "cls")]
