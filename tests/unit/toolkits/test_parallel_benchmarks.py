"""What benchmarks of a CPU measure is what their figures say; figures of known rounds."""

import json
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import new_job, rejoin, run_distributed

from toolkits.benchmarks import _rig, checkpoint, overlap, parallel
from toolkits.benchmarks._measure import COMMUNICATION, COMPUTE, Rounds
from toolkits.benchmarks._rig import CableError, Cables
from toolkits.benchmarks.adam_cpu import Tensors, contenders

WAIT_S = 0.03

_RECEIVE = """
import socket
server = socket.create_server(("192.0.2.3", 9000))
server.settimeout(20)
print("ready", flush=True)
print(server.accept()[0].recv(6).decode())
"""
_SEND = 'import socket; socket.create_connection(("192.0.2.3", 9000), 20).sendall(b"got it")'


def run_parts(rank: int, world_size: int) -> dict[str, Any]:
    """Two ranks of each part."""
    from training_runs import CPU

    from patch import compat
    from patch.distributed.groups import initialize, shutdown
    from toolkits.benchmarks import long_context

    compat.apply(cuda=False)
    config = parallel.pipeline_run(world_size, 2, 4)
    waits, work = [], _rig._Device.work
    _rig._Device.work = lambda self, seconds: [waits.append(seconds), work(self, seconds)][1]
    step_s, layers_s = parallel.time_schedule(config, initialize(config, CPU), WAIT_S)()
    found: dict[str, Any] = {"step": step_s, "layers": layers_s, "waits": sorted(waits)}
    new_job()
    parallel._TOKENS = 64
    ring = parallel.build_contenders(initialize(parallel.context_run("p2p"), CPU))
    found["losses"] = {name: step() for name, step in ring.items() if name != COMMUNICATION}
    found["messages"] = [message.numel() for message in ring[COMMUNICATION]()]
    new_job()
    configs = [long_context.ring_run(tokens, world_size) for tokens in (256, 512)]
    groups = initialize(configs[0], CPU)
    found["peaks"] = [long_context.step_peak_bytes(one, groups) for one in configs]
    torch.distributed.barrier()  # before anybody leaves the job
    shutdown()
    if rank == 0:
        parallel._LENGTH = 64
        found["activations"] = parallel.measure_activations([0.5, 1.0], rounds=2)
    rejoin()
    found["overlap"] = run_waiting(world_size)
    return found


def run_waiting(world_size: int) -> dict[str, dict[str, Any]]:
    """Two steps of each contender of `overlap` whose layers wait; last, as it changes upstream's modules."""
    from training_runs import CPU

    from patch.distributed.groups import initialize
    from toolkits.benchmarks._contenders import OurTrainer
    from toolkits.benchmarks._upstream import prepare_cpu

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
    return run_distributed(run_parts, 2)


def test_layers_of_the_pipeline_wait(found: list) -> None:
    """Interleaved, two stages of one layer, four micro-batches: the last process is idle for half of one.

    A busy machine makes waits longer, never shorter; but a wait that ends late makes the next one shorter.
    """
    forward = WAIT_S / 2 / 3
    for rank in found:
        assert rank["waits"] == pytest.approx([forward] * 8 + [2 * forward] * 8)
        assert rank["layers"] > 3.9 * WAIT_S and rank["step"] > 4.4 * WAIT_S


def test_contenders_of_overlap_wait_and_come_to_the_same_weights(found: list) -> None:
    ours = found[0]["overlap"]["ours: none"]
    for rank in found:
        for name, one in rank["overlap"].items():
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
        with Cables(3) as cables:
            files = [Path("/run/netns", name) for name in cables.namespaces]
            receive, send = (
                cables.inside(end, [sys.executable, "-S", "-c", program])
                for end, program in ((2, _RECEIVE), (0, _SEND))
            )
            server = subprocess.Popen(receive, stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            subprocess.run(send, check=True, timeout=20)
            assert server.communicate(timeout=20)[0] == "got it\n"
    except CableError as reason:
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


def test_contenders_of_context_parallelism_compute_one_loss_and_their_messages_are_the_rings(
    found: list,
) -> None:
    losses = [rank["losses"] for rank in found]
    whole = losses[0][parallel.WHOLE]
    for name in (parallel.RING, parallel.WAITING_RING, parallel.ALL_TO_ALL):
        assert sum(one[name] for one in losses) == pytest.approx(whole, rel=1e-6)
    model = parallel.context_run("p2p").model
    piece = 2 * model.num_query_groups * model.kv_channels * 32
    # In each layer a piece travels in forward, and in backward with its gradient.
    assert [sum(rank["messages"]) for rank in found] == [model.num_layers * 3 * piece] * 2


def test_memory_is_that_of_the_tokens(found: list) -> None:
    short, long = found[0]["peaks"]
    assert found[1]["peaks"] == [short, long]
    assert long == pytest.approx(2 * short, rel=0.1)


def test_activations_are_where_the_contenders_names_say(found: list) -> None:
    rounds = found[0]["activations"]
    names = [parallel.KEEP, parallel.RECOMPUTE, parallel.offload(0.5), parallel.offload(1.0)]
    assert [*rounds] == names
    keep, recompute, fast, slow = (rounds[name][0] for name in names)
    assert recompute["peak_bytes"] < fast["peak_bytes"] == slow["peak_bytes"] < keep["peak_bytes"] / 2
    assert fast["sent_bytes"] == slow["sent_bytes"] > keep["peak_bytes"] / 2
    assert len(parallel.activation_table(rounds).splitlines()) == 6


def test_the_bubble_of_two_waits_has_no_constant() -> None:
    latency, bubble = 0.05, 0.25
    steps = {wait_s: [(4 * wait_s * (1 + bubble) + latency, 4 * wait_s)] * 3 for wait_s in (0.25, 0.75)}
    one = parallel.Bubble(2, 1, 4, steps)
    assert one.formula == bubble and one.without_constant == pytest.approx(bubble)
    assert one.at(0.25) == pytest.approx(0.3)
    assert parallel.bubble_table([one]).splitlines()[2].split()[1:8:2] == ["2", "1", "4", "0.2500"]


def test_contenders_of_adam_do_the_same_update() -> None:
    after = {}
    for index, one in enumerate(contenders(Tensors(64))[0]):
        tensors = Tensors(5056)
        before = tensors.weight.clone()
        contenders(tensors)[0][index].update()
        after[one.title] = tensors.weight if one.case == "bf16" else tensors.master
        assert one.case != "bf16" or not torch.equal(tensors.weight, before), one.title
        if one.case != "copy":
            torch.testing.assert_close(after[one.title], after[f"{one.case}: ours"], rtol=2**-7, atol=1e-7)


def test_a_benchmark_reports_aims_machine_versions_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_COUNT": 2, "_ROWS": 16, "_STEP_S": 0.1}.items():  # else it writes 13 GB
        monkeypatch.setattr(checkpoint, name, value)
    files = ["--json", str(tmp_path / "report.json"), "--plot", str(tmp_path / "plot.png")]
    assert checkpoint.main(["--quick", "--folder", str(tmp_path), *files]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [sorted(aim) for aim in report["aims"]] == [["aim", "measured", "met", "name"]] * 3
    assert report["versions"]["torch"] and report["machine"]["cores"]
    assert {len(seconds) for seconds in report["rounds"].values()} == {3}
    said = capsys.readouterr().out
    assert "| plain copy " in said and (tmp_path / "plot.png").stat().st_size > 1000
    assert sum(line.startswith(("met   ", "MISSED")) for line in said.splitlines()) == 3
