"""Call the shell script as a user does, with 25 positions by name, or only the workers of its launcher.

A worker that the launcher starts imports torch and megatron-core, which takes four CPU seconds. So `call` is
for the interplay of launcher and workers, and `call_workers` for the run itself.
"""

import json
import os
import resource
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from distributed_runner import leave, rejoin, run_distributed
from small_runs import small_run
from started_programs import start_program
from transformers import AutoModelForCausalLM, AutoTokenizer

from patch.device import MachineFacts
from patch.launch.launcher import worker_environment
from toolkits.quickstart.tasks import Example

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "examples" / "llama3_1" / "run_mcore_llama.sh"
PROGRAM = SCRIPT.with_name("pretrain_llama.py")
TIMEOUT_S = 200
MACHINE = MachineFacts(cuda_devices=0, cpu_cores=2)

POSITIONS = {
    "ENV": "dsw",
    "MODEL_SIZE": "auto",
    "BATCH_SIZE": "2",
    "GLOBAL_BATCH_SIZE": "8",
    "LR": "5e-3",
    "MIN_LR": "1e-4",
    "SEQ_LEN": "64",
    "PAD_LEN": "48",
    "PR": "fp32",
    "TP": "1",
    "PP": "1",
    "CP": "1",
    "SP": "false",
    "DO": "false",
    "FL": "true",
    "SFT": "true",
    "AC": "none",
    "OPTIMIZER_OFFLOAD": "false",
    "SAVE_INTERVAL": "1000",
    "DATASET_PATH": "none",
    "VALID_DATASET_PATH": "none",
    "PRETRAIN_CHECKPOINT_PATH": "none",
    "TRAIN_TOKENS_OR_ITERS": "8",
    "WARMUP_TOKENS_OR_ITERS": "2",
    "OUTPUT_BASEPATH": "none",
}


def command(**changes: object) -> list[str]:
    """Return the script and its positions, with replacements."""
    assert changes.keys() <= POSITIONS.keys(), f"no such position in {sorted(changes)}"
    return ["sh", str(SCRIPT), *(str(value) for value in {**POSITIONS, **changes}.values())]


def environment(**variables: object) -> dict[str, str]:
    """Return the environment of a run: raw data, two CPU processes, none of the tests' own variables."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    own = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": 1}
    own |= {"MP_DATASET_TYPE": "raw", "NPROC_PER_NODE": 2}
    return {**kept, **{name: str(value) for name, value in {**own, **variables}.items()}}


def call(arguments: list[str], **variables: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its output and exit code."""
    return subprocess.run(
        arguments,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def start(arguments: list[str], variables: dict[str, str]) -> subprocess.Popen:
    return start_program(arguments, variables, stderr=subprocess.PIPE, text=True)


def call_workers(
    world_size: int, arguments: list[str], limit: tuple[int, int] | None = None, **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run only the workers, in processes of the tests' runner; return their common exit code, and all stderr.

    `limit` is a resource limit of each worker: a RLIMIT_* of the module `resource`, and its value.
    """
    own = {"MP_DATASET_TYPE": "raw", **variables}
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    own |= {"MASTER_ADDR": store.host, "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    shared = {name: str(value) for name, value in own.items()}
    environments = [
        {**worker_environment(small_run(dp=world_size), MACHINE, shared), "RANK": rank, "LOCAL_RANK": rank}
        for rank in map(str, range(world_size))
    ]
    with tempfile.NamedTemporaryFile() as messages:
        codes = run_distributed(
            _work, world_size, arguments, environments, messages.name, limit, timeout_s=TIMEOUT_S
        )
        assert len(set(codes)) == 1, codes
        said = Path(messages.name).read_text()
    return subprocess.CompletedProcess(arguments, codes[0], "", said)


def _work(
    rank: int,
    world_size: int,
    arguments: list[str],
    environments: list[dict[str, str]],
    messages: str,
    limit: tuple[int, int] | None,
) -> int:
    """Run a worker as this rank; return its exit code, and append its stderr to a file."""
    leave()
    os.environ.update(environments[rank])
    stderr = os.dup(2)
    with open(messages, "ab") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = [str(PROGRAM), *arguments[2:]]
    try:
        if limit is not None:
            resource.setrlimit(limit[0], (limit[1], resource.RLIM_INFINITY))
        runpy.run_path(str(PROGRAM), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    if limit is not None:
        resource.setrlimit(limit[0], (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.dup2(stderr, 2)
    if torch.distributed.is_initialized():  # a failed worker ends without leaving its job
        torch.distributed.destroy_process_group()
    rejoin()
    return code


def await_steps(output: Path, count: int, launcher: subprocess.Popen) -> None:
    """Wait until this number of steps is in the log."""
    metrics = output / "log" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= count):
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()[1]
        time.sleep(0.02)


def await_file(file: Path, launcher: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not file.is_file():
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()[1]
        time.sleep(0.02)


def worker_of(launcher: int, local_rank: str) -> int:
    variable = f"LOCAL_RANK={local_rank}".encode()
    for task in Path("/proc").glob(f"{launcher}/task/*/children"):
        for child in task.read_text().split():
            if variable in Path("/proc", child, "environ").read_bytes().split(b"\0"):
                return int(child)
    raise AssertionError("no such worker")


def cut_back(output: Path, iteration: int) -> None:
    """Restore a run's folder to its state right after the checkpoint of `iteration`, except its log."""
    root = output / "checkpoint"
    for link in ("last", "best"):
        (root / link).unlink(missing_ok=True)
    for folder in root.glob("iter_*"):
        if int(folder.name.removeprefix("iter_")) > iteration:
            shutil.rmtree(folder)
    (root / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")


def training_records(output: Path) -> list[dict[str, Any]]:
    lines = (output / "log" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in training_records(output)]


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """Compare the bits of two Hugging Face folders."""
    first, second = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (ours, theirs))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def loss_in_transformers(folder: Path, examples: list[Example]) -> float:
    """Return the mean loss over the answers' tokens, computed by transformers from a Hugging Face folder."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for example in examples:
        user = [{"role": "user", "content": example.question}]
        text = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        learned = tokenizer(example.answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        tokens = torch.tensor([prompt + learned])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(learned), reduction="sum").item()
        count += len(learned)
    return total / count
