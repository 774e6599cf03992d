"""What comes back from a checkpoint, and which checkpoints are refused before the model is touched."""

import pickle
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from refusals import Payload

from patch.checkpoint import load_checkpoint, read_common, save_checkpoint
from patch.checkpoint.folder import iteration_folder
from patch.checkpoint.load import load_only_weights
from patch.compat.checkpoint_format import COMMON_IS_OBJECT
from patch.config import user_message
from patch.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_process")

OF_COMMON = () if COMMON_IS_OBJECT else ("common.pt",)
COMMON = {"iteration": 7, "optimizer_steps": 7, "config": "seed: 1\n"}


def whole(key: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "embedding.weight": torch.randn(6, 4, dtype=torch.bfloat16),
        "decoder.weight": torch.randn(4, 4),
        "optimizer.exp_avg.decoder.weight": torch.randn(4, 4),
        "random.cpu": torch.randint(0, 256, (100,), dtype=torch.uint8),
    }


def sections(values: dict[str, torch.Tensor]) -> dict:
    state: dict = {"model": {"decoder._extra_state": ShardedObject("decoder._extra_state", None, (1,), (0,))}}
    for key, tensor in values.items():
        section = key.split(".")[0] if key.startswith(("optimizer.", "random.")) else "model"
        state.setdefault(section, {})[key] = whole(key, tensor)
    return state


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, 7, sections(tensors()), COMMON)
    return tmp_path


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    values = tensors()
    values["decoder.weight"][1, 2] = torch.nan
    save_checkpoint(tmp_path, 7, sections(values), COMMON)
    folder, state = iteration_folder(tmp_path, 7), {"model": sections(tensors())["model"]}
    state["model"]["decoder.weight"].data = torch.nn.Parameter(torch.zeros(4, 4))  # as of a model
    with pytest.raises(CheckpointError, match="decoder.weight has values that are NaN or infinite"):
        load_only_weights(folder, state["model"], prefixes=("decoder.", "embedding."), vocab_size=6)
    assert load_checkpoint(tmp_path, 7, sections(tensors())), "a resume goes on from what it saved"


def test_load_brings_every_bit_back_in_place_without_the_extra_state_of_a_new_layer(root):
    values = {key: torch.zeros_like(tensor) for key, tensor in tensors().items()}
    state = sections(values)
    state["model"]["new._extra_state"] = ShardedObject("new._extra_state", None, (1,), (0,))
    loaded = load_checkpoint(root, 7, state)
    for key, tensor in tensors().items():
        assert torch.equal(values[key], tensor), key
    assert torch.equal(
        loaded["optimizer"]["optimizer.exp_avg.decoder.weight"], values["optimizer.exp_avg.decoder.weight"]
    )
    assert {key: loaded[key] for key in COMMON} == COMMON == read_common(root, 7)


def test_load_of_the_weights_alone_leaves_other_sections_unread(root):
    weights = {key: torch.zeros_like(t) for key, t in list(tensors().items())[:2]}
    load_checkpoint(root, 7, sections(weights))
    assert torch.equal(weights["decoder.weight"], tensors()["decoder.weight"])


def misfit(change: str) -> dict[str, torch.Tensor]:
    values = {key: torch.full_like(tensor, 3) for key, tensor in tensors().items()}
    if change == "shape":
        values["embedding.weight"] = torch.full((8, 4), 3, dtype=torch.bfloat16)
    if change == "dtype":
        values["embedding.weight"] = values["embedding.weight"].float()
    if change == "missing":
        values["embeding.weight"] = values.pop("embedding.weight")
    if change == "layout":
        values["random.cpu"] = torch.full((200,), 3, dtype=torch.uint8)
    return values


@pytest.mark.parametrize(
    "change, words",
    [
        ("shape", ["--model-size", "embedding.weight", "(6, 4)", "(8, 4)"]),
        ("dtype", ["position 9", "embedding.weight", "torch.bfloat16", "torch.float32"]),
        ("missing", ["lacks embeding.weight", "did you mean embedding.weight?"]),
        ("layout", ["random.cpu", "number of processes"]),
    ],
)
def test_load_refuses_what_does_not_fit_and_leaves_the_state_untouched(root, change, words):
    values = misfit(change)
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(root, 7, sections(values))
    assert all(word in user_message(refused.value) for word in words), refused.value
    assert all(bool((tensor == 3).all()) for tensor in values.values())


UNTIED = ("output_layer.weight", "optimizer.state.exp_avg.output_layer.weight")
UNTIED_BF16 = (*UNTIED, "optimizer.state.master_low.output_layer.weight")
BF16 = ("optimizer.state.master_low.decoder.weight", "optimizer.state.master_low.output_layer.weight")


@pytest.mark.parametrize(
    "keys, cure",
    [
        (UNTIED, "--untie-embeddings-and-output-weights"),
        (UNTIED_BF16, "--untie-embeddings-and-output-weights"),
        (BF16, "position 9"),
        (("optimizer.state.exp_avg.decoder.bias",), "position 2 MODEL_SIZE"),
    ],
)
@pytest.mark.parametrize("is_stored", [True, False])
def test_load_names_the_cure_for_tensors_that_one_side_has_not(tmp_path, keys, cure, is_stored):
    few, many = tensors(), tensors() | {key: torch.ones(4, 4) for key in keys}
    save_checkpoint(tmp_path, 7, sections(many if is_stored else few), COMMON)
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(tmp_path, 7, sections(few if is_stored else many))
    message = user_message(refused.value)
    assert f"{'holds' if is_stored else 'lacks'} {sorted(keys)[0]}" in message and cure in message
    assert ("position 9" in message) == (cure == "position 9")


@pytest.mark.parametrize("name", ["__0_0.distcp", *OF_COMMON, ".metadata"])
def test_load_refuses_a_damaged_file_and_names_it(root, name):
    path = iteration_folder(root, 7) / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    values = misfit("none")
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(root, 7, sections(values))
    assert all(bool((tensor == 3).all()) for tensor in values.values())


@pytest.mark.parametrize("name", [".metadata", "common.pt", "object"])
@pytest.mark.parametrize("forced", [False, True])
def test_load_does_not_run_a_planted_payload(root, tmp_path, monkeypatch, name, forced):
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    folder, payload = iteration_folder(root, 7), Payload(tmp_path / "ran")
    if name == "object":
        state = sections(tensors())
        state["model"]["decoder._extra_state"].data = payload
        save_checkpoint(root, 7, state, COMMON)
    elif name == "common.pt":
        torch.save({"iteration": payload}, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(payload))
    with pytest.raises(CheckpointError):
        load_checkpoint(root, 7, sections(tensors()))
    assert not payload.mark.exists()


@pytest.mark.parametrize("content", [b"\xff\xfe garbage", b"[]", b'{"sharded_backend": "zarr"}'])
def test_load_refuses_a_description_that_is_none_before_it_touches_the_state(root, content):
    path = iteration_folder(root, 7) / "metadata.json"
    path.write_bytes(content)
    values = misfit("none")
    with pytest.raises(CheckpointError, match=r"metadata\.json (cannot be read|says)") as refused:
        load_checkpoint(root, 7, sections(values))
    assert "unusable" not in str(refused.value)
    assert all(bool((tensor == 3).all()) for tensor in values.values())


def test_common_state_that_is_malformed_or_no_dict_is_named(root):
    path = iteration_folder(root, 7) / "common.pt"  # read before an object of the index
    for content in (b"\x80\x02ctorch\nfloat32\n)R.", pickle.dumps([1], protocol=2)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"common\.pt is damaged"):
            read_common(root, 7)
