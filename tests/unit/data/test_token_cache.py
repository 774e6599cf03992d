"""The token cache: the tokens of a set without it, whatever happens while it is made."""

import json
import os
import signal
import time
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from full_disk import disk_full_after
from kills import killer_at
from llama3_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from patch.data.formats.turns import PLAIN
from patch.data.readers import rows as sets
from patch.data.sft.cache import TokenWriter
from patch.data.sft.options import user_cache
from patch.data.sft.source import SftSource, load_sft
from patch.errors import DataError

LENGTH = 40


@cache
def the_tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def write_rows(path: Path, count: int = 60) -> Path:
    rows = [{"instruction": f"what is {n}?", "output": f"{n} " * (n % 20)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def plain(rows: Path) -> SftSource:
    """The set without a cache."""
    return load(rows, None)


def load(path: Path, cache: Path | None, **options) -> SftSource:
    return load_sft(path, the_tokenizer(), LENGTH, replace(PLAIN, **options), cache_dir=cache)


def assert_same(source: SftSource, other: SftSource) -> None:
    assert len(source) == len(other) > 0
    for index in range(len(source)):
        for one, two in zip(source.conversation(index), other.conversation(index), strict=True):
            assert one.dtype == two.dtype and np.array_equal(one, two)
    assert source.report == other.report
    assert source.fingerprint == other.fingerprint and source.num_learned == other.num_learned


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "sets").iterdir() if not path.name.startswith("."))


def leftovers(cache: Path) -> list[Path]:
    """Temporary folders. A lock file may be left: without its process it locks nothing."""
    return list((cache / "sets").glob(".*.tmp"))


@pytest.mark.parametrize("workers", [1, 3])
def test_set_is_the_same_without_cache_made_and_read_again(rows: Path, tmp_path: Path, workers: int) -> None:
    plain = load(rows, None)
    made = load(rows, tmp_path, data_workers=workers)
    assert_same(plain, made)
    (entry,) = entries(tmp_path)
    before = {file.name: file.stat().st_mtime_ns for file in entry.iterdir()}
    assert_same(plain, load(rows, tmp_path))
    assert {file.name: file.stat().st_mtime_ns for file in entry.iterdir()} == before
    assert not leftovers(tmp_path)
    assert all(sample.tokens.shape == (LENGTH,) for sample in (plain[0], made[0]))


def test_entry_serves_equal_rows_in_another_file(rows: Path, tmp_path: Path, monkeypatch) -> None:
    """Also with options that do not decide the tokens; no row is read."""
    cache, copy = tmp_path / "cache", write_rows(tmp_path / "copy.json")
    load(rows, cache)
    monkeypatch.setattr("patch.data.readers.rows.read_rows", lambda path: pytest.fail("the rows are read"))
    load(copy, cache, data_workers=2, max_dropped_share=0.9)
    with pytest.raises(DataError, match="are dropped"):
        load(rows, cache, max_dropped_share=0.01)
    assert len(entries(cache)) == 1


@pytest.mark.long
def test_whatever_decides_the_tokens_makes_another_entry(rows: Path, tmp_path: Path, monkeypatch) -> None:
    """Against the same without a cache: a value that the key lacks would give the tokens of another."""
    cache = tmp_path / "cache"
    base = replace(PLAIN, max_dropped_share=1.0)
    other_template = tiny_tokenizer()
    other_template.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    more_special = tiny_tokenizer()
    more_special.add_special_tokens({"additional_special_tokens": ["what"]})
    cases = [
        (rows, tiny_tokenizer(), LENGTH, base),
        (write_rows(tmp_path / "fewer.jsonl", 59), tiny_tokenizer(), LENGTH, base),
        (rows, tiny_tokenizer(), LENGTH - 1, base),
        (rows, tiny_tokenizer(), LENGTH, replace(base, long_samples="drop")),
        (rows, tiny_tokenizer(), LENGTH, replace(base, long_samples="split")),
        (rows, tiny_tokenizer(), LENGTH, replace(base, train_on="last")),
        (rows, tiny_tokenizer(), LENGTH, replace(base, allow_special_tokens=True)),
        (rows, tiny_tokenizer(), LENGTH, replace(base, alpaca_input_join="empty")),
        (rows, tiny_tokenizer(pattern=r"\S+|\s+"), LENGTH, base),
        (rows, other_template, LENGTH, base),
        (rows, more_special, LENGTH, base),
    ]
    for number, (path, tokenizer, length, options) in enumerate(cases, start=1):
        cached = load_sft(path, tokenizer, length, options, cache_dir=cache)
        assert_same(load_sft(path, tokenizer, length, options), cached)
        assert len(entries(cache)) == number
    monkeypatch.setattr("patch.data.sft.options.TOKEN_RULES", 0)
    load(rows, cache, max_dropped_share=1.0)
    assert len(entries(cache)) == len(cases) + 1


