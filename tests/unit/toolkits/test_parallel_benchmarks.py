"""What benchmarks of a CPU measure is what their figures say; figures of known rounds."""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import run_distributed

from toolkits.benchmarks import checkpoint, overlap
from toolkits.benchmarks.__main__ import main
from toolkits.benchmarks._report import COMMUNICATION, COMPUTE, NotRunError, Rounds
from toolkits.benchmarks._rig import connected, enter
from toolkits.benchmarks.adam_cpu import Tensors, contenders

pytestmark = pytest.mark.long

WAIT_S = 0.03

_RECEIVE = """
import socket
server = socket.create_server(("192.0.2.3", 9000))
server.settimeout(20)
print("ready", flush=True)
print(server.accept()[0].recv(6).decode())
"""
_SEND = 'import socket; socket.create_connection(("192.0.2.3", 9000), 20).sendall(b"got it")'


def run_waiting(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Two steps of each contender of `overlap`, whose layers wait."""
    from training_runs import CPU

    from patch import compat
    from patch.distributed.groups import initialize
    from toolkits.benchmarks._contenders import OurTrainer, prepare_cpu

    compat.apply(cuda=False)
    prepare_cpu()
    overlap.WAIT_S = WAIT_S
    overlap._SHAPE |= {"num_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    config = overlap.sharded_run(world_size, 2)
    by_name = overlap.build_contenders(config, initialize(config, CPU), CPU.device)
    found = {}
    for name, one in by_name.items():
        one.step()
        begin = time.perf_counter()
        loss = one.step()
        one.settle()
        seconds = time.perf_counter() - begin
        if isinstance(one, OurTrainer):
            (model,), optimizer = one.run.stages, one.run.optimizer
            buckets, whole = optimizer.grad_buffer.buckets, optimizer.full_weights()
        else:
            model, buckets, whole = one.model, one.model.bucket_groups, nullcontext()
        with whole:
            weights = [weight.detach().float().clone().numpy() for weight in model.parameters()]
        found[name] = {"seconds": seconds, "loss": loss, "weights": weights, "buckets": len(buckets)}
    overlap.communicate(by_name["ours: optimizer"].run.optimizer)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_distributed(run_waiting, 2)


def test_contenders_of_overlap_wait_and_come_to_the_same_weights(found: list) -> None:
    ours = found[0]["ours: none"]
    for rank in found:
        for name, one in rank.items():
            assert one["seconds"] >= 1.9 * WAIT_S  # two micro-batches
            assert one["buckets"] > 1 or name == "upstream: no overlap"
            is_same = all(map(np.array_equal, one["weights"], ours["weights"]))
            if name == COMPUTE:  # with the gradients of one rank, and its own weights alone
                assert not is_same
                continue
            assert one["loss"] == pytest.approx(ours["loss"], rel=1e-3)
            # Upstream averages where we sum, so its gradients differ in their last bits.
            assert is_same or not name.startswith("ours")
            for own, other in zip(one["weights"], ours["weights"], strict=True):
                np.testing.assert_allclose(own, other, rtol=0.02, atol=1e-3)


def test_each_rank_has_a_cable_to_the_switch_or_the_reason_is_said() -> None:
    try:
        with connected(3) as names:
            files = [Path("/run/netns", name) for name in names]
            receive, send = ([sys.executable, "-S", "-c", program] for program in (_RECEIVE, _SEND))
            enter_2, enter_0 = (partial(enter, names[end]) for end in (2, 0))
            server = subprocess.Popen(receive, stdout=subprocess.PIPE, text=True, preexec_fn=enter_2)
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            subprocess.run(send, check=True, timeout=20, preexec_fn=enter_0)
            assert server.communicate(timeout=20)[0] == "got it\n"
    except NotRunError as reason:
        pytest.skip(str(reason))
    assert not any(file.exists() for file in files)


def test_the_best_possible_ratio_is_the_bound_over_upstream() -> None:
    seconds = {
        COMPUTE: 1.0, COMMUNICATION: 0.5, "ours: none": 1.05, "ours: optimizer": 1.02,
        overlap.ALL_TO_ALL: 1.25, "upstream: gradients": 2.0,
    }  # fmt: skip
    figures = Rounds({name: [one, 2 * one] for name, one in seconds.items()})
    assert figures.best("upstream") == overlap.ALL_TO_ALL
    row = next(line for line in figures.table("", "ours: none").splitlines() if "all-to-all" in line)
    assert row.replace(" ", "").split("|")[2:6] == ["1.875", "1.562-2.188", "1.190", "1.250"]
    aims = overlap.aims_of(2, {"1": figures, "16": figures})
    found = [(round(aim.measured, 3), aim.aim) for aim in aims]
    assert found == [(0.816, 0.90), (1.02, 1.05), (0.816, 0.97)]
    assert "(perfect overlap: 0.800)" in aims[0].name


def test_contenders_of_adam_do_the_same_update() -> None:
    after = {}
    for title in contenders(Tensors(64))[0]:
        tensors = Tensors(5056)
        before, case = tensors.weight.clone(), title.split(":")[0]
        contenders(tensors)[0][title].update()
        after[title] = tensors.weight if case == "bf16" else tensors.master
        assert case != "bf16" or not torch.equal(tensors.weight, before), title
        if case != "copy":
            torch.testing.assert_close(after[title], after[f"{case}: ours"], rtol=2**-7, atol=1e-7)


def test_a_benchmark_reports_aims_machine_and_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_COUNT": 2, "_ROWS": 16, "_STEP_S": 0.1}.items():  # else it writes 13 GB
        monkeypatch.setattr(checkpoint, name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["checkpoint", "--quick", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [sorted(aim) for aim in report["aims"]] == [["aim", "measured", "met", "name"]] * 3
    assert report["versions"]["torch"] and report["machine"]["cores"]
    assert {len(seconds) for seconds in report["rounds"].values()} == {3}
    said = capsys.readouterr().out
    assert "| plain copy " in said
    assert sum(line.startswith(("met   ", "MISSED")) for line in said.splitlines()) == 3
