"""Machines: presets, this one, and files, which are read as they were written."""

import dataclasses
import json

import pytest
import yaml

from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.flops import peak_flops
from patch.plan.timing.machine import PRESETS, Efficiency, Machine, preset, read_machine, this_machine


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dump", [json.dumps, yaml.safe_dump])
def test_a_machine_is_read_as_it_was_written(tmp_path, name, dump):
    file = tmp_path / "machine"
    file.write_text(dump(PRESETS[name].to_json()))
    assert read_machine(str(file)) == PRESETS[name]
    file.write_text(dump({"checks": [], "machine": PRESETS[name].to_json()}))
    assert read_machine(str(file)) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_peak_is_that_of_metrics(name):
    machine = preset(name.upper(), "--machine")
    for precision in ("bf16", "fp8") if machine.fp8_flops else ("bf16",):
        assert machine.peak_flops(precision) == peak_flops(machine.name, precision)
    facts = machine.facts
    assert (facts.cuda_devices, facts.cuda_memory_bytes) == (8, machine.device_memory_bytes)
    assert this_machine(facts, 1) == machine
    assert this_machine(dataclasses.replace(facts, cpu_cores=16), 1).host_bandwidth == 16 * 15e9


def test_a_file_may_change_some_fields_of_a_preset(tmp_path):
    file = tmp_path / "slow.yaml"
    file.write_text(
        "like: h100\nnetwork_bandwidth: 12.5e9\nprice_per_device_hour: 2\nreached: {network: 1}\n"
    )
    found, base = read_machine(str(file)), PRESETS["h100"]
    assert (found.network_bandwidth, found.price_per_device_hour, found.reached.network) == (12.5e9, 2, 1)
    assert (found.bf16_flops, found.reached.gemm) == (base.bf16_flops, base.reached.gemm)


WHOLE = PRESETS["h100"].to_json()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"like": "h10"}, "got 'h10', did you mean h100?, expected a100, h100, h200, b200"),
        ({"like": "h100", "network_bandwith": 1}, "unknown key 'network_bandwith', did you mean network_ban"),
        ({"like": "h100", "nodes": 1.5}, "nodes: got 1.5, expected a whole number above 0"),
        ({"like": "h100", "nodes": True}, "nodes: got True, expected a whole number above 0"),
        ({"like": "h100", "bf16_flops": 0}, "bf16_flops: got 0, expected a number above 0"),
        ({"like": "h100", "network_latency": -1}, "network_latency: got -1, expected a number of at least 0"),
        ({"like": "h100", "name": 3}, "name: got 3, expected a text"),
        ({"like": "h100", "is_gpu": 1}, "is_gpu: got 1, expected true or false"),
        ({"like": "h100", "compute_capability": [9]}, "got [9], expected two whole numbers"),
        ({"like": "h100", "reached": {"gem": 1}}, "reached: unknown key 'gem', did you mean gemm?"),
        ({"like": "h100", "reached": 1}, "reached: got 1, expected keys with values"),
        ({"name": "x"}, "lacks devices_per_node, device_memory_bytes"),
        ([1], "got [1], expected keys with values"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, values, message):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as error:
        read_machine(str(file))
    assert message in str(error.value) and str(file) in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for content in (None, b"a: [", b"\xff"):
        if content is not None:
            (tmp_path / "m").write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_machine(str(tmp_path / "m"))


def test_a_measured_machine_reaches_what_was_measured():
    cpu = this_machine(MachineFacts(0, 4, host_memory_bytes=2**33), processes=2)
    assert (cpu.num_devices, cpu.is_gpu, cpu.device_memory_bytes) == (2, False, 0)
    assert set(vars_of(cpu.reached)) == {0.0, 1.0} and not cpu.reached.contention
    assert cpu.facts == MachineFacts(0, 4, host_memory_bytes=2**33)
    assert Machine.from_json(cpu.to_json(), "cpu") == cpu


def vars_of(reached: Efficiency) -> list[float]:
    return [getattr(reached, name) for name in Efficiency.__dataclass_fields__]


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "Tesla V100-SXM2-16GB", "NVIDIA L4"])
def test_a_gpu_of_unknown_rates_is_refused(name):
    with pytest.raises(ConfigError, match=f"got a {name}, whose rates are not known; expected one of a100"):
        this_machine(MachineFacts(1, 2, 2**34, cuda_name=name), 1)
