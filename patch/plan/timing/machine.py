"""The machine that a run is planned for: rates of its devices, links and hosts, and what of them is reached.

All devices and all nodes are taken to be equal. Peaks are those of data sheets, dense; what of them a run
reaches is in `Reached`, the only place of assumed shares: 1.0 where a rate was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patch.config.choices import PRECISIONS, Precision
from patch.device import MachineFacts
from patch.errors import ConfigError, nearest
from patch.numbers import to_float, to_int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Shares of the data sheet's rates that training reaches; the defaults are assumed, for an H100."""

    gemm: float = 0.72
    """Large bf16 products: cuBLAS has 680 to 740 of 989 TFLOP/s on an H100, which its power limits."""
    gemm_fp8: float = 0.62
    """Large 8-bit products: cuBLASLt has 1150 to 1300 of 1979 TFLOP/s on an H100."""
    attention_forward: float = 0.65
    """Long causal sequences: 640 TFLOP/s (FlashAttention-3, arXiv 2407.08608, figure 5)."""
    attention_backward: float = 0.55
    """550 TFLOP/s (the same paper, figure 6), the recomputed scores counted."""
    sustained: float = 0.85
    """Share of the speed of single kernels, in a step: power, and gaps between kernels. By the kernels' rates
    here LLaMA 8B on eight H100s would have 57 % MFU; the best that is published has 45 to 50 %."""
    device_bandwidth: float = 0.85
    """Kernels that read and write large tensors."""
    node_link: float = 0.78
    """Bus bandwidth of large collectives over NVLink (nccl-tests: 350 of 450 GB/s, A100 230 of 300)."""
    network: float = 0.85
    """Large collectives over InfiniBand (nccl-tests: about 42 of 50 GB/s a GPU)."""
    contention: float = 0.05
    """What computation loses to collectives' kernels of the time in which they travel beside it."""
    host_link: float = 0.8
    """Pinned copies over PCIe: 25 of 32 GB/s, 51 of 64."""
    host_bandwidth: float = 0.6
    """The optimizer's kernel on all cores of a node."""
    disk: float = 0.8
    """Chunks of states that are read and written at once."""


