"""Scripts with the names and positions of other projects, called by sh with a tiny model."""

import json
import os
import shlex
from pathlib import Path

import pytest
import yaml
from end_to_end.conftest import Office
from end_to_end.shell import MACHINE, REPOSITORY, call

from patch.preflight.parse import parse_args
from toolkits.preprocess_pretrain import main as preprocess_pretrain

pytestmark = pytest.mark.long

LLAMA = REPOSITORY / "examples" / "LLaMA"
LLAMA3 = REPOSITORY / "examples" / "llama3_1"
PAIS = REPOSITORY / "toolkits/pretrain_data_preprocessing/run_make_pretraining_dataset_megatron.sh"


@pytest.fixture(scope="module")
def documents(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with two keys, and the sets that our own tool makes of them."""
    folder = tmp_path_factory.mktemp("documents")
    rows = [{"text": text, "title": text[:20]} for text in office.train.read_text().splitlines()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = ["--input", str(folder / "rows.jsonl"), "--output-prefix", str(folder / "ours")]
    made += ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(office.model)]
    assert preprocess_pretrain([*made, "--json-keys", "text", "title"]) == 0
    return folder


def test_pais_data_preparation_with_its_positions_makes_the_same_bytes(
    office: Office, documents: Path, tmp_path: Path
) -> None:
    positions = [documents / "rows.jsonl", "LLama3Tokenizer", "text title", tmp_path / "new", office.model]
    result = call(["sh", str(PAIS), *map(str, positions)])
    assert result.returncode == 0, result.stderr
    for key in ("text", "title"):
        for ending in (".bin", ".idx"):
            theirs = tmp_path / "new" / f"mmap_llama3_datasets_{key}_document{ending}"
            assert theirs.read_bytes() == (documents / f"ours_{key}_document{ending}").read_bytes()
    few = call(["sh", str(PAIS), "a", "LLama3Tokenizer"])
    assert few.returncode == 2 and "INPUT TOKENIZER JSON_KEYS OUTPUT_FOLDER" in few.stderr


ARTICLE = """dsw 8B 1 8 1e-5 1e-6 128 128 bf16 4 2 1 true true true {sft} false false 100000 {data} {valid}
    none 10000 100 {run}"""
"""Both lines of the article on Pai-Megatron-Patch. Here position 22 names no model."""


@pytest.mark.parametrize(("kind", "sft", "steps"), [("idxmap", "false", 9), ("raw", "true", 10000)])
def test_lines_of_pais_article(
    office: Office, documents: Path, tmp_path: Path, kind: str, sft: str, steps: int
) -> None:
    sets = (documents / "ours_text_document",) * 2 if kind == "idxmap" else (office.train, office.valid)
    line = ARTICLE.format(sft=sft, data=sets[0], valid=sets[1], run=tmp_path / "run").split()
    variables = {"MP_DATASET_TYPE": kind, "NPROC_PER_NODE": 8, "TOKENIZER_PATH": office.model}
    result = call(["sh", str(LLAMA3 / "run_mcore_llama3_1.sh"), *line, "--dry-run", "--force"], **variables)
    assert result.returncode == 0, result.stderr
    run = yaml.safe_load(result.stdout)
    assert (run["training"]["train_iters"], run["model"]["num_layers"]) == (steps, 32)


def _variables(office: Office, documents: Path, output: Path) -> dict[str, object]:
    prefix = documents / "ours_text_document"
    return {
        "DATASET": f"0.4 {prefix} 0.6 {prefix}",
        "TOKENIZER_PATH": office.model,
        "LOAD_CHECKPOINT_PATH": office.model,
        "SAVE_CHECKPOINT_PATH": output,
        "MODEL_SIZE": "auto",
        "TP_SIZE": 1,
        "MP_DATASET_TYPE": "idxmap",
    }


def test_standalone_script_of_megatron_llama(office: Office, documents: Path, tmp_path: Path) -> None:
    script, variables = str(LLAMA / "LLaMA_13_standalone.sh"), _variables(office, documents, tmp_path / "out")
    small = "--seq-length 64 --max-position-embeddings 64 --precision fp32 --dry-run"
    result = call(["sh", script, *small.split()], **variables, GPUS_PER_NODE=2)
    assert result.returncode == 0, result.stderr
    run = yaml.safe_load(result.stdout)
    assert (
        run["parallel"]["use_distributed_optimizer"] and run["parallel"]["overlapped_distributed_optimizer"]
    )
    assert run["optimizer"]["reduce_bucket_size"] == 2e8 and run["training"]["precision"] == "fp32"
    assert (run["training"]["micro_batch_size"], run["training"]["global_batch_size"]) == (2, 2 * 2 * 8)
    missing = call(["sh", script], **{**variables, "DATASET": ""})
    assert missing.returncode == 2 and "DATASET: the prefix of .bin/.idx" in missing.stderr


def test_slurm_script_of_megatron_llama(office: Office, documents: Path, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    script, variables = str(LLAMA / "LLaMA_13_slurm.sh"), _variables(office, documents, tmp_path / "out")
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL_SIZE": "llama1-13B", "TP_SIZE": 2}
    result = call(["sh", script, "--exit-duration-in-mins", "60"], **variables)
    assert result.returncode == 0, result.stderr
    options, line = result.stdout.split("slurm.sh\n")
    assert shlex.split(options)[:4] == ["--job-name", "megatron_llama_13b", "--nodes", "64"]
    ours = Path(options.splitlines()[-1]) / "slurm.sh"
    assert ours.resolve() == REPOSITORY / "examples/llama3_1/slurm.sh"
    config = parse_args(["dsw", *line.splitlines()[1:]], {"MP_DATASET_TYPE": "idxmap"}, MACHINE).config
    assert (config.training.train_iters, config.optimizer.lr_warmup_iters) == (1000, 5)
    assert config.training.exit_duration_in_mins == 60 and config.optimizer.reduce_bucket_size == 4e8
    assert config.parallel.overlapped_distributed_optimizer and config.model.num_layers == 40
