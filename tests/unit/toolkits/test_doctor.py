"""llama-patch doctor: each check on machines that a test makes up, and once on this one."""

import json
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import small_run

from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.timing.machine import Machine, read_machine
from patch.preflight.validate import validate_run
from patch.storage.places import file_system_of
from toolkits.doctor.__main__ import main
from toolkits.doctor.check import Finding, Settings, json_of, run_check, verdict_of
from toolkits.doctor.devices import check_torch_sees_gpus
from toolkits.doctor.messages import measure_messages
from toolkits.doctor.software import check_software, missing_libraries, pinned_versions
from toolkits.doctor.speed import machine_part

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
CPU = MachineFacts(cuda_devices=0, cpu_cores=4, host_memory_bytes=1 << 34)
H100 = MachineFacts(
    cuda_devices=8, cpu_cores=96, cuda_memory_bytes=80 << 30, host_memory_bytes=1 << 40,
    compute_capability=(9, 0), cuda_name="NVIDIA H100 80GB HBM3", libraries=frozenset({"triton"}),
)  # fmt: skip


SETTINGS = Settings(CPU, 2)


def statuses(findings) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


def test_a_check_that_fails_keeps_what_it_has_found() -> None:
    def fail(_):
        yield Finding("first", "ok", "1")
        raise OSError("no such device")

    failed = run_check("disk", fail, SETTINGS)
    assert statuses(failed) == {"first": "ok", "disk": "warning"} and "no such device" in failed[1].value
    assert verdict_of({"x": failed}) == "warnings" and verdict_of({"x": failed[:1]}) == "ok"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_gpus_that_torch_cannot_use_are_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = check_torch_sees_gpus(SETTINGS, tmp_path)
    assert found.status == "ok" and "CPU" in found.value
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    for version, why, cure in (
        (None, r"build for CPUs", r"CUDA build"),
        ("13.0", r"cannot use them \(Torch not compiled with CUDA", r"a driver as new as torch's"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        found = check_torch_sees_gpus(SETTINGS, tmp_path)
        assert found.status == "broken" and re.search(rf"here \(1\), but torch .*{why}", found.value)
        assert re.search(cure, found.advice)
        facts = MachineFacts.probe(tmp_path)
        with pytest.raises(ConfigError, match=rf"{why}.*{cure}.*; CUDA_VISIBLE_DEVICES='' trains on the CPU"):
            validate_run(small_run(), facts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = check_torch_sees_gpus(SETTINGS, tmp_path)
    assert found.status == "warning" and "hidden" in found.value
    assert not MachineFacts.probe(tmp_path).unusable_gpus


def test_missing_libraries_are_those_that_the_table_of_backends_would_take() -> None:
    assert not list(missing_libraries(CPU))
    assert statuses(missing_libraries(H100)) == {"flash_attn_3": "warning", "transformer_engine": "warning"}
    bare = replace(H100, libraries=frozenset())
    assert statuses(missing_libraries(bare))["triton"] == "broken"
    ampere = replace(H100, compute_capability=(8, 0), cuda_name="NVIDIA A100-SXM4-80GB")
    assert "flash_attn_3" not in statuses(missing_libraries(ampere))
    full = replace(H100, libraries=frozenset({"triton", "flash_attn_3", "transformer_engine"}))
    assert not list(missing_libraries(full))


def test_versions_are_compared_with_those_that_tests_run_with() -> None:
    pins = pinned_versions(ROOT / "requirements.txt")
    tested = "==0.16.1" if sys.version_info < (3, 12) else "==0.19.2"
    assert str(pins["megatron-core"]) == tested and len(pins["fsspec"]) == 1
    found = {finding.name: finding for finding in check_software(SETTINGS)}
    assert found["torch"].data["version"] == torch.__version__
    assert found["python"].status == found["megatron-core"].status == "ok"


def test_the_innermost_mount_decides_and_there_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = {"/": "rootfs", "/data/in ram": "tmpfs", "/data": "nfs4"}
    places = [*mounts.items(), ("/", "ext4")]
    parts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in places]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: parts)
    for folder, kind in (("/data/in ram/x", "tmpfs"), ("/database", "ext4"), ("/data/x", "nfs4")):
        assert file_system_of(Path(folder)) == kind


def test_processes_talk_and_are_timed() -> None:
    found = {finding.name: finding for finding in measure_messages(SETTINGS)}
    assert {*found} == {"reduce-scatter", "latency"}
    assert all(finding.status == "ok" for finding in found.values())
    reduced = found["reduce-scatter"].data
    # With two ranks half of the message crosses the link.
    assert reduced["bus_bytes_per_s"] * reduced["seconds"] == pytest.approx(8 * 2**20)


def test_the_report_has_no_names_of_people_or_machines() -> None:
    words = [socket.gethostname(), str(Path.home() / "x"), str(Path.cwd() / "y")]
    report = {"a": [Finding(word, "warning", f"at {word}: no", word, {"deep": [word]}) for word in words]}
    text = json_of(report, {})
    assert not [word for word in (socket.gethostname(), str(Path.cwd())) if word in text]
    assert str(Path.home()) + "/" not in text
    assert json.loads(text)["verdict"] == "warnings" and "HOST" in text and "HERE/y" in text


def test_a_gpu_machine_is_planned_with_what_was_measured() -> None:
    numbers = {
        "GPU 0 products": {"flops_per_s": 700e12}, "GPU 0 memory": {"bytes_per_s": 2.8e12},
        "GPU 0 pinned copies": {"to_device_bytes_per_s": 55e9, "to_host_bytes_per_s": 50e9},
        "GPU 0 start": {"seconds": 5e-6}, "Adam on the host": {"bytes_per_s": 200e9},
        "reduce-scatter": {"bus_bytes_per_s": 300e9}, "latency": {"seconds": 2e-5},
        "interfaces": {"mbit_per_s": {"eth0": 400_000}},
    }  # fmt: skip
    report = {"all": [Finding(name, "ok", "", data=data) for name, data in numbers.items()]}
    assert machine_part(report, Settings(CPU, 8)) == {}
    planned = Machine.from_json(machine_part(report, Settings(H100, 8)), "doctor")
    assert planned.bf16_flops * planned.reached.gemm == pytest.approx(700e12)
    assert (planned.devices_per_node, planned.node_link_bandwidth) == (8, 300e9)
    assert planned.host_link_bandwidth == 50e9 and planned.network_bandwidth == pytest.approx(400e9 / 8 / 8)
    assert machine_part({}, Settings(H100, 8)) == {}


def test_the_doctor_examines_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZER_PATH", "/nowhere")  # of the user's own runs
    monkeypatch.setenv("MP_VP", "7")
    file = tmp_path / "report.json"
    code = main(["--nproc", "1", "--json", str(file)])
    report = json.loads(file.read_text())
    found = {each["name"]: each for check in report["checks"].values() for each in check}
    assert found["training"]["status"] == "ok", found
    assert code == int(report["verdict"] == "broken") == 0, capsys.readouterr().out
    assert not re.search(rf"(?<!\w){socket.gethostname()}(?!\w)", file.read_text())
    planned = read_machine(str(file))
    assert planned.facts.cpu_cores == MachineFacts.probe().cpu_cores and not planned.is_gpu
    assert planned.bf16_flops == found["products"]["data"]["bf16"]
    shown = capsys.readouterr().out
    assert re.search(r"^verdict: (ok|warnings)$", shown, re.M)
