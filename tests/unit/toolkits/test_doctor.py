"""llama-patch doctor: each check on machines that a test makes up, and once on this one."""

import json
import re
import resource
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launches import await_end
from small_runs import small_run

from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.timing.machine import Machine
from patch.plan.timing.machine_presets import read_machine
from patch.preflight.validate import validate_run
from patch.storage.places import file_system_of
from toolkits.doctor.__main__ import main
from toolkits.doctor.check import (
    Check,
    Finding,
    Settings,
    json_of,
    run_check,
    run_program,
    verdict_lines,
    verdict_of,
)
from toolkits.doctor.folder import check_folder
from toolkits.doctor.gpus import check_torch_sees_gpus, health_of
from toolkits.doctor.host import check_limits, check_variables, interface_variables, own_name
from toolkits.doctor.messages import measure_messages
from toolkits.doctor.self_test import resumed_finding
from toolkits.doctor.software import check_versions, missing_libraries, pinned_versions
from toolkits.doctor.speed import machine_part

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
CPU = MachineFacts(cuda_devices=0, cpu_cores=4, host_memory_bytes=1 << 34)
H100 = MachineFacts(
    cuda_devices=8, cpu_cores=96, cuda_memory_bytes=80 << 30, host_memory_bytes=1 << 40,
    compute_capability=(9, 0), cuda_name="NVIDIA H100 80GB HBM3", libraries=frozenset({"triton"}),
)  # fmt: skip


def settings(folder: Path = Path(), machine: MachineFacts = CPU) -> Settings:
    return Settings(machine, 2, folder)


def statuses(findings) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


def test_a_check_that_fails_or_hangs_keeps_what_it_has_found() -> None:
    def fail(_):
        yield Finding("first", "ok", "1")
        raise OSError("no such device")

    def hang(_):
        yield Finding("first", "ok", "1")
        time.sleep(60)

    failed = run_check(Check("disk", fail), settings())
    assert statuses(failed) == {"first": "ok", "disk": "warning"} and "no such device" in failed[1].value
    begin = time.monotonic()
    assert statuses(run_check(Check("disk", hang, 0.2), settings())) == {"first": "ok", "disk": "warning"}
    assert time.monotonic() - begin < 10


def test_a_program_whose_time_is_up_is_killed_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    ended = run_program(["bash", "-c", script], 1.0)
    assert ended.code is None and ended.reason == "took too long"
    await_end([int((tmp_path / "child").read_text())])