MEASURED = Reached(
    **{**dict.fromkeys((field.name for field in dataclasses.fields(Reached)), 1.0), "contention": 0.0}
)
"""Shares of a machine whose rates were measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Equal nodes with equal devices: GPUs, or parts of a CPU that a process computes on."""

    name: str
    """Name of a GPU: as its driver reports it."""
    nodes: int = 1
    devices_per_node: int
    is_gpu: bool = True
    compute_capability: tuple[int, int] = (0, 0)
    device_memory_bytes: int
    """Memory of a GPU, as its driver reports it; 0 where devices compute in the host's memory."""
    fp32_flops: float
    """FLOP/s of a device, dense."""
    bf16_flops: float
    """Peak, of fp16 too."""
    fp8_flops: float = 0.0
    """0: it has no 8-bit products."""
    device_bandwidth: float
    """Bytes/s of a device's memory, reads and writes together."""
    node_link_bandwidth: float
    """Bytes/s of a device to others of its node, in each direction."""
    node_link_latency: float
    """Seconds of a step of a collective between devices of a node."""
    network_bandwidth: float
    """Bytes/s of a device to other nodes, in each direction."""
    network_latency: float
    """Seconds of a step of a collective between nodes."""
    host_memory_bytes: int
    """Memory of a node."""
    host_cores: int
    """Cores of a node."""
    host_bandwidth: float
    """Bytes/s of a node's memory, reads and writes together."""
    host_link_bandwidth: float
    """Bytes/s between a device and its host, in each direction."""
    launch_seconds: float
    """Time of the host, to start a kernel: no operation of a step is faster."""
    disk_bandwidth: float = 2e9
    """Bytes/s of a node's fast disks, reads and writes together; the default is assumed, for one disk."""
    price_per_device_hour: float | None = None
    """In any currency; None: not known."""
    reached: Reached = Reached()

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    def peak_flops(self, precision: Precision) -> float:
        """Dense FLOP/s of a device with this precision; of fp8 without 8-bit products those of bf16."""
        if precision == "fp32":
            return self.fp32_flops
        return (self.fp8_flops if PRECISIONS[precision].has_8_bits else 0.0) or self.bf16_flops

    def gemm_share(self, precision: Precision) -> float:
        """The share of `peak_flops` that large products reach."""
        return self.reached.gemm_fp8 if PRECISIONS[precision].has_8_bits else self.reached.gemm

    @property
    def memory_rate(self) -> float:
        """Bytes/s of a device's memory that kernels of a step reach."""
        return self.device_bandwidth * self.reached.device_bandwidth * self.reached.sustained

    @property
    def facts(self) -> MachineFacts:
        """One node, as the launcher would find it; with Triton, which torch for CUDA brings."""
        return MachineFacts(
            cuda_devices=self.devices_per_node if self.is_gpu else 0,
            cpu_cores=self.host_cores,
            cuda_memory_bytes=self.device_memory_bytes if self.is_gpu else 0,
            host_memory_bytes=self.host_memory_bytes,
            compute_capability=self.compute_capability,
            gpu_nodes=(-1,) * self.devices_per_node if self.is_gpu else (),
            cuda_name=self.name if self.is_gpu else "",
            libraries=frozenset({"triton"} if self.is_gpu else ()),
        )

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON's types, for `from_json`."""
        return {**dataclasses.asdict(self), "compute_capability": list(self.compute_capability)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], origin: str) -> Machine:
        """The machine that `to_json` has written.

        Args:
            values: keys and values; those with a default may be left out.
            origin: where they come from, for messages.

        Raises:
            ConfigError: a key is unknown or missing, or a value has the wrong type or sign.
        """
        given = dict(values)
        shares = mapping(given.pop("reached", {}), f"{origin}: reached")
        reached = Reached(**_checked(shares, Reached, f"{origin}: reached"))
        return cls(**_checked(given, cls, origin), reached=reached)


def mapping(value: object, origin: str) -> Mapping[str, Any]:
    """The value, refused if it is no mapping.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{origin}: got {value!r}, expected keys with values")
    return value


_MOST_DEVICES = 100_000
_MAY_BE_ZERO = {
    "contention", "device_memory_bytes", "fp8_flops", "node_link_latency", "network_latency",
    "launch_seconds",
}  # fmt: skip


def _checked(values: Mapping[str, Any], cls: type, origin: str) -> dict[str, Any]:
    """The values of a dataclass, refused if a key or a value is wrong."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name != "reached"}
    for name in values:
        if name not in fields:
            raise ConfigError(f"{origin}: unknown key {name!r}{nearest(str(name), list(fields))}")
    missing = [n for n, field in fields.items() if n not in values and field.default is dataclasses.MISSING]
    if missing:
        raise ConfigError(f"{origin}: lacks {', '.join(missing)}; or begin with a preset, `like: h100`")
    return {name: _value(name, value, str(fields[name].type), origin) for name, value in values.items()}


def _value(name: str, value: Any, annotation: str, origin: str) -> Any:
    """A value as the field's type."""
    is_whole, may_be_zero = annotation == "int", name in _MAY_BE_ZERO
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(part) is int for part in value)
    # YAML reads 1e-05, which JSON writes, as a text.
    number = (to_int if is_whole else to_float)(str(value))
    is_right = number is not None and number >= 0 and (number > 0 or may_be_zero)
    is_right &= name != "devices_per_node" or (number or 0) <= _MOST_DEVICES
    least = "of at least" if may_be_zero else "above"
    expected, found = {
        "str": ("a text", value if isinstance(value, str) else None),
        "bool": ("true or false", value if isinstance(value, bool) else None),
        "tuple[int, int]": ("two whole numbers", tuple(value) if is_pair else None),
    }.get(annotation, (f"a {'whole ' * is_whole}number {least} 0", number if is_right else None))
    if found is None and (annotation, value) != ("float | None", None):
        raise ConfigError(f"{origin}: {name}: got {value!r}, expected {expected}")
    return found
