"""For tests on a GPU: the end-to-end tests' small model and data, a job of one process over NCCL, figures."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from end_to_end.conftest import office
from gpu.run import FIGURES
from megatron.core import parallel_state

from patch.device import DeviceContext

__all__ = ["office"]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at cuBLAS's first use; see `deterministic`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are GPU tests, and skip themselves where there is none."""
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def job() -> Iterator[DeviceContext]:
    """One process over NCCL on the first GPU."""
    context = DeviceContext.select(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(context.backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield context
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    """A test that failed leaves nothing for the next one to stumble over."""
    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture(scope="session")
def figure() -> Callable[[str, object], None]:
    """Note a figure for the report of `make gpu-check`: its name, and its value with the unit."""

    def note(name: str, value: object) -> None:
        if os.environ.get(FIGURES):
            with Path(os.environ[FIGURES]).open("a") as file:
                file.write(json.dumps([name, str(value)]) + "\n")

    return note


@pytest.fixture
def deterministic() -> Iterator[None]:
    """What `--deterministic-mode` asks of torch."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
