"""The programs in examples/llama3_1/library give right results.

They run in processes of the test's runner, as torchrun would start them.
"""

import inspect
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from distributed_runner import leave, rejoin, run_distributed
from hf_families import family_model
from launches import free_port
from llama3_tokenizer import tiny_tokenizer
from safetensors.torch import load_file
from small_runs import hf_llama, small_run
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import patch.alignment
import patch.convert
import patch.data
import patch.optimizer
from patch.config import to_yaml
from patch.data.chat_templates import LLAMA3_CHAT_TEMPLATE
from patch.families import FAMILIES
from patch.preflight.model_of_folder import read_hf_config

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "examples/llama3_1/library"
EXAMPLES = sorted(LIBRARY.glob("*.py"))
# Ten steps move a weight by up to 0.1. The order of sums matters most where Adam's moments are small.
BOUND = 1e-5


def _signatures(package: ModuleType) -> Iterator[tuple[str, inspect.Signature]]:
    """Yield the public functions, and the methods of public classes that are ours."""
    for name in package.__all__:
        public = getattr(package, name)
        methods = vars(public).items() if inspect.isclass(public) else [(name, public)]
        for method, function in methods:
            if inspect.isfunction(function) and (method == "__init__" or not method.startswith("_")):
                yield f"{package.__name__}.{name} {method}", inspect.signature(function)


def test_paths_may_be_strings() -> None:
    """Wherever a public function takes a path, not only in these programs."""
    found = {
        f"{name}({parameter.name})": str(parameter.annotation)
        for package in (patch.alignment, patch.convert, patch.data, patch.optimizer)
        for name, signature in _signatures(package)
        for parameter in signature.parameters.values()
        if "Path" in str(parameter.annotation)
    }
    assert len(found) > 9
    assert not {name: kind for name, kind in found.items() if "StrPath" not in kind}


def test_they_have_at_most_30_lines_or_40_if_they_extend_a_run() -> None:
    extending = {example for example in EXAMPLES if "register_" in example.read_text()}
    assert (len(EXAMPLES), len(extending)) == (8, 2)
    assert all(len(each.read_text().splitlines()) <= (40 if each in extending else 30) for each in EXAMPLES)


def _run_example(name: str, port: int, *arguments: object) -> list[tuple]:
    """Run a program as a rank of torchrun; return the arguments of its calls of `print`."""
    leave()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    printed: list[tuple] = []
    sys.argv = [name, *map(str, arguments)]
    runpy.run_path(str(LIBRARY / name), {"print": lambda *values: printed.append(values)}, "__main__")
    rejoin()
    return printed


def _train_both(rank: int, world_size: int, folder: Path, port: int) -> dict[str, float]:
    """Return the largest difference of each parameter between the program's and torch's training."""
    os.chdir(folder)
    _run_example("overlapped_optimizer.py", port)
    torch.manual_seed(0)
    model = torch.nn.Bilinear(16, 16, 4)
    replicas = DistributedDataParallel(model)
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for first, last in torch.randn(10, 2, 8, 16, generator=torch.manual_seed(1 + rank)):
        optimizer.zero_grad()
        for batch, context in ((first, replicas.no_sync()), (last, nullcontext())):
            with context:
                (replicas(batch, batch).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    saved = torch.load(f"rank{rank}.pt")
    assert saved["optimizer"]["optimizer_steps"] == 10
    return {
        name: (value - saved["model"][name]).abs().max().item() for name, value in model.state_dict().items()
    }


def test_optimizer_trains_any_module_as_ddp_and_adamw_do(tmp_path: Path) -> None:
    for differences in run_distributed(_train_both, 2, tmp_path, free_port()):
        assert max(differences.values()) < BOUND


def _receive(rank: int, world_size: int, folder: Path, port: int) -> dict[str, bool]:
    """Return the tensors that this rank received, and whether they equal the folder's bit for bit."""
    stored = load_file(folder / "model.safetensors")
    received = _run_example("stream_weights.py", port, folder)
    return {
        name: tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name])
        for name, tensor in received
    }


