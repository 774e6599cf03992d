"""Tasks on the live model in any layout are lm-eval's own on its `hf` model; they change nothing of training.

LM_EVAL names a folder with lm-eval and what its import needs, beside this environment (.ci/run makes it).
"""

import gc
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from llama3_tokenizer import build_tiny_tokenizer
from small_runs import hf_llama, small_run
from training_runs import CPU, Records, build_seeded_run

from patch import compat
from patch.config.schema import RunConfig
from patch.data.chat_templates import BUILT_IN
from patch.distributed.groups import initialize
from patch.errors import PatchError
from patch.training.evaluation import evaluating
from patch.training.guards.phases import PhaseClock
from patch.training.hooks.metrics import MetricsLog, plot_losses, read_metrics
from patch.training.setup import Run, build_run
from patch.training.trainer import Trainer

_FOLDER = os.environ.get("LM_EVAL", "")
BOUND = 1e-5
"""Of log-likelihoods in fp32; those of long texts relative. Largest measured: 2e-6."""
LENGTH = 512
CALLS = {
    "loglikelihood": [
        ("the quick brown fox", " jumps"),
        ("the quick brown fox", " over the lazy dog"),
        ("what is two plus two?", " four"),
        ("what is two plus two?", " 5"),
        ("", "hello world"),
        ("yes no answer hello " * 200, "question"),
    ],
    "loglikelihood_rolling": [("the quick brown fox jumps",), ("hello world " * 300,)],
    "generate_until": [
        (text, {"until": ["\n\n", "q"], "max_gen_toks": 12}) for text in ("the quick", "what is", "user")
    ],
}
"""Texts longer than the model's longest sequence are cut, or read in windows."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "sequence_parallel": True},
    "vpp": {"pp": 2, "stage": 1, "micro_batch_size": 1},
    "cp": {"cp": 2},
    "dp": {"dp": 2, "packing": True},
    "aligned": {"dp": 2, "precision_align": "eager"},
}
TASKS = {
    "choice": """doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
