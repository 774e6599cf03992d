"""Read the training command of a shell script without running it.

Read are assignments (`+=` and arrays too), `$NAME`, `$1`, `${NAME:-default}`, and lines that a backslash
continues. What only a shell can know, such as $(date) or what an `if` sets, keeps its `$` in the words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from patch.config.positions import POSITIONS
from patch.errors import ConfigError

_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n.*?\n[ \t]*\2(?=\n|$)", re.DOTALL)
_TOKEN = re.compile(
    r"""(?:[ \t\r]|\\\n)+ | (?<![^\s;&|()])\#[^\n]* | (?P<end>\n|;;?|&&|\|\|?|&(?!>)|[()])
    | (?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\$\{[^{}]*\}|\\[^\n]|>&|[^\s'"\\;&|()])+) | (?P<rest>.)""",
    re.VERBOSE | re.DOTALL,
)
_PART = re.compile(r"'[^']*'|\$\{[^{}]*\}|\"(?:\\.|[^\"\\])*\"|(?:\\.|[^'\"\\$]|\$(?!\{))+", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(\[[@*]\])?(?::?-([^{}]*))?\}|(\w+|[@*]))")
_ASSIGNED = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"\w*(pretrain|finetune|train)\w*\.py")
_REDIRECTION = re.compile(r"\d*[<>].*|&>.*", re.DOTALL)
OPTIONS = "?}"
"""End of a word that stands for options which only a shell knows."""
_GAP = "\0"
"""Between the raw words of an array."""
_OPENING, _CLOSING = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_BEFORE = ("then", "else", "do", "export", "local", "declare", "readonly")
"""Words before an assignment or a command."""
_SPOKEN = ("echo", "printf", "ls", "cd", "cp", "[", "[[", "test", "elif", *_OPENING)
"""Commands that may name a program but do not run it."""
_Variables = dict[str, str | list[str]]


class Command(NamedTuple):
    """A training command."""

    launcher: list[str]
    """Words before the program, such as those of torchrun."""
    words: list[str]
    """Its arguments; they begin with ENV if they are the 25 positions."""
    variables: dict[str, str]
    """Texts that the script assigns."""


def read_command(text: str, arguments: Sequence[str]) -> Command:
    """Return the one training command of a shell script, whose `$1`, `$2` ... are `arguments`.

    Raises:
        ConfigError: the script has none or several, or a quotation mark is not closed.
    """
    variables: _Variables = {str(index): value for index, value in enumerate(arguments, 1)}
    variables["@"] = list(arguments)
    found, depth = [], 0
    for raw in _statements(_without_substitutions(_HEREDOC.sub(r"\3", text))):
        depth += (raw[0] in _OPENING) - (raw[0] in _CLOSING)
        raw = raw[raw[0] in _BEFORE :]
        while raw and (match := _ASSIGNED.fullmatch(raw[0])):
            _assign(variables, *match.groups(), is_known=not depth)
            raw = raw[1:]
        words = [word for part in raw for word in _expand(part, variables)]
        inner = [part for word in words for part in (shlex.split(word) if ".py " in word else [word])]
        found += [each for each in [_training(inner)] if each and words[0] not in _SPOKEN]
    if len(found) != 1:
        what = "a call of pretrain_gpt.py or the like, or of run_mcore_*.sh with its 25 positions"
        raise ConfigError(f"got {len(found)} training commands, expected one: {what}")
    texts = {name: value for name, value in variables.items() if isinstance(value, str)}
    return Command(*found[0], texts)


def _without_substitutions(text: str) -> str:
    """Replace $(...) and `...` by a variable that has no value."""
    parts, at = [], 0
    while (start := text.find("$(", at)) >= 0:
        depth, end = 1, start + 2
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        parts += [text[at:start], "${...}"]
        at = end
    return re.sub(r"`[^`]*`", "${...}", "".join([*parts, text[at:]]))


def _statements(text: str) -> Iterator[list[str]]:
    """Yield the raw words of each statement, an array as one word."""
    raw: list[str] = []
    array: list[str] | None = None
    for token in _TOKEN.finditer(text + "\n"):
        end, word = token["end"], token["word"]
        if token["rest"]:
            raise ConfigError(f"a quotation mark is not closed: {text[token.start() :][:40]!r}")
        if array is not None:
            array += [word] if word else []
            if end == ")":
                raw[-1] += f"({_GAP.join(array)})"
                array = None
        elif end == "(" and raw and raw[-1].endswith("="):
            array = []
        elif word:
            raw.append(word)
        elif end and raw:
            yield raw
            raw = []


def _assign(variables: _Variables, name: str, adds: str, raw: str, *, is_known: bool) -> None:
    """Set a variable. Without `is_known` it gets no value: ${NAME}, or ${NAME?} in place of options."""
    is_array = raw.startswith("(")
    words = [word for part in raw.strip("()").split(_GAP) for word in _expand(part, variables)]
    old = variables.pop(name, None)
    if not is_known:
        adds = adds or ("+" if old and words[0].startswith(str(old)) else "")  # NAME="$NAME ..."
        words = [f"${{{name}{OPTIONS if any(word[:1] == '-' for word in words) else '}'}"]
    new = words if is_array else " ".join(words)
    if adds and old is not None:
        new = [*old, *new] if isinstance(old, list) else f"{old}{''.join(new)}"
    variables[name] = new


def _expand(raw: str, variables: _Variables) -> list[str]:
    """Return the words that a raw word becomes."""
    parts = _PART.findall(raw)
    return shlex.split("".join(part if part[0] == "'" else _filled(part, variables) for part in parts))


def _filled(part: str, variables: _Variables) -> str:
    whole = _VARIABLE.fullmatch(part.strip('"'))
    if whole and whole[2] and isinstance(value := variables.get(whole[1]), list) and part[0] == '"':
        return shlex.join(value)

    def text(found: re.Match[str]) -> str:
        value = variables.get(found[1] or found[4])
        if not value and found[3] is not None:
            value = _filled(found[3], variables).strip("\"'")
        shown = found[0] if value is None else value if isinstance(value, str) else " ".join(value)
        return re.sub(r'(["\\])', r"\\\1", shown) if part[0] == '"' else shown

    return _VARIABLE.sub(text, part.replace("\\\n", " "))


def _training(words: list[str]) -> tuple[list[str], list[str]] | None:
    """Return the words before and after the program of a training command, or None for another command."""
    end = next((index for index, word in enumerate(words) if _REDIRECTION.fullmatch(word)), len(words))
    for index, word in enumerate(words[:end]):
        name, rest = PurePath(word).name, words[index + 1 : end]
        is_positional = name.endswith(".sh") and len(rest) >= len(POSITIONS) and rest[0] in POSITIONS[0].words
        if is_positional or _PROGRAM.fullmatch(name):
            return words[:index], rest
    return None
