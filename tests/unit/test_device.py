"""Facts of this machine; where it has no NVIDIA driver, they cost no import of torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_device import LATE, FakeDevice

from patch.device import multiplies_16_bits, start_thread, usable_cores, usable_memory

REPOSITORY = Path(__file__).parents[2]


def test_gpus_are_counted_as_torch_does_and_without_it_where_there_is_no_driver() -> None:
    code = (
        "import sys; from patch.device import MachineFacts;"
        "print(MachineFacts.probe().cuda_devices, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    devices, has_torch = done.stdout.split()
    assert int(devices) == torch.cuda.device_count()
    assert has_torch == str(Path("/proc/driver/nvidia").exists())


DRIVER = """
#include <stdlib.h>
int cuInit(unsigned flags) { return atoi(getenv("STATUS")); }
int cuDeviceGetCount(int *count) { *count = 8; return 0; }
"""
"""A libcuda of eight GPUs, or with an error."""
REFUSED = (("0", "open"), ("0", "none"), ("803", "open"))
"""What cuInit returns, and the device nodes; on Windows' virtual machines there are none."""
NOT_REFUSED = (
    ("100", "open"), ("100", "none"), ("803", "none"), ("803", "closed"), ("0", "open", ""),
    ("0", "open", "-1"), ("0", "open", "NoDevFiles"), ("803", "open", ""),
)  # fmt: skip
"""Closed nodes lead nowhere; the third is CUDA_VISIBLE_DEVICES."""
PROGRAM = """
import json, os, sys
from pathlib import Path
from patch.device import MachineFacts
for status, nodes, *visible in json.loads(sys.argv[1]):
    os.environ |= {"STATUS": status, "CUDA_VISIBLE_DEVICES": "0"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": word for word in visible}
    print(json.dumps(MachineFacts.probe(Path(sys.argv[2], nodes)).unusable_gpus))
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
@pytest.mark.long
def test_gpus_are_refused_where_the_driver_gives_them_and_torch_cannot_use_them(tmp_path: Path) -> None:
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    for nodes in ("open", "closed", "none"):
        (tmp_path / nodes).mkdir()
    (tmp_path / "open" / "nvidia0").touch()
    (tmp_path / "closed" / "nvidia0").symlink_to(tmp_path / "not there")
    cases = REFUSED + NOT_REFUSED
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases), str(tmp_path)],
        cwd=REPOSITORY, env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    said = dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))
    for case in REFUSED:
        count = 1 if case[0] == "803" else 8
        assert said[case].startswith(f"GPUs are here ({count}), but torch is a build for CPUs: "), case
    assert not any(said[case] for case in NOT_REFUSED), said


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))


def _cgroups(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A cgroup file system of these files, and the /proc/self/cgroup that says `own`."""
    for name, content in files.items():
        file = folder / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (folder / "self").write_text(own)
    return folder / "cgroup", folder / "self"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 16),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, 4),
        ("0::/not/mounted/here\n", {"cpu.max": "600000 100000\n"}, 6),
        (
            "3:cpu,cpuacct:/job\n2:memory:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "200000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        (
            "3:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            16,
        ),
        ("", {}, 16),
    ],
)
def test_cores_are_those_of_affinity_and_cgroup(many_cores, tmp_path, own, files, cores) -> None:
    """No affinity or thread handling (the original's defect 13): every process used all cores of the box."""
    assert usable_cores(*_cgroups(tmp_path, own, files)) == cores


@pytest.mark.parametrize(
    ("own", "files", "memory"),
    [
        ("0::/\n", {"memory.max": "max\n"}, 64),
        ("0::/a/b\n", {"a/memory.max": "16384\n", "a/b/memory.max": "max\n"}, 16),
        ("3:memory:/job\n", {"memory/job/memory.limit_in_bytes": "8192\n"}, 8),
        ("3:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64),
        ("", {}, 64),
    ],
)
def test_memory_is_that_of_machine_and_cgroup(monkeypatch, tmp_path, own, files, memory) -> None:
    pages = {"SC_PHYS_PAGES": 64, "SC_PAGE_SIZE": 1024}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    assert usable_memory(*_cgroups(tmp_path, own, files)) == memory * 1024


@pytest.mark.parametrize(("flags", "found"), [("avx2 fma", False), ("avx512bw", True), ("asimd bf16", True)])
def test_products_in_16_bits_need_instructions_of_the_cpu(tmp_path: Path, flags: str, found: bool) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nflags\t\t: sse {flags} clzero\n")
    assert multiplies_16_bits(file) is found
    assert multiplies_16_bits(tmp_path / "none"), "nothing is said where nothing is known"


def test_a_thread_is_on_the_device_of_the_one_that_starts_it() -> None:
    fake, found = FakeDevice(LATE), []
    with fake:
        start_thread("of a test", lambda: found.append(fake.has_device())).join()
    assert found == [True]
