"""Kill runs at random moments around saves: `python tests/random_kills.py --kills 50`, minutes.

A tiny run of two ranks saves every step or two. A moment of a save is drawn: save begun, data, marker, name,
tracker, deletion of an older checkpoint. When the folder shows this moment, a process of the run is killed by
SIGKILL. The run is started again until it has ended. Each start must resume from the newest complete
checkpoint on disk, whose iteration never decreases. The end must have the bytes of an undisturbed run.
Completeness is checked independently, with json and zlib.

`make test-all` does five kills (tests/unit/training/test_random_kills.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "support")]

import argparse
import json
import random
import signal
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

from safetensors.torch import load_file

STEPS = 10
RANKS = 2
MOMENTS = "between begun data index marker named tracked deletion starting".split()
"""Moments of a save, in order, and of a start. named: the folder has its name, but the tracker does not name
it yet."""
_RUN_S, _END_S, _MOMENT_S, _STEPS_S, _FRESH_S, _POLL_S = 300.0, 5.0, 3.0, 0.2, 0.005, 0.0005
"""Limits in seconds: of a run's start and end; of its end after a kill; of the search for a moment; of the
random delay before this search; of the age of a new tracker. Then the polling interval."""
TRACKER = "latest_checkpointed_iteration.txt"


class Hit(NamedTuple):
    victim: str
    moment: str
    """Moment that the folder showed right after the kill."""


# The run.


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora_rank": 3},
    "disk": {
        "optimizer_offload_policy": "static", "optimizer_offload_chunk_size": 5000,
        "optimizer_offload_host_share": 0.0,
    },
}  # fmt: skip
KINDS["host"] = KINDS["disk"] | {
    "data_parallel_sharding": "parameters", "param_persistence_threshold": 100,
    "cpu_offloading_weights": True,
}  # fmt: skip
KINDS["biases"] = {
    "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.01,
    "expert_model_parallel_size": 2,
}  # fmt: skip
"""Kinds of runs: plain, with adapters, with states on a disk, also with weights in host memory, with biases
of experts."""


def settings(output: Path, *, is_async: bool, interval: int, kind: str) -> dict[str, Any]:
    folder = {"offload_folder": str(output.parent / "states")} if kind in ("disk", "host") else {}
    return {
        "dp": RANKS, "num_layers": 1, "vocab_size": 1000,
        "train_iters": STEPS, "save_interval": interval, "async_save": is_async,
        "data_parallel_sharding": "optimizer", "output_path": str(output), "distributed_timeout_minutes": 5,
        **KINDS[kind], **folder,
    }  # fmt: skip


def work(changes: dict[str, Any]) -> None:
    """Resume, train and save as a worker. RANK and the like are in the environment."""
    from patch.compat import quick_start

    with quick_start():
        import torch
        from small_runs import small_run
        from training_runs import resume_seeded_run

        from patch.distributed.groups import shutdown
        from patch.storage.lock import hold_run
        from patch.storage.names import METRICS_FILE
        from patch.training.hooks.checkpoint_retention import CheckpointRetention, Retention
        from patch.training.hooks.metrics import MetricsLog
        from patch.training.setup import checkpoint_root
        from patch.training.trainer import Trainer

    torch.set_num_threads(1)
    config = small_run(**changes)
    root, output, is_first = checkpoint_root(config), Path(changes["output_path"]), os.environ["RANK"] == "0"
    run = resume_seeded_run(config)
    run.data.valid_readers = {}
    with hold_run(output) if is_first else nullcontext():
        hooks = []
        if is_first:
            with (output / "starts").open("a") as stream:
                stream.write(f"{run.start_iteration}\n")
            kept = CheckpointRetention(output / METRICS_FILE, root, Retention(last=2), run.start_iteration)
            hooks = [MetricsLog(output, run.start_iteration), kept]
        Trainer(run, hooks).train()
    shutdown()


# Its processes.


class Job:
    """Processes of one start of a run: workers forked from a server that has imported torch."""

    def __init__(self, changes: dict[str, Any]) -> None:
        import torch.distributed as dist
        from distributed_runner import _forking

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1,
            "MASTER_PORT": self._store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
        }  # fmt: skip
        environments = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(RANKS)]
        self._workers = [_forking().Process(target=_forked, args=(changes, own)) for own in environments]
        for worker in self._workers:
            worker.start()

    def victims(self) -> dict[str, int]:
        return {f"rank {rank}": each.pid for rank, each in enumerate(self._workers) if each.is_alive()}

    def ended(self) -> bool:
        return not self.victims()

    def end(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()


def _forked(changes: dict[str, Any], environment: dict[str, object]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    with open(Path(changes["output_path"], "messages"), "ab") as messages:
        os.dup2(messages.fileno(), 2)
    work(changes)


# What its folder shows.


def moment_of(root: Path) -> str:
    """Return the moment that the folder of a started run shows."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return "between"
    tracked = max(numbers_in(root / TRACKER), default=0)
    if any(name.startswith(".removed_") for name in names):
        return "deletion"
    for name in names:
        if name.startswith("iter_") and name.endswith(".tmp"):
            return _moment_of_save(root / name)
    if any(iteration > tracked for iteration in named(names)):
        return "named"
    with suppress(FileNotFoundError):
        return "tracked" if time.time() - (root / TRACKER).stat().st_mtime < _FRESH_S else "between"
    return "between"