def test_changed_file_is_read_again_even_if_its_size_and_time_stay(tmp_path: Path) -> None:
    path, cache = write_rows(tmp_path / "rows.jsonl"), tmp_path / "cache"
    os.utime(path, (1e9, 1e9))
    load(path, cache)
    text = path.read_text()
    path.write_text(text.replace("what is 7?", "what is 8?"))
    os.utime(path, (1e9, 1e9))
    assert path.stat().st_size == len(text)
    assert_same(load(path, cache), load(path, None))
    assert len(entries(cache)) == 2


def test_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch) -> None:
    path, cache = write_rows(tmp_path / "rows.jsonl"), tmp_path / "cache"

    def read_and_append(file, **options):
        yield from build_read(file, **options)
        with file.open("a") as stream:
            stream.write('{"instruction": "late", "output": "late"}\n')

    build_read = sets.read_rows
    monkeypatch.setattr("patch.data.readers.rows.read_rows", read_and_append)
    with pytest.raises(DataError, match=f"^{path} has changed while it was read"):
        load(path, cache)
    assert not entries(cache)


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("ids.bin", "flip"), ("ends.bin", "remove"), ("ends.bin", "foreign"),
        ("report.json", "cut"), ("report.json", "remove"), ("report.json", "foreign"),
        ("ids.bin", "pipe"), ("report.json", "pipe"), ("learned.bin", "endless"), ("learned.bin", "short"),
    ],
)  # fmt: skip
@pytest.mark.timeout(60)
@pytest.mark.long
def test_damaged_entry_is_named_and_made_again(
    rows: Path, plain: SftSource, tmp_path: Path, logged: list[str], file: str, harm: str
) -> None:
    load(rows, tmp_path)
    (entry,) = entries(tmp_path)
    path = entry / file
    content = path.read_bytes()
    if harm == "remove":
        path.unlink()
    elif harm == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif harm == "endless":
        os.truncate(path, 1 << 40)
    elif harm == "short":  # with the right digest
        path.write_bytes(content[:3])
        was, now = (sha256(each).hexdigest() for each in (content, content[:3]))
        (entry / "report.json").write_text((entry / "report.json").read_text().replace(was, now))
    elif harm == "foreign":
        load(write_rows(tmp_path / "others.jsonl", 50), tmp_path)
        (other,) = set(entries(tmp_path)) - {entry}
        path.write_bytes((other / file).read_bytes())
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"flip": flipped, "cut": content[:-9]}[harm])
    logged.clear()
    again = load(rows, tmp_path)
    assert (entry / "ids.bin").read_bytes() and not leftovers(tmp_path)
    assert_same(plain, again)
    assert any(f"token cache's {entry} is damaged" in message for message in logged)
    assert path.read_bytes() == content


