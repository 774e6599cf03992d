"""For all tests: the project's logger as it was, and imports that Python's garbage collector leaves alone."""

import gc
import logging
from collections.abc import Iterator

import pytest

gc.disable()  # while test modules import torch and megatron-core: a quarter of that time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    """Undo what a command line under test does to the logger for good: `configure_logging`."""
    logger = logging.getLogger("patch")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The project's messages, whatever another test has made of the logger's handlers."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger("patch")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield messages
    root.removeHandler(handler)
    root.setLevel(level)
