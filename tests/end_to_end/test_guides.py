"""The users' documents: links resolve, commands of four pages work, both languages agree.

tests/support/guides.py reads a page, lets bash call its commands, and checks each call.
examples/llama3_1/README.md says which blocks a guide may have.
"""

import json
import os
import shutil
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from end_to_end.shell import call_workers, command
from guides import (
    CHINESE,
    REPOSITORY,
    Block,
    Page,
    calls_of,
    check,
    faults_of_flags,
    faults_of_links,
    faults_of_translation,
    read_page,
)
from llama3_tokenizer import tiny_tokenizer
from small_runs import hf_llama, small_run

EXAMPLES = REPOSITORY / "examples/llama3_1"
LIBRARY = EXAMPLES / "library"
LONG = ("CONTRIBUTING.md", "README.md")
PAGES = sorted(
    [
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / name for name in ("README.md", "README_zh.md", "CONTRIBUTING.md")),
        *(folder / "README.md" for folder in (EXAMPLES, LIBRARY)),
    ]
)
RUN_PAGES = ("README.md", "fine_tuning.md", "launcher.md", "converting.md")
"""Pages whose commands are checked."""
RUN = (
    "bash examples/llama3_1/run_mcore_llama.sh dsw auto 1 16 1e-5 1e-6 512 512 bf16 1 1 1 false false true "
    "true none false 200 $DATA none $MODEL 10 0 $OUT"
)
CHATS = [
    {"messages": [{"role": "user", "content": f"{n} plus 1?"}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(200)
]


class Fixtures(NamedTuple):
    folder: Path
    variables: dict[str, str]


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Fixtures:
    """A narrow model with the layers and heads of LLaMA-3.2-1B, small data, and a run that has ended."""
    folder = tmp_path_factory.mktemp("guides")
    names = {name: folder / name.lower() for name in ("MODEL", "RUN", "OUT", "TRAINED")}
    names |= {"DATA": folder / "chats.json", "VALID": folder / "valid.json"}
    shape = dict(
        num_layers=16, hidden_size=256, ffn_hidden_size=512, num_attention_heads=32, num_query_groups=8,
        kv_channels=8, vocab_size=400, max_position_embeddings=131072, rope_original_max_position=8192,
        rope_scaling_factor=32.0, untie_embeddings_and_output_weights=False,
    )  # fmt: skip
    hf_llama(small_run(**shape), names["MODEL"])
    tiny_tokenizer().save_pretrained(names["MODEL"])
    names["DATA"].write_text(json.dumps(CHATS))
    names["PAIRS"] = folder / "pairs.json"
    names["PAIRS"].write_text(json.dumps([{"prompt": "q", "chosen": "yes", "rejected": "no"}] * 20))
    names["VALID"].write_text(json.dumps(CHATS[:8]))
    positions = {
        "DATASET_PATH": names["DATA"], "VALID_DATASET_PATH": names["VALID"], "OUTPUT_BASEPATH": names["RUN"],
        "PRETRAIN_CHECKPOINT_PATH": names["MODEL"], "TRAIN_TOKENS_OR_ITERS": 2, "WARMUP_TOKENS_OR_ITERS": 0,
        "GLOBAL_BATCH_SIZE": 2, "PR": "bf16",
    }  # fmt: skip
    ended = call_workers(1, [*command(**positions), "--export-hf"])
    assert ended.returncode == 0, ended.stderr
    shutil.copytree(names["RUN"], names["TRAINED"], symlinks=True)
    (names["TRAINED"] / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (names["TRAINED"] / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    return Fixtures(folder, {name: str(path) for name, path in names.items()})


@cache
def _library() -> set[str]:
    return {file.read_text() for file in LIBRARY.glob("*.py")}


def faults_of_commands(page: Page, fixtures: Fixtures, folder: Path) -> list[str]:
    """Return the faults of a page's bash and Python blocks, by line."""
    name, blocks = page.path.name, page.blocks
    calls, complaint = calls_of(page, folder, fixtures.variables)
    found = [f"{name}: {complaint}"] if complaint else []
    last = None
    for call in calls:
        block = max((b for b in blocks if b.is_bash and b.line <= call.line), key=lambda b: b.line)
        if block != last:
            shutil.rmtree(fixtures.variables["OUT"], ignore_errors=True)
        last = block
        if why := check(call, block, fixtures.folder):
            found.append(f"{name}:{call.line}: {' '.join(call.argv)}\n    {why}")
    with chdir(folder), mock.patch.dict(os.environ, fixtures.variables):
        for block in blocks:
            if block.info == "python" and (why := _python_fault(block)):
                found.append(f"{name}:{block.line}: {why}")
    return found


def _python_fault(block: Block) -> str:
    """Return the fault of a Python block, unless it is a program of the library."""
    if block.text in _library():
        return ""
    try:
        exec(compile("\n" * (block.line - 1) + block.text, "page", "exec"), {"__name__": "page"})
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_links_of_the_other_documents_lead_somewhere() -> None:
    folders = [REPOSITORY / name for name in ("patch", "toolkits", "tests", "examples")]
    pages = [*REPOSITORY.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    assert len(pages) > len(PAGES)
    assert not [fault for page in pages if page not in PAGES for fault in faults_of_links(read_page(page))]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] if path.name in LONG else []) for path in PAGES],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)
def test_page_is_right(path: Path, fixtures: Fixtures, tmp_path: Path) -> None:
    page = read_page(path)
    faults = faults_of_links(page) + faults_of_flags(page)
    if path.stem.endswith(CHINESE):
        faults += faults_of_translation(page)
    elif path.name in RUN_PAGES:
        faults += faults_of_commands(page, fixtures, tmp_path / "page")
    assert not faults, "\n" + "\n".join(faults)


BROKEN = {
    "# A b\n\n[a](#a-b) [b](#b)": ("page.md:3", "#b names no heading"),
    "# A\n\nwith `--tp-overlap true`": ("page.md:3", "no flag --tp-overlap"),
    "```python\n1 + 1\n1 / 0\n```": ("page.md:2", "ZeroDivisionError"),
    "```bash\n\nls nothing\n```": ("page.md: ", "line 3: ended with 2: ls nothing"),
    "```bash\nllama-patch doctor --colour red\n```": ("page.md:2", "--colour"),
    "```bash\nllama-patch convert hf2mcore --load $DATA --save $OUT\n```": ("page.md:2", "ended with 4"),
    f"```bash\nMP_PACKING=true {RUN}\n```": ("page.md:2", "MP_PACKING has no effect"),
    f"```bash plan=a100x8\n{RUN.replace('auto', '70B')}\n```": ("page.md:2", "does not fit"),
}


@pytest.mark.parametrize("text", BROKEN, ids=[why for _, why in BROKEN.values()])
def test_what_does_not_work_is_named_with_its_line(text: str, fixtures: Fixtures, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    page = read_page(path)
    found = faults_of_links(page) + faults_of_flags(page)
    found += faults_of_commands(page, fixtures, tmp_path / "page")
    assert len(found) == 1, found
    assert all(part in found[0] for part in BROKEN[text]), found
