"""RoPE frequencies against transformers', to the bit."""

import pytest
import torch
from small_runs import hf_llama, small_run

from patch.model.rotary import inverse_frequencies


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rope_scaling": False, "rotary_base": 10000.0},
        {"rope_scaling_factor": 8.0, "rope_original_max_position": 8192, "kv_channels": 128},
        {"rope_scaling_factor": 32.0, "rope_original_max_position": 8192, "kv_channels": 64},
        {"rope_original_max_position": 2048, "rope_low_freq_factor": 2.0, "rope_high_freq_factor": 8.0},
    ],
    ids=["plain", "llama3.1", "llama3.2", "other-fields"],
)
def test_frequencies_equal_transformers(changes: dict) -> None:
    config = small_run(**changes)
    expected = hf_llama(config).model.rotary_emb.inv_freq
    assert torch.equal(inverse_frequencies(config.model), expected)
