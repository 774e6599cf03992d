"""Building the C++ kernel: once for many ranks, anywhere it may, never loading what others can write."""

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from adam_cases import assert_equal, bits_after, make_items

from patch.errors import ConfigError
from patch.optimizer.kernels import TRITON_CURE, adam_kernel, build, cpp_adam, try_kernel
from patch.optimizer.kernels.cpp_adam import CppAdam
from patch.optimizer.kernels.numpy_adam import NumpyAdam

TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A folder of its own that build.py takes for the package's, with a source that compiles at once."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "adam.cpp").write_text(TINY)
    monkeypatch.setattr(build, "SOURCE", folder / "adam.cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def native_bits():
    """What the C++ kernel computes; kernels are chosen anew after that, and again after the test."""
    found = bits_after(CppAdam(), make_items("split master", torch.bfloat16))
    adam_kernel.cache_clear()
    cpp_adam.load.cache_clear()
    yield found
    adam_kernel.cache_clear()
    cpp_adam.load.cache_clear()


def _answer(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


def test_a_library_is_built_once_and_anew_when_its_source_changes(package):
    first = build.find_or_build()
    assert first.parent == package / "build"
    assert _answer(first) == 42
    stamp = first.stat().st_mtime_ns
    assert build.find_or_build() == first
    assert first.stat().st_mtime_ns == stamp
    build.SOURCE.write_text(TINY.replace("42", "43"))
    assert _answer(build.find_or_build()) == 43


def test_a_package_that_cannot_be_written_leaves_the_library_in_the_users_cache(package, tmp_path):
    (package / "build").write_text("in the way, for root too")
    assert build.find_or_build().parent == tmp_path / "cache" / "llama-megatron-patch"


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_library_that_others_can_write_is_replaced_not_loaded(package, mode):
    library = build.find_or_build()
    library.write_bytes(b"planted")
    library.chmod(mode)
    assert _answer(build.find_or_build()) == 42
    assert library.stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.getuid(), reason="only root can give files away")
def test_a_library_of_another_user_is_not_loaded(package, tmp_path):
    library = build.find_or_build()
    for path in (library.parent, library):
        os.chown(path, 12345, 12345)
    assert build.find_or_build().parent == tmp_path / "cache" / "llama-megatron-patch"


def test_compilers_that_fail_are_named(package, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "false --with options")
        with pytest.raises(build.BuildError, match="^false --with options: exit code 1$"):
            build.find_or_build()
    build.SOURCE.write_text("neither C nor C++")
    with pytest.raises(build.BuildError, match=r"c\+\+: .*adam.cpp:1"):
        build.find_or_build()
    assert not list((package / "build").glob("*.so"))


def test_a_compiler_that_takes_too_long_ends_with_all_its_processes_and_is_not_tried_again(
    package, monkeypatch, tmp_path
):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nsleep 300 & echo $! >> {tmp_path}/children\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(os, "getloadavg", lambda: (1e9, 0.0, 0.0))
    with ThreadPoolExecutor(3) as ranks:
        failures = [each.exception() for each in [ranks.submit(build.find_or_build) for _ in range(3)]]
    assert all("compiler: compiling took longer than 0.5 s" in str(failure) for failure in failures)
    (child,) = map(int, (tmp_path / "children").read_text().split())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(build, "_TIMEOUT_S", 120)
    assert _answer(build.find_or_build()) == 42


def test_ranks_that_start_at_once_build_once_and_make_survives_without_a_compiler(tmp_path):
    shutil.copy(Path(build.__file__).with_name("build.py"), tmp_path)
    (tmp_path / "adam.cpp").write_text(TINY)
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho >> {tmp_path}/calls\nsleep 0.2\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-S", tmp_path / "build.py"]
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, check=True, timeout=60)
    assert "NumPy will be used" in done.stderr
    environment = {**os.environ, "CXX": str(compiler)}
    ranks = [subprocess.Popen(command, env=environment) for _ in range(4)]
    assert [rank.wait(60) for rank in ranks] == [0] * 4
    assert (tmp_path / "calls").read_text() == "\n"
    assert sorted(file.suffix for file in (tmp_path / "build").iterdir()) == [".lock", ".so"]


def test_without_a_compiler_numpy_gives_the_same_bits_and_says_what_it_costs(
    native_bits, package, monkeypatch, logged
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    kernels = [adam_kernel(torch.device("cpu")) for _ in range(3)]
    assert [type(kernel) for kernel in kernels] == [NumpyAdam] * 3
    (warning,) = logged
    assert "slower" in warning and "no C++ compiler" in warning and "CXX" in warning
    assert_equal(bits_after(kernels[0], make_items("split master", torch.bfloat16)), native_bits)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where no kernel of CUDA can run")
def test_a_machine_that_cannot_compile_a_kernel_is_told_what_it_lacks() -> None:
    try_kernel(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^no kernel can be compiled for cuda: .+; ") as told:
        try_kernel(torch.device("cuda"))
    assert str(told.value).endswith(TRITON_CURE)
