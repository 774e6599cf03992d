"""The machine that a run is planned for: rates of devices, links and hosts, and the shares reached.

All devices and nodes are taken to be equal. Peaks are dense, from data sheets. `Efficiency` is the only place
of assumed shares of the peaks; they are 1.0 for measured rates.
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
from patch.plan.flops import peak_flops
from patch.storage.text_files import parse_yaml, read_text
from patch.text import to_float, to_int


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of the data sheet's rates that training reaches; the defaults are assumed, for an H100."""

    gemm: float = 0.72
    """Large bf16 products: cuBLAS has 680 to 740 of 989 TFLOP/s on an H100, limited by power."""
    gemm_fp8: float = 0.62
    """Large fp8 products: cuBLASLt has 1150 to 1300 of 1979 TFLOP/s on an H100."""
    attention_forward: float = 0.65
    """Long causal sequences: 640 TFLOP/s (FlashAttention-3, arXiv 2407.08608, figure 5)."""
    attention_backward: float = 0.55
    """550 TFLOP/s (the same paper, figure 6), recomputed scores included."""
    sustained: float = 0.85
    """Share of a GPU's speed that it keeps in a run on several nodes, which waits for the slowest of them."""
    device_bandwidth: float = 0.88
    """Kernels that read and write large tensors: the update reaches 3.0 of 3.35 TB/s on an H100."""
    node_link: float = 0.78
    """Bus bandwidth of large collectives over NVLink (nccl-tests: 350 of 450 GB/s, A100 230 of 300)."""
    network: float = 0.85
    """Large collectives over InfiniBand (nccl-tests: about 42 of 50 GB/s a GPU)."""
    contention: float = 0.05
    """Share of its speed that compute loses to concurrent collectives."""
    host_link: float = 0.8
    """Pinned copies over PCIe: 25 of 32 GB/s, 51 of 64."""
    host_bandwidth: float = 0.6
    """The optimizer's kernel on all cores of a node."""
    disk: float = 0.8
    """Concurrent reads and writes of chunks of states."""


MEASURED = Efficiency(
    **{**dict.fromkeys((field.name for field in dataclasses.fields(Efficiency)), 1.0), "contention": 0.0}
)
"""Shares of a machine with measured rates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Equal nodes with equal devices: GPUs, or the parts of a CPU that processes compute on."""

    name: str
    nodes: int = 1
    devices_per_node: int
    is_gpu: bool = True
    compute_capability: tuple[int, int] = (0, 0)
    device_memory_bytes: int
    """Memory of a GPU in its driver, or 0 if devices compute in host memory."""
    fp32_flops: float
    """Dense FLOP/s of a device."""
    bf16_flops: float
    """Also of fp16."""
    fp8_flops: float = 0.0
    """0 without fp8 products."""
    device_bandwidth: float
    """Bytes/s of a device's memory, reads and writes together."""
    node_link_bandwidth: float
    """Bytes/s between a device and others of its node, in each direction."""
    node_link_latency: float
    """Seconds of a step of a collective between devices of a node."""
    network_bandwidth: float
    """Bytes/s between a device and other nodes, in each direction."""
    network_latency: float
    """Seconds of a step of a collective between nodes."""
    host_memory_bytes: int
    host_cores: int
    host_bandwidth: float
    """Bytes/s of a node's memory, reads and writes together."""
    host_link_bandwidth: float
    """Bytes/s between a device and its host, in each direction."""
    launch_seconds: float
    """Host time of a kernel launch: no operation of a step is faster."""
    disk_bandwidth: float = 2e9
    """Bytes/s of a node's fast disks, reads and writes together; the default is assumed, for one disk."""
    price_per_device_hour: float | None = None
    """In any currency, or None if unknown."""
    reached: Efficiency = Efficiency()

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    def peak_flops(self, precision: Precision) -> float:
        """Return the dense FLOP/s of a device; a device without fp8 products gets its bf16 peak for fp8."""
        if precision == "fp32":
            return self.fp32_flops
        return (self.fp8_flops if PRECISIONS[precision].has_casts else 0.0) or self.bf16_flops

    def gemm_share(self, precision: Precision) -> float:
        """Return the share of `peak_flops` that large products reach."""
        return self.reached.gemm_fp8 if PRECISIONS[precision].has_casts else self.reached.gemm

    @property
    def sustained(self) -> float:
        """Share of single kernels' speed that a step reaches."""
        return self.reached.sustained if self.nodes > 1 else 1.0

    @property
    def memory_rate(self) -> float:
        """Bytes/s of device memory that kernels reach in a step."""
        return self.device_bandwidth * self.reached.device_bandwidth * self.sustained

    @property
    def facts(self) -> MachineFacts:
        """Facts of one node as the launcher would find them; with Triton, which torch for CUDA requires."""
        count = self.devices_per_node if self.is_gpu else 0
        return MachineFacts(
            count, self.host_cores, self.device_memory_bytes if count else 0, self.host_memory_bytes,
            self.compute_capability, cuda_name=self.name if count else "",
            libraries=frozenset({"triton"} if count else ()),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON types, for `from_json`."""
        return {**dataclasses.asdict(self), "compute_capability": list(self.compute_capability)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], origin: str) -> Machine:
        """Return a machine from its fields, as `to_json` writes them, or from `like: h100` and other fields.

        Args:
            origin: source of the values, for messages.
        Raises:
            ConfigError: a key is unknown or missing, or a value has the wrong type or sign.
        """
        given = dict(values)
        shares = mapping(given.pop("reached", {}), f"{origin}: reached")
        if (like := given.pop("like", None)) is not None:
            base = preset(str(like), origin).to_json()
            shares, given = {**base.pop("reached"), **shares}, {**base, **given}
        reached = Efficiency(**_checked(shares, Efficiency, f"{origin}: reached"))
        return cls(**_checked(given, cls, origin), reached=reached)


def mapping(value: object, origin: str) -> Mapping[str, Any]:
    """Return the value if it is a mapping.

    Raises:
        ConfigError: the value is no mapping.
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
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name != "reached"}
    for name in values:
        if name not in fields:
            raise ConfigError(f"{origin}: unknown key {name!r}{nearest(str(name), list(fields))}")
    missing = [n for n, field in fields.items() if n not in values and field.default is dataclasses.MISSING]
    if missing:
        raise ConfigError(f"{origin}: lacks {', '.join(missing)}; or begin with a preset, `like: h100`")
    return {name: _value(name, value, str(fields[name].type), origin) for name, value in values.items()}


