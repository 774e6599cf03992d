"""A student learns a stored teacher in any layout, against transformers and torch's kl_div, and resumes.

In all pairs of layouts: test_covered_layouts.py. The loss alone, in all precisions: test_loss.py.
"""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed_runner import new_job, rejoin, run_distributed
from hf_families import family_model, family_run
from llama3_tokenizer import build_tiny_tokenizer, tiny_tokenizer
from small_runs import hf_llama, small_run
from training_runs import CPU, Records, transformers_steps
from transformers import AutoModelForCausalLM

from patch import compat
from patch.checks.needs import needs_are_met
from patch.config.schema import RunConfig
from patch.data import load_sft, load_tokenizer
from patch.data.chat_templates import LLAMA3_CHAT_TEMPLATE
from patch.device import MachineFacts
from patch.distributed.collectives import from_rank_0, max_over_world
from patch.distributed.groups import initialize
from patch.errors import ConfigError, DataError
from patch.preflight.validate import teacher_is_of_this_run
from patch.storage.teacher_store import read_header
from patch.training.guards.phases import PhaseClock
from patch.training.hooks.hook import Record
from patch.training.setup import build_run
from patch.training.teacher import write_store
from patch.training.trainer import Trainer
from patch.training.worker import _compare_data

pytestmark = pytest.mark.long

VOCABULARY, LENGTH, STEPS, ALPHA = 400, 48, 3, 0.7
BOUND = 1e-4
"""Relative, of fp32 sums in another order, after updates."""
ROWS = [
    {"instruction": question, "output": answer}
    for question in ("the quick brown fox?", "what is two plus two?")
    for answer in ("jumps over the lazy dog.", "four", "world yes no", "system user assistant 1234")
]
DATA = {
    "train_data_path": "rows.json", "valid_data_path": "rows.json", "vocab_size": VOCABULARY,
    "seq_length": LENGTH, "max_padding_length": LENGTH,
}  # fmt: skip
STORES: dict[str, tuple[dict[str, Any], int, float]] = {
    "padded": ({"tp": 2, "sequence_parallel": True}, 7, 2.0),
    "packed": ({"pp": 2, "packing": True, "micro_batch_size": 1}, 7, 2.0),
    "other": ({"dp": 2, "micro_batch_size": 1}, 6, 2.0),
    "whole": ({"cp": 2, "global_batch_size": 3, "micro_batch_size": 3}, VOCABULARY, 1.5),
}
"""Layout of the teacher, tokens that it stores, and the temperature."""
STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp": ("padded", {"dp": 2, "micro_batch_size": 2}),
    "tp": ("padded", {"tp": 2, "sequence_parallel": True, "micro_batch_size": 8}),
    "cp": ("padded", {"cp": 2, "micro_batch_size": 4}),
    "pp": ("padded", {"pp": 2, "micro_batch_size": 1}),
    "packed": ("packed", {"packing": True, "pp": 2, "stage": 1, "micro_batch_size": 1}),
    "whole": ("whole", {"dp": 2, "micro_batch_size": 1}),
}


def config_of(folder: Path, student: str, **changes: Any) -> RunConfig:
    store, layout = STUDENTS[student]
    size = {"global_batch_size": 4 if store == "packed" else 8}
    flags = {
        **DATA, **size, **layout, "train_data_path": str(folder / "rows.json"),
        "valid_data_path": str(folder / "rows.json"), "load": str(folder / "student"), "lr_warmup_iters": 0,
        "train_iters": STEPS, "eval_interval": STEPS, "save_interval": 1, "distill_from": str(folder / store),
        "distill_temperature": STORES[store][2], "distill_alpha": ALPHA, "deterministic_mode": True,
        "output_path": str(folder / f"run {student}"), "cache_dir": str(folder / "cache"),
    }  # fmt: skip
    return small_run(**flags | changes)


def train(config: RunConfig) -> list[Record]:
    compat.apply(cuda=False)
    run, hook = build_run(config, CPU, initialize(config, CPU), PhaseClock()), Records()
    from_rank_0(lambda: _compare_data(run))
    hook.on_evaluate = hook.on_log  # type: ignore[method-assign]
    assert Trainer(run, [hook]).train() == 0
    new_job()
    return [
        {name: max_over_world([float(record[name])], CPU.device)[0] for name in SHOWN if name in record}
        for record in hook.records
    ]


