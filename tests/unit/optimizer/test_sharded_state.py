"""Optimizer states by global shape: rectangles, and checkpoints that every layout loads to the bit.

The oracle of the checkpoints: each state is set to a function of the weight it belongs to, element by
element in the flat buffers, where no code that describes shards is involved. The weights are upstream's
to save, and differ in every element of the model. So wherever a state element lands, it shows whether
its weight is there too: in the loading run, and in the files as plain torch.distributed.checkpoint reads
them.
"""

import itertools
import math
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.validation import determine_global_metadata
from optimizer_runs import states_of
from small_runs import small_run
from training_runs import build_seeded_run, stored_tensors

from patch.checkpoint import load_checkpoint, save_checkpoint
from patch.checkpoint.folder import iteration_folder
from patch.checkpoint.sharded_tensors import shards_of
from patch.config.schema import RunConfig
from patch.model import sharded_weights
from patch.optimizer.states.sharded_state import rectangles, zeros_of_frozen
from patch.training.setup import Run

SHAPES = [(1,), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]
# Of 264,000 elements, which several buckets hold.
TIED = {"untie_embeddings_and_output_weights": False, "vocab_size": 4400}

TWO_INSTANCES = {"num_distributed_optimizer_instances": 2}


def layout(level: str, bucket_size: int, **changes: Any) -> RunConfig:
    """Rows of 60, 64, 76 and 152 elements: shards, multiples of 64, begin and end inside of them."""
    changes = {"precision": "bf16", "hidden_size": 60, "ffn_hidden_size": 152} | changes
    return small_run(data_parallel_sharding=level, reduce_bucket_size=bucket_size, **changes)


