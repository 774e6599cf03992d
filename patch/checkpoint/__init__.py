"""Checkpoints in megatron-core's torch_dist format, written whole or not at all; see README.md."""

from patch.checkpoint.folder import latest_iteration
from patch.checkpoint.load import load_checkpoint, read_common
from patch.checkpoint.save import save_checkpoint

__all__ = ["latest_iteration", "load_checkpoint", "read_common", "save_checkpoint"]
