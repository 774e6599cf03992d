"""A reader for torch's DCP that needs only a small buffer, whatever part of a stored tensor a rank wants.

torch's own FileSystemReader reads a whole stored piece for each part of it that is wanted: a rank that loads
a hundredth of an embedding would have all of it in memory.
"""

from __future__ import annotations

import io
from collections import defaultdict
from typing import IO, Any, cast

import numpy as np
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from patch.checkpoint.records import WINDOW_BYTES, read_header, read_region, reading_errors
from patch.storage.places import AnyPath, open_to_read


class WindowReader(FileSystemReader):
    """Reads each file in its order, a window at a time, straight into the tensors where that is possible.

    Args:
        folder: the checkpoint.
        index: its parsed `.metadata`, which is not read again.
    """

    def __init__(self, folder: AnyPath, index: Metadata) -> None:
        super().__init__(str(folder))
        self._folder, self._index = folder, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index that was given."""
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan wants into the planner's tensors.

        Raises:
            CheckpointError: a record cannot be read; the message names the file and the tensor.
        """
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        buffer = np.empty(WINDOW_BYTES, np.uint8)
        for name, items in sorted(by_file.items()):
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            path = self._folder / name
            with open_to_read(path) as stream:
                self._read_file(path, stream, items, planner, buffer)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(
        self,
        path: AnyPath,
        stream: IO[bytes],
        items: list[ReadItem],
        planner: LoadPlanner,
        buffer: np.ndarray,
    ) -> None:
        """Read what is wanted of one file; items of one record follow each other."""
        index, record = None, None
        for item in items:
            place = self.storage_data[item.storage_index]
            with reading_errors(path, item.storage_index.fqn, place):
                if item.type == LoadItemType.BYTE_IO:
                    stream.seek(place.offset)
                    planner.load_bytes(item, io.BytesIO(stream.read(place.length)))
                    continue
                if record is None or index != item.storage_index:
                    index = item.storage_index
                    stored = cast(TensorStorageMetadata, self._index.state_dict_metadata[index.fqn])
                    shape = stored.chunks[cast(int, index.index)].sizes
                    record = read_header(stream, place, shape, stored.properties.dtype)
                target = planner.resolve_tensor(item).detach()
                read_region(stream, record, item.storage_offsets, target, buffer)
                planner.commit_tensor(item, target)
