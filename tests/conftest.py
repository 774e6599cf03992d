"""Fixtures for all tests: a fresh logger, no remaining programs, imports without garbage collection."""

import gc
import logging
import os
from collections.abc import Iterator

import pytest
from started_programs import kill_started

os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it at import: no test uses the network

if "PYTEST_XDIST_WORKER" in os.environ:  # it imports all test modules: torch and megatron-core the quick way
    import distributed_imports  # noqa: F401

gc.disable()  # during the imports of torch and megatron-core, which saves a quarter of their time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def new_logger() -> None:
    """Undo the permanent effects of `configure_logging` by command lines under test."""
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
    """Return the project's messages from INFO on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("patch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return messages


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep token caches of runs, also in other processes, out of the user's home."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
