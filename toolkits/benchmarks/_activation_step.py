"""The activation part of `parallel`: steps that keep, offload or recompute activations, in one process.

The device is a simulated one whose copies travel beside compute, at a chosen speed each way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any

import torch

from patch.config.schema import RunConfig
from patch.device import same_device
from patch.distributed.groups import initialize
from patch.memory import SimulatedDevice
from patch.memory.offload_device import Copies, Event
from toolkits.benchmarks._contenders import OurTrainer, SameBatches, llama, run_config
from toolkits.benchmarks._measure import ratio
from toolkits.benchmarks._report import spread, table
from toolkits.benchmarks._runner import CPU, job

KEEP, RECOMPUTE = "keep all", "recompute all layers"
_LAYERS, _LENGTH = 8, 1024
_FORWARD_SHARE = 1 / 3
"""Share of the forward in forward and backward."""
_PLENTY = 10**15
"""Bytes of the device: a budget that counts, and never runs out."""


def offload(share: float) -> str:
    """The name of the contender whose copy of a layer takes `share` of the layer's forward."""
    return f"offload, copy {share:g} of forward"


class _Copied:
    """The event at the end of copies."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def synchronize(self) -> None:
        """See Event."""
        self._future.result()

    def wait(self) -> None:
        """See Event; the host is the stream of a CPU."""
        self._future.result()


class PacedDevice:
    """A simulated device whose copies go beside compute: one queue each way, at a speed.

    Args:
        device: does everything else.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        self.bytes_per_s = float("inf")
        self._device = device
        self._to_host, self._to_device = (ThreadPoolExecutor(1, initializer=same_device()) for _ in range(2))

    def copy_to_host(self, copies: Copies, after: Event) -> Event:
        """See OffloadDevice; on a CPU `after` is over."""
        return _Copied(self._to_host.submit(self._copy, copies))

    def copy_to_device(self, copies: Copies, after: Event | None = None) -> Event:
        """See OffloadDevice."""
        return _Copied(self._to_device.submit(self._copy, copies))

    def close(self) -> None:
        """End the threads."""
        for queue in (self._to_host, self._to_device):
            queue.shutdown()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def _copy(self, copies: Copies) -> None:
        end = time.perf_counter() + sum(source.nbytes for source, _ in copies) / self.bytes_per_s
        for source, target in copies:
            target.copy_(source)
        time.sleep(max(end - time.perf_counter(), 0.0))


def activation_run(**training: Any) -> RunConfig:
    """The run that all contenders train."""
    model = llama(
        _LENGTH, num_layers=_LAYERS, hidden_size=256, ffn_hidden_size=704, num_attention_heads=4,
        num_query_groups=2, kv_channels=64, vocab_size=512,
    )  # fmt: skip
    return run_config(model, **training)


class Steps:
    """The steps of one contender."""

    def __init__(self, groups: Any, **training: Any) -> None:
        config = activation_run(**training)
        self._trainer = OurTrainer(config, groups, torch.device("cpu"), SameBatches(config, 0))
        self._simulated = SimulatedDevice(_PLENTY)
        self.device: PacedDevice | None = None
        offload = self._trainer.run.activation_offload
        if offload is not None:
            offload.device = self.device = PacedDevice(self._simulated)

    def time(self) -> dict[str, float]:
        """Figures of a step: seconds, peak bytes of the device, loss; bytes sent to the host, seconds of
        waiting."""
        self._simulated.pop_peak_bytes()
        begin = time.perf_counter()
        with self._simulated.count_activations():
            loss = self._trainer.step()
        seconds = time.perf_counter() - begin
        found = {"seconds": seconds, "peak_bytes": self._simulated.pop_peak_bytes(), "loss": loss}
        offload = self._trainer.run.activation_offload
        if offload is None:
            return found
        return found | {"sent_bytes": offload.pop_bytes(), "waited_s": offload.pop_wait_ms() / 1e3}


def measure(shares: Sequence[float], rounds: int) -> dict[str, list[dict[str, float]]]:
    """What `Steps.time` found for each contender in each round.

    Args:
        shares: speeds: the time of a layer's copy, as a share of the layer's forward.
        rounds: how often each contender takes a step.
    """
    with job(CPU):
        groups = initialize(activation_run(), CPU)
        keep = Steps(groups)
        steps = {KEEP: keep, RECOMPUTE: Steps(groups, recompute_granularity="full")}
        offloading = Steps(groups, cpu_offloading=True)
        assert offloading.device is not None
        speed = _layer_bytes_per_s(keep, offloading)
        found: dict[str, list[dict[str, float]]] = {}
        for index in range(rounds):
            for name, one in steps.items():
                found.setdefault(name, []).append(one.time())
            for share in shares if index % 2 else reversed(shares):
                offloading.device.bytes_per_s = speed / share
                found.setdefault(offload(share), []).append(offloading.time())
        offloading.device.close()
    return found


def _layer_bytes_per_s(keep: Steps, offloading: Steps) -> float:
    """The speed at which the copy of a layer takes as long as its forward; both contenders get warm."""
    seconds = median(keep.time()["seconds"] for _ in range(3))
    offloading.time()
    sent = offloading.time()["sent_bytes"] / (_LAYERS - 1)
    return sent / (seconds * _FORWARD_SHARE / _LAYERS)


def rounds_table(rounds: dict[str, list[dict[str, float]]]) -> str:
    """A row for each way; see `measure`."""
    rows = []
    seconds = {name: [one["seconds"] for one in found] for name, found in rounds.items()}
    for name, found in rounds.items():
        middle = {key: median(one[key] for one in found) for key in found[0]}
        cells = [f"{ratio(seconds[name], seconds[KEEP]):.3f}", f"{middle['peak_bytes'] / 2**20:.1f}"]
        cells += [f"{middle.get('sent_bytes', 0) / 2**20:.1f}", f"{middle.get('waited_s', 0):.3f}"]
        rows.append([name, *spread(seconds[name]), *cells])
    return table(("", "median s", "quartiles", "/ keep all", "peak MiB", "to host MiB", "waited s"), rows)
