"""DPO from rows is TRL's: tokens, losses and rewards; a reference is computed once and outlives a resume.

TRL names a folder as in tests/unit/data/test_trl_masks.py. In any layout: test_covered_layouts.py.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from llama3_tokenizer import build_tiny_tokenizer
from small_runs import hf_llama, small_run
from training_runs import CPU, Records, messages_from

from patch import compat
from patch.config.choices import ROW_KINDS, RowKind
from patch.config.schema import RunConfig
from patch.convert import export_adapter
from patch.data import load_sft, load_tokenizer
from patch.data.chat_templates import LLAMA3_CHAT_TEMPLATE
from patch.data.packing import PairSource
from patch.data.sft.source import SftSource
from patch.distributed.groups import initialize
from patch.errors import CheckpointError
from patch.training.guards.phases import PhaseClock
from patch.training.hooks.hook import Record
from patch.training.hooks.store_records import send_records, take_records
from patch.training.objectives.preference import Preference
from patch.training.objectives.reference import _keys_in
from patch.training.setup import build_run
from patch.training.trainer import Trainer

_FOLDER = os.environ.get("TRL", "")
LENGTH, STEPS = 192, 10
ONE_ROW = {
    "packing": True, "micro_batch_size": 1, "global_batch_size": 1, "seq_length": 512,
    "max_padding_length": 512,
}  # fmt: skip
BOUND = 1e-5
"""Of fp32 sums in another order, after updates."""
SAID = [
    ("the quick brown fox?", " jumps over.", " sleeps"),
    ("what is two plus two?", " four.", " five, as far as I know"),
    ("hello", " world", " no"),
    ("question", " answer, yes", " answer, no"),
]


def says(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def both(chosen: str, rejected: str, answer: Callable[[str], Any]) -> dict[str, Any]:
    return {"chosen": answer(chosen), "rejected": answer(rejected)}


BEFORE = says("user", "hello") + says("assistant", "yes")
FORMS = {
    "messages": [
        {"prompt": BEFORE + says("user", q), **both(a, b, lambda x: says("assistant", x))} for q, a, b in SAID
    ],
    "whole": [both(a, b, lambda x, q=q: says("user", q) + says("assistant", x)) for q, a, b in SAID],
    "turns": [
        {"prompt": BEFORE + says("user", q), **both(a, b, lambda x: says("assistant", x) + BEFORE)}
        for q, a, b in SAID
    ],
    "texts": [{"prompt": q, "chosen": a, "rejected": f"{b}<|end_of_text|>"} for q, a, b in SAID],
    "transcripts": [
        both(a, b, lambda x, q=q: f"\n\nHuman: {q}\n\nAssistant: {x}") for q, a, b in SAID
    ],
}
TEXTS = [
    {"prompt": question, "completion": said[number == 1], "label": number != 1}
    for number, (question, *said) in enumerate(SAID)
]
TALKS = [
    {"prompt": BEFORE + says("user", question), "completion": says("assistant", completion), "label": label}
    for question, completion, label in (row.values() for row in TEXTS)
]
UNPAIRED = {"labelled": TALKS, "labelled texts": TEXTS}
ADAPTERS = {"lora_rank": 4, "lora_alpha": 8.0}
KTO = {"objective": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5}
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("messages", {}),
    "ipo": ("texts", {"dpo_loss_type": "ipo"}),
    "hinge": ("messages", {"dpo_loss_type": "hinge"}),
    "robust": ("texts", {"dpo_loss_type": "robust", "dpo_label_smoothing": 0.2}),
    "sft": ("whole", {"dpo_sft_weight": 0.5, "micro_batch_size": 1}),
    "dpo adapters": ("messages", {**ADAPTERS, "precision_align": "eager"}),
    "orpo": ("texts", {"objective": "orpo", "dpo_beta": 0.5}),
    "orpo adapters": ("texts", {"objective": "orpo", **ADAPTERS}),
    "simpo": ("texts", {"objective": "simpo", "dpo_beta": 2.0, "simpo_gamma": 1.0}),
    "simpo adapters": ("texts", {"objective": "simpo", **ADAPTERS}),
    "kto": ("labelled", KTO),
    "kto adapters": ("labelled texts", {**KTO, **ADAPTERS}),
}
_TRL = """
import json, sys
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
folder, found = sys.argv[1], {}
def noting(trainer):
    class Noting(trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            share = loss.item() / self.args.gradient_accumulation_steps
            steps[-1]["loss"] = steps[-1].get("loss", 0) + share
            return loss
        def log(self, logs, *args):
            metrics = getattr(self, "_metrics", None) or self._stored_metrics
            means = {name: sum(own) / len(own) for name, own in metrics["train"].items() if own}
            kept = ("rew", "logps", "nll", "kl")
            steps[-1].update({name: mean for name, mean in means.items() if name.startswith(kept)})
            steps.append({})
            metrics["train"].clear()
    return Noting
KINDS = {
    "dpo": (DPOTrainer, DPOConfig, {}),
    "kto": (KTOTrainer, KTOConfig, {}),
    "orpo": (ORPOTrainer, ORPOConfig, {}),
    "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0}),
}
NAMES = {"dpo_beta": "beta", "dpo_label_smoothing": "label_smoothing"}
KEPT = ("simpo_gamma", "desirable_weight", "undesirable_weight")
num_steps = int(sys.argv[2])
for form, (rows, asked) in json.load(open(f"{folder}/request.json")).items():
    changes = asked or {}
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer, config, own = KINDS[changes.get("objective", "dpo")]
    own = own | {NAMES.get(name, name): changes[name] for name in (*NAMES, *KEPT) if name in changes}
    if "dpo_loss_type" in changes:
        own["loss_type"] = [changes["dpo_loss_type"]]
    if "dpo_sft_weight" in changes:
        own = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, changes["dpo_sft_weight"]]}
    size = changes.get("micro_batch_size", 4)
    config = config(
        f"{folder}/trl", max_steps=num_steps, learning_rate=1e-3, lr_scheduler_type="constant",
        adam_beta2=0.95, weight_decay=0.1, per_device_train_batch_size=size, use_cpu=True,
        gradient_accumulation_steps=4 // size, bf16=False, gradient_checkpointing=False,
        report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no", max_length=1024, **own,
    )
    steps = [{}]
    tokenizer, data = AutoTokenizer.from_pretrained(folder), Dataset.from_list(rows)
    tokenizer.pad_token = tokenizer.eos_token
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear") if "lora_rank" in changes else None
    own = {"train_dataset": data, "processing_class": tokenizer, "peft_config": lora}
    trainer = noting(trainer)(model, args=config, **own)
    if lora:
        trainer.model.save_pretrained(f"{folder}/{form}")
    if asked is not None:
        trainer.train()
    found[form] = {"steps": steps[:num_steps], "rows": list(trainer.train_dataset)}
