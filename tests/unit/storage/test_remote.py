"""Paths in stores: against fsspec's own file system in memory, and one that fails."""

import errno
import pickle
import re
import zlib

import fsspec
import pytest
from failing_store import failing_store

from patch.storage.checksums import SummedFile, content, difference
from patch.storage.places import any_path, file_sizes, is_in, subfolders
from patch.storage.remote import RemotePath, is_url

DATA = bytes(range(256)) * 80000  # more than one window


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> RemotePath:
    return RemotePath(f"memory://{re.sub('[^a-z_]', '', request.node.name)}")


def test_what_is_a_url() -> None:
    assert all(map(is_url, ("s3://bucket/run", "gs://b", "abfs+x://c/d")))
    assert not any(map(is_url, (None, "", "out", "/out", "s3:/bucket", "C:\\run", "simplecache::s3://b/x")))
    assert any_path("out").is_absolute() is False and isinstance(any_path("memory://x"), RemotePath)


def test_paths_have_the_parts_that_pathlib_gives_them(folder: RemotePath) -> None:
    path = folder / "iter_0000001" / "common.pt"
    assert str(path) == f"{folder}/iter_0000001/common.pt" and path.name == "common.pt"
    assert path.parent.parent == folder and RemotePath(f"{folder}/") == folder
    assert RemotePath("memory://x").parent == RemotePath("memory://x")
    assert is_in(path, folder) and not is_in(RemotePath(f"{folder}x"), folder)
    assert (
        pickle.loads(pickle.dumps(path)) == path and len({path, folder / "iter_0000001" / "common.pt"}) == 1
    )


def test_files_and_folders_are_those_that_fsspec_sees(folder: RemotePath) -> None:
    assert not folder.exists() and folder.files() == {} and subfolders(folder) == []
    assert list(folder.glob("*")) == []
    (folder / "a" / "one").write_bytes(b"1")
    (folder / "b" / "two").write_bytes(b"22")
    (folder / "three").write_bytes(b"333")
    system = fsspec.filesystem("memory")
    assert sorted(system.find(str(folder))) == [
        f"/{folder.name}/{name}" for name in ("a/one", "b/two", "three")
    ]
    assert file_sizes(folder) == {"a/one": 1, "b/two": 2, "three": 3}
    assert (
        sorted(subfolders(folder)) == ["a", "b"] and (folder / "a").is_dir() and (folder / "three").is_file()
    )
    assert list(folder.glob("*/t*")) == [folder / "b" / "two"]
    assert not (folder / "three").is_dir() and not (folder / "a").is_file()
    assert (folder / "b" / "two").stat().st_size == 2
    (folder / "three").unlink()
    (folder / "three").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match="three"):
        (folder / "three").read_bytes()
    (folder / "b").remove_tree()
    (folder / "b").remove_tree()
    assert system.find(str(folder)) == [f"/{folder.name}/a/one"]


def test_file_is_written_in_pieces_and_read_in_ranges(folder: RemotePath) -> None:
    file = SummedFile(folder / "data")
    for begin in range(0, len(DATA), 3_000_000):
        file.write(DATA[begin : begin + 3_000_000])
    written = file.finish()
    assert written == (len(DATA), f"{zlib.crc32(DATA):08x}") == content(folder / "data")
    assert difference(folder / "data", written) is None
    assert "missing" in str(difference(folder / "none", written))
    assert (folder / "data").read_bytes(9_000_001, 9_000_101) == DATA[9_000_001:9_000_101]


def test_small_file_is_created_once_also_without_exclusive_creation(folder: RemotePath) -> None:
    with failing_store(None, OSError(errno.ENOSYS, "A header you provided is not implemented")):
        for place in (folder / "one", RemotePath("failing://folder/file")):
            place.create_bytes(b"1")
            with pytest.raises(FileExistsError):
                place.create_bytes(b"2")
            assert place.read_bytes() == b"1"


class NoCredentialsError(Exception):
    """As botocore has it."""


class EndpointError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (EndpointError("cannot connect"), OSError, "EndpointError: cannot connect"),
        (OSError(5, "503"), OSError, "503"),
        (NoCredentialsError("Unable to locate"), PermissionError, "NoCredentialsError: Unable to locate"),
        (PermissionError("Access Denied"), PermissionError, "Access Denied"),
        (FileNotFoundError("no such bucket"), FileNotFoundError, "no such bucket"),
    ],
)
def test_errors_of_a_driver_become_oserrors_with_a_text(error, kind, said) -> None:
    with failing_store(error), pytest.raises(kind) as raised:
        RemotePath("failing://folder/file").read_bytes()
    assert raised.value.strerror == said and raised.value.filename == "failing://folder/file"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gs://bucket/run", r"gs:// needs a driver that is not installed: .*gcsfs"),
        ("nosuch://bucket/run", "Protocol not known: nosuch"),
        ("s3://", "expected a URL with a folder"),
        ("sftp://me:hush@host/run", "expected a URL without a password"),
        ("s3://AKIA:sec/hush@bucket/run", "expected a URL without a password .*AWS_SECRET_ACCESS_KEY"),
        ("abfs://box/run?sig=hush", "or a query"),
        ("hf://org/..", "name of the hub without hf://"),
        ("hdfs://no-such-host:9000/run", r"Unable to load \w+"),
    ],
)
def test_urls_that_cannot_be_used(url, said) -> None:
    with pytest.raises(OSError, match=said) as raised:
        RemotePath(url)
    assert "hush" not in str(raised.value) and "\n" not in str(raised.value)


def test_file_that_is_given_up_does_not_appear_later(folder: RemotePath) -> None:
    """Where the driver uploads what it has when the garbage collector finds the file, as s3fs would."""
    closed: list[bytes] = []

    class Uploading(fsspec.spec.AbstractBufferedFile):
        def _upload_chunk(self, final: bool = False) -> bool:
            closed.append(self.buffer.getvalue())
            return True

        def _initiate_upload(self) -> None:
            pass

    class Store(fsspec.implementations.memory.MemoryFileSystem):
        protocol = "uploading"
        cachable = False

        def open(self, path: str, mode: str = "rb", **options: object) -> Uploading:
            return Uploading(self, path, mode)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return path.replace("uploading://", "/")

    fsspec.register_implementation("uploading", Store, clobber=True)
    file = SummedFile(RemotePath("uploading://x/data"))
    file.write(b"half")
    file.close()
    del file
    assert not closed
