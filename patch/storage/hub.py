"""Names of the Hugging Face hub: org/name becomes a folder of the Hugging Face cache.

The cache is asked first, so a name keeps its meaning as long as the cache keeps its copy, and nothing is
downloaded twice. What is missing there is downloaded by huggingface_hub, which respects HF_TOKEN,
HF_HUB_OFFLINE, HF_HOME and HF_ENDPOINT, shows its progress, and locks each file: one process of a machine
downloads it, the others wait for that.

The folder of a snapshot holds name and revision (models--org--name/snapshots/REVISION). So such a path is a
name too: a machine whose cache lacks it fetches the same revision.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from patch.errors import CheckpointError, ConfigError, DataError, PatchError
from patch.logger import get_logger
from patch.storage.atomic import write_atomically
from patch.storage.names import (
    DATA_SUFFIXES,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    TOKENIZER_FILES,
    row_files,
)
from patch.storage.text_files import read_json, read_small

_logger = get_logger(__name__)

Kind = Literal["model", "dataset"]

MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configuration and tokenizer: all that a run is planned with. Names of folders below are not matched."""
WEIGHT_FILES = ("model*.safetensors",)
"""Weights that cannot execute code, and no second copy of them under another name."""
DATA_FILES = tuple(f"*{suffix}" for suffix in DATA_SUFFIXES)

_WORD = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_NAME = re.compile(rf"{_WORD}/{_WORD}", re.ASCII)
_FILE = re.compile(
    r"\.(json|jsonl|ndjson|parquet|arrow|gz|zst|txt|csv|tsv|bin|idx|yaml|model)$", re.IGNORECASE
)
"""Endings of files; a path with one is a misspelled path, not a name."""
_SNAPSHOT = re.compile(r"(models|datasets)--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})(/.*)?$")


class HubName(NamedTuple):
    """A model or data set of the hub."""

    kind: Kind
    repo: str
    """org/name."""
    revision: str | None = None
    """The commit; None: the one that the cache has, or the newest."""
    inside: str = ""
    """The path inside the snapshot: "/data/train*"; "" for all."""

    @property
    def folder_name(self) -> str:
        """The name of its folder in the cache."""
        return f"{self.kind}s--{self.repo.replace('/', '--')}"


def shadowed_by(text: str) -> str | None:
    """The folder here whose name makes a path of what would else be a name of the hub; None if none does.

    None also if there is such a path.
    """
    first = text.partition("/")[0]
    return first if _has_form(text) and os.path.isdir(first) and not os.path.lexists(text) else None


def _has_form(text: str) -> bool:
    """Whether a text is written as org/name is."""
    return bool(_NAME.fullmatch(text) and not _FILE.search(text) and ".." not in text and "--" not in text)


def hub_name(text: str, kind: Kind) -> HubName | None:
    """The name of the hub that a path stands for: org/name, or a snapshot.

    None if there is such a path, or a folder here is called like its first part: it is a misspelled path.
    """
    if os.path.lexists(text):
        return None
    if (name := snapshot_name(text)) is not None:
        return name if name.kind == kind else None
    if os.path.isdir(text.partition("/")[0]):
        return None
    return HubName(kind, text) if _has_form(text) else None


def snapshot_name(path: str) -> HubName | None:
    """The name and revision that a path into a cache of the hub holds; None for any other path."""
    match = _SNAPSHOT.search(path)
    if match is None:
        return None
    kinds, organisation, name, revision, inside = match.groups()
    kind: Kind = "model" if kinds == "models" else "dataset"
    return HubName(kind, f"{organisation}/{name}", revision, inside or "")


