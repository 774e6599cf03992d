"""The walls of the house: how long a file, a function and an argument list may be, and how large the whole.

A commit that raises a figure of BUDGET says what it buys; one that takes away lowers it. The aims are 29,000
lines of code of the product, 25,500 of tests, 15 % small modules and 45 files in a room.
"""

import ast
import io
import tokenize
from collections import Counter

FILE_LINES = 500
FUNCTION_LINES = 60
POSITIONAL_ARGUMENTS = 8
SMALL_LINES = 45
BUDGET = {"product": 41_278, "tests": 35_125, "small modules, %": 15, "files in a room": 45}
"""Lines of code are those without docstrings, comments and blanks."""
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


def test_the_whole_stays_within_its_budget(all_sources):
    sizes = {source.path.parts: _lines_of_code(source) for source in all_sources}
    product = {parts: lines for parts, lines in sizes.items() if parts[0] in ("patch", "toolkits")}
    rooms = Counter(parts[:2] for parts in product if len(parts) > 2)
    found = {
        "product": sum(product.values()),
        "tests": sum(lines for parts, lines in sizes.items() if parts[0] == "tests"),
        "small modules, %": round(100 * sum(n < SMALL_LINES for n in product.values()) / len(product)),
        "files in a room": max(rooms.values()),
    }
    assert not {name: n for name, n in found.items() if n > BUDGET[name]}, found


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
        return []  # Triton knows no keyword-only arguments
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return [name for name in names if name not in ("self", "cls")]
