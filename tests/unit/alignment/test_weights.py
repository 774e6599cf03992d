"""What is wrong with a stored weight, in words; the oracle is the damage that was done."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from safetensors.torch import load_file, save_file
from training_runs import build_stages

LAYER = "model.layers.0."


def _o_proj(layer: Any) -> torch.Tensor:
    return layer.self_attention.linear_proj.weight.data


def _transpose(layer: Any) -> None:
    _o_proj(layer).copy_(_o_proj(layer).t().clone())


def _turn_rows(layer: Any) -> None:
    _o_proj(layer).copy_(_o_proj(layer).roll(1, dims=0))


def _negate_zero(layer: Any) -> None:
    """The folder's value is 0: equal as a number, not as bits."""
    layer.input_layernorm.weight.data[5] = -0.0


def _swap_keys_and_values(layer: Any) -> None:
    """The merged parameter holds [q, q, k, v] of each group, 16 rows a head."""
    heads = layer.self_attention.linear_qkv.weight.data.unflatten(0, (2, 4, 16))
    heads[:, 2:] = heads[:, [3, 2]].clone()


DAMAGE: dict[str, tuple[Callable[[Any], None], list[tuple[str, str]]]] = {
    "nothing": (lambda layer: None, []),
    "transposed": (_transpose, [("self_attn.o_proj.weight", "is transposed")]),
    "rows": (_turn_rows, [("self_attn.o_proj.weight", "holds its rows in another order")]),
    "zero": (
        _negate_zero,
        [("input_layernorm.weight", "differs in 1 of 64 values, first at [5]: -0, expected 0")],
    ),
    "siblings": (
        _swap_keys_and_values,
        [
            ("self_attn.k_proj.weight", f"holds the values of {LAYER}self_attn.v_proj.weight"),
            ("self_attn.v_proj.weight", f"holds the values of {LAYER}self_attn.k_proj.weight"),
        ],
    ),
}


def _compare(rank: int, world_size: int, folder: Path) -> dict[str, tuple]:
    """For each damage what is found; and for a model of a narrower type."""
    from patch.alignment.weights import compare_weights
    from patch.convert import import_hf

    found = {}
    for precision, names in (("fp32", list(DAMAGE)), ("bf16", ["nothing"])):
        config = family_run(folder, precision=precision)
        groups, (stage,) = build_stages(config)
        for name in names:
            import_hf([stage], folder, config.model, groups)
            DAMAGE[name][0](stage.decoder.layers[0])
            compared = compare_weights(stage, config.model, folder, is_tied=False)
            found[f"{name} {precision}"] = tuple(compared)
        new_job()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    folder = tmp_path_factory.mktemp("weights")
    model = family_model("llama-3", spelling=4)
    model.model.layers[0].input_layernorm.weight.data[5] = 0
    model.save_pretrained(folder)
    return run_distributed(_compare, 1, folder)[0]


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(found: dict[str, tuple], name: str) -> None:
    num_tensors, is_rounded, differences = found[f"{name} fp32"]
    assert num_tensors == len(family_model("llama-3").state_dict()) and not is_rounded
    assert [tuple(difference) for difference in differences] == [
        (LAYER + tensor, words) for tensor, words in DAMAGE[name][1]
    ]


def test_rounding_is_told_and_is_no_difference(found: dict[str, tuple]) -> None:
    _, is_rounded, differences = found["nothing bf16"]
    assert is_rounded and differences == []


def _compare_alone(rank: int, world_size: int, folder: Path) -> tuple:
    from patch.alignment.weights import compare_weights
    from patch.convert import import_hf

    config = family_run(folder, precision="fp32")
    groups, (stage,) = build_stages(config)
    import_hf([stage], folder, config.model, groups)
    return tuple(compare_weights(stage, config.model, folder, is_tied=False))


def test_layers_of_further_tokens_are_no_fault_of_the_folder(tmp_path: Path) -> None:
    model = family_model("moonlight", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    further = {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}
    save_file(weights | further, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    num_tensors, _, differences = run_distributed(_compare_alone, 1, tmp_path)[0]
    assert num_tensors == len(weights) and differences == [] and model.config.num_hidden_layers == 3