def lacking_weights(folder: Path) -> list[str]:
    """The files of weights that a snapshot's folder lacks, by its index; without one, model.safetensors."""
    try:
        names = set(map(str, read_json(folder / SAFE_WEIGHTS_INDEX_NAME)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # who reads the weights says why
        names = {SAFE_WEIGHTS_NAME}
    return sorted(name for name in names if not os.path.isfile(folder / name))


def fetch_model(
    name: HubName, *, weights: bool, error: type[PatchError] = ConfigError, field: str | None = None
) -> Path:
    """The folder of a model's snapshot: its configuration, its tokenizer if it has one, and its weights.

    Args:
        name: the model.
        weights: whether weights are needed; without them a few megabytes are downloaded.
        error: the kind of error to raise.
        field: the field of the configuration that holds the name, for messages.
    Raises:
        PatchError: of that kind: the hub does not know the name or cannot be reached, the download fails, or
            the repository does not hold what is needed.
    """
    patterns = MODEL_FILES + WEIGHT_FILES if weights else MODEL_FILES
    words = "weights as safetensors" if weights else "config.json"

    def is_there(folder: Path) -> bool:
        return (folder / "config.json").is_file() and not (weights and lacking_weights(folder))

    return _fetch(name, patterns, is_there, words, error, field)


def fetch_tokenizer(
    name: HubName, *, error: type[PatchError] = ConfigError, field: str | None = None
) -> Path:
    """The folder of a snapshot with a tokenizer; see `fetch_model`."""

    def is_there(folder: Path) -> bool:
        return any((folder / file).is_file() for file in TOKENIZER_FILES)

    return _fetch(name, MODEL_FILES, is_there, " or ".join(TOKENIZER_FILES), error, field)


def fetch_data(name: HubName, *, field: str | None = None) -> Path:
    """The folder of a data set's snapshot: all files of rows.

    Raises:
        DataError: see `fetch_model`.
    """
    words = "files of rows (JSON, Parquet, Arrow or CSV)"
    return _fetch(name, DATA_FILES, lambda folder: bool(data_files(folder)), words, DataError, field)


def data_files(folder: Path) -> list[Path]:
    """The files of rows in a snapshot, see `row_files`."""
    return row_files(file for file in folder.rglob("*") if file.is_file())


def _fetch(
    name: HubName,
    patterns: Sequence[str],
    is_there: Callable[[Path], bool],
    words: str,
    error_type: type[PatchError],
    field: str | None,
) -> Path:
    """The folder of a snapshot that holds what is wanted: from the cache, or downloaded into it.

    Args:
        name: of the repository.
        patterns: what is downloaded.
        is_there: whether a snapshot's folder holds what is wanted.
        words: what is wanted, for messages.
        error_type: of the error where it is missing.
        field: the field of the configuration that holds the name.
    """
    from huggingface_hub import constants, snapshot_download  # takes 0.6 s, and few runs need it
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(*, local: bool) -> Path:
        folder = snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            # Files in a model's folders are other forms of the same weights and tokenizers of other programs.
            ignore_patterns=["*/*"] if name.kind == "model" else None,
            local_files_only=local,
        )
        return Path(folder)

    folder, cache, is_offline = None, Path(constants.HF_HUB_CACHE), constants.HF_HUB_OFFLINE
    try:
        with suppress(LocalEntryNotFoundError):
            folder = snapshot(local=True)
        if folder is None or not is_there(folder):
            _logger.info("%s: %s is downloaded into %s", name.repo, words, cache)
            folder = snapshot(local=False)
        if is_there(folder):
            return folder
        reason, cause = "the hub does not have them or cannot be reached", None
    except Exception as error:  # noqa: BLE001 - it raises errors of httpx, OSError and ValueError
        folder, reason, cause = getattr(error, "snapshot_path", None), _reason(error, name), error
    found = f"has no {words} in {folder}" if folder else f"is neither a path nor in {cache}"
    reason = "HF_HUB_OFFLINE forbids to download" if is_offline else reason
    raise error_type(f"{name.repo} {found}, and {reason}", field=field) from cause


def _reason(error: Exception, name: HubName) -> str:
    """Why a download failed, in one line."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return "its terms must be accepted on its page of the hub, then log in (hf auth login, or HF_TOKEN)"
    if isinstance(error, RevisionNotFoundError):
        return f"the hub does not have its revision {name.revision}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no {name.kind} of that name, or it is private (hf auth login, or HF_TOKEN)"
    return f"it cannot be downloaded: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


def lack_of_repository(repo: str, pushed: Path, how: str) -> str:
    """Why a run may not push its model to a repository of the hub; "" if it may.

    Args:
        repo: org/name.
        pushed: the file with the repositories that this run has created.
        how: private or public, as a new repository, or update.
    """
    from huggingface_hub import HfApi, constants

    if not _has_form(repo):
        return "it is no such name"
    try:
        HfApi().whoami()
        is_there = HfApi().repo_exists(repo)
    except Exception as error:  # noqa: BLE001 - see `_fetch`
        return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub says: {_first_line(error)}"
    if how == "update" and not is_there:
        return "there is none to update (--push-to-hub-as update)"
    if is_there and how != "update" and repo not in _created(pushed):
        return "there is one already, which this run has not created; --push-to-hub-as update overwrites it"
    return ""


def push_model(folder: Path, repo: str, pushed: Path, how: str) -> str:
    """Upload an exported model; its address. See `lack_of_repository`.

    Raises:
        CheckpointError: the hub refuses it, or has such a repository that this run has not created.
    """
    from huggingface_hub import HfApi, constants

    api, created = HfApi(), _created(pushed)
    try:
        if how != "update" and repo not in created:
            api.create_repo(repo, private=how == "private")
            write_atomically(pushed, "".join(f"{name}\n" for name in (*created, repo)))
        old = ["model*.safetensors", SAFE_WEIGHTS_INDEX_NAME]
        api.upload_folder(repo_id=repo, folder_path=folder, delete_patterns=old)
    except Exception as error:  # noqa: BLE001 - see `_fetch`
        message = f"{folder} was not pushed to {repo}: {_first_line(error)}; the same command tries again"
        raise CheckpointError(message, field="push_to_hub") from error
    return f"{constants.ENDPOINT}/{repo}"


def _created(pushed: Path) -> list[str]:
    return read_small(pushed).decode(errors="replace").split() if pushed.is_file() else []
