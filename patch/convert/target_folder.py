"""The target folder of a conversion: replaced as a whole at the end, or not changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from patch.errors import ConversionError
from patch.logger import get_logger
from patch.storage.atomic import StagedFolder
from patch.storage.lock import check_held, hold_target
from patch.storage.names import ADAPTER_CONFIG_NAME, RELEASE

_logger = get_logger(__name__)
Kind = Literal["Hugging Face model", "converted checkpoint", "PEFT adapter"]
_MARKS: dict[Kind, str] = {
    "Hugging Face model": "config.json",
    "converted checkpoint": f"{RELEASE}/",
    "PEFT adapter": ADAPTER_CONFIG_NAME,
}
"""The file that identifies a folder of each kind."""


@contextmanager
def staging(
    target: Path, sources: Sequence[Path], *, overwrite: bool, kind: Kind = "Hugging Face model"
) -> Iterator[Path]:
    """Open an empty folder, which `publish` renames to `target`; locked against other conversions.

    Args:
        target: an absolute path.
        sources: the folders that are read; the target must not be or contain a source.
        overwrite: replace an existing target of the same kind.
        kind: the kind of the target; a folder of another kind is never replaced.
    Raises:
        ConversionError: the target is or contains a source, must not be replaced, is being written by another
            process, or cannot be written.
    """
    _check_target(target, sources, overwrite, kind)
    staged = _staged(target)
    with hold_target(target):
        _check_target(target, sources, overwrite, kind)  # another conversion may have written it
        try:
            with writing(staged.partial):
                staged.open()
            yield staged.partial
        finally:
            staged.discard()


def partial_folder(target: Path) -> Path:
    """Return the folder that `staging` yields."""
    return _staged(target).partial


def _staged(target: Path) -> StagedFolder:
    return StagedFolder(
        target, target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.replaced")
    )


def _check_target(target: Path, sources: Sequence[Path], overwrite: bool, kind: Kind) -> None:
    for source in (folder.resolve() for folder in sources):
        if target in (source, *source.parents):
            what = "is the folder" if target == source else f"holds {source},"
            raise ConversionError(f"{target} {what} the weights came from; give another one to write to")
    if target.is_mount():
        raise ConversionError(f"{target} is a mount point, which nothing can replace; give a folder in it")
    is_used = target.exists() and not (target.is_dir() and not any(target.iterdir()))
    if is_used and _kind_of(target) != kind:
        raise ConversionError(
            f"{target} exists and is no {kind} (it has no {_MARKS[kind]}), so it is not replaced: give "
            "another folder or remove it"
        )
    if is_used and not overwrite:
        raise ConversionError(
            f"{target} holds a {kind} already: give another folder (--save), or --overwrite to replace it"
        )


def _kind_of(folder: Path) -> Kind | None:
    is_released = (folder / RELEASE).is_dir()
    if (folder / "config.json").is_file():
        return "converted checkpoint" if is_released else "Hugging Face model"
    is_adapter = (folder / ADAPTER_CONFIG_NAME).is_file() and not is_released
    return "PEFT adapter" if is_adapter else None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a library's error of writing a file into a ConversionError.

    `tokenizers` raises a plain Exception for this. Exceptions other than Exception itself, OSError and
    SafetensorError are bugs and pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, SafetensorError)) and type(error) is not Exception:
            raise
        raise ConversionError(
            f"cannot write {path}: {error}; expected room for it, in a folder that every machine sees",
            field="output_path",
        ) from error


def publish(target: Path, what: str, step: int | None = None) -> None:
    """Rename the finished folder to `target` and log it; on failure the previous target is restored.

    All bytes are synced before the rename, so `target` is complete even after a power failure.

    Args:
        target: the folder that `staging` was given.
        what: the name of its kind, for the log.
        step: the step of the weights.
    Raises:
        ConversionError: it cannot be renamed, or another process has taken the lock.
    """
    try:
        check_held(target)
        _staged(target).publish()
    except OSError as error:
        raise ConversionError(f"cannot put the finished export in place at {target}: {error}") from error
    _logger.info("%s written: %s%s", what, target, "" if step is None else f" (step {step})")
