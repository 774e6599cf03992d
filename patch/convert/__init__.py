"""Hugging Face <-> megatron-core conversion of a running, sharded model; see README.md."""

from patch.convert.hf_export import export_hf
from patch.convert.hf_import import import_hf

__all__ = ["export_hf", "import_hf"]
