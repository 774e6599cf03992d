"""The project's documents as the tests read them, by the parser of markdown-it: blocks, links, headings.

rich needs that parser too, and so brings it. A page may have fences of five kinds (`KINDS`); a fault is a
text that names the page and its line.
"""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
KINDS = re.compile(r"bash( plan=(?P<machine>[a-z]\d+)x(?P<devices>\d+)(x(?P<nodes>\d+))?)?(?P<fails> fails)?")
OTHER_KINDS = ("text", "python", "yaml")
CHINESE = "_zh"
_FILE = re.compile(r"(?:patch|toolkits|tests)/[\w/]+\.(?:py|sh|md)")


class Block(NamedTuple):
    """A fenced block: where its text begins, its info string, its text."""

    line: int
    info: str
    text: str

    @property
    def is_bash(self) -> bool:
        return KINDS.fullmatch(self.info) is not None


@cache
def tokens_of(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks from the top of the page on."""
    return [
        Block(token.map[0] + 2, token.info.strip(), token.content)
        for token in tokens_of(page)
        if token.type == "fence" and token.map
    ]


def faults_of_page(page: Path) -> list[str]:
    """What is wrong with a page by itself: kinds of blocks, YAML, and links that lead nowhere."""
    faults = []
    for token in tokens_of(page):
        if token.type == "code_block" and token.map:
            faults.append((token.map[0] + 1, "an indented block, expected a fence with its kind"))
    for block in blocks_of(page):
        if not block.is_bash and block.info not in OTHER_KINDS:
            expected = "bash, bash plan=h100x8, bash plan=h100x8x4, text, python or yaml"
            faults.append((block.line - 1, f"got a block of kind {block.info!r}, expected {expected}"))
        if block.info == "yaml" and (why := _yaml_fault(block.text)):
            faults.append((block.line, why))
    return [f"{page.name}:{line}: {why}" for line, why in sorted(faults)] + faults_of_links(page)


def faults_of_links(page: Path) -> list[str]:
    """Links, images and files of the code within the repository that are not there."""
    found = [(line, _link_fault(page, target)) for line, target in links_of(page)]
    for line, text in codes_of(page):
        if _FILE.fullmatch(text) and not (REPOSITORY / text).is_file():
            found.append((line, f"there is no file {text}"))
    return [f"{page.name}:{line}: {why}" for line, why in found if why]


def _yaml_fault(text: str) -> str:
    try:
        yaml.safe_load(text)
    except yaml.YAMLError as error:
        return f"YAML that cannot be read: {error}"
    return ""


def links_of(page: Path) -> list[tuple[int, str]]:
    """Line (of the paragraph) and target of each link and image."""
    found = []
    for token in tokens_of(page):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target:
                found.append(((token.map or [0])[0] + 1, unquote(str(target))))
    return found


def _link_fault(page: Path, target: str) -> str:
    if re.match(r"[a-z]+:", target):
        return ""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"the link {target} leads nowhere"
    if anchor and (file.suffix != ".md" or anchor not in anchors_of(file)):
        return f"the link {target} names no heading of {file.name}"
    return ""


def anchors_of(page: Path) -> set[str]:
    """The names by which GitHub links to a page's headings."""
    found: dict[str, int] = {}
    for _, text in headings_of(page):
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


def headings_of(page: Path) -> list[tuple[str, str]]:
    """Level (h1, ...) and text of each heading."""
    tokens = tokens_of(page)
    return [
        (token.tag, "".join(child.content for child in tokens[index + 1].children or ()))
        for index, token in enumerate(tokens)
        if token.type == "heading_open"
    ]


def rows_of(page: Path) -> list[tuple[str, list[str]]]:
    """Of each table's rows but its head: the heading above it, and the cells."""
    found: list[tuple[str, list[str]]] = []
    heading = ""
    for token, inner in pairwise(tokens_of(page)):
        if token.type == "heading_open":
            heading = inner.content
        elif token.type == "tr_open":
            found.append((heading, []))
        elif token.type == "td_open":
            found[-1][1].append(inner.content)
    return [(heading, cells) for heading, cells in found if cells]


def flags_of(page: Path) -> list[tuple[int, str]]:
    """Line (of the paragraph or row) and name of each flag that the page's text mentions as code."""
    return [
        (line, flag)
        for line, text in codes_of(page)
        for flag in re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", text)
        if not flag.endswith("-")  # of several flags, as --no-...
    ]


def codes_of(page: Path) -> list[tuple[int, str]]:
    """Line (of the paragraph or row) and text of what the page's text has as code."""
    return [
        ((token.map or [0])[0] + 1, child.content)
        for token in tokens_of(page)
        for child in token.children or ()
        if child.type == "code_inline"
    ]


def twin_of(page: Path) -> Path:
    """The English page of a Chinese one."""
    return page.with_name(page.name.replace(f"{CHINESE}.md", ".md"))


def faults_of_translation(page: Path) -> list[str]:
    """Where a Chinese page differs from its English twin in what both must have: commands and headings."""
    twin = twin_of(page)
    if not twin.exists():
        return [f"{page.name}:1: there is no {twin.name}"]
    ours, theirs = _commands(page), _commands(twin)
    for (line, command), (_, other) in zip(ours, theirs, strict=False):
        if command != other:
            return [f"{page.name}:{line}: got {command!r}, {twin.name} has {other!r}"]
    if len(ours) != len(theirs):
        return [f"{page.name}:1: {len(ours)} lines of commands, {twin.name} has {len(theirs)}"]
    levels, expected = ([level for level, _ in headings_of(one)] for one in (page, twin))
    if levels != expected:
        return [f"{page.name}:1: headings {' '.join(levels)}, {twin.name} has {' '.join(expected)}"]
    return []


def _commands(page: Path) -> list[tuple[int, str]]:
    """Line and text of all that is no output, without comments, which are translated."""
    found = []
    for block in blocks_of(page):
        if block.info == "text":
            continue
        found.append((block.line - 1, block.info))
        for number, text in enumerate(block.text.splitlines(), block.line):
            if command := re.sub(r"(^|\s)#.*", "", text).rstrip():
                found.append((number, command))
    return found