# Each loads what the one before it saved.
CHAINS = {
    "bf16": [
        layout("gradients", 9000, dp=4),
        layout("optimizer", 1, tp=2, dp=2, sequence_parallel=True, decoupled_lr=1e-2),
        layout("gradients", 10**9, pp=2, dp=2),
        layout("none", 5000, tp=2, pp=2, stage=1),
        layout("parameters", 9000, dp=4, param_persistence_threshold=100),
        layout("none", 20_000, dp=4),
        layout("gradients", 20_000, dp=4, **TWO_INSTANCES),
        layout("parameters", 20_000, dp=4, **TWO_INSTANCES, param_persistence_threshold=0),
        layout("optimizer", 20_000, dp=4, decoupled_lr=1e-2),  # other places in the buckets
    ],
    "tied": [
        layout("gradients", 9000, pp=2, dp=2, **TIED),
        layout("optimizer", 9000, dp=4, **TIED),
        layout("parameters", 9000, pp=2, dp=2, **TIED, param_persistence_threshold=100),
        layout("none", 1, pp=2, dp=2, stage=1, **TIED),
        layout("optimizer", 9000, pp=2, dp=2, **TIED),
        layout("optimizer", 9000, cp=2, dp=2, **TWO_INSTANCES, **TIED),
    ],
    "fp32": [
        layout("optimizer", 9000, dp=4, precision="fp32"),
        layout("gradients", 3, tp=2, pp=2, precision="fp32"),
        layout("gradients", 3, pp=2, dp=2, stage=1, precision="fp32"),
    ],
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_are_the_range_in_order_contiguous_and_few(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    whole = torch.arange(numel).view(shape)
    for begin, end in product(range(numel + 1), repeat=2):
        found = list(rectangles(shape, begin, end))
        cuts = [whole[tuple(slice(o, o + s) for o, s in zip(*part, strict=True))] for part in found]
        assert all(cut.numel() > 0 and cut.is_contiguous() for cut in cuts)
        covered = torch.cat([cut.flatten() for cut in cuts]) if cuts else torch.arange(0)
        assert covered.tolist() == list(range(begin, end))
        assert len(found) <= 2 * len(shape) - 1


def build(config: RunConfig) -> Run:
    """A run whose weights differ in every element, the same ones in every layout."""
    run = build_seeded_run(config)
    with torch.no_grad():
        for shard in shards_of(sharded_weights(run.stages)):
            if isinstance(shard, ShardedTensor) and shard.data.ndim == 1:  # norms, ones until now
                torch.manual_seed(zlib.crc32(f"{shard.key}{shard.global_offset}".encode()))
                shard.data.uniform_(0.5, 1.5)
    run.optimizer.reload_model_params()
    return run


def wanted_states(run: Run) -> dict[str, list[torch.Tensor]]:
    """What each state has to be, next to the weights of this rank's shards."""
    weights = [weight for _, weight in states_of(run.optimizer, "exp_avg")]
    found = {
        "exp_avg": [2 * w.float() for w in weights],
        "exp_avg_sq": [w.float().square() for w in weights],
        "master_low": [w.view(torch.int16) for w in weights],
    }
    return {name: found[name] for name in run.optimizer.adam.dtypes}


def sharded_state(run: Run) -> dict[str, Any]:
    with run.optimizer.meta_weights():
        weights = sharded_weights(run.stages)
        states = run.optimizer.sharded_state_dict(weights)
        return {"model": run.optimizer.sharded_weights(weights), "optimizer": states}


def check_loaded(root: Path, iteration: int, run: Run) -> None:
    """A run's states, all wrong before, are those of its weights after a load."""
    wanted = wanted_states(run)
    for state in (state for name in wanted for state, _ in states_of(run.optimizer, name)):
        state.fill_(math.pi)
    (flat,) = run.optimizer.param_buffer.flats
    weights = flat.buffer.clone()
    load_checkpoint(root, iteration, sharded_state(run))
    assert torch.equal(flat.buffer, weights), "weights of another layout"
    for name, expected in wanted.items():
        for (ours, _), values in zip(states_of(run.optimizer, name), expected, strict=True):
            is_padding = values == 0  # no weight is, but for padded rows of the vocabulary
            assert torch.equal(ours[~is_padding], values[~is_padding]), name
            assert set(ours[is_padding].tolist()) <= {0.0, ours.new_tensor(math.pi).item()}


def check_files(folder: Path, num_states: int) -> None:
    """Every weight's states as torch's own DCP reads them, whole, next to the weight itself."""
    tensors = stored_tensors(folder)
    states = {key for key in tensors if key.startswith("optimizer.state.")}
    weights = set(tensors) - states
    assert len(states) == num_states * len(weights) and len(weights) > 5
    for key in weights:
        weight = tensors[key].float()
        assert torch.equal(tensors[f"optimizer.state.exp_avg.{key}"], 2 * weight), key
        assert torch.equal(tensors[f"optimizer.state.exp_avg_sq.{key}"], weight.square()), key
        if num_states == 3:
            low = tensors[f"optimizer.state.master_low.{key}"]
            assert torch.equal(low, tensors[key].view(torch.int16)), key


def check_writers(state: dict[Any, Any]) -> None:
    """Each element of each stored state has one rank that writes it."""
    _, everywhere = determine_global_metadata(state)
    shards = [shard for shard in itertools.chain(*everywhere) if isinstance(shard, ShardedTensor)]
    writers = {shard.key: torch.zeros(shard.global_shape, dtype=torch.int) for shard in shards}
    for shard in shards:
        writers[shard.key][shard.global_slice()] += is_main_replica(shard.replica_id)
    assert writers and all((count == 1).all() for count in writers.values())


def run_chain(chain: list[RunConfig], root: Path, rank: int) -> None:
    """Carry one set of states through a chain of layouts."""
    for iteration, config in enumerate(chain):
        run = build(config)
        if iteration:
            check_loaded(root, iteration - 1, run)
        else:
            for name, values in wanted_states(run).items():
                for (state, _), value in zip(states_of(run.optimizer, name), values, strict=True):
                    state.copy_(value)
        state = sharded_state(run)
        check_writers(dict(enumerate(shards_of(state))))
        save_checkpoint(root, iteration, state, {"iteration": iteration})
        if rank == 0:
            check_files(iteration_folder(root, iteration), len(run.optimizer.adam.dtypes))
        new_job()


def run_chains(rank: int, world_size: int, folder: str) -> None:
    for name, chain in CHAINS.items():
        run_chain(chain, Path(folder) / name, rank)


@pytest.mark.long
def test_states_are_bitwise_the_same_after_every_layout_and_for_plain_torch(tmp_path: Path) -> None:
    run_distributed(run_chains, 4, str(tmp_path), timeout_s=200)


def written_zeros(rank: int, world_size: int) -> list[tuple[str, tuple, tuple]]:
    """What this rank writes where the second of two layers is frozen: a copied weight, and its own expert."""
    state, trained = {}, set()
    stored = {"optimizer.exp_avg.decoder.copied", "optimizer.exp_avg.decoder.expert"}
    kinds = ("copied", (1, 0, 1), (0, 0, rank)), ("expert", (1, rank, world_size), (0, 0, 0))
    for name, place, replica in kinds:
        for layer in range(2):
            weight = torch.zeros(4, 3)
            trained |= {id(weight)} if layer == 0 else set()
            state[f"{name}{layer}"] = ShardedTensor.from_rank_offsets(
                f"decoder.{name}", weight, (0, layer, 2), place, replica_id=replica, prepend_axis_num=1
            )
    dtypes = dict.fromkeys(("exp_avg", "momentum_buffer"), torch.float32)  # the second one is of others
    zeros = zeros_of_frozen(state, trained, dtypes, stored, "optimizer")
    written = [shard for shard in zeros.values() if is_main_replica(shard.replica_id)]
    return sorted((shard.key, shard.global_offset, shard.local_shape) for shard in written)


def test_zeros_of_frozen_experts_are_written_by_every_rank_that_has_one() -> None:
    first, second = run_distributed(written_zeros, 2)
    assert first == [
        ("optimizer.exp_avg.decoder.copied", (1, 0, 0), (1, 4, 3)),
        ("optimizer.exp_avg.decoder.expert", (1, 0, 0), (1, 4, 3)),
    ]
    assert second == [("optimizer.exp_avg.decoder.expert", (1, 4, 0), (1, 4, 3))]
