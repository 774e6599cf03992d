"""The walls of the house: how long a file, a function and an argument list may be."""

import ast

FILE_LINES = 500
FUNCTION_LINES = 60
POSITIONAL_ARGUMENTS = 8


def _functions(source):
    return [n for n in ast.walk(source.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def test_files_stay_below_the_wall(all_sources):
    long = {str(s.path): n for s in all_sources if (n := s.text.count("\n")) > FILE_LINES}
    assert not long


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