def test_weights_of_a_model_over_two_processes_are_those_of_the_folder(tmp_path: Path) -> None:
    hf_llama(small_run()).to(torch.bfloat16).save_pretrained(tmp_path)
    received, nothing = run_distributed(_receive, 2, tmp_path, free_port())
    assert received.keys() == load_file(tmp_path / "model.safetensors").keys() and not nothing
    assert all(received.values()), received


def test_layouts_of_a_plan_fit_and_the_fastest_is_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    flags = "--model-size 8B --seq-length 8192 --global-batch-size 64"
    monkeypatch.setattr(sys, "argv", ["plan_run.py", "h100", "1", *flags.split()])
    runpy.run_path(str(LIBRARY / "plan_run.py"), run_name="__main__")
    given, *layouts = capsys.readouterr().out.splitlines()
    usable = int(given.split(" GiB of ")[1].split(",")[0])
    needed = [int(line.split(": ")[1].split(" GiB")[0]) for line in layouts]
    seconds = [float(line.split(", ")[1].split(" s")[0]) for line in layouts]
    assert len(layouts) == 3 and max(needed) <= usable
    assert seconds == sorted(seconds) and seconds[0] <= float(given.split(", ")[1].split(" s")[0])


def _answers(model: torch.nn.Module, folder: Path) -> list[torch.Tensor]:
    """Write rows of four answers and a tokenizer to `folder`; return transformers' token losses of each."""
    tokenizer = tiny_tokenizer(template=LLAMA3_CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    losses, rows = [], []
    for answer in ("no", "yes, and again and again", "you", "never in the world"):
        turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]
        begin = len(tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False))
        ids = torch.tensor(tokenizer.apply_chat_template(turns, return_dict=False))
        logits = model(ids[None]).logits[0, begin - 1 : -1].detach()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[begin:], reduction="none"))
        rows.append(json.dumps({"messages": turns}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return losses


def _train(
    program: Sequence[object], folder: Path, variables: Mapping[str, object], **run: object
) -> subprocess.CompletedProcess[bytes]:
    """Run a program with a configuration of two steps on all rows of `_answers`."""
    common = {
        "train_iters": 2,
        "lr_warmup_iters": 0,
        "seq_length": 64,
        "max_padding_length": 64,
        "vocab_size": 400,
    }
    data = {"load": str(folder), "train_data_path": str(folder / "rows.jsonl")}
    config = small_run(**common | data | run)
    (folder / "run.yaml").write_text(to_yaml(config))
    environment = {**os.environ, "PYTHONPATH": ROOT, "CUDA_VISIBLE_DEVICES": "", **variables}
    environment = {name: str(value) for name, value in environment.items()}
    command = [sys.executable, *program, "--config", folder / "run.yaml"]
    return subprocess.run(command, env=environment, capture_output=True, check=False)


def test_run_with_an_objective_and_a_hook_of_its_own(tmp_path: Path) -> None:
    """With one process of a scheduler and with two of our launcher. The first loss is transformers'."""
    of_rows = _answers(hf_llama(small_run(vocab_size=400), tmp_path), tmp_path)
    expected = torch.stack([losses.mean() for losses in of_rows]).mean().item()
    assert abs(torch.cat(of_rows).mean().item() - expected) > 10 * BOUND, "not the mean over tokens"
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    tables = []
    for cp, variables in ((1, alone | {"MASTER_ADDR": "127.0.0.1"}), (2, {})):
        output = tmp_path / f"cp={cp}"
        run = {"cp": cp, "objective": "sequence-mean", "output_path": str(output)}
        ended = _train([LIBRARY / "sequence_mean.py"], tmp_path, variables, **run)
        assert ended.returncode == 0, ended.stderr.decode()
        tables.append(dict(map(float, line.split(",")) for line in (output / "losses.csv").open()))
    assert [*tables[0]] == [1, 2] and tables == [pytest.approx(tables[1] | {1: expected}, abs=BOUND)] * 2
    ended = _train([LIBRARY / "sequence_mean.py", "--dry-run"], tmp_path, {}, **run)
    assert ended.returncode == 0 and b"rows.jsonl: 4 samples in one epoch" in ended.stderr
    ended = _train(["-m", "toolkits.train"], tmp_path, {}, **run)
    assert ended.returncode == 2 and b"expected one of default, sft, pretrain" in ended.stderr


@pytest.fixture
def arcee() -> Iterator[None]:
    """Let this process know the family of arcee.py."""
    runpy.run_path(str(LIBRARY / "arcee.py"))
    yield
    del FAMILIES["arcee"]


def test_run_of_a_family_of_its_own(tmp_path: Path, arcee: None) -> None:
    """From transformers' folder over two TP ranks and back. The first loss is transformers'."""
    model = family_model("arcee", tmp_path, vocab_size=400)
    expected = torch.cat(_answers(model, tmp_path)).mean().item()
    output = tmp_path / "output"
    run = {**read_hf_config(tmp_path), "tp": 2, "sequence_parallel": True, "export_hf": True}
    ended = _train([LIBRARY / "arcee.py"], tmp_path, {}, **run, output_path=str(output))
    assert ended.returncode == 0, ended.stderr.decode()
    first = json.loads((output / "log/metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(expected, abs=BOUND)
    trained = AutoModelForCausalLM.from_pretrained(output / "hf")
    assert isinstance(trained, type(model))
    moved = [(a - b).abs().max() for a, b in zip(trained.parameters(), model.parameters(), strict=True)]
    assert all(0 < each < 0.1 for each in moved)


ALONE = """
import json, os, runpy, sys
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
import warnings
import patch  # it filters megatron-core's warnings about Apex
import torch.distributed.checkpoint, torch.distributed.fsdp, torch.nn.parallel, torch.optim, torch.utils.data
from transformers import LlamaForCausalLM  # with accelerate, which filters a warning for itself
import megatron.core.dist_checkpointing.strategies.torch
import megatron.core.models.gpt.gpt_model, megatron.core.pipeline_parallel.schedules
KINDS = FunctionType, MethodType, ModuleType, type
METHODS = FunctionType, staticmethod, classmethod, property

def seen():
    found = {"filters": list(warnings.filters), "compile": torch.compile}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("torch", "megatron", "warnings", "pickle"):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, KINDS):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {(name, key, own): v for own, v in vars(value).items() if isinstance(v, METHODS)}
    return found

def changed(before):
    after = seen()
    return [key for key, value in before.items() if after.get(key) is not value and after.get(key) != value]

before = seen()
library, folder = map(Path, sys.argv[1:3])
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
os.chdir(folder)
for name, *arguments in (
    ("chat_dataset.py", "rows.jsonl", "hf"),
    ("convert_weights.py", "hf", "mcore", "new"),
    ("overlapped_optimizer.py",),
):
    sys.argv = [name, *arguments]
    runpy.run_path(str(library / name), run_name="__main__")
from patch import compat
from patch.alignment import verify
try:
    verify(Path("hf"), Path("mcore"))
except ValueError as error:
    print(error, file=sys.stderr)
print("CHANGED", changed(before))
compat.apply(cuda=False)
print("APPLIED", changed(before))
sys.argv = ["check_alignment.py", "hf", "mcore", "report.json"]
runpy.run_path(str(library / "check_alignment.py"), run_name="__main__")
"""


def test_programs_work_alone_and_change_nothing_of_torch_and_megatron(tmp_path: Path) -> None:
    """All programs in one process, one after the other; their results are checked too."""
    hf_llama(small_run(), tmp_path / "hf")
    tiny_tokenizer(template=LLAMA3_CHAT_TEMPLATE).save_pretrained(tmp_path / "hf")
    turns = [{"role": role, "content": "yes and no"} for role in ("user", "assistant")]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", ALONE, str(LIBRARY), str(tmp_path), str(free_port())]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert {"learned", "-"} <= {word for line in lines for word in line.split()[1:2]}
    changed, applied = (line for line in lines if line[:7] in ("CHANGED", "APPLIED"))
    assert changed == "CHANGED []"
    assert "_reduce" in applied and "filters" in applied
    assert "dist_checkpointing" not in applied, "a program may save in upstream's ways"
    assert "call patch.compat.apply(cuda=False) first" in ended.stderr and "Apex" not in ended.stderr
    first, last = (tmp_path / name / "model.safetensors" for name in ("hf", "new"))
    assert first.read_bytes() == last.read_bytes()
    assert lines[-1].startswith("Normal."), ended.stdout
    assert json.loads((tmp_path / "report.json").read_text())["weights_equal"]
