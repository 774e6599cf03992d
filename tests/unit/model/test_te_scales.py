"""Scales of delayed scaling are read from Transformer Engine's pickle without running it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Payload

from patch.errors import CheckpointError
from patch.model.te_scales import scales_in


class Recipe:
    """Stands for Transformer Engine's class, which is not installed everywhere."""


def stored(**changes: Any) -> torch.Tensor:
    """As `TransformerEngineBaseModule.get_extra_state` of 2.11 makes it, of two steps."""
    state = {
        "recipe": Recipe(), "scale_fwd": torch.tensor([1.0, 2.0, 4.0]), "amax_history_fwd": torch.rand(2, 3),
        "scale_bwd": torch.tensor([8.0, 16.0]), "amax_history_bwd": torch.rand(2, 2),
        "extra_fp8_variables": {"num_gemms": 1},
    }  # fmt: skip
    return torch.frombuffer(bytearray(pickle.dumps(state | changes)), dtype=torch.uint8)


def test_scales_come_back_to_the_bit() -> None:
    state = stored()
    expected = pickle.loads(state.numpy().tobytes())
    found = scales_in(state, "fc1", 2)
    assert found.keys() == {"scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_layer_without_scales_and_the_state_of_current_scaling_have_none() -> None:
    contents = pickle.dumps({"recipe": Recipe(), "extra_fp8_variables": {}})
    current = torch.frombuffer(bytearray(contents), dtype=torch.uint8)
    for state in (None, torch.empty(0, dtype=torch.uint8), current):
        assert scales_in(state, "fc1", 2) == {}


@pytest.mark.parametrize("field", ["recipe", "scale_fwd"])
def test_code_in_a_state_is_not_run(tmp_path: Path, field: str) -> None:
    state = stored(**{field: Payload(tmp_path / "ran")})
    if field == "scale_fwd":
        with pytest.raises(CheckpointError, match="scale_fwd of the fp8 scales of fc1: got none"):
            scales_in(state, "fc1", 2)
    else:
        assert len(scales_in(state, "fc1", 2)) == 4
    assert not (tmp_path / "ran").exists()


def test_code_in_the_bytes_of_a_storage_is_not_run(tmp_path: Path) -> None:
    """A plain pickle keeps a storage as a file of torch.save in it, which torch would unpickle in full."""

    class Storage:
        def __reduce__(self) -> tuple:
            return torch.storage._load_from_bytes, (pickle.dumps(Payload(tmp_path / "ran")),)

    with pytest.raises(CheckpointError, match="the fp8 scales of fc1 cannot be read"):
        scales_in(stored(scale_fwd=Storage()), "fc1", 2)
    assert not (tmp_path / "ran").exists()


WRONG = [{"scale_fwd": torch.ones(2)}, {"scale_bwd": torch.ones(2).double()}, {"amax_history_fwd": None}]


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_scales_of_another_layer_and_cut_bytes_are_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(CheckpointError, match=f"{name} of the fp8 scales of fc1: got .*, expected"):
        scales_in(stored(**changes), "fc1", 2)
    with pytest.raises(CheckpointError, match="the fp8 scales of fc1 cannot be read"):
        scales_in(stored(**changes)[:40].clone(), "fc1", 2)
