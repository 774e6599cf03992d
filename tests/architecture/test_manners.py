"""Rules for every file and folder: docstrings, READMEs, a tidy top level, no stray output."""

import ast
import inspect
import re
import shutil
import subprocess

import pytest

TOP_LEVEL = set(
    ".ci .dockerignore .github .gitignore CHANGELOG.md CITATION.cff CONTRIBUTING.md Dockerfile LICENSE "
    "Makefile README.md README_zh.md SECURITY.md docs examples mkdocs.yml patch pyproject.toml "
    "requirements-gpu.txt requirements.txt setup.py tests toolkits".split()
)
README_LINES, SENTENCE_WORDS = 60, 30
PRIVATE_WORDS = re.compile(r"\b(nobody|whoever|somebody|travel\w*|comes? and goe?s?|once more)\b", re.I)
NOT_SEARCHED = {"CHANGELOG.md", "tests/architecture/test_manners.py", "patch/alignment/logits.py"}
"""The history, the list of these words, and a prompt."""


@pytest.fixture(scope="session")
def git_files(root) -> list[str]:
    """Return the files that git tracks, without a user's own logs and runs."""
    try:
        listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: the house's files cannot be told from the others")
    return listed.stdout.splitlines()


def test_top_level_holds_only_what_the_design_lists(git_files):
    assert {file.split("/")[0] for file in git_files} <= TOP_LEVEL


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_pass_shellcheck(root, git_files):
    scripts = [file for file in git_files if file.endswith(".sh") or file == ".ci/run"]
    found = subprocess.run(["shellcheck", *scripts], cwd=root, capture_output=True, text=True, check=False)
    assert scripts and not found.stdout


def test_every_module_has_a_docstring(all_sources):
    assert not [str(source.path) for source in all_sources if not ast.get_docstring(source.tree)]


NO_BEGINNING = {"Of", "That", "Those", "Who", "Whom", "What", "As"}


def test_docstrings_begin_with_a_noun_or_a_verb(house):
    """Also those of attributes and constants."""
    odd = [
        f"{source.path}:{node.lineno} {node.value.value[:40]}"
        for source in house
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and node.value.value.split(" ")[0] in NO_BEGINNING
    ]
    assert not odd


def test_private_words_are_gone(root, git_files):
    found = [
        f"{name}:{number}: {line.strip()[:80]}"
        for name in git_files
        if name.endswith((".py", ".md", ".sh")) and name not in NOT_SEARCHED
        for number, line in enumerate((root / name).read_text(encoding="utf-8").splitlines(), 1)
        if PRIVATE_WORDS.search(line)
    ]
    assert not found, "\n".join(found)


def _sentences(text: str) -> list[str]:
    """Tables, code and lists of files are no sentences."""
    blocks = re.split(r"\n\s*\n|\n\s*(?=[\w, ]+: |[-*|] )", re.sub(r"```.*?```", "", text, flags=re.S))
    prose = [block for block in blocks if "   " not in block.strip("\n") and not block.startswith("|")]
    return [sentence for block in prose for sentence in re.split(r"(?<=[.;:?!])\s+", block)]


def test_sentences_have_few_words(root, git_files, house):
    nodes = ast.Module, ast.ClassDef, ast.FunctionDef
    texts = [
        (f"{source.path} {getattr(node, 'name', '')}", inspect.cleandoc(ast.get_docstring(node) or ""))
        for source in house
        for node in ast.walk(source.tree)
        if isinstance(node, nodes)
    ]
    texts += [(name, (root / name).read_text()) for name in git_files if name.endswith("README.md")]
    long = [
        f"{name}: {' '.join(sentence.split())[:90]}"
        for name, text in texts
        for sentence in _sentences(text)
        if len(sentence.split()) > SENTENCE_WORDS
    ]
    assert not long, "\n".join(long)


def test_every_function_of_the_house_is_annotated(house):
    bare = [
        f"{source.path}:{node.lineno} {node.name}"
        for source in house
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef) and node.returns is None
    ]
    assert not bare


def test_every_package_opens_with_a_readme_of_a_screen(house, root):
    problems = {}
    for folder in sorted({s.path.parts[:-1][:2] for s in house if s.path.parts[0] == "patch"}):
        readme = root.joinpath(*folder, "README.md")
        lines = len(readme.read_text().splitlines()) if readme.is_file() else 0
        if not 5 <= lines <= README_LINES:
            problems[folder] = lines
    assert not problems, f"lines of README.md: {problems}"


def test_patch_is_ascii(house):
    assert not [str(s.path) for s in house if s.path.parts[0] == "patch" and not s.text.isascii()]


def test_patch_never_prints(house):
    prints = [
        f"{source.path}:{node.lineno}"
        for source in house
        if source.path.parts[0] == "patch"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints


OWN_READS = {
    "patch/config/foreign_flags.py": "a table of the house",
    "patch/families/config_json.py": "a table of the house",
    "patch/device.py": "/proc and /sys",
    "patch/launch/launcher.py": "/sys",
    "patch/launch/worker_process.py": "the launcher's own temporary folder",
    "patch/optimizer/kernels/build.py": "a source of the house",
}
"""Files that may open their input without a check of its kind, because no user writes it."""


def test_files_of_others_are_opened_by_storage_which_looks_at_them(house):
    found = {}
    for source in house:
        name = str(source.path)
        if not name.startswith("patch/") or name.startswith("patch/storage/") or name in OWN_READS:
            continue
        for node in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
            called = getattr(node.func, "attr", "open" if getattr(node.func, "id", "") == "open" else "")
            modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            is_whole = called in ("read_text", "read_bytes") and not node.args
            if is_whole or (called == "open" and "rb" in modes):
                found.setdefault(name, []).append(node.lineno)
    assert not found, "use open_to_read, read_small or read_json of patch.storage"
