"""Records that travel with a run's checkpoints in a store, so that it goes on elsewhere with only the URL.

config.yaml, data.json and (DPO) reference.json are sent when training begins, metrics.jsonl after each save.
A run whose folder lacks them, or has fewer metrics than the store, takes them from there.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from patch.config.schema import RunConfig
from patch.device import start_thread
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.preflight.checkpoint_places import checkpoint_root, record_home
from patch.storage.atomic import write_atomically, write_record
from patch.storage.names import CONFIG_FILE, DATA_RECORD_FILE, METRICS_FILE, REFERENCE_FILE
from patch.storage.remote import RemotePath
from patch.storage.text_files import read_small
from patch.training.hooks import TrainerHook
from patch.training.metrics import read_metrics

_logger = get_logger(__name__)

_RECORDS = (CONFIG_FILE, DATA_RECORD_FILE, REFERENCE_FILE)
_MOST_BYTES = 1 << 32
_WAIT_S = 10.0
"""Seconds that the next save and the end wait for a store that does not take the metrics."""


def take_records(config: RunConfig) -> None:
    """Bring the records from the store of a run that is resumed; in one process.

    Raises:
        CheckpointError: the store does not answer, or the run's folder cannot be written.
    """
    home, output = record_home(config), Path(config.checkpoint.output_path)
    if isinstance(home, RemotePath):
        for name in _RECORDS:
            _take(home / name, output / name)


def send_records(config: RunConfig) -> None:
    """Send the records to the store, if there is one; in one process.

    Raises:
        CheckpointError: the store refuses them.
    """
    root = checkpoint_root(config)
    for name in _RECORDS if isinstance(root, RemotePath) else ():
        file = Path(config.checkpoint.output_path) / name
        try:
            if file.is_file():
                write_atomically(root / name, read_small(file))
        except OSError as error:
            raise CheckpointError(
                f"{root / name} cannot be written: {error.strerror}", field="save"
            ) from error


def take_metrics(config: RunConfig, start_iteration: int) -> None:
    """Bring metrics.jsonl from the store if it has more of the steps that are done; in one process.

    Raises:
        CheckpointError: the run's folder cannot be written, or the store does not answer.
    """
    root, file = checkpoint_root(config), Path(config.checkpoint.output_path) / METRICS_FILE
    if not isinstance(root, RemotePath) or not start_iteration:
        return
    draft = file.with_name(f"{file.name}.store")
    _take(root / file.name, draft)
    if draft.is_file():
        if _num_done(draft, start_iteration) > _num_done(file, start_iteration):
            draft.replace(file)
        draft.unlink(missing_ok=True)


def _num_done(file: Path, start_iteration: int) -> int:
    return sum(record["iteration"] <= start_iteration for record in read_metrics(file))


def _take(source: RemotePath, target: Path) -> None:
    try:
        content = read_small(source, _MOST_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror}", field="save") from error
    write_record(target, content)


class StoreMetrics(TrainerHook):
    """Sends metrics.jsonl to the store after each save, in the background. It is created after `MetricsLog`.

    Args:
        output: the run's folder.
        root: the folder of its checkpoints.
    """

    def __init__(self, output: Path, root: RemotePath) -> None:
        self._file, self._root = output / METRICS_FILE, root
        self._sending: threading.Thread | None = None

    def on_save(self, iteration: int) -> None:
        """Send the file as it is now."""
        self.close()
        self._sending = start_thread("send metrics", partial(self._send, read_small(self._file, _MOST_BYTES)))

    def close(self) -> None:
        """Wait until it was sent, but not for ever."""
        if self._sending is not None:
            self._sending.join(_WAIT_S)

    def _send(self, content: bytes) -> None:
        """A failure is no reason to end the run: the next save will tell."""
        try:
            write_atomically(self._root / self._file.name, content)
        except OSError as error:
            _logger.warning("%s was not sent: %s", self._root / self._file.name, error.strerror)