json.dump(found, open(f"{folder}/answer.json", "w"))
"""


def config_of(folder: Path, name: str, **changes: Any) -> RunConfig:
    flags = {
        "objective": "dpo", "load": str(folder), "train_data_path": str(folder / f"{name}.json"), "lr": 1e-3,
        "min_lr": 1e-3, "lr_warmup_iters": 0, "train_iters": STEPS, "micro_batch_size": 4,
        "global_batch_size": 4, "seq_length": LENGTH, "max_padding_length": LENGTH,
        "deterministic_mode": True, "output_path": str(folder / "run"),
        "cache_dir": str(folder / "cache"), "vocab_size": 400,
    }  # fmt: skip
    return small_run(**flags | changes)


def load(folder: Path, form: str, row_kind: RowKind = "pair") -> SftSource:
    tokenizer = load_tokenizer(str(folder))
    return load_sft(folder / f"{form}.json", tokenizer, LENGTH, row_kind=row_kind)


def train(config: RunConfig) -> list[Record]:
    """The records of the steps."""
    compat.apply(cuda=False)
    this_run, hook = build_run(config, CPU, initialize(config, CPU), PhaseClock()), Records()
    hook.on_evaluate = hook.on_log  # type: ignore[method-assign]
    assert Trainer(this_run, [hook]).train() == 0
    if config.adapter.lora_rank:
        with this_run.optimizer.full_weights():
            folder, groups = Path(config.checkpoint.output_path) / "adapter", this_run.groups
            export_adapter(this_run.stages, folder, config.model, config.adapter, groups, base=None)
    new_job()
    return hook.records


def refusal_of(config: RunConfig) -> str:
    with pytest.raises(CheckpointError) as error:
        train(config)
    new_job()
    return str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and the rows in each form."""
    folder = tmp_path_factory.mktemp("pairs")
    hf_llama(config_of(folder, "messages"), folder)
    build_tiny_tokenizer(folder, LLAMA3_CHAT_TEMPLATE)
    for name, rows in (FORMS | UNPAIRED).items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def trl(folder: Path) -> dict[str, Any]:
    if not _FOLDER:
        pytest.skip("TRL names no folder with trl")
    request: dict[str, Any] = {form: [rows, None] for form, rows in FORMS.items()}
    request |= {form: [rows, {"objective": "kto"}] for form, rows in UNPAIRED.items()}
    request |= {name: [(FORMS | UNPAIRED)[form], changes] for name, (form, changes) in LOSSES.items()}
    (folder / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _TRL, str(folder), str(STEPS)],
        env={**os.environ, "PYTHONPATH": _FOLDER, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.parametrize("form", [*FORMS, *UNPAIRED])
def test_tokens_are_trls(folder: Path, trl: dict[str, Any], form: str) -> None:
    """What follows the prompt is learned. Of transcripts TRL's prompt goes on into what both answers say."""
    is_pair = form in FORMS
    answers = ("chosen", "rejected") if is_pair else ("completion",)
    source = load(folder, form, "pair" if is_pair else "unpaired")
    for number, row in enumerate(trl[form]["rows"]):
        begin = len(row["prompt_ids"])
        for place, answer in enumerate(answers):
            ids, learned = source.conversation(len(answers) * number + place)
            assert learned[0] == row.get("label", False)
            assert ids.tolist() == row["prompt_ids"] + row[f"{answer}_ids"]
            first = learned.tolist().index(True, 1)
            assert first == begin if form != "transcripts" else first <= begin
            assert learned[first:].all()


def losses_of_forms(rank: int, world_size: int, folder: Path) -> dict[str, list[Record]]:
    found = {}
    for name, (form, own) in LOSSES.items():
        drawn = {"lora_load": str(folder / name)} if "lora_rank" in own else {}  # by PEFT
        found[name] = train(config_of(folder, form, output_path=f"{folder}/ten {name}", **own, **drawn))
    return found


def test_losses_and_rewards_are_trls(folder: Path, trl: dict[str, Any]) -> None:
    (found,) = run_distributed(losses_of_forms, 1, folder)
    assert all(trl[name]["steps"][-1]["kl"] > 0 for name in ("kto", "kto adapters"))
    for name, records in found.items():
        for step, (ours, theirs) in enumerate(zip(records, trl[name]["steps"], strict=True)):
            assert len(theirs) > 5
            own = {name: ours.get(name, 0.0) for name in theirs}  # of SimPO nll_loss is 0
            assert own == pytest.approx(theirs, rel=BOUND, abs=BOUND), (name, step)


def packed_and_resumed(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Of three steps, and of the last two again: records; what the log says of references; a refusal."""
    found: dict[str, Any] = {}
    said = messages_from("INFO", "patch.training.objectives.reference")
    common = {"valid_data_path": str(folder / "whole.json"), "save_interval": 1, "eval_interval": 3}

    def config(output: str, **own: Any) -> RunConfig:
        changes = {"micro_batch_size": 2, "train_iters": 3, "output_path": str(folder / output)}
        changes |= common | own
        return config_of(folder, "messages", **changes)

    found["alone"] = train(config("alone"))
    found["packed"] = train(config("packed", **ONE_ROW))
    cache, root = folder / "cache" / "references", folder / "alone" / "checkpoint"
    found["computed"] = len(said)
    found["adapters"] = train(config("adapters", lr=2e-3, lora_rank=4))
    found["adapters computed"] = len(said)
    loaded = {"lora_rank": 4, "lora_alpha": 4.0, "lora_load": str(folder / "adapters" / "adapter")}
    found["loaded"] = train(config("loaded", **loaded))
    found["loaded computed"] = len(said)
    for name in ("again", "recomputed"):
        for step in (2, 3):
            shutil.rmtree(root / f"iter_{step:07d}")
        (root / "latest_checkpointed_iteration.txt").write_text("1\n")
        found[name] = train(config("alone"))
        found[f"{name} computed"] = len(said)
        shutil.rmtree(cache)
    shutil.rmtree(root / "iter_0000003")
    (root / "latest_checkpointed_iteration.txt").write_text("2\n")
    found["refused"] = refusal_of(config("alone", load=None, tokenizer_name_or_path=str(folder)))
    moved = config("there", save="memory://dpo", cache_dir=str(folder / "there"))
    here = config("here", save="memory://dpo", train_iters=1)
    train(here)
    (folder / "here" / "config.yaml").touch()
    send_records(here)
    take_records(moved)
    found["moved"], found["moved computed"] = train(moved), len(said)
    for gone in (folder / "there" / "reference.json", folder / "there" / "references"):
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    found["unknown"] = refusal_of(moved)
    found["valid"] = train(config("valid", valid_data_path=str(folder / "messages.json")))
    return found


def numbers(records: list[Record]) -> list[dict[str, float]]:
    """Report of the objective."""
    names = ("loss", "rewards", "logps", "nll", "kl", "desirable", "valid")
    return [{key: each for key, each in record.items() if key.startswith(names)} for record in records]


def others_resumed(rank: int, world_size: int, folder: Path) -> dict[str, list[list[dict[str, float]]]]:
    """Records of three steps, of the last two again, and of three packed steps."""
    found = {}
    for kind in (name for name in ROW_KINDS if name != "dpo"):
        form = "labelled" if kind == "kto" else "messages"
        common = {
            "objective": kind, "micro_batch_size": 2, "train_iters": 3, "save_interval": 1,
            "eval_interval": 3,
            "valid_data_path": str(folder / f"{form}.json"), "lora_rank": 4 if kind == "kto" else 0,
        }  # fmt: skip
        common |= KTO if kind == "kto" else {}
        config = config_of(folder, form, **common, output_path=str(folder / kind))
        found[kind] = [numbers(train(config))]
        for step in (2, 3):
            shutil.rmtree(folder / kind / "checkpoint" / f"iter_{step:07d}")
        (folder / kind / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("1\n")
        shutil.rmtree(folder / "cache" / "references", ignore_errors=True)
        found[kind].append(numbers(train(config)))
        packed = {**common, **ONE_ROW, "output_path": str(folder / f"{kind} packed")}
        found[kind].append(numbers(train(config_of(folder, form, **packed))))
    return found


@pytest.mark.long
def test_other_objectives_go_on_to_the_bit_and_packed_as_alone(folder: Path) -> None:
    (found,) = run_distributed(others_resumed, 1, folder)
    *_, last, _ = found["kto"][0]
    assert last["desirable"] == 0.75 and last["kl"] > 0
    for kind, (whole, again, packed) in found.items():
        assert again == whole[2:], kind
        assert [*map(dict, packed)] == [pytest.approx(each, rel=BOUND, abs=BOUND) for each in whole], kind


RESUMED: dict[str, list[dict[str, Any]]] = {
    "pipeline, experts": [{"pp": 2, "stage": 1}, {"dp": 2, "expert_model_parallel_size": 2}],
    "tensor, context": [{"tp": 2, "sequence_parallel": True}, {"cp": 2}],
}


def resumed_elsewhere(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """The last of Mixtral's three steps, here and in another layout, with the cache and without it."""
    said, cache = messages_from("INFO", "patch.training.objectives.reference"), folder / "experts cache"
    found: dict[str, Any] = {}
    for name, (first, then) in RESUMED.items():
        root = folder / name / "checkpoint"
        common = {
            "model_type": "mixtral", "num_experts": 4, "load": None, "micro_batch_size": 2, "train_iters": 3,
            "tokenizer_name_or_path": str(folder), "cache_dir": str(cache), "output_path": str(folder / name),
        }  # fmt: skip
        *_, last = train(config_of(folder, "messages", **common, **first, save_interval=2))
        for lost in ("nothing", "references"):
            if rank == 0:
                shutil.rmtree(root / "iter_0000003")
                (root / "latest_checkpointed_iteration.txt").write_text("2\n")
                shutil.rmtree(cache / lost, ignore_errors=lost == "nothing")
            before = len(said)
            (other,) = train(config_of(folder, "messages", **common, **then))
            found[f"{name}, {lost} lost"] = last, other, len(said) - before
    return found


@pytest.mark.long
def test_a_run_goes_on_in_another_layout_with_the_reference_of_its_beginning(folder: Path) -> None:
    for found in run_distributed(resumed_elsewhere, 2, folder):
        for name, (one, other, computed) in found.items():
            own = {key: value for key, value in one.items() if key.startswith(("loss", "rewards"))}
            assert {key: other[key] for key in own} == pytest.approx(own, rel=BOUND, abs=BOUND), name
            assert computed == ("references" in name), name


@pytest.mark.long
def test_reference_is_computed_once_and_outlives_a_resume(folder: Path) -> None:
    (found,) = run_distributed(packed_and_resumed, 1, folder)
    first = found["alone"][0]
    assert first["loss"] == torch.tensor(2.0).log().item() and first["rewards/margins"] == 0.0
    for alone, packed in zip(found["alone"], found["packed"], strict=True):
        own = {k: x for k, x in alone.items() if k.startswith(("loss", "rewards", "logps", "valid"))}
        assert own == pytest.approx({name: packed[name] for name in own}, rel=BOUND, abs=BOUND)
    assert found["computed"] == 4, "of two sets, alone and packed"
    for name, computed in (("adapters", 4), ("loaded", 6)):  # new ones add nothing to the base
        begin, *later = (record["loss"] for record in found[name] if "loss" in record)
        assert begin == first["loss"] > max(later) and found[f"{name} computed"] == computed, name
    assert found["again computed"] == 6 and found["recomputed computed"] == 8, "a lost one is made anew"
    losses = [record["loss"] for record in found["alone"] if "loss" in record]
    for name in ("again", "recomputed", "moved"):
        assert [record["loss"] for record in found[name] if "loss" in record] == losses[1:], name
    assert "began with weights whose checksum is" in found["refused"]
    assert found["moved computed"] == found["recomputed computed"] + 4, "of two sets, here and there"
    assert "reference.json is not there or cannot be read; expected that of the run" in found["unknown"]
    _, *steps = (record for record in found["valid"] if "loss" in record)
    *evaluated, _ = (record for record in found["valid"] if "valid_loss" in record)
    for before, step in zip(evaluated, steps, strict=True):  # the pairs of training
        names = {"loss": "loss", "margin": "rewards/margins", "accuracy": "rewards/accuracies"}
        own = {f"valid_{name}": step[theirs] for name, theirs in names.items()} | {"valid_pairs": 4}
        assert {name: before[name] for name in own} == pytest.approx(own, rel=BOUND, abs=BOUND)


@pytest.mark.timeout(60)
def test_files_of_the_reference_are_looked_at_before_they_are_read(folder: Path, tmp_path: Path) -> None:
    preference = Preference(config_of(folder, "messages", cache_dir=str(tmp_path)))
    pairs = load(folder, "messages")
    source = PairSource(pairs, LENGTH, is_packed=False)
    file = tmp_path / "references" / "key"
    file.parent.mkdir()

    def put(content: bytes) -> None:
        file.write_bytes(sha256(content).digest() + content)

    for harm in (lambda: put(b"abc"), lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero")):
        harm()
        assert preference._stored("key", source) is None
        file.unlink()
    put(torch.arange(8.0).numpy().tobytes())
    assert preference._stored("key", source).tolist() == [*range(8)]
    good = {"a": f"{0:016x}-{1:032x}"}
    (tmp_path / "reference.json").write_text(json.dumps({**good, "b": "../../key", "c": 3}))
    assert _keys_in(tmp_path / "reference.json") == good
