"""For all tests: the logger as in a new process, no program left, imports without garbage collection."""

import gc
import logging
import os
from collections.abc import Iterator

import pytest
from started_programs import kill_started

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test asks the network

if "PYTEST_XDIST_WORKER" in os.environ:  # it imports all test modules: torch and megatron-core the quick way
    import distributed_imports  # noqa: F401

gc.disable()  # while test modules import torch and megatron-core: a quarter of that time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def new_logger() -> None:
    """Undo what command lines under test did to the project's logger for good: `configure_logging`."""
    logger = logging.getLogger("patch")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_program_is_left() -> Iterator[None]:
    yield
    kill_started()


@pytest.fixture
def logged() -> list[str]:
    """The project's messages from INFO on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("patch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return messages


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the token caches of runs under test, also of those in other processes, out of the user's home."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
