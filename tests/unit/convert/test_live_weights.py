"""Hugging Face tensors of a running model at TP 2 x PP 2, one by one and as files, against transformers'.

And what happens to all ranks when something is wrong on one.
"""

import os
import resource
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from full_disk import disk_full_after
from safetensors.torch import load, load_file, save
from small_runs import hf_llama, small_run
from training_runs import build_stages, messages_from
from transformers import AutoTokenizer, LlamaForCausalLM

from patch.convert import Receipt, export_hf, import_hf, iter_hf_weights
from patch.convert.live_weights import Receivers
from patch.errors import ConversionError

CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "interleaved": {"stage": 1},
    "by hand": {"pipeline_model_parallel_layout": "E|ttt|t|L"},
    "tied bf16": {"untie_embeddings_and_output_weights": False, "precision": "bf16"},
}
CUT = ("stage", "pipeline_model_parallel_layout")
LAYERS_OF_THE_SECOND = {"interleaved": {1, 3}, "by hand": {0, 1, 2}}
RECEIVERS: tuple[Receivers, ...] = ("all", "first", "stage")
NORM = "model.norm.weight"
DIVIDED, FILE_BYTES = ("untied", "tied bf16"), 150_000
"""Exports with several files for each stage, and how large they are at most."""


def _equal(tensors: dict[str, torch.Tensor], folder: Path) -> bool:
    """Whether these are tensors of the folder, to the bit; the vocabulary's padding is no part of them."""
    stored = load_file(folder / "model.safetensors")
    return all(
        tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name])
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_receipt_names_what_is_handed_over_and_counts_what_has_changed(dtype: torch.dtype) -> None:
    """Its checksums are those of the files that safetensors writes."""
    weights = {"a": torch.arange(6, dtype=dtype).view(2, 3).T, "b": torch.ones(4, dtype=dtype)}
    receipt = Receipt()
    for change, num_changed in ((0, 2), (0, 0), (1, 1)):
        weights["b"][3] += change
        handed = dict(receipt.of(weights.items()))
        assert handed == weights and receipt.num_changed == num_changed
        stored = load(save({name: tensor.contiguous() for name, tensor in weights.items()}))
        assert receipt.entries == {
            name: (tuple(tensor.shape), dtype, zlib.crc32(bytes(tensor.untyped_storage())))
            for name, tensor in stored.items()
        }


def _iterate(
    rank: int, world_size: int, root: Path, tokenizer: Any
) -> dict[Any, Any]:
    """For each case and receivers: the names this rank got, and whether their values are the source's.

    And what trouble came to.
    """
    found = {}
    for case, changes in CASES.items():
        config = small_run(2, 2, **changes)
        groups, stages = build_stages(config)
        import_hf(stages, root / case, config.model, groups)
        export_hf(
            stages, root / f"{case}-back", config.model, groups,
            hf_source=root / case, tokenizer=tokenizer, file_bytes=FILE_BYTES if case in DIVIDED else 2**30,
        )  # fmt: skip
        for receivers in RECEIVERS:
            tensors = dict(iter_hf_weights(stages, config.model, groups, receivers=receivers))
            found[case, receivers] = (list(tensors), _equal(tensors, root / case))
            for tensor in tensors.values():
                tensor.fill_(7)  # new tensors: the next receivers find the model as it was
        if case == "interleaved":
            found["one at a time", "all"] = _change_while_iterating(stages, config, groups)
        new_job()
    return found | _trouble(rank, root, tokenizer)


def _trouble(rank: int, root: Path, tokenizer: Any) -> dict[str, Any]:
    """Errors of an import that is broken on rank 0 and of an export to its full disk, and a rounding."""
    config = small_run(2, 2, precision="bf16")
    groups, stages = build_stages(config)
    for parameter in stages[0].parameters():
        parameter.data.fill_(3.0)
    with pytest.raises(ConversionError) as broken:
        import_hf(stages, root / ("broken" if rank == 0 else "untied"), config.model, groups)
    is_untouched = all(bool((parameter == 3.0).all()) for parameter in stages[0].parameters())
    messages = messages_from("WARNING", "patch.convert")
    import_hf(stages, root / "untied", config.model, groups)
    words = stages[0].embedding.word_embeddings.weight.detach().float().numpy() if rank < 2 else None
    most_bytes = 20_000 if rank == 0 else resource.RLIM_INFINITY
    with disk_full_after(most_bytes), pytest.raises(ConversionError) as full:
        export_hf(
            stages, root / "target", config.model, groups,
            hf_source=None, tokenizer=tokenizer, file_bytes=50_000,
        )  # fmt: skip
    return {
        "broken": (str(broken.value), is_untouched),
        "rounded": (messages, words),
        "full": str(full.value),
    }


def _change_while_iterating(stages: Any, config: Any, groups: Any) -> tuple[list[str], bool]:
    """The last norm is changed after the first tensor came; whether the change is seen on every rank."""
    weights = iter_hf_weights(stages, config.model, groups)
    first, _ = next(weights)
    torch.distributed.barrier()
    if groups.pp.rank() == 1:
        stages[-1].decoder.final_layernorm.weight.data.fill_(3)
    tensors = dict(weights)
    return [first], bool((tensors[NORM] == 3).all())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("live")
    for case, changes in CASES.items():
        config = small_run(**{name: value for name, value in changes.items() if name not in CUT})
        dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
        hf_llama(config).to(dtype).save_pretrained(root / case)
    for name in ("broken", "target"):
        shutil.copytree(root / "untied", root / name)
    (root / "broken" / "config.json").unlink()
    return root


