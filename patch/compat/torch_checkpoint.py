"""What torch's checkpoint format is made of and has no public name for.

- torch/distributed/checkpoint/filesystem.py:75 `_StorageInfo`: where a record lies in a .distcp file. The
  pickled `.metadata` holds objects of this class, so whoever writes the format piece by piece needs it.
- torch/distributed/checkpoint/utils.py:427 `_create_file_view`: a window of a file that reads like a file.

Delete when torch gives them public names. Megatron-core's `.metadata` holds the same class.
"""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view as create_file_view

__all__ = ["StorageInfo", "create_file_view"]
