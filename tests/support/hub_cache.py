"""Put files into a cache of the Hugging Face hub, in the layout that huggingface_hub reads."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


def add_to_cache(
    cache: Path, repo: str, files: Mapping[str, bytes], kind: str = "model", revision: str = REVISION
) -> Path:
    """Store files as the main revision of a repository; return the snapshot's folder."""
    folder = cache / f"{kind}s--{repo.replace('/', '--')}"
    for name in ("blobs", "refs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(revision)
    snapshot = folder / "snapshots" / revision
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}
