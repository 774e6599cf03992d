"""Names of the hub: what is one, and what is downloaded from a server that answers as the hub does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import FakeHub, serving
from hub_cache import REVISION, add_to_cache

from patch.storage.hub import HubName, hub_name, lacking_weights, snapshot_name

REPOSITORY = Path(__file__).parents[3]
INDEX = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
MODEL = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b'{"b": 2}',
    "tokenizer.model": b"sentences",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
    "model-00001-of-00002.safetensors": b"first half",
    "model-00002-of-00002.safetensors": b"other half",
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"a pickle",
    "modeling_one.py": b"code",
    "original/params.json": b'{"c": 3}',
}
DATA = {
    "README.md": b"# Rows",
    "load.py": b"code",
    "data/train.parquet": b"PAR1",
    "more/rows.jsonl.gz": b"zip",
    "more/rows.json": b"[]",
}
WEIGHTS = [name for name in MODEL if name.startswith("model-")]
LIGHT = [*MODEL][:5]
UNSAFE = {key: MODEL[key] for key in ("config.json", "pytorch_model.bin")}

ROWS = "fetch(hub_name('acme/{}', 'dataset'), 'rows', error_type=DataError)"


@pytest.fixture(scope="module")
def hub() -> FakeHub:
    repositories = {"models/acme/one": MODEL, "models/acme/unsafe": UNSAFE, "datasets/acme/rows": DATA}
    with serving(repositories) as hub:
        yield hub


def start(
    calls: list[str], hub_url: str, home: Path, offline: bool = False, token: str = ""
) -> subprocess.Popen[str]:
    """A new process, because the library reads its environment when imported; prints what calls return."""
    code = "from patch.errors import DataError, PatchError\nfrom patch.storage.hub import *\n" + "".join(
        f"try: print({call})\nexcept PatchError as error: print(error.exit_code, error)\n" for call in calls
    )
    own = {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
    own["HF_TOKEN"] = token
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **own}, cwd=REPOSITORY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def said(process: subprocess.Popen[str]) -> list[str]:
    return process.communicate(timeout=60)[0].splitlines()


def fetch_model(name: str, *, weights: bool) -> str:
    return f"fetch(hub_name('{name}', 'model'), '{'weights' if weights else 'config.json'}')"


def test_a_model_is_downloaded_once_without_what_could_execute_code(hub: FakeHub, tmp_path: Path) -> None:
    """A plan needs no weights; three processes that start together need one download."""
    folder = tmp_path / "hub" / "models--acme--one" / "snapshots" / REVISION
    hub.sent.clear()
    assert said(start([fetch_model("acme/one", weights=False)], hub.url, tmp_path)) == [str(folder)]
    assert sorted(hub.sent) == sorted(LIGHT)
    processes = [start([fetch_model("acme/one", weights=True)], hub.url, tmp_path) for _ in range(3)]
    assert [said(process) for process in processes] == [[str(folder)]] * 3
    assert sorted(hub.sent) == sorted(LIGHT + WEIGHTS)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: MODEL[name] for name in LIGHT + WEIGHTS
    }


def test_a_data_set_is_downloaded_without_its_code(hub: FakeHub, tmp_path: Path) -> None:
    hub.sent.clear()
    folder = tmp_path / "hub" / "datasets--acme--rows" / "snapshots" / REVISION
    assert said(start([ROWS.format("rows")], hub.url, tmp_path)) == [str(folder)]
    assert sorted(hub.sent) == ["data/train.parquet", "more/rows.json", "more/rows.jsonl.gz"]


def test_what_cannot_be_had_is_said_in_one_line(hub: FakeHub, tmp_path: Path) -> None:
    add_to_cache(tmp_path / "hub", "acme/one", {name: MODEL[name] for name in LIGHT})
    one, two, unsafe = (fetch_model(f"acme/{name}", weights=True) for name in ("one", "two", "unsafe"))
    nothing_listens = "http://127.0.0.1:1"
    processes = [
        start([two, ROWS.format("two"), unsafe], hub.url, tmp_path),
        start([one, two], nothing_listens, tmp_path),
        start([one, two], hub.url, tmp_path, offline=True),
    ]
    cache = tmp_path / "hub"
    model = f"{cache}/models--acme--one/snapshots/{REVISION}"
    parts = [
        f"2 acme/two is neither a path nor in {cache}, and the hub has no model of that name, or",
        f"3 acme/two is neither a path nor in {cache}, and the hub has no dataset of that name",
        f"2 acme/unsafe has no weights as safetensors in {cache}/models--acme--unsafe/snapshots/",
        f"2 acme/one has no weights as safetensors in {model}, and the",
        f"2 acme/two is neither a path nor in {cache}, and it cannot be downloaded: ",
        f"2 acme/one has no weights as safetensors in {model}, and HF_HUB",
        f"2 acme/two is neither a path nor in {cache}, and HF_HUB_OFFLINE forbids downloads",
    ]
    messages = [message for process in processes for message in said(process)]
    for message, part in zip(messages, parts, strict=True):
        assert message.startswith(part), message


def test_names_and_paths() -> None:
    names = "meta-llama/Llama-3.2-1B a/b org/data_set.v1 0rg/1 data/rows org/name.git2".split()
    assert [hub_name(text, "model") for text in names] == [HubName("model", text) for text in names]
    paths = "/models/llama ./models/llama ../llama ~/llama llama a/b/c a//b a/b/ a/.b data/rows.json".split()
    paths += [*"data/rows.jsonl.gz data/rows.parquet a/b..c a--b/c a/b*".split(), "a/b c", ""]
    assert not [text for text in paths if hub_name(text, "dataset") is not None]


def test_a_path_that_exists_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name", "model") is not None
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_name("org/name", "model") is None


def test_a_snapshot_of_another_machine_is_a_name_with_its_revision(tmp_path: Path) -> None:
    there = f"/home/a/hub/datasets--acme--the-rows/snapshots/{REVISION}/data/train*"
    name = HubName("dataset", "acme/the-rows", REVISION, "/data/train*")
    assert hub_name(there, "dataset") == snapshot_name(there) == name
    assert hub_name(there, "model") is None
    here = add_to_cache(tmp_path, "acme/one", {"config.json": b"{}"})
    assert hub_name(str(here), "model") is None
    assert snapshot_name(str(here)) == HubName("model", "acme/one", REVISION)


@pytest.mark.parametrize(
    ("place", "lacking"),
    [
        ("5", ["5"]),
        (f'"{"x" * 300}"', ["x" * 300]),
        ('["x"]', ["['x']"]),
        ("[" * 100_000, ["model.safetensors"]),
    ],
)
def test_index_that_lies_names_what_is_not_there(tmp_path: Path, place: str, lacking: list[str]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": {place}}}}}')
    assert lacking_weights(tmp_path) == lacking


def test_an_export_becomes_a_repository_and_overwrites_none_without_a_word(tmp_path: Path) -> None:
    folder, pushed = tmp_path / "hf", tmp_path / "pushed.txt"
    folder.mkdir()
    files = {"config.json": b"{}", "model-00001-of-00001.safetensors": b"new weights"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    ask = f"lack_of_repository({{!r}}, Path({str(pushed)!r}), {{!r}})"
    push = f"push_model(Path({str(folder)!r}), {{!r}}, Path({str(pushed)!r}), {{!r}})"
    new = ("acme/new", "private")
    wanted = ("acme/one", "private"), ("acme/new", "update"), new, ("acme/open", "public")
    tried = [call.format(*which) for which in wanted for call in (ask, push)]
    with serving({"models/acme/one": MODEL}) as hub:
        others, unmade = said(start(tried, hub.url, tmp_path, token="some")), "the repository does not exist"
        assert others[0].startswith("the repository exists") and others[2].startswith(unmade)
        assert f"4 {folder} was not pushed to acme/one: Client error '409 Conflict'" in others[1]
        assert others[3].startswith(f"4 {folder} was not pushed to acme/new: 404")
        assert others[4:] == ["", f"{hub.url}/acme/new", "", f"{hub.url}/acme/open"]
        repositories = hub.repositories
        assert repositories["models/acme/new"] == files == repositories["models/acme/open"]
        assert hub.visible == {"models/acme/new": "private", "models/acme/open": "public"}
        assert repositories["models/acme/one"] == MODEL
        repositories["models/acme/new"] = {"README.md": b"by hand", "model.safetensors": b"old"}
        tried = [ask.format(*new), push.format(*new), push.format("acme/one", "update")]
        assert said(start(tried, hub.url, tmp_path, token="some"))[0] == ""
        assert repositories["models/acme/new"] == {**files, "README.md": b"by hand"}
        kept = MODEL.keys() - {*WEIGHTS, "model.safetensors.index.json"}
        assert repositories["models/acme/one"].keys() == kept | files.keys()
        (refused,) = said(start([ask.format("acme/x", "private")], hub.url, tmp_path))
        assert refused.startswith("the hub says: ")
