"""The folder where a user's programs keep what can be made again.

Source: XDG Base Directory Specification.
"""

from __future__ import annotations

import os
from pathlib import Path

_NAME = "llama-megatron-patch"


def user_cache(fallback: Path) -> Path:
    """This project's folder in XDG_CACHE_HOME or ~/.cache, which is created.

    Args:
        fallback: the folder to use where there is no home, or one that cannot be written.
    """
    home = os.path.expanduser("~")
    chosen = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home != "~" else "")
    if not os.path.isabs(chosen):  # the specification: other values are to be ignored
        return fallback
    folder = Path(chosen, _NAME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return fallback
    return folder if os.access(folder, os.W_OK | os.X_OK) else fallback
