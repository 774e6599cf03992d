"""Hugging Face <-> megatron-core conversion; see README.md.

Files: `hf_to_mcore`, `mcore_to_hf`, in one process without a process group. A live model sharded over TP, PP
and VPP: `import_hf`, `export_hf`, `iter_hf_weights` with its `Receipt`; `model_of` reads the shape for them.
PEFT adapters: `merge_adapter` for files, `import_adapter` and `export_adapter` for a live model; `adapter_of`
reads their configuration. None of them needs `compat.apply`, but the caller's model on a CPU does.

They raise a `ConversionError` of `patch.errors` if input or output cannot be read, written or matched, and a
`CheckpointError` if a checkpoint is damaged. Both say what was expected, and are raised on every rank.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from patch.errors import CheckpointError, ConversionError

if TYPE_CHECKING:
    from patch.convert.hf_config_files import model_of
    from patch.convert.live_adapters import export_adapter, import_adapter
    from patch.convert.live_weights import Receipt, export_hf, import_hf, iter_hf_weights
    from patch.convert.merge import adapter_of, merge_adapter
    from patch.convert.offline import hf_to_mcore, mcore_to_hf

_MODULES = {
    "model_of": "hf_config_files", "export_hf": "live_weights", "import_hf": "live_weights",
    "iter_hf_weights": "live_weights", "mcore_to_hf": "offline", "hf_to_mcore": "offline",
    "export_adapter": "live_adapters", "import_adapter": "live_adapters", "adapter_of": "merge",
    "merge_adapter": "merge", "Receipt": "live_weights",
}  # fmt: skip
"""Imported on first access (PEP 562): most users need one kind of conversion."""

__all__ = [
    "CheckpointError", "ConversionError", "Receipt", "adapter_of", "export_adapter", "export_hf",
    "hf_to_mcore", "import_adapter", "import_hf", "iter_hf_weights", "mcore_to_hf", "merge_adapter",
    "model_of",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
