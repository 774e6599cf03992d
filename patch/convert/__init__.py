"""Hugging Face <-> megatron-core conversion; see README.md."""

from patch.convert.live_export import export_hf
from patch.convert.live_import import import_hf
from patch.convert.offline_export import mcore_to_hf
from patch.convert.offline_import import hf_to_mcore

__all__ = ["export_hf", "hf_to_mcore", "import_hf", "mcore_to_hf"]
