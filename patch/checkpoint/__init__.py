"""Checkpoints in megatron-core's torch_dist format, written completely or not at all; see README.md."""

from patch.checkpoint.folder import latest_iteration, weights_folder
from patch.checkpoint.load import load_checkpoint, load_only_weights, read_common
from patch.checkpoint.save import save_checkpoint

__all__ = [
    "latest_iteration",
    "load_checkpoint",
    "load_only_weights",
    "read_common",
    "save_checkpoint",
    "weights_folder",
]