output_type: multiple_choice
metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "letters": """doc_to_choice: [dog, cat, four, five]
doc_to_target: answer
output_type: multiple_choice
num_fewshot: 2
fewshot_split: test
metric_list: [{metric: acc}, {metric: brier_score}]""",
    "said": """doc_to_target: "{{choices[answer]}}"
output_type: generate_until
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
gen_prefix: "it is"
filter_list: [{name: strict, filter: [{function: take_first}]}]
metric_list: [{metric: exact_match}]
tag: further""",
    "text": """doc_to_text: ""
doc_to_target: "{{question}}"
output_type: loglikelihood_rolling
metric_list: [{metric: word_perplexity}]
tag: further""",
}
GROUP = "group: both\ntask: [choice, letters]\naggregate_metric_list: [{metric: acc}]\n"
ROWS = [
    {"question": f"{word} question {number} is", "choices": ["yes", "no answer", f"{word} dog"], "answer": 2}
    for number, word in enumerate("hello world quick lazy brown fox system user".split())
]
HUB = {
    "ceval": ("ceval/ceval-exam", "{split}/{name}_{split}.csv", "id,question,A,B,C,D,answer,explanation"),
    "cmmlu": ("haonan-li/cmmlu", "{split}/{name}.csv", ",Question,A,B,C,D,Answer"),
}
"""lm-eval's own groups: their sets, the files in those, and their columns."""
CHATS = ["both", "further", "ceval-valid", "cmmlu"]
CHAT = {"system_instruction": "answer", "apply_chat_template": True, "fewshot_as_multiturn": False}
EXPERTS = {"expert_model_parallel_size": 2, "dp": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with a tokenizer, the folder of tasks, and rows to train on."""
    if not _FOLDER:
        pytest.skip("LM_EVAL names no folder with lm-eval")
    folder = tmp_path_factory.mktemp("tasks")
    hf_llama(small_run(vocab_size=400), folder / "llama")
    family_model("mixtral", folder / "mixtral", vocab_size=400)
    for name in ("llama", "mixtral"):
        build_tiny_tokenizer(folder / name)
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(f"task: {name}\ninclude: _common\n{text}")
    (folder / "tasks" / "both.yaml").write_text(GROUP)
    common = "dataset_path: json\ntest_split: test\ndoc_to_text: '{{question}}'\n"
    (folder / "tasks" / "_common").write_text(f"{common}dataset_kwargs: {{data_files: {{test: rows.json}}}}")
    for kind in HUB:
        write_hub_set(kind, folder / "tasks")
    (folder / "tasks" / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = [{"instruction": "hello", "output": f"world {number}"} for number in range(8)]
    (folder / "train.json").write_text(json.dumps(rows))
    return folder


def write_hub_set(kind: str, folder: Path) -> None:
    """A set as it is downloaded, two questions a subject; and what has `datasets` find a subject's files."""
    name, form, columns = HUB[kind]
    tasks = sorted((Path(_FOLDER) / "lm_eval" / "tasks" / kind).glob("*.yaml"))
    subjects, configs = re.findall('_name": "(.*)"', "".join(task.read_text() for task in tasks)), []
    for number, subject in enumerate(subjects):
        files = {split: form.format(split=split, name=subject) for split in ("dev", "val", "test")}
        for split, file in files.items():
            rights = ["ABCD"[(number * 7 + row * len(split)) % 4] for row in range(2)]
            lines = [f'{row},"{subject}, 问题\n{row}",7,no,"yes, yes",dog,{rights[row]}' for row in range(2)]
            (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_text("\n".join([columns, *lines, ""]))
        named = [{"split": split, "path": file} for split, file in files.items()]
        configs.append({"config_name": subject, "data_files": named})
    (folder / name / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")


def calls(model: Any) -> dict[str, list[Any]]:
    from lm_eval.api.instance import Instance

    return {
        kind: getattr(model, kind)([Instance(kind, {}, arguments, 0) for arguments in own])
        for kind, own in CALLS.items()
    }


def evaluated_by_lm_eval(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """What its `hf` model says to CALLS, and its scores of the tasks; those with PEFT's adapters too."""
    sys.path.append(_FOLDER)
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found: dict[str, Any] = {}
    for name in ("llama", "mixtral"):
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        hf = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        model = HFLM(pretrained=hf, tokenizer=tokenizer, batch_size=4, max_length=LENGTH)
        found[name] = calls(model)
        if name == "llama":
            os.chdir(folder / "tasks")  # where lm-eval looks for rows.json
            paths = [str(folder / "tasks"), *(f"{_FOLDER}/lm_eval/tasks/{kind}" for kind in HUB)]
            own = {"task_manager": TaskManager(include_path=paths, include_defaults=False)}
            found["scores"] = lm_eval.simple_evaluate(model, tasks=["both", "further"], **own)["results"]
            adapters = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
            hf = get_peft_model(hf, adapters)
            hf.save_pretrained(folder / "adapter")
            tokenizer.chat_template = BUILT_IN["alpaca"]
            model = HFLM(pretrained=hf, tokenizer=tokenizer, batch_size=4, max_length=LENGTH)
            chats = lm_eval.simple_evaluate(model, tasks=CHATS, num_fewshot=1, **CHAT, **own)
            found["chat"] = chats["results"]
    return found


def run_of(name: str, folder: Path) -> Run:
    if name == "ep":
        config = family_run(folder / "mixtral", vocab_size=400, **EXPERTS)
        return build_seeded_run(config, folder / "mixtral")
    return build_seeded_run(small_run(vocab_size=400, **LAYOUTS.get(name, {})), folder / "llama")


def answered_everywhere(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    """What LiveModel says to CALLS in each layout; all ranks ask the same."""
    sys.path.append(_FOLDER)
    from transformers import AutoTokenizer

    from patch.training.tasks.live_model import LiveModel
    from patch.training.tasks.scoring import answers_to
    from patch.training.tasks.templates import Templates

    found = {}
    for name in names:
        run = run_of(name, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
        chat = Templates(tokenizer).chat
        with evaluating(run):
            found[name] = calls(LiveModel(tokenizer, LENGTH, partial(answers_to, run), chat))
        new_job()
    return found


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Any]:
    (found,) = run_distributed(evaluated_by_lm_eval, 1, folder)
    return found


def test_answers_of_any_layout_are_lm_evals(folder: Path, theirs: dict[str, Any]) -> None:
    """Log-likelihoods, greedy ones, windows of long texts, and what is generated."""
    alone = run_distributed(answered_everywhere, 1, folder, ["one"])
    shared = run_distributed(answered_everywhere, 2, folder, [*LAYOUTS, "ep"])
    for found in (*alone, *shared):
        for name, ours in found.items():
            oracle = theirs["mixtral" if name == "ep" else "llama"]
            sums, is_greedy = zip(*ours["loglikelihood"], strict=True)
            own_sums, own_greedy = zip(*oracle["loglikelihood"], strict=True)
            assert sums == pytest.approx(own_sums, abs=BOUND, rel=0), name
            assert is_greedy == own_greedy, name
            rolling = oracle["loglikelihood_rolling"]
            assert ours["loglikelihood_rolling"] == pytest.approx(rolling, rel=BOUND, abs=0), name
            assert ours["generate_until"] == oracle["generate_until"], name


def test_a_folder_is_scored_without_a_run(folder: Path, theirs: dict[str, Any]) -> None:
    """By the command, on two processes, with adapters and chats; C-Eval and CMMLU from downloaded files."""
    file, repository = folder / "scores.json", Path(__file__).parents[3]
    own = f"{folder / 'llama'} --tasks {','.join(CHATS)} --tasks-path {folder / 'tasks'} --json {file}"
    flags = "--precision fp32 --tensor-model-parallel-size 2 --eval-tasks-num-fewshot 1 "
    flags += "--eval-tasks-apply-chat-template --no-eval-tasks-fewshot-as-multiturn --chat-template alpaca "
    flags += f"--eval-tasks-system-instruction answer --lora-load {folder / 'adapter'}"
    command = [sys.executable, "-m", "toolkits.evaluate", *own.split(), "--", *flags.split()]
    environ = {**os.environ, "PYTHONPATH": f"{repository}:{_FOLDER}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert theirs["chat"]["letters"] != theirs["scores"]["letters"] and len(theirs["chat"]) > 119
    compare_scores(json.loads(file.read_text()), theirs["chat"])
    assert "choice/acc_norm" in done.stdout


def compare_scores(ours: dict[str, float], theirs: dict[str, dict[str, Any]]) -> None:
    for task, values in theirs.items():
        for metric, value in values.items():
            if isinstance(value, float) and "," in metric:
                name, is_error = metric.replace(",none", "").replace("_stderr", ""), "_stderr" in metric
                found = ours[f"tasks/{task}/{name}{'_stderr' if is_error else ''}"]
                assert found == pytest.approx(value, rel=BOUND), (task, metric)


def config_of(folder: Path, output: str, **changes: Any) -> RunConfig:
    flags = {
        "load": str(folder / "llama"), "train_data_path": str(folder / "train.json"), "vocab_size": 400,
        "output_path": str(folder / output), "cache_dir": str(folder / "cache"), "train_iters": 2, "dp": 2,
        "lora_rank": 4, "lora_dropout": 0.5, "deterministic_mode": True, "chat_template": "plain",
        "lr_warmup_iters": 0, "micro_batch_size": 1,
    }  # fmt: skip
    return small_run(**flags | changes)


def trained(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Records of a run with tasks and of one without, its measure; errors of a task and of a measure."""
    sys.path.append(_FOLDER)
    from patch.training.tasks.suite import TaskScores

    compat.apply(cuda=False)
    found: dict[str, Any] = {}
    tasks = {"eval_tasks": "both,further", "eval_tasks_path": str(folder / "tasks"), "eval_tasks_interval": 1}
    bad = {"eval_tasks": "bad", "eval_tasks_path": str(folder / "bad")}
    runs = {"with": tasks | {"metric_for_best_model": "both/acc"}, "without": {}, "bad": bad}
    runs["unknown"] = tasks | {"metric_for_best_model": "both/acc_norm"}
    for name, changes in runs.items():
        config = config_of(folder, name, **changes)
        run, records = build_run(config, CPU, initialize(config, CPU), PhaseClock()), Records()
        hooks = [MetricsLog(folder / name, 0)] if rank == 0 else []
        try:
            hooks += [TaskScores(run)] if changes else []
            Trainer(run, [*hooks, records]).train()
            losses = [(record["loss"], record["grad_norm"]) for record in records.records]
            found[name] = losses, torch.get_rng_state().sum().item()
        except PatchError as error:
            found[name] = str(error)
        if name == "with":
            found["measure"] = hooks[-1].measure
        new_job()
    gc.collect()  # the processes of templates, which errors still have
    return found


def test_scores_are_lm_evals_and_training_is_the_same(folder: Path, theirs: dict[str, Any]) -> None:
    """Adapters begin as nothing, so step 0 has the scores of the folder; a task that fails ends all ranks."""
    (folder / "bad").mkdir()
    common = (folder / "tasks" / "_common").read_text().replace("{{question}}", "{{ 'x' * 2 ** 24 }}")
    (folder / "bad" / "_common").write_text(common.replace("'{{", '"{{').replace("}}'", '}}"'))
    (folder / "bad" / "bad.yaml").write_text(f"task: bad\ninclude: _common\n{TASKS['choice']}")
    (folder / "bad" / "rows.json").write_text(json.dumps(ROWS[0]))
    first, second = run_distributed(trained, 2, folder)
    assert first["with"] == first["without"] and second["with"] == second["without"]
    assert "writes more than" in first["bad"] and "writes more than" in second["bad"]
    assert first["measure"] == second["measure"] == ("tasks/both/acc", True)
    assert "expected one of choice/acc, choice/acc_norm" in first["unknown"]
    assert first["unknown"] in second["unknown"]
    records = read_metrics(folder / "with" / "log" / "metrics.jsonl")
    records = [record for record in records if "loss" not in record]
    assert [record["iteration"] for record in records] == [0, 1, 2]
    compare_scores(records[0], theirs["scores"])
    assert records[2] != records[0] | {"iteration": 2}
    plot_losses(records, folder / "plot.png")
    assert (folder / "plot.png").stat().st_size
