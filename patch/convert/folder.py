"""A target folder that appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from patch.errors import ConversionError
from patch.storage.atomic import StagedFolder
from patch.storage.lock import hold_target
from patch.storage.names import RELEASE


@contextmanager
def staging(
    target: Path, sources: Sequence[Path], *, overwrite: bool, released: bool = False
) -> Iterator[Path]:
    """An empty folder to write into, which `publish` puts in the target's place; no other conversion's.

    Args:
        target: an absolute path.
        sources: folders that are read; the target may be, or hold, none of them.
        overwrite: a target of the same kind is to be replaced.
        released: the target is to be a converted checkpoint, not a Hugging Face model; neither replaces the
            other.
    Raises:
        ConversionError: the target is or holds a source, is something that must not be replaced, or is being
            written; or nothing can be written there.
    """
    _check_target(target, sources, overwrite, released)
    staged = _staged(target)
    with hold_target(target):
        _check_target(target, sources, overwrite, released)  # what the last holder has made is there now
        try:
            with writing(staged.partial):
                staged.open()
            yield staged.partial
        finally:
            staged.discard()


def partial_folder(target: Path) -> Path:
    """Where `staging` writes."""
    return _staged(target).partial


def _staged(target: Path) -> StagedFolder:
    return StagedFolder(
        target, target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.replaced")
    )


def _check_target(target: Path, sources: Sequence[Path], overwrite: bool, released: bool) -> None:
    for source in (folder.resolve() for folder in sources):
        if target in (source, *source.parents):
            what = "is the folder" if target == source else f"holds {source},"
            raise ConversionError(f"{target} {what} the weights came from; give another one to write to")
    if target.is_mount():
        raise ConversionError(f"{target} is a mount point, which nothing can replace; give a folder in it")
    if target.exists() and not _is_replaceable(target, released):
        kind = (
            "converted checkpoint (no release/)" if released else "Hugging Face model (it has no config.json)"
        )
        raise ConversionError(
            f"{target} exists and is no {kind}, so it is not replaced: give another folder or remove it"
        )
    if target.exists() and any(target.iterdir()) and not overwrite:
        raise ConversionError(
            f"{target} holds a {'converted checkpoint' if released else 'Hugging Face model'} already: give "
            "another folder (--save), or --overwrite to replace it"
        )


def _is_replaceable(target: Path, released: bool) -> bool:
    if not target.is_dir():
        return False
    is_model, is_released = (target / "config.json").is_file(), (target / RELEASE).is_dir()
    return (is_model and is_released is released) or not any(target.iterdir())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever the libraries raise when a file cannot be written becomes a ConversionError.

    `tokenizers` raises plain Exception for it; subclasses other than the named ones are bugs and pass.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, SafetensorError)) and type(error) is not Exception:
            raise
        raise ConversionError(
            f"cannot write {path}: {error}; expected room for it, in a folder that every machine sees "
            "(OUTPUT_BASEPATH, position 25, or --save)"
        ) from error


def publish(target: Path) -> None:
    """Put the finished folder in the target's place; a target that was there comes back on failure.

    Its bytes are on the disk before it has its name: whatever ends the machine, a name means a whole folder.
    """
    try:
        _staged(target).publish()
    except OSError as error:
        raise ConversionError(f"cannot put the finished export in place at {target}: {error}") from error
