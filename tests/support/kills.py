"""A process that is killed after one of its file operations: all moments at which a machine may go down."""

import os
import signal
from collections.abc import Callable
from typing import Any


def killer_at(moment: int) -> Callable[[Callable], Callable]:
    """A decorator: this process is killed when the functions it decorates have returned so many times."""
    passed = 0

    def killed_at(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            result = function(*args, **kwargs)
            passed += 1
            if passed == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    return killed_at
