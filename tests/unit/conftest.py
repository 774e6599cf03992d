"""Fixtures of several rooms: a command line, and a job of one process inside the test's own."""

from collections.abc import Iterator

import pytest
from support.command_line import command  # noqa: F401  (fixtures)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A job of one process: the many ways to fail need no start of processes."""
    import torch.distributed as dist  # most tests below do without torch
    from megatron.core import parallel_state

    from patch import compat

    compat.apply(cuda=False)
    parallel_state.destroy_model_parallel()  # of a test in the same process that made a job of its own
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
