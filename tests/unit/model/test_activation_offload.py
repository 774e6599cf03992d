"""AC=offload: no bit changes in any layout; the device's memory falls by what travels; when it travels."""

from typing import Any

import pytest
from distributed_runner import new_job, run_distributed
from packed_runs import PACKED, TalkReader
from small_runs import small_run
from training_runs import bits_of_steps, build_seeded_run

from patch.config.schema import RunConfig
from patch.distributed.zigzag import Zigzag
from patch.memory import SimulatedDevice
from patch.memory.offload_device import Copies, Event
from patch.plan import activation_bytes, activation_peak
from patch.training.evaluation import evaluate
from patch.training.setup import Run
from patch.training.step import train_step

OFFLOAD = {"cpu_offloading": True}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "cpu_offloading_num_layers": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": OFFLOAD,
    "all": OFFLOAD | {"cpu_offloading_num_layers": 4},
    "block": OFFLOAD | BLOCK,
    "selective": OFFLOAD | {"recompute_granularity": "selective"},
}
STATES = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.5}
CASES: dict[int, dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    1: {
        "bf16, one sample": ({"precision": "bf16", "micro_batch_size": 1}, ("block", "selective")),
        "packed": (PACKED, ("default",)),
        "aligned": ({"precision_align": "eager"}, ("all",)),
        "fp16": ({"precision": "fp16"}, ("selective",)),
        "fp8": ({"precision": "fp8"}, ("default",)),
    },
    2: {
        "tp": ({"tp": 2, **STATES}, ("default",)),
        "sp": ({"tp": 2, "sequence_parallel": True, "precision": "bf16"}, ("selective",)),
        "pp": ({"pp": 2, "global_batch_size": 8}, ("default", "block")),
        "vpp": ({"pp": 2, "stage": 1, "global_batch_size": 6}, ("default",)),
        "ring": ({"cp": 2, "cp_comm_type": "p2p", **PACKED}, ("all",)),
        "all-to-all": ({"cp": 2, "cp_comm_type": "a2a"}, ("default",)),
        "zero-2": ({"dp": 2, "data_parallel_sharding": "gradients", **STATES}, ("block",)),
    },
}
"""By number of processes: what changes, and the settings to compare with no offload."""
DEEP = {
    "num_layers": 6, "global_batch_size": 2, "max_padding_length": 64, "seq_length": 64, **STATES,
    "optimizer_offload_fraction": 0.0, "simulated_device_memory": 10**9,
}  # fmt: skip
MEASURED: dict[str, dict[str, Any]] = {
    "fp32": DEEP,
    "bf16": DEEP | {"precision": "bf16", "micro_batch_size": 1, "global_batch_size": 1},
    "selective": DEEP | {"precision": "bf16", "recompute_granularity": "selective"},
}


def run_of(changes: dict[str, Any]) -> RunConfig:
    return small_run(**{"train_iters": 2, **changes})


def bits(config: RunConfig) -> dict[str, Any]:
    """Of two steps and an evaluation; and the bytes that each of them sent to the host."""
    run = build_seeded_run(config)
    if config.data.packing:
        reader = TalkReader(config, run.groups.dp.rank(), Zigzag.of(run.groups.cp))
        run.train_reader, run.valid_readers = reader, {"valid": reader}  # type: ignore[assignment]
    steps, sent = bits_of_steps(run), sent_by(run)
    found = {"bits": [*steps, evaluate(run)["valid_loss"]], "sent": [sent, sent_by(run)]}
    new_job()
    return found


def sent_by(run: Run) -> int:
    return run.activation_offload.pop_bytes() if run.activation_offload else 0


