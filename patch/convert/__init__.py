"""Hugging Face <-> megatron-core conversion; see README.md."""

from patch.convert.hf_export import export_hf
from patch.convert.hf_import import import_hf
from patch.convert.to_hf import mcore_to_hf
from patch.convert.to_mcore import hf_to_mcore

__all__ = ["export_hf", "hf_to_mcore", "import_hf", "mcore_to_hf"]