def test_gpus_that_need_care_are_named() -> None:
    healthy = "12, 0, 16, 16, 0x0000000000000001, 35, [N/A]"
    sick = "70000, 3, 8, 16, 0x0000000000000060, 92, Enabled"
    assert not list(health_of(healthy + "\n"))
    found = statuses(health_of(f"{healthy}\n{sick}\n"))
    assert found == {
        "GPU 1 memory errors": "broken", "GPU 1 in use": "warning", "GPU 1 PCIe": "warning",
        "GPU 1 throttled": "warning", "GPU 1": "warning",
    }  # fmt: skip
    assert not list(health_of("[N/A], [N/A], [N/A], [N/A], [N/A], 30, [N/A]"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_gpus_that_torch_cannot_use_are_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = check_torch_sees_gpus(settings(), tmp_path)
    assert found.status == "ok" and "CPU" in found.value
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    for version, why, cure in (
        (None, r"build for CPUs", r"CUDA build"),
        ("13.0", r"cannot use them \(Torch not compiled with CUDA", r"a driver as new as torch's"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        found = check_torch_sees_gpus(settings(), tmp_path)
        assert found.status == "broken" and re.search(rf"here \(1\), but torch .*{why}", found.value)
        assert re.search(cure, found.advice)
        facts = MachineFacts.probe(tmp_path)
        with pytest.raises(ConfigError, match=rf"{why}.*{cure}.*; CUDA_VISIBLE_DEVICES='' trains on the CPU"):
            validate_run(small_run(), facts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = check_torch_sees_gpus(settings(), tmp_path)
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
    assert pins["megatron-core"] == "0.16.1" and pins["fsspec"] and "#" not in "".join(pins.values())
    found = {finding.name: finding for finding in check_versions(settings())}
    assert found["torch"].data["version"] == torch.__version__
    assert found["python"].status == found["megatron-core"].status == "ok"


def test_names_and_interfaces_that_gloo_would_take() -> None:
    addresses = {"lo": ["127.0.0.1"], "eth0": ["192.0.2.7"]}
    assert own_name(["192.0.2.7"], addresses).value == "gloo takes eth0"
    for resolved in (["127.0.1.1"], [], ["192.0.2.8"]):
        found = own_name(resolved, addresses)
        assert found.status == "warning" and "GLOO_SOCKET_IFNAME" in found.advice, resolved
    assert statuses(interface_variables({"GLOO_SOCKET_IFNAME": "ens5"}, ["lo", "eth0"])) == {
        "GLOO_SOCKET_IFNAME": "broken"
    }
    for fine in ({"NCCL_SOCKET_IFNAME": "eth"}, {"NCCL_SOCKET_IFNAME": "^docker0,lo"}, {}):
        assert not list(interface_variables(fine, ["lo", "eth0"]))


def test_variables_for_debugging_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    found = statuses(check_variables(settings()))
    assert found["CUDA_LAUNCH_BLOCKING"] == "warning" and found["NCCL_P2P_DISABLE"] == "ok"
    assert "SECRET_TOKEN" not in found


def test_limits_are_those_of_the_shell() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit, status in ((4095, "warning"), (4096, "ok")):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
            found = statuses(check_limits(settings()))
            assert found["open files"] == status
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert set(found) == {"open files", "processes", "locked memory"}


def test_the_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in check_folder(settings(tmp_path))}
    assert not list(tmp_path.iterdir())
    assert found["locks"].value == "a second run is refused" and found["its clock"].status == "ok"
    assert found["writing"].data["bytes_per_s"] > 0 < found["reading"].data["bytes_per_s"]
    df = subprocess.run(["df", "--output=fstype", tmp_path], capture_output=True, text=True, check=True)
    assert found["file system"].value == df.stdout.split()[-1]


def test_a_folder_that_cannot_be_written_to_is_broken() -> None:
    (found,) = check_folder(settings(Path("/proc")))
    assert found.status == "broken" and found.value.startswith("cannot be written to: ")


def test_the_innermost_mount_decides_and_there_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = {"/": "rootfs", "/data/in ram": "tmpfs", "/data": "nfs4"}
    places = [*mounts.items(), ("/", "ext4")]
    parts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in places]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: parts)
    for folder, kind in (("/data/in ram/x", "tmpfs"), ("/database", "ext4"), ("/data/x", "nfs4")):
        assert file_system_of(Path(folder)) == kind


def test_processes_talk_and_are_timed() -> None:
    found = {finding.name: finding for finding in measure_messages(settings())}
    assert {"all-reduce", "reduce-scatter", "all-gather", "send and receive", "latency"} <= set(found)
    assert all(finding.status == "ok" for finding in found.values())
    reduced = found["all-reduce"].data
    # With two ranks the bus bandwidth of an all-reduce is the message over its time.
    assert reduced["bus_bytes_per_s"] * reduced["seconds"] == pytest.approx(16 * 2**20)


def test_losses_after_a_resume_must_be_equal_to_the_bit() -> None:
    losses = {1: 6.0, 2: 5.5, 3: 5.25, 4: 5.0}
    assert resumed_finding(losses, dict(losses)).status == "ok"
    found = resumed_finding(losses, {**losses, 4: 5.000001})
    assert found.status == "broken" and "[4]" in found.value
    assert resumed_finding(losses, {1: 6.0, 2: 5.5, 3: 5.25}).status == "broken"


def test_the_report_has_no_names_of_people_or_machines(tmp_path: Path) -> None:
    words = [socket.gethostname(), str(Path.home() / "x"), str(tmp_path / "y")]
    report = {"a": [Finding(word, "warning", f"at {word}: no", word, {"deep": [word]}) for word in words]}
    text = json_of(report, {}, tmp_path)
    assert not [word for word in (socket.gethostname(), str(tmp_path)) if word in text]
    assert str(Path.home()) + "/" not in text
    assert json.loads(text)["verdict"] == "warnings" and "HOST" in text and "FOLDER/y" in text


def test_the_verdict_is_the_worst_finding_and_repeats_its_cure() -> None:
    fine = [Finding("a", "ok", "1")]
    slow, wrong = Finding("b", "warning", "2", "buy"), Finding("c", "broken", "3", "mend")
    assert verdict_of({"x": fine}) == "ok" and verdict_lines({"x": fine}) == ["verdict: ok"]
    lines = verdict_lines({"x": [*fine, slow], "y": [wrong]})
    assert lines[0] == "broken   c: 3" and "cure: mend" in lines[1] and lines[-1] == "verdict: broken"


def test_a_gpu_machine_is_planned_with_what_was_measured() -> None:
    bus = {"bus_bytes_per_s": 300e9}
    numbers = {
        "GPU 0 products": {"flops_per_s": 700e12}, "GPU 0 memory": {"bytes_per_s": 2.8e12},
        "GPU 0 pinned copies": {"to_device_bytes_per_s": 55e9, "to_host_bytes_per_s": 50e9},
        "GPU 0 start": {"seconds": 5e-6}, "Adam on the host": {"bytes_per_s": 200e9},
        "reduce-scatter": bus, "all-gather": {"bus_bytes_per_s": 320e9}, "latency": {"seconds": 2e-5},
        "interfaces": {"mbit_per_s": {"eth0": 400_000}},
    }  # fmt: skip
    report = {"all": [Finding(name, "ok", "", data=data) for name, data in numbers.items()]}
    assert machine_part(report, Settings(CPU, 8, Path())) == {}
    planned = Machine.from_json(machine_part(report, Settings(H100, 8, Path())), "doctor")
    assert planned.bf16_flops * planned.reached.gemm == pytest.approx(700e12)
    assert (planned.devices_per_node, planned.node_link_bandwidth) == (8, 300e9)
    assert planned.host_link_bandwidth == 50e9 and planned.network_bandwidth == pytest.approx(400e9 / 8 / 8)
    assert machine_part({}, Settings(H100, 8, Path())) == {}


def test_the_doctor_examines_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZER_PATH", "/nowhere")  # of the user's own runs
    monkeypatch.setenv("MP_VP", "7")
    file = tmp_path / "report.json"
    code = main(["--nproc", "1", "--folder", str(tmp_path), "--json", str(file)])
    report = json.loads(file.read_text())
    found = {each["name"]: each for check in report["checks"].values() for each in check}
    assert found["training"]["status"] == "ok" and found["resuming"]["status"] == "ok", found
    assert code == int(report["verdict"] == "broken") == 0, capsys.readouterr().out
    assert not re.search(rf"(?<!\w){socket.gethostname()}(?!\w)", file.read_text())
    planned = read_machine(str(file))
    assert planned.facts.cpu_cores == MachineFacts.probe().cpu_cores and not planned.is_gpu
    assert planned.bf16_flops == found["products"]["data"]["bf16"]
    assert not list(tmp_path.glob(".doctor*"))
    shown = capsys.readouterr().out
    assert re.search(r"^verdict: (ok|warnings)$", shown, re.M)


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--folder", "/nowhere"])
    assert ended.value.code == 2 and "--folder /nowhere: no such folder" in capsys.readouterr().err
