"""Parts of torch's checkpoint format that have no public name.

- torch/distributed/checkpoint/filesystem.py:75 `_StorageInfo`: the position of a record in a .distcp file.
  The pickled `.metadata` contains objects of this class, in checkpoints of torch and of megatron-core, so
  code that writes the format itself needs it.
- torch/distributed/checkpoint/utils.py:427 `_create_file_view`: a part of a file as a file object.

Delete when torch gives them public names.
"""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view as create_file_view

__all__ = ["StorageInfo", "create_file_view"]
