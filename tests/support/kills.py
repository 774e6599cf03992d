"""Kill a process after one of its file operations, as a machine may go down at any moment."""

import os
import signal
from collections.abc import Callable
from typing import Any


def killer_at(moment: int) -> Callable[[Callable], Callable]:
    """Return a decorator that kills this process when decorated functions have returned `moment` times."""
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