def _moment_of_save(folder: Path) -> str:
    files = ""
    with suppress(FileNotFoundError):  # it was renamed
        files = " ".join(os.listdir(folder))
    moments = {"checksums.json": "marker", ".metadata": "index", ".distcp": "data", "": "begun"}
    return next(moment for part, moment in moments.items() if part in files)


def numbers_in(file: Path) -> list[int]:
    with suppress(OSError, ValueError):
        return [int(line) for line in file.read_text().split()]
    return []


def named(names: list[str]) -> list[int]:
    numbers = (name.removeprefix("iter_") for name in names if name.startswith("iter_"))
    return [int(number) for number in numbers if number.isdecimal()]


def marked(root: Path) -> list[int]:
    names = os.listdir(root) if root.exists() else []
    return [i for i in named(names) if (root / f"iter_{i:07d}" / "checksums.json").exists()]


def starts(output: Path) -> list[int]:
    return numbers_in(output / "starts")


def _is_whole(folder: Path) -> bool:
    marker = folder / "checksums.json"
    files = json.loads(marker.read_text())["files"]
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path != marker}
    return {name: (len(data), f"{zlib.crc32(data):08x}") for name, data in contents.items()} == {
        name: (saved["length"], saved["crc32"]) for name, saved in files.items()
    }


def outcome(output: Path) -> dict[str, Any]:
    """Return the bytes of the last checkpoint's tensors and of adapter/, and the metrics of all steps."""
    folder = output / "checkpoint" / f"iter_{STEPS:07d}"
    lines = map(json.loads, (output / "log" / "metrics.jsonl").read_text().splitlines())
    metrics = [(line["iteration"], line["loss"], line["grad_norm"]) for line in lines]
    data = {path.name: path.read_bytes() for path in folder.glob("*.distcp")}
    assert _is_whole(folder) and len(data) == 2 * RANKS
    data |= {path.name: path.read_bytes() for path in output.glob("adapter/*")}
    return {"metrics": metrics, "index": (folder / ".metadata").read_bytes(), **data}


# The kills.