def compare(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    found = {}
    for case, (changes, settings) in CASES[world_size].items():
        found[case] = {name: bits(run_of(changes | SETTINGS[name])) for name in settings}
        found[case]["none"] = bits(run_of(changes))
    return found


class LoggingDevice(SimulatedDevice):
    """Notes the copies back."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(10**9)
        self._log = log

    def copy_to_device(self, copies: Copies, after: Event | None = None) -> Event:
        self._log.append("copies back")
        return super().copy_to_device(copies, after)

    def copy_to_host(self, copies: Copies, after: Event) -> Event:
        event = super().copy_to_host(copies, after)
        self._log.clear()  # the simulated device copies both ways alike
        return event


def order_of_backward() -> list[str]:
    """Of one micro-batch: copies back, and the layers' gradients."""
    run = build_seeded_run(run_of(OFFLOAD | {"global_batch_size": 2}))
    log: list[str] = []
    assert run.activation_offload is not None
    run.activation_offload.device = LoggingDevice(log)
    for number, layer in enumerate(run.stages[0].decoder.layers):
        # The last and the first weight that a layer's forward reads.
        for word, module in (("begins", layer.mlp.linear_fc2), ("ends", layer.input_layernorm)):
            module.weight.register_hook(lambda gradient, note=f"{number} {word}": log.append(note))
    train_step(run, 0)
    new_job()
    return log


def offloading(changes: dict[str, Any], number: int) -> RunConfig:
    return run_of(changes | {"cpu_offloading": number > 0, "cpu_offloading_num_layers": number or None})


def measure(changes: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """By number of offloaded layers: the peak of activations on a simulated device, and the bytes sent."""
    found = {}
    for number in (0, 4, 5):
        config = offloading(changes, number)
        run = build_seeded_run(config)
        device = run.optimizer.offload_device
        assert isinstance(device, SimulatedDevice)
        device.pop_peak_bytes()
        held = device.allocated_bytes
        train_step(run, 0)
        found[number] = device.pop_peak_bytes() - held, sent_by(run)
        new_job()
    return found


def run_alone(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "cases": compare(rank, world_size),
        "order": order_of_backward(),
        "measured": {name: measure(changes) for name, changes in MEASURED.items()},
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_distributed(run_alone, 1)[0]


@pytest.fixture(scope="module")
def found(alone: dict) -> dict[int, list[dict[str, Any]]]:
    return {1: [alone["cases"]], 2: run_distributed(compare, 2)}


@pytest.mark.parametrize(
    ("size", "case", "setting"),
    [(n, case, name) for n, cases in CASES.items() for case, (_, names) in cases.items() for name in names],
)
def test_offload_changes_no_bit(found: dict, size: int, case: str, setting: str) -> None:
    for rank in found[size]:
        assert rank[case][setting]["bits"] == rank[case]["none"]["bits"]
        in_steps, in_evaluation = rank[case][setting]["sent"]
        assert in_steps > 0 and in_evaluation == 0


def test_a_stage_that_others_feed_keeps_its_input(found: dict) -> None:
    """Its schedule has it until backward anyway."""
    first, second = (rank["pp"]["default"]["sent"][0] for rank in found[2])
    one_input = 2 * 32 * 64 * 4
    assert first - second == 2 * 4 * one_input  # in two steps of four micro-batches


def test_copies_back_start_when_the_layer_behind_begins(alone: dict) -> None:
    assert alone["order"] == [
        "copies back", "3 begins", "3 ends", "copies back", "2 begins", "2 ends",
        "copies back", "1 begins", "1 ends", "0 begins", "0 ends",
    ]  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_the_devices_memory_falls_by_what_travels(alone: dict, name: str) -> None:
    """While two layers stay: two of the others are there at a time. Upstream holds the first one's input.

    With recomputation the peak is elsewhere in a layer's backward, where some of that input is not counted.
    """
    measured, config = alone["measured"][name], run_of(MEASURED[name])
    peak = {number: found[0] for number, found in measured.items()}
    one_input = 64 * 2 * 64 * 4
    assert measured[4][1] - one_input <= peak[0] - peak[4] <= measured[4][1]
    assert peak[4] >= peak[5] > peak[4] - measured[4][1] / 4
    planned = activation_bytes(
        config.model, config.parallel, config.training, length=config.sample_length, cuda=False
    )[config.recompute]
    assert measured[4][1] == pytest.approx(4 * planned, rel=0.06)  # log-sum-exps and the like stay


@pytest.mark.parametrize("number", [0, 4])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_plan_says_what_stays_on_the_device(alone: dict, name: str, number: int) -> None:
    """While as many layers stay as have copies on their way, which take no time here."""
    planned = activation_peak(offloading(MEASURED[name], number), 0, cuda=False)
    assert planned.layers + planned.ends == pytest.approx(alone["measured"][name][number][0], rel=0.1)
