"""The machine that a run is planned for: rates of its devices, links and hosts, and what of them is reached.

All devices and all nodes are taken to be equal. Peaks are those of data sheets, dense; what of them a run
reaches is in `Reached`, the only place of assumed shares: 1.0 where a rate was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patch.config import RunConfig
from patch.config.choices import PRECISIONS, Precision
from patch.device import MachineFacts
from patch.errors import ConfigError, nearest
from patch.numbers import to_float, to_int
from patch.plan.flops import peak_flops
from patch.storage.text_files import parse_yaml, read_text


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
    """Share of its speed that computation loses to collectives that run beside it."""
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


_GIB, _TB = 2**30, 10**12

# Steps of NCCL's rings with its protocol for large messages: 3.6 us over NVLink, 14 us over a network (its
# tables of latencies, nccl/src/tuner). A kernel costs the host 10 us: 3,900 launches of 32 layers, 40 ms.
_NCCL: dict[str, Any] = {"node_link_latency": 3.6e-6, "network_latency": 14e-6, "launch_seconds": 10e-6}

# NVIDIA H100 SXM (data sheet of the H100): bf16 989.5 dense, fp8 twice that, fp32 67 TFLOP/s, 3.35 TB/s,
# NVLink 900 GB/s and PCIe 5.0 128 GB/s, both for both directions. DGX H100 (its data sheet): eight ports of
# 400 Gbit/s for eight GPUs, 2 TB, two Xeon 8480C of 56 cores, eight channels of DDR5-4800 each, eight NVMe
# disks of about 5 GB/s (assumed). 79.1 GiB is what torch reports.
_H100 = Machine(
    name="NVIDIA H100 80GB HBM3", devices_per_node=8, compute_capability=(9, 0),
    device_memory_bytes=int(79.1 * _GIB), fp32_flops=67e12, bf16_flops=989.5e12, fp8_flops=1979e12,
    device_bandwidth=3.35e12, node_link_bandwidth=450e9, network_bandwidth=50e9, host_memory_bytes=2 * _TB,
    host_cores=112, host_bandwidth=614e9, host_link_bandwidth=64e9, disk_bandwidth=40e9, **_NCCL,
)  # fmt: skip

PRESETS: dict[str, Machine] = {
    # NVIDIA A100 80GB SXM (data sheet): bf16 312 dense, fp32 19.5 TFLOP/s, 2.039 TB/s, NVLink 600 GB/s and
    # PCIe 4.0 64 GB/s, both for both directions. DGX A100 (its data sheet): eight ports of 200 Gbit/s, 2 TB,
    # two EPYC 7742 of 64 cores, eight channels of DDR4-3200 each. Power does not limit it: cuBLAS reaches
    # 255 TFLOP/s, FlashAttention-2 200 forward and 170 backward (arXiv 2307.08691, figures 5 and 6).
    "a100": Machine(
        name="NVIDIA A100-SXM4-80GB", devices_per_node=8, compute_capability=(8, 0),
        device_memory_bytes=int(79.15 * _GIB), fp32_flops=19.5e12, bf16_flops=312e12,
        device_bandwidth=2.039e12, node_link_bandwidth=300e9, network_bandwidth=25e9,
        host_memory_bytes=2 * _TB, host_cores=128, host_bandwidth=409e9, host_link_bandwidth=32e9,
        disk_bandwidth=20e9,
        reached=Reached(gemm=0.82, attention_forward=0.65, attention_backward=0.55, sustained=1.0), **_NCCL,
    ),
    "h100": _H100,
    # NVIDIA H200 SXM (data sheet): an H100 with 141 GB at 4.8 TB/s. DGX H200: the node of the DGX H100.
    "h200": dataclasses.replace(
        _H100, name="NVIDIA H200", device_memory_bytes=int(139.8 * _GIB), device_bandwidth=4.8e12
    ),
    # An eighth of a DGX B200 (data sheet): bf16 2,250 and fp8 4,500 dense, fp32 75 TFLOP/s, 8 TB/s, NVLink
    # 1.8 TB/s for both directions, eight ports of 400 Gbit/s, 2 TB, two Xeon 8570 of 56 cores, DDR5-5600.
    "b200": dataclasses.replace(
        _H100, name="NVIDIA B200", compute_capability=(10, 0), device_memory_bytes=int(178.3 * _GIB),
        fp32_flops=75e12, bf16_flops=2250e12, fp8_flops=4500e12, device_bandwidth=8e12,
        node_link_bandwidth=900e9, host_bandwidth=716e9,
    ),
}  # fmt: skip
"""Nodes of eight GPUs by the name of the GPU."""


_CORE_FLOPS, _CORE_BANDWIDTH, _GLOO_LATENCY, _LAUNCH = 80e9, 10e9, 100e-6, 5e-6
"""Rates of a core of a server's CPU: fp32 products and copies, assumed; `llama-patch doctor` measures
them."""


def preset(name: str, origin: str) -> Machine:
    """A preset by its name, in any case.

    Raises:
        ConfigError: there is none of this name.
    """
    if name.lower() not in PRESETS:
        hint = nearest(name.lower(), list(PRESETS))
        raise ConfigError(
            f"{origin}: got {name!r}{hint}, expected {', '.join(PRESETS)}, here, or a file of "
            "llama-patch doctor"
        )
    return PRESETS[name.lower()]


def this_machine(facts: MachineFacts, processes: int) -> Machine:
    """The machine of this program: a preset with its number of GPUs and memory, or its CPU.

    Args:
        facts: what was found.
        processes: that share the CPU, where there is no GPU.

    Raises:
        ConfigError: no preset is like its GPU.
    """
    if facts.cuda_devices:
        return _like_a_preset(facts)
    cores = facts.cpu_cores / processes
    bandwidth = cores * _CORE_BANDWIDTH
    return Machine(
        name="this machine's CPU", devices_per_node=processes, is_gpu=False, device_memory_bytes=0,
        fp32_flops=cores * _CORE_FLOPS, bf16_flops=cores * _CORE_FLOPS, device_bandwidth=bandwidth,
        node_link_bandwidth=bandwidth / 4, node_link_latency=_GLOO_LATENCY, network_bandwidth=1e9,
        network_latency=_GLOO_LATENCY, host_memory_bytes=max(1, facts.host_memory_bytes),
        host_cores=facts.cpu_cores, host_bandwidth=bandwidth * processes, host_link_bandwidth=bandwidth,
        launch_seconds=_LAUNCH, reached=MEASURED,
    )  # fmt: skip


def machines_of(config: RunConfig, facts: MachineFacts) -> Machine | None:
    """The machines of a run that starts on this one, all like it.
    Returns:
        None if no preset is like its GPU.
    """
    parallel = config.parallel
    try:
        machine = this_machine(facts, parallel.nproc_per_node)
    except ConfigError:
        return None
    return dataclasses.replace(machine, nodes=parallel.nnodes, devices_per_node=parallel.nproc_per_node)


def _like_a_preset(facts: MachineFacts) -> Machine:
    words = facts.cuda_name.upper().replace("-", " ").split()
    found = [
        machine
        for name, machine in PRESETS.items()
        if name.upper() in words and machine.bf16_flops == peak_flops(facts.cuda_name)
    ]
    if not found:
        raise ConfigError(
            f"--machine here: got a {facts.cuda_name}, whose rates are not known; expected one of "
            f"{', '.join(PRESETS)}, or a file of llama-patch doctor"
        )
    return dataclasses.replace(
        found[0],
        name=facts.cuda_name,
        devices_per_node=facts.cuda_devices,
        device_memory_bytes=facts.cuda_memory_bytes,
        host_memory_bytes=facts.host_memory_bytes or found[0].host_memory_bytes,
        host_cores=facts.cpu_cores,
    )


def read_machine(file: str) -> Machine:
    """A machine from a YAML or JSON file: its fields, or a report of the doctor with them at `machine`.

    A file may begin with a preset, `like: h100`, and change some of its fields.

    Raises:
        ConfigError: it cannot be read, or a field is wrong.
    """
    origin = f"--machine {file}"
    try:
        values = parse_yaml(read_text(Path(file)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}: cannot be read: {error}") from error
    values = dict(mapping(values, origin))
    values = dict(mapping(values.get("machine", values), origin))
    if (like := values.pop("like", None)) is not None:
        base = preset(str(like), origin).to_json()
        reached = {**base["reached"], **mapping(values.get("reached", {}), f"{origin}: reached")}
        values = {**base, **values, "reached": reached}
    return Machine.from_json(values, origin)