@pytest.fixture(scope="module")
def ranks(root: Path, tiny_tokenizer: Any) -> list[dict]:
    """What each of the four ranks got: TP is the fastest, then PP."""
    return run_distributed(_iterate, 4, root, tiny_tokenizer("{{ messages }}<|eot_id|>"))


def _in_order(folder: Path) -> list[str]:
    """The names that transformers wrote: embedding, layers by number, last norm, output layer."""

    def place(name: str) -> tuple[int, int]:
        parts = name.split(".")
        if parts[1] == "layers":
            return 1, int(parts[2])
        return {"model.embed_tokens.weight": 0, NORM: 2, "lm_head.weight": 3}[name], 0

    return sorted(load_file(folder / "model.safetensors"), key=place)


def _outline(names: list[str]) -> list[str]:
    """Without what is inside of layers, whose order is the weight table's."""
    return [".".join(name.split(".")[:3]) if ".layers." in name else name for name in names]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_every_rank_gets_every_tensor_in_order(root: Path, ranks: list[dict], case: str) -> None:
    expected = _in_order(root / case)
    names = ranks[0][case, "all"][0]
    assert _outline(names) == _outline(expected) and sorted(names) == sorted(expected)
    assert all(found[case, "all"] == (names, True) for found in ranks)
    assert ("lm_head.weight" in names) == (case != "tied bf16")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_receivers_get_every_tensor_or_those_of_their_stage(ranks: list[dict], case: str) -> None:
    everything = ranks[0][case, "all"]
    assert [found[case, "first"] for found in ranks] == [everything, *[([], True)] * 3]
    (first, first_is_equal), no, (second, second_is_equal), nor = (found[case, "stage"] for found in ranks)
    assert first_is_equal and second_is_equal and no == nor == ([], True)
    assert sorted(first + second) == sorted(everything[0])
    assert first[0] == "model.embed_tokens.weight" and NORM in second
    assert {int(name.split(".")[2]) for name in second if ".layers." in name} == (
        LAYERS_OF_THE_SECOND.get(case, {2, 3})
    )


@pytest.mark.parametrize("case", CASES)
def test_export_is_the_source_and_loads_in_transformers(root: Path, ranks: list[dict], case: str) -> None:
    source, target = root / case, root / f"{case}-back"
    before, files = load_file(source / "model.safetensors"), list(target.glob("*.safetensors"))
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert before.keys() == after.keys()
    assert all(after[name].dtype == tensor.dtype for name, tensor in before.items())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    if case in DIVIDED:
        assert len(files) > 2 and all(file.stat().st_size < FILE_BYTES + 5000 for file in files)
    else:
        assert len(files) == 2, "one for each stage"
    model, info = LlamaForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()) and model.dtype == before[NORM].dtype
    assert AutoTokenizer.from_pretrained(target).chat_template.endswith("<|eot_id|>")
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_import_fails_on_every_rank_when_one_cannot_read(ranks: list[dict]) -> None:
    (own, is_untouched), *others = (found["broken"] for found in ranks)
    assert "broken has no config.json" in own and is_untouched
    assert {other for other, _ in others} == {f"rank 0: {own}"}


def test_rounding_is_said_once_and_padding_is_zero(root: Path, ranks: list[dict]) -> None:
    (messages, first), (_, second), *_ = (found["rounded"] for found in ranks)
    assert len(messages) == 1 and "F32" in messages[0] and "rounded to bfloat16" in messages[0]
    rows = torch.cat([torch.from_numpy(first), torch.from_numpy(second)])
    words = load_file(root / "untied" / "model.safetensors")["model.embed_tokens.weight"]
    assert rows.shape[0] == 256 and torch.equal(rows[:250], words.bfloat16().float())
    assert not rows[250:].any()


def test_full_disk_on_one_rank_fails_on_all_and_keeps_the_target(root: Path, ranks: list[dict]) -> None:
    own, *others = (found["full"] for found in ranks)
    assert "cannot write" in own and ".safetensors" in own and "File too large" in own
    assert set(others) == {f"rank 0: {own}"}
    assert sorted(os.listdir(root / "target")) == sorted(os.listdir(root / "untied"))
    assert _equal(load_file(root / "target" / "model.safetensors"), root / "untied")


def test_tensors_are_made_one_by_one(ranks: list[dict]) -> None:
    assert all(found["one at a time", "all"] == (["model.embed_tokens.weight"], True) for found in ranks)


def _refuse(rank: int, world_size: int) -> list[str]:
    """Messages for models that are not what their configuration says."""
    messages = []
    for built, told in (({"add_qkv_bias": True}, {}), ({}, {"ffn_hidden_size": 96}), ({}, {"num_layers": 5})):
        groups, stages = build_stages(small_run(**built))
        with pytest.raises(ConversionError) as caught:
            list(iter_hf_weights(stages, small_run(**told).model, groups))
        messages.append(str(caught.value))
        new_job()
    return messages


def test_a_model_of_another_shape_is_refused() -> None:
    (found,) = run_distributed(_refuse, 1)
    words = (
        "linear_qkv.bias, which its configuration has no place for",
        "has shape (320, 64)",
        "no pipeline stage has model.layers.4",
    )
    assert all(map(str.__contains__, found, words)), found