def in_child(work, *args) -> int:
    """Start work in a forked process; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - only the exit code leaves this process
            os._exit(1)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def load_until(moment: int, path: Path, cache: Path) -> None:
    """Load; after so many writes, syncs, renames, new folders and removals this process is killed."""
    killed_at = killer_at(moment)
    TokenWriter.write = killed_at(TokenWriter.write)
    os.fsync = killed_at(os.fsync)
    for name in ("rename", "replace", "mkdir", "unlink", "write_text"):
        setattr(Path, name, killed_at(getattr(Path, name)))
    load(path, cache, data_workers=2)


@pytest.mark.long
def test_process_that_is_killed_at_any_moment_leaves_nothing_that_misleads(
    rows: Path, plain: SftSource, tmp_path: Path
) -> None:
    path = rows
    moment, num_kept = 0, 0
    while True:
        moment += 1
        cache = tmp_path / str(moment)
        code = exit_code(in_child(load_until, moment, path, cache))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        found = entries(cache) if (cache / "sets").exists() else []
        num_kept += len(found)
        assert_same(load(path, cache), plain)
        assert len(entries(cache)) == 1 and not leftovers(cache)
    assert moment > 20 and 0 < num_kept < moment / 2


@pytest.mark.parametrize("is_bad", [False, True])
def test_one_process_reads_the_rows_and_those_who_wait_end_as_it_does(tmp_path: Path, is_bad: bool) -> None:
    """A bad row at the end of a large file must not be looked for by one rank after the other."""
    path, cache, log = write_rows(tmp_path / "rows.jsonl", 20), tmp_path / "cache", tmp_path / "log"
    with path.open("a") as file:
        file.write('{"instruction": "no answer"}\n' * is_bad)

    def load_slowly() -> None:
        def read(file, **options):
            with log.open("a") as stream:
                stream.write(f"{os.getpid()}\n")
            time.sleep(0.5)
            yield from read_rows(file, **options)

        read_rows, sets.read_rows = sets.read_rows, read
        load(path, cache)

    pids = [in_child(load_slowly) for _ in range(3)]
    assert [exit_code(pid) for pid in pids] == [is_bad] * 3
    assert len(log.read_text().split()) == 1
    if is_bad:
        with pytest.raises(DataError, match="line 21: found the keys instruction"):
            load(path, cache)
        write_rows(path)
    assert_same(load(path, cache), load(path, None))
    assert len(entries(cache)) == 1 and not leftovers(cache)


def test_full_disk_is_named_with_the_flag_and_leaves_nothing(tmp_path: Path) -> None:
    path, cache = write_rows(tmp_path / "rows.jsonl", 300), tmp_path / "cache"
    with disk_full_after(3_000), pytest.raises(DataError) as caught:
        load(path, cache)
    assert caught.value.field == "cache_dir" and caught.value.exit_code == 3
    said = str(caught.value)
    assert f"the token cache {cache} cannot be written: File too large: this set needs about " in said
    assert " bytes, " in said and " are free" in said
    assert not entries(cache) and not leftovers(cache)
    assert_same(load(path, cache), load(path, None))
    with pytest.raises(DataError, match="token cache .*rows.jsonl/cache cannot be written: Not a") as caught:
        load(path, path / "cache")
    assert caught.value.field == "cache_dir"


def test_folder_of_many_files_is_one_set_and_names_its_rows(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows" / "b.jsonl", 30)
    write_rows(tmp_path / "rows" / "a.jsonl", 21)
    source = load(tmp_path / "rows", tmp_path / "cache")
    assert any("dropped: nothing to learn: a.jsonl: line 1, a.jsonl: line 21, b.j" in each for each in logged)
    assert_same(source, load(tmp_path / "rows", None, data_workers=3))
    (tmp_path / "rows" / "a.jsonl").rename(tmp_path / "rows" / "c.jsonl")
    assert_same(load(tmp_path / "rows", tmp_path / "cache"), load(tmp_path / "rows", None))


def test_default_folder_is_the_users_cache_or_that_of_the_run(tmp_path: Path, monkeypatch) -> None:
    fallback = tmp_path / "run" / "data_cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache(fallback) == tmp_path / "xdg" / "llama-megatron-patch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_cache(fallback) == tmp_path / "home" / ".cache" / "llama-megatron-patch"
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert user_cache(fallback) == fallback
    monkeypatch.setenv("HOME", "/proc/nowhere")
    assert user_cache(fallback) == fallback
