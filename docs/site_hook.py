"""A hook of mkdocs: documents outside docs/ become pages below repository/, and links lead to them.

So a relative link works on the site as in the repository. A link to a folder becomes plain text. Griffe reads
docstrings for the API page; it gets the blank lines that it needs before a section.
"""

import os
import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FOLDERS = ("examples", "patch", "tests", "toolkits")
_LINK = re.compile(r"(!?\[[^]]*\])\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)")
_WORDS_OF_TESTS = re.compile(r"^( *```\w+) .*$", re.MULTILINE)
_TITLE_OF_A_LIST = re.compile(r"^(\*\*.*)\n(?=- )", re.MULTILINE)


def _uri(path: Path) -> str:
    """Return the place of a file on the site."""
    return re.sub(r"^\.\./", "repository/", os.path.relpath(path, DOCS))


def _add(files: Files, config: MkDocsConfig, path: Path) -> None:
    files.append(File.generated(config, _uri(path), abs_src_path=str(path)))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents outside docs/."""
    for path in [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]:
        _add(files, config, path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text with links to places on the site, and blocks without the words for their tests."""

    def lead(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(Path(str(page.file.abs_src_path)).parent / link[2]))
        if path.is_dir():
            return link[1].strip("[]")
        if path.is_file() and files.get_file_from_path(_uri(path)) is None:
            _add(files, config, path)
        return f"{link[1]}({os.path.relpath(_uri(path), os.path.dirname(page.file.src_uri))}{link[3] or ''})"

    if page.file.src_uri.startswith("repository/"):
        page.meta["search"] = {"boost": 0.5}  # guides are found first
    markdown = _TITLE_OF_A_LIST.sub(r"\1\n\n", markdown)  # which Python-Markdown needs, but GitHub does not
    return _LINK.sub(lead, _WORDS_OF_TESTS.sub(r"\1", markdown))


class SpacedSections(Extension):
    """Adds a blank line before each section of a docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?<=\S)\n(?=(Raises|Source):)", "\n\n", obj.docstring.value)
