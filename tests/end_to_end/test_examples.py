"""Example files: by plan each fits the machine of its first line, and a dry run on the CPU takes it.

Only paths are changed, and the dry run begins from random weights.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from end_to_end.conftest import Office
from end_to_end.shell import REPOSITORY, call
from planned_runs import ENVIRON, H100
from transformers import MistralConfig

from patch.plan.fits import fit_of
from patch.plan.planned_run import plan_run
from toolkits.preprocess_pretrain import main as preprocess_pretrain
from toolkits.train.__main__ import main as train

EXAMPLES = REPOSITORY / "examples"
FILES = [*EXAMPLES.glob("llama3_1/configs/*.yaml")]
FILES += [file for file in EXAMPLES.glob("*/*.sh") if file.parent.name not in ("LLaMA", "llama3_1")]
TITLE = re.compile(r"(\d) machines? of (\d) H100: planned, ([\d.]+) GiB of a GPU\.")
DRY = "--load=none --quantize-base=none --lr-warmup-iters=0 --dry-run --force".split()
"""Random weights, which are not quantized; data of few steps; a CPU's memory."""


@pytest.fixture(scope="module")
def data(office: Office, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Chats, pairs of answers, and documents."""
    folder = tmp_path_factory.mktemp("data")
    rows = {"pairs": {"prompt": "q", "chosen": "yes", "rejected": "no"}, "docs": {"text": "a b"}}
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 20)
    made = ["--input", folder / "docs.jsonl", "--output-prefix", folder / "docs"]
    assert preprocess_pretrain([*map(str, made), "--tokenizer-name-or-path", str(office.model)]) == 0
    return {"sft": office.train, "dpo": folder / "pairs.jsonl", "pretrain": folder / "docs_text_document"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_example_fits_its_machine_and_is_taken(
    file: Path, office: Office, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, devices, planned_gib = TITLE.search(file.read_text()).groups()
    kind = re.search("pretrain|dpo", file.stem)
    paths = {"MODEL": tmp_path / "model", "DATA": data[kind[0] if kind else "sft"], "RUN": tmp_path / "run"}
    shape = {"vocab_size": 32768, "max_position_embeddings": 32768, "sliding_window": None}
    MistralConfig(**shape, rope_theta=1e6).save_pretrained(paths["MODEL"])  # sft_7b.sh has no other shape
    if file.suffix == ".sh":
        (tmp_path / "python").write_text('#!/bin/sh\nshift\nprintf "%s\\n" "$@"\n')
        (tmp_path / "python").chmod(0o755)
        argv = call(["sh", str(file)], PYTHON=tmp_path / "python", **paths).stdout.splitlines()
    else:
        own = {"load": "MODEL", "train-data-path": "DATA", "output-path": "RUN"}
        argv = [f"--config={file}", *(f"--{name}={paths[path]}" for name, path in own.items())]
    planned = plan_run(argv, "h100", int(nodes), int(devices), here=H100.facts)
    fit = fit_of(planned.resolved, planned.machine.facts)
    assert fit.is_whole and f"{fit.device_needed / 2**30:.1f}" == planned_gib
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    argv += ["--model-size=8B"] * (file.stem == "sft_7b")  # the shape of Mistral 7B
    argv += [f"--tokenizer-name-or-path={office.model}", f"--nproc-per-node={devices}", *DRY]
    assert train(argv) == 0


@pytest.mark.long
def test_notebook_trains_adapters(office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # a cell changes it
    for name, value in {"MODEL": office.model, "RUN": "run", "DATA": "sums.json"}.items():
        monkeypatch.setenv(name, str(value))
    names: dict[str, object] = {}
    for cell in json.loads((EXAMPLES / "llama3_1" / "lora_quickstart.ipynb").read_text())["cells"]:
        text = "".join(cell["source"]).replace("range(1, 21)", "range(10, 15)")  # few steps
        if text.startswith("%%bash"):
            subprocess.run(["bash", "-eo", "pipefail", "-c", text.partition("\n")[2]], check=True)
        elif cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec(text, names)
    assert names["losses"][-1] < names["losses"][0]
