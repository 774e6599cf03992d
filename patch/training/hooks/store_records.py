"""Copies a run's records to the store of its checkpoints, so that a resume elsewhere needs only the URL.

config.yaml, data.json and (DPO) reference.json are sent when training begins, metrics.jsonl after each save.
If the run's folder lacks a file, or has fewer metrics than the store, the run fetches it from the store.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from patch.config.schema import RunConfig
from patch.device import start_thread
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.preflight.checkpoint_places import checkpoint_root, resumed_run_folder
from patch.storage.atomic import write_atomically, write_record
from patch.storage.names import CONFIG_FILE, DATA_RECORD_FILE, METRICS_FILE, REFERENCE_FILE
from patch.storage.remote import RemotePath
from patch.storage.text_files import read_small
from patch.training.hooks.hook import TrainerHook
from patch.training.hooks.metrics import MOST_BYTES, read_metrics

_logger = get_logger(__name__)

_RECORDS = (CONFIG_FILE, DATA_RECORD_FILE, REFERENCE_FILE)
_CURE = "check the URL and the permissions of --save"
_WAIT_S = 10.0
"""Seconds that the next save and the end of the run wait for a slow store."""


def take_records(config: RunConfig) -> None:
    """Fetch the records of a resumed run from the store; call it in one process.

    Raises:
        CheckpointError: the store does not answer, or the run's folder cannot be written.
    """
    home, output = resumed_run_folder(config), Path(config.checkpoint.output_path)
    if isinstance(home, RemotePath):
        for name in _RECORDS:
            _take(home / name, output / name)


def send_records(config: RunConfig) -> None:
    """Send the records to the store, if there is a store; call it in one process.

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
            what = f"cannot be written: {error.strerror}; {_CURE}"
            raise CheckpointError(f"{root / name} {what}", field="save") from error


def take_metrics(config: RunConfig, start_iteration: int) -> None:
    """Fetch metrics.jsonl from the store if that file has more of the finished steps; call it in one process.

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
        content = read_small(source, MOST_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        what = f"cannot be read: {error.strerror}; {_CURE}"
        raise CheckpointError(f"{source} {what}", field="save") from error
    write_record(target, content)


class StoreMetrics(TrainerHook):
    """Sends metrics.jsonl to the store after each save, in the background. Create it after `MetricsLog`."""

    def __init__(self, output: Path, root: RemotePath) -> None:
        self._file, self._root = output / METRICS_FILE, root
        self._sending: threading.Thread | None = None

    def on_save(self, iteration: int) -> None:
        """Send the current file."""
        self.close()
        self._sending = start_thread("send metrics", partial(self._send, read_small(self._file, MOST_BYTES)))

    def close(self) -> None:
        """Wait at most _WAIT_S seconds until the file is sent."""
        if self._sending is not None:
            self._sending.join(_WAIT_S)

    def _send(self, content: bytes) -> None:
        try:
            write_atomically(self._root / self._file.name, content)
        except OSError as error:  # the run goes on; the next save sends the file again
            _logger.warning("%s was not sent: %s", self._root / self._file.name, error.strerror)