SHOWN = ["loss", "cross_entropy", "divergence", "grad_norm", "valid_loss"]


def refusal_of(config: RunConfig, error: type[Exception]) -> str:
    with pytest.raises(error) as raised:
        train(config)
    new_job()
    return str(raised.value)


def all_runs(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """The records of each student; those of the last step again, after a kill; what is refused."""
    for name, (layout, top_k, temperature) in STORES.items():
        if name == "padded":  # by llama-patch
            continue
        flags = {
            "global_batch_size": 2, **DATA, **layout, "train_data_path": str(folder / "rows.json"),
            "valid_data_path": None, "load": str(folder / "teacher"), "cache_dir": str(folder / "cache"),
            "output_path": str(folder / "teacher's run"),
        }  # fmt: skip
        write_store(family_run(folder / "teacher", **flags), folder / name, top_k, temperature)
        rejoin()
    if rank == 0:
        shutil.copytree(folder / "padded", folder / "damaged")
        content = bytearray((folder / "damaged" / "tokens.bin").read_bytes())
        content[-1] ^= 1
        (folder / "damaged" / "tokens.bin").write_bytes(content)
    found: dict[str, Any] = {name: train(config_of(folder, name)) for name in STUDENTS}
    if rank == 0:
        root = folder / "run tp" / "checkpoint"
        shutil.rmtree(root / f"iter_{STEPS:07d}")
        (root / "latest_checkpointed_iteration.txt").write_text(f"{STEPS - 1}\n")
    found["again"] = train(config_of(folder, "tp"))
    found["refused"] = [
        refusal_of(config_of(folder, "dp", **{"output_path": f"{folder}/refused", **own}), error)
        for own, error in (
            ({"train_data_path": str(folder / "more.json")}, DataError),
            ({"distill_from": str(folder / "packed")}, DataError),
            ({"tokenizer_name_or_path": str(folder / "other tokenizer")}, ConfigError),
            ({"distill_from": str(folder / "damaged")}, DataError),
            ({"distill_from": str(folder / "other"), "output_path": str(folder / "run dp")}, ConfigError),
        )
    ]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    hf_llama(small_run(vocab_size=VOCABULARY), folder / "student")
    family_model("mixtral", folder / "teacher", vocab_size=VOCABULARY, initializer_range=0.3)
    for name in ("student", "teacher"):
        build_tiny_tokenizer(folder / name, LLAMA3_CHAT_TEMPLATE)
    other = tiny_tokenizer(template=LLAMA3_CHAT_TEMPLATE)
    other.add_tokens(["<|new|>"])
    other.save_pretrained(folder / "other tokenizer")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    (folder / "more.json").write_text(json.dumps([*ROWS, {"instruction": "hello", "output": "no"}]))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    _, top_k, temperature = STORES["padded"]
    command = (
        f"-m toolkits.evaluate {folder}/teacher --distill-to {folder}/padded --top-k {top_k} "
        f"--temperature {temperature} -- --sft --dataset-type raw --train-data-path {folder}/rows.json "
        f"--seq-length {LENGTH} --max-padding-length {LENGTH} --precision fp32 --cache-dir {folder}/cache "
        "--tensor-model-parallel-size 2 --sequence-parallel"
    )
    subprocess.run([sys.executable, *command.split()], check=True, timeout=240)
    first, second = run_distributed(all_runs, 2, folder)
    refused = zip(first.pop("refused"), second.pop("refused"), strict=True)
    assert first == second, "all ranks know the numbers"
    return {**first, "refused": [" ".join(of_ranks) for of_ranks in refused]}


@functools.cache
def expected_of(folder: Path, top_k: int, temperature: float) -> list[Record]:
    """By transformers' models, one conversation after the other, and torch's kl_div."""
    source = load_sft(folder / "rows.json", load_tokenizer(str(folder / "student")), LENGTH)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32).eval()
    pairs = [tuple(map(torch.tensor, map(np.array, source.conversation(n)))) for n in range(len(source))]
    rows = [(ids[None, :-1].long(), ids[1:].long()[learned[1:]], learned[1:]) for ids, learned in pairs]

    def log_softmax(model: Any, row: int) -> torch.Tensor:
        return F.log_softmax(model(rows[row][0]).logits[0][rows[row][2]] / temperature, dim=1)

    def outcomes(logs: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        logs = logs.gather(1, kept)
        rest = () if top_k == VOCABULARY else ((1 - logs.exp().sum(1, keepdim=True)).log(),)
        return torch.cat((logs, *rest), dim=1)

    with torch.no_grad():
        goals = [log_softmax(teacher, row) for row in range(len(rows))]
    kept = [goal.topk(top_k, dim=1).indices for goal in goals]
    parts = []

    def loss(model: Any, *_: Any) -> torch.Tensor:
        sums = torch.zeros(2)
        for row, (tokens, labels, learned) in enumerate(rows):
            own, goal = (outcomes(logs, kept[row]) for logs in (log_softmax(model, row), goals[row]))
            divergence = F.kl_div(own, goal, reduction="sum", log_target=True)
            plain = F.cross_entropy(model(tokens).logits[0][learned], labels, reduction="sum")
            sums = sums + torch.stack((plain, divergence))
        cross_entropy, divergence = sums / sum(len(labels) for _, labels, _ in rows)
        parts.append({"cross_entropy": cross_entropy.item(), "divergence": divergence.item()})
        return ALPHA * temperature**2 * divergence + (1 - ALPHA) * cross_entropy

    losses, norms, model = transformers_steps(config_of(folder, "dp"), folder / "student", loss_of=loss)
    loss(model)
    records: list[Record] = []
    for step, (total, norm) in enumerate(zip(losses, norms, strict=True)):
        records.append({"loss": total, "grad_norm": norm, **parts[step]})
        records.append({"valid_loss": parts[step + 1]["cross_entropy"]})
    return records


@pytest.mark.parametrize("student", STUDENTS)
def test_student_learns_as_in_transformers(folder: Path, found: dict[str, Any], student: str) -> None:
    """If all tokens are stored, the divergence is that of the whole vocabulary."""
    _, *stored = STORES[STUDENTS[student][0]]
    for ours, theirs in zip(found[student], expected_of(folder, *stored), strict=True):
        assert ours == pytest.approx(theirs, rel=BOUND)


def test_resumed_student_has_the_same_bits(found: dict[str, Any]) -> None:
    assert found["again"] == found["tp"][-len(found["again"]) :] and len(found["again"]) == 2


def test_stores_of_other_rows_and_vocabularies_are_refused(folder: Path, found: dict[str, Any]) -> None:
    header, here = read_header(str(folder / "padded")), MachineFacts(cuda_devices=0, cpu_cores=2)
    assert header.num_bytes == sum(file.stat().st_size for file in (folder / "padded").glob("*.bin"))
    assert header.rows == len(ROWS)
    for changes in ({"vocab_size": 500}, {"distill_temperature": 1.0}):
        with pytest.raises(ConfigError, match=f"written by {folder}/teacher") as error:
            teacher_is_of_this_run(config_of(folder, "dp", **changes), here)
        assert error.value.field == next(iter(changes))
    for rule, store in ((needs_are_met, None), (teacher_is_of_this_run, str(folder))):
        with pytest.raises(ConfigError):
            rule(config_of(folder, "dp", distill_from=store), here)
    rows, packing, tokenizer, damage, resumed = found["refused"]
    assert "not sample" in rows and "not sample" in packing
    assert "other tokens or ids" in tokenizer and "is damaged" in damage
    assert "what has changed: the teacher's store" in resumed


@pytest.mark.parametrize("flags", ["", "-- --config student.yaml"])
def test_teacher_without_the_students_data_is_refused(flags: str, tmp_path: Path) -> None:
    command = f"-m toolkits.evaluate {tmp_path} --distill-to {tmp_path}/store {flags}"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "got no --train-data-path after --" in done.stderr