class Killing:
    """Kills of several runs, one after the other. Every wrong finding raises AssertionError.

    Args:
        is_async: whether checkpoints are written in the background.
        kind: a key of KINDS.
    """

    def __init__(self, folder: Path, *, is_async: bool, seed: int, kind: str) -> None:
        self._folder, self._how = folder, {"is_async": is_async, "kind": kind}
        self._random = random.Random(seed)
        self.hits: list[Hit] = []
        self._moments: list[str] = []
        """Moments to come, so that each has its turn."""
        self._least: dict[int, int] = {}
        """Number of a start of this run -> least iteration from which it must resume."""

    def run(self, num_kills: int) -> None:
        """Kill `num_kills` times, in several runs. Each run must end like an undisturbed one."""
        expected = self._run("undisturbed", 0)
        number = 0
        while len(self.hits) < num_kills:
            number += 1
            found = self._run(f"run-{number}", num_kills)
            differing = [name for name in expected if found[name] != expected[name]]
            assert not differing, f"run {number}: {differing} differ from the undisturbed run's"

    def _run(self, name: str, num_kills: int) -> dict[str, Any]:
        """Start a run again and again until it has ended; return its outcome."""
        output = self._folder / name
        output.mkdir()
        self._least = {}
        interval, newest = self._random.choice((1, 2)), 0
        while newest < STEPS:
            job = Job(settings(output, interval=interval, **self._how))
            try:
                is_killed = len(self.hits) < num_kills and self._kill(job, output)
                wait_for(job.ended, _END_S if is_killed else _RUN_S)
                assert is_killed or job.ended(), f"{output}: the run hangs"
            finally:
                job.end()
            newest = self._check(output, newest, is_killed=is_killed)
        return outcome(output)

    def _kill(self, job: Job, output: Path) -> bool:
        """Kill one of the processes at one of the moments; return whether the run was still alive."""
        root, started = output / "checkpoint", len(starts(output))
        if not self._moments:
            self._moments = self._random.sample(MOMENTS, len(MOMENTS))
        moment = self._moments.pop()

        def has_begun() -> bool:
            is_starting = moment == "starting" and bool(job.victims())
            return is_starting or job.ended() or len(starts(output)) > started

        assert wait_for(has_begun, _RUN_S), f"{output}: the run does not start"
        time.sleep(self._random.uniform(0, _STEPS_S))
        if not (living := job.victims()):
            return False
        victim = self._random.choice([*living, *[name for name in living if name == "rank 0"] * 2])
        if moment != "starting":
            wait_for(lambda: job.ended() or moment_of(root) == moment, _MOMENT_S)
        seen = max(marked(root), default=0)
        try:
            os.kill(living[victim], signal.SIGKILL)
        except ProcessLookupError:  # the run has ended
            return False
        begun = len(starts(output))
        self._least[begun] = seen
        self.hits.append(Hit(victim, moment_of(root) if begun > started else "starting"))
        return True

    def _check(self, output: Path, newest: int, *, is_killed: bool) -> int:
        """Check the disk while no process lives; return the newest complete checkpoint."""
        begun = starts(output)
        late = {at: least for at, least in self._least.items() if at < len(begun) and begun[at] < least}
        assert not late, f"{output}: starts {late} had more on disk than they went on from, {begun}"
        root = output / "checkpoint"
        whole = max((i for i in marked(root) if _is_whole(root / f"iter_{i:07d}")), default=0)
        least = max([newest, *self._least.values()])
        assert whole >= least, f"{output}: the newest whole checkpoint is {whole}, it was {least}"
        if (output / "adapter").exists():
            load_file(output / "adapter" / "adapter_model.safetensors")
            json.loads((output / "adapter" / "adapter_config.json").read_text())
        assert is_killed or whole == STEPS, f"{output}/messages: not killed, but ended after {whole}"
        self._least = {len(begun): whole}
        return whole


def wait_for(is_so: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds or the time is up; return whether it holds."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--save", choices=("sync", "async"), default="async")
    parser.add_argument("--kind", choices=KINDS, default="plain")
    chosen = parser.parse_args(arguments)
    print(chosen, flush=True)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        is_async = chosen.save == "async"
        killing = Killing(Path(folder), is_async=is_async, seed=chosen.seed, kind=chosen.kind)
        try:
            killing.run(chosen.kills)
        finally:
            for (victim, moment), count in sorted(Counter(killing.hits).items()):
                print(f"{count:4} {victim:9} {moment}", flush=True)
    print(f"{len(killing.hits)} kills: each start had the newest whole checkpoint, each end the same bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
