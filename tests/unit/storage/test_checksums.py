"""What a file held, against zlib and through JSON."""

import json
import os
import zlib
from pathlib import Path

import pytest

from patch.storage import places
from patch.storage.checksums import Checksum, SummedFile, content, difference, from_json, to_json


def test_content_is_length_and_crc32_and_survives_json(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 20000)  # longer than what is read at once
    found = content(path)
    assert found == Checksum(256 * 20000, f"{zlib.crc32(path.read_bytes()):08x}")
    assert from_json(json.loads(json.dumps(to_json({"data": found})))) == {"data": found}
    assert list(to_json({"b": found, "a": found})) == ["a", "b"]


def test_disk_begins_to_write_a_long_file_before_it_is_finished(tmp_path: Path, monkeypatch) -> None:
    flushed: list[int] = []
    flush = places._sync_file_range
    monkeypatch.setattr(places, "_sync_file_range", lambda *flushing: flushed.append(flush(*flushing)))
    file = SummedFile(tmp_path / "data")
    part = bytes(9 * 2**20)
    for _ in range(4):
        file.write(part)
    assert flushed == [0, 0]  # after 16 and 32 MiB
    assert file.finish() == Checksum(4 * len(part), f"{zlib.crc32(4 * part):08x}")


def test_difference_names_length_bits_and_absence(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    held = content(path)
    assert difference(path, held) is None
    path.write_bytes(b"abd")
    assert "CRC-32" in str(difference(path, held))
    path.write_bytes(b"ab")
    assert "2 bytes, expected 3" in str(difference(path, held))
    path.unlink()
    assert "missing" in str(difference(path, held))


@pytest.mark.timeout(20)
def test_a_pipe_of_the_right_length_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "data"
    os.mkfifo(path)
    assert "it is a pipe or a device" in str(difference(path, Checksum(0, "0" * 8)))
