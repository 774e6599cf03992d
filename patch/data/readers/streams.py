"""Opens a file of text: decompresses it by its first bytes, and refuses what is no UTF-8 text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from patch.errors import DataError

_BUFFER_BYTES = 1 << 18
NOT_UTF8 = "which is not UTF-8; convert it: iconv -f ENCODING -t UTF-8 FILE > NEW"
_BOM = b"\xef\xbb\xbf"

_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}

_OTHER_KINDS = {
    b"PK\x03\x04": "a zip archive, or the workbook of a spreadsheet; unpack it, or save the sheet as CSV",
    b"BZh": "compressed by bzip2; unpack it, or use gzip or zstd",
    b"\xfd7zXZ": "compressed by xz; unpack it, or use gzip or zstd",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"PARE": "an encrypted parquet file; decrypt it",
    b"\x89HDF": "an HDF5 file; write it as JSONL or parquet",
    b"PAR1": "a compressed parquet file, which is compressed in itself; unpack it",
    b"ARROW1": "a compressed Arrow file; unpack it",
    b"\xff\xff\xff\xff": "a compressed Arrow stream; unpack it",
    b"\x1f\x8b": "compressed twice; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed twice; unpack it",
    b"\x80": "a Python pickle or other binary data; write it as JSONL or parquet",
}
"""What users give by mistake: first bytes, and what they are."""


class DamagedDataError(Exception):
    """Compressed data that ends early or is damaged: `args` are this in words, and what the codec says."""


@contextmanager
def open_stream(path: Path) -> Iterator[io.BufferedReader]:
    """The text of a file, decompressed, from behind its UTF-8 byte-order mark.

    Raises:
        DataError: the text is UTF-16 or UTF-32, or the file is of a known kind that is not read.
        DamagedDataError: within the block, the compressed data is damaged or ends early.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(8)
        file.seek(0)
        codec = next((name for magic, name in _CODECS.items() if head.startswith(magic)), None)
        raw: Any = file if codec is None else _decompressed(file, codec)
        with io.BufferedReader(raw, _BUFFER_BYTES) as stream:
            try:
                _refuse_other_kinds(path, stream.peek(8))
                if stream.peek(len(_BOM)).startswith(_BOM):
                    stream.read(len(_BOM))
                yield stream
            except OSError as error:
                if codec is None or error.errno is not None:
                    raise
                # pyarrow's errors have nothing but a text, such as "Truncated compressed stream".
                what = "ends early" if "Truncated" in str(error) else "is damaged"
                raise DamagedDataError(f"{codec} data {what}", str(error)) from error


def _decompressed(file: BinaryIO, codec: str) -> Any:
    """The decompressed stream. pyarrow refuses data that ends early, and zstd windows over 128 MiB."""
    import pyarrow  # only parquet and compressed files need it

    return pyarrow.CompressedInputStream(file, codec)


def _refuse_other_kinds(path: Path, head: bytes) -> None:
    if encoding := _encoding(head):
        raise DataError(
            f"{path}: is {encoding} text, expected UTF-8; convert it: iconv -f {encoding} -t UTF-8 FILE > NEW"
        )
    kind = next((what for magic, what in _OTHER_KINDS.items() if head.startswith(magic)), None)
    if head[257:262] == b"ustar":
        kind = "a tar archive; unpack it"
    if kind:
        raise DataError(f"{path}: is {kind}; expected JSON, JSONL, parquet, Arrow or CSV")


def _encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, by a byte-order mark or by the zero bytes beside the first character."""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    zeros = [byte == 0 for byte in head[:4]]
    if zeros in ([False, True, True, True], [True, True, True, False]):
        return "UTF-32LE" if zeros[3] else "UTF-32BE"
    if zeros in ([False, True, False, True], [True, False, True, False]):
        return "UTF-16LE" if zeros[3] else "UTF-16BE"
    return None
