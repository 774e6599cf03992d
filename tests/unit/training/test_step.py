"""A step that cannot be taken leaves the weights alone; upstream's own model takes ours from a checkpoint."""

from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from small_runs import small_run
from training_runs import build_seeded_run, seeded_batches

from patch.errors import TrainingError
from patch.training.run_state import Progress, save
from patch.training.step import train_step


def run_with_an_infinite_weight(rank: int, world_size: int) -> None:
    run = build_seeded_run(small_run(dp=2))
    if rank == 1:
        next(run.stages[0].parameters()).data.fill_(float("inf"))
    before = [weight.detach().clone() for weight in run.stages[0].parameters()]
    with pytest.raises(TrainingError, match="step 1: gradient norm nan.*--lr"):
        train_step(run, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, run.stages[0].parameters(), strict=True))
    assert run.optimizer.adam.step_count == 0


def test_gradients_that_are_not_finite_on_one_rank_stop_all_before_anything_is_written() -> None:
    run_distributed(run_with_an_infinite_weight, 2)


@torch.no_grad()
def run_upstream(rank: int, world_size: int, folder: Path) -> None:
    run = build_seeded_run(small_run(rope_original_max_position=8192))
    with torch.enable_grad():
        train_step(run, 0)
    save(folder, Progress(1, 8), run.stages, run.optimizer, "")
    (model,) = run.stages
    upstream = GPTModel(
        config=model.config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=run.config.padded_vocab_size,
        max_sequence_length=run.config.model.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=run.config.model.rotary_base,
        rope_scaling=True,
    )
    loaded = dist_checkpointing.load(upstream.sharded_state_dict(), str(folder / "iter_0000001"))
    upstream.load_state_dict({name: value for name, value in loaded.items() if "." in name}, strict=True)
    weights = dict(model.named_parameters())
    assert weights.keys() == dict(upstream.named_parameters()).keys()
    assert all(torch.equal(weights[name], weight) for name, weight in upstream.named_parameters())
    tokens = seeded_batches(run.config, 0)[0].tokens
    mask = torch.ones(32, 32).triu(1).bool()[None, None]
    expected = upstream(tokens, None, mask)
    torch.testing.assert_close(model(tokens, None, None), expected, rtol=0, atol=1e-5)


def test_upstreams_load_gives_its_model_the_bits_of_our_checkpoint_and_it_computes_the_same(
    tmp_path: Path,
) -> None:
    run_distributed(run_upstream, 1, tmp_path)
