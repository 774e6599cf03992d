"""Names of the Hugging Face hub: org/name becomes a folder of the Hugging Face cache.

The cache is asked first, so a name keeps its revision while the cache keeps its copy, and nothing is
downloaded twice. Missing files are downloaded by huggingface_hub. It respects HF_TOKEN, HF_HUB_OFFLINE,
HF_HOME and HF_ENDPOINT, shows progress, and locks each file: one process per machine downloads it.

The path of a snapshot contains name and revision (models--org--name/snapshots/REVISION). So such a path is a
name too: a machine without it in its cache downloads the same revision.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from patch.errors import CheckpointError, ConfigError, PatchError
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

_WORD = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_NAME = re.compile(rf"{_WORD}/{_WORD}", re.ASCII)
_FILE = re.compile(
    r"\.(json|jsonl|ndjson|parquet|arrow|gz|zst|txt|csv|tsv|bin|idx|yaml|model)$", re.IGNORECASE
)
"""Suffixes of files; a text with such a suffix is a misspelled path, not a name."""
_SNAPSHOT = re.compile(r"(models|datasets)--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})(/.*)?$")


class HubName(NamedTuple):
    """A model or data set of the hub."""

    kind: Kind
    repo: str
    """org/name."""
    revision: str | None = None
    """The commit, or None for the commit in the cache, or else the newest."""
    inside: str = ""
    """The path inside the snapshot ("/data/train*"), or "" for all files."""

    @property
    def folder_name(self) -> str:
        """The name of the folder in the cache."""
        return f"{self.kind}s--{self.repo.replace('/', '--')}"


def shadowed_by(text: str) -> str | None:
    """Return the local folder that makes a hub name a path, or None if there is none.
    None also if the whole path exists.
    """
    first = text.partition("/")[0]
    return first if _has_form(text) and os.path.isdir(first) and not os.path.lexists(text) else None


def _has_form(text: str) -> bool:
    return bool(_NAME.fullmatch(text) and not _FILE.search(text) and ".." not in text and "--" not in text)


def hub_name(text: str, kind: Kind) -> HubName | None:
    """Return the hub name of a text (org/name or a snapshot's path), or None if it has another form.
    None also for a path: it exists, or it is misspelled if its first part is a local folder.
    """
    if os.path.lexists(text):
        return None
    name = snapshot_name(text)
    if name is None and _has_form(text) and shadowed_by(text) is None:
        return HubName(kind, text)
    return name if name is not None and name.kind == kind else None


def snapshot_name(path: str) -> HubName | None:
    """Return name and revision in a path into a hub cache, or None for any other path."""
    match = _SNAPSHOT.search(path)
    if match is None:
        return None
    kinds, organisation, name, revision, inside = match.groups()
    kind: Kind = "model" if kinds == "models" else "dataset"
    return HubName(kind, f"{organisation}/{name}", revision, inside or "")


def lacking_weights(folder: Path) -> list[str]:
    """Return the weight files of the index (or model.safetensors) that a snapshot's folder lacks."""
    try:
        names = set(map(str, read_json(folder / SAFE_WEIGHTS_INDEX_NAME)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the weights' reader reports it
        names = {SAFE_WEIGHTS_NAME}
    return sorted(name for name in names if not os.path.isfile(folder / name))


def data_files(folder: Path) -> list[Path]:
    """Return the row files of a snapshot, see `row_files`."""
    return row_files(file for file in folder.rglob("*") if file.is_file())


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _has_weights(folder: Path) -> bool:
    return _has_config(folder) and not lacking_weights(folder)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


Wanted = Literal["config.json", "weights", "tokenizer", "rows"]
_MODEL = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configuration and tokenizer, a few megabytes, enough to plan a run. Files in subfolders do not match."""
_ROWS = tuple(f"*{suffix}" for suffix in DATA_SUFFIXES)
_WANTED: dict[Wanted, tuple[tuple[str, ...], Callable[[Path], object], str]] = {
    "config.json": (_MODEL, _has_config, "config.json"),
    # Weights that cannot execute code, without a second copy under another name.
    "weights": ((*_MODEL, "model*.safetensors"), _has_weights, "weights as safetensors"),
    "tokenizer": (_MODEL, _has_tokenizer, " or ".join(TOKENIZER_FILES)),
    "rows": (_ROWS, data_files, "files of rows (JSON, Parquet, Arrow or CSV)"),
}
"""Kind of files -> patterns of what to download, whether a folder has them, words for messages."""


def fetch(
    name: HubName, wanted: Wanted, *, error_type: type[PatchError] = ConfigError, field: str | None = None
) -> Path:
    """Return the folder of a snapshot that has the wanted files, from the cache or downloaded into it.

    Args:
        wanted: `weights` are those of a model with its config.json, and its tokenizer if it has one.
        error_type: the class of the error to raise.
        field: the configuration field with the name, for messages.
    Raises:
        PatchError: of that class: the hub does not know the name or cannot be reached, the download fails, or
            required files are missing.
    """
    patterns, is_there, words = _WANTED[wanted]
    from huggingface_hub import constants, snapshot_download  # takes 0.6 s; few runs need it
    from huggingface_hub.errors import LocalEntryNotFoundError

    # A model's subfolders hold other forms of the weights, and tokenizers of other programs.
    others = ["*/*"] if name.kind == "model" else None
    snapshot = partial(
        snapshot_download, name.repo, repo_type=name.kind, revision=name.revision,
        allow_patterns=list(patterns), ignore_patterns=others,
    )  # fmt: skip
    folder, cache, is_offline = None, Path(constants.HF_HUB_CACHE), constants.HF_HUB_OFFLINE
    try:
        with suppress(LocalEntryNotFoundError):
            folder = Path(snapshot(local_files_only=True))
        if folder is None or not is_there(folder):
            _logger.info("%s: %s is downloaded into %s", name.repo, words, cache)
            folder = Path(snapshot())
        if is_there(folder):
            return folder
        why = "the hub does not have them or cannot be reached"
        reason, cause = f"{why}; check the name and the network, or give a local folder", None
    except Exception as error:  # noqa: BLE001 - it raises errors of httpx, OSError and ValueError
        folder, reason, cause = getattr(error, "snapshot_path", None), _reason(error, name), error
    found = f"has no {words} in {folder}" if folder else f"is neither a path nor in {cache}"
    reason = "HF_HUB_OFFLINE forbids downloads" if is_offline else reason
    raise error_type(f"{name.repo} {found}, and {reason}", field=field) from cause


def local_model(text: str, wanted: Wanted, error_type: type[PatchError]) -> Path:
    """Return the folder of a text that is a path, or a model's name of the hub; errors as in `fetch`."""
    name = hub_name(text, "model")
    return Path(text) if name is None else fetch(name, wanted, error_type=error_type)


def _reason(error: Exception, name: HubName) -> str:
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
    """Return why a run may not push its model to a repository of the hub, or "" if it may.

    Args:
        repo: org/name.
        pushed: the file with the names of repositories that this run has created.
        how: private or public for a new repository, or update.
    """
    from huggingface_hub import HfApi, constants

    if not _has_form(repo):
        return "it does not have the form org/name"
    try:
        HfApi().whoami()
        is_there = HfApi().repo_exists(repo)
    except Exception as error:  # noqa: BLE001 - see `_fetch`
        return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub says: {_first_line(error)}"
    if how == "update" and not is_there:
        return (
            "the repository does not exist, and --push-to-hub-as update needs one; use --push-to-hub-as "
            "private or public"
        )
    if is_there and how != "update" and repo not in _created(pushed):
        return "the repository exists, and not from this run; --push-to-hub-as update overwrites it"
    return ""


def push_model(folder: Path, repo: str, pushed: Path, how: str) -> str:
    """Upload an exported model and return its address. Arguments as in `lack_of_repository`.

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