def _value(name: str, value: Any, annotation: str, origin: str) -> Any:
    is_whole, may_be_zero = annotation == "int", name in _MAY_BE_ZERO
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(part) is int for part in value)
    # YAML reads 1e-05, which JSON writes, as a string.
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


_HOST_OF_CORE = 15e9
"""Bytes/s of host memory for each core beside a GPU, of which the optimizer's kernel reaches 9e9: 16 virtual
cores of Sapphire Rapids reached 150e9 together. A preset's host has more cores than its memory can feed."""
_CORE_FLOPS, _CORE_BANDWIDTH, _GLOO_LATENCY, _LAUNCH = 80e9, 10e9, 100e-6, 5e-6
"""Rates of a server CPU's core: fp32 products and copies, assumed; `llama-patch doctor` measures them."""


def preset(name: str, origin: str) -> Machine:
    """Return a preset by its name in any case.

    Raises:
        ConfigError: there is no such preset.
    """
    if name.lower() not in PRESETS:
        hint = nearest(name.lower(), list(PRESETS))
        raise ConfigError(
            f"{origin}: got {name!r}{hint}, expected {', '.join(PRESETS)}, here, or a file of "
            "llama-patch doctor"
        )
    return PRESETS[name.lower()]


def this_machine(facts: MachineFacts, processes: int) -> Machine:
    """Return this machine: a preset with the found GPUs and memory, or its CPU shared by `processes`.

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
    """Return the machines, all equal, of a run that starts here, or None if no preset is like its GPU."""
    parallel = config.parallel
    try:
        machine = this_machine(facts, parallel.nproc_per_node)
    except ConfigError:
        return None
    return dataclasses.replace(machine, nodes=parallel.nnodes, devices_per_node=parallel.nproc_per_node)


def _like_a_preset(facts: MachineFacts) -> Machine:
    words, peak = facts.cuda_name.upper().replace("-", " ").split(), peak_flops(facts.cuda_name)
    found = [each for name, each in PRESETS.items() if name.upper() in words and each.bf16_flops == peak]
    if not found:
        raise ConfigError(
            f"--machine here: got a {facts.cuda_name}, whose rates are not known; expected one of "
            f"{', '.join(PRESETS)}, or a file of llama-patch doctor"
        )
    host = facts.host_memory_bytes or found[0].host_memory_bytes
    return dataclasses.replace(
        found[0], name=facts.cuda_name, devices_per_node=facts.cuda_devices, host_memory_bytes=host,
        device_memory_bytes=facts.cuda_memory_bytes, host_cores=facts.cpu_cores,
        host_bandwidth=min(found[0].host_bandwidth, facts.cpu_cores * _HOST_OF_CORE),
    )  # fmt: skip


def read_machine(file: str) -> Machine:
    """Return a machine from a file: its fields, a doctor report, or `like: h100` and changed fields.

    Raises:
        ConfigError: the file cannot be read, or a field is wrong.
    """
    origin = f"--machine {file}"
    try:
        values = parse_yaml(read_text(Path(file)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}: cannot be read: {error}") from error
    values = mapping(values, origin)
    return Machine.from_json(mapping(values.get("machine", values), origin), origin)


PRESETS: dict[str, Machine] = {}
"""Nodes of eight GPUs, by the GPU's name."""
for _name, _values in parse_yaml(Path(__file__).with_name("machines.yaml").read_text("utf-8")).items():
    PRESETS[_name] = Machine.from_json(_values, "machines.yaml")
