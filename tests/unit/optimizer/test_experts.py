"""Experts of upstream's model, over several ranks, against one process with torch's AdamW on the whole model.

All layouts begin with a checkpoint that one process wrote, and leave one with which one process goes on.
"""

from collections.abc import Iterable
from itertools import cycle, groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_runner import new_job, run_distributed
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from optimizer_runs import LR, ZERO_STAGES, take_step, weights_of
from small_runs import small_run
from training_runs import CPU

from patch import compat
from patch.checkpoint import load_checkpoint, save_checkpoint
from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.distributed.groups import initialize
from patch.model.norm import RMSNorm
from patch.optimizer import OverlappedDistributedOptimizer, build_optimizer

WORLD_SIZE, NUM_STEPS = 4, 3
LAYOUTS = [(1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 2, 1)]
"""TP (with sequence parallelism), EP, ETP; in the last one tensor-parallel ranks hold copies of an expert."""
CASES = [*product(LAYOUTS[:1], ZERO_STAGES), *zip(LAYOUTS[1:], cycle(ZERO_STAGES[:0:-1]), strict=False)]
ALONE = ((1, 1, 1), ZeroStage.OPTIMIZER)
NUM_ROWS, LENGTH, VOCAB_SIZE = 4, 16, 64
# Orders of sums; with a small EPS Adam makes them large where a gradient is almost zero.
BOUND, NORM_BOUND, EPS, CLIP = 2e-6, 2e-6, 1e-5, 0.5


class Experts(torch.nn.Module):
    """Upstream's model, two layers of four experts; forward gives the part of some rows in a mean loss."""

    def __init__(self, groups: ProcessGroupCollection, tp: int = 1, ep: int = 1, etp: int = 1) -> None:
        super().__init__()
        config = TransformerConfig(
            num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_moe_experts=4,
            moe_ffn_hidden_size=48, moe_router_load_balancing_type="none", normalization="RMSNorm",
            # The parts that alltoall gathers over ETP differ in size, which gloo cannot.
            moe_token_dispatcher_type="allgather" if min(ep, etp) > 1 else "alltoall",
            tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
            expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, gated_linear_unit=True,
            activation_func=torch.nn.functional.silu, add_bias_linear=False, use_cpu_initialization=True,
            attention_dropout=0.0, hidden_dropout=0.0, gradient_accumulation_fusion=False,
            init_method_std=0.1, masked_softmax_fusion=False, persist_layer_norm=False,
        )  # fmt: skip
        layer = get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm")
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        block = TransformerBlockSubmodules(layer_specs=[layer, layer], layer_norm=RMSNorm)
        self.dp_cp = groups.dp_cp
        self.model = GPTModel(
            config, block, VOCAB_SIZE, LENGTH, position_embedding_type="rope", pg_collection=groups
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(LENGTH).expand(len(rows), LENGTH)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        losses = self.model(rows[:, :-1].contiguous(), positions, mask, labels=rows[:, 1:].contiguous())
        return losses.sum() / (NUM_ROWS * LENGTH)

    def sections(self, optimizer: OverlappedDistributedOptimizer) -> dict[str, Any]:
        """What a checkpoint holds."""
        state = self.model.sharded_state_dict(metadata={"dp_cp_group": self.dp_cp}).items()
        weights = {name: shard for name, shard in state if "_extra_state" not in name}
        states = optimizer.sharded_state_dict(weights)
        return {"model": optimizer.sharded_weights(weights), "optimizer": states}


def batches(step: int, dp_rank: int = 0, dp_size: int = 1) -> list[torch.Tensor]:
    """A rank's micro-batches of a step, of one row each."""
    rows = torch.randint(VOCAB_SIZE, (NUM_ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return list(rows.chunk(dp_size)[dp_rank].split(1))


class Trained:
    """A model of a layout and its optimizer, which may be loaded from a checkpoint after some steps."""

    def __init__(
        self, groups: ProcessGroupCollection, case: tuple, folder: str, number: int = 0, num_steps: int = 0
    ) -> None:
        self.dp, self.folder, (layout, zero_stage) = groups.dp, Path(folder), case
        self.model = Experts(groups, *layout)
        adam = OptimizerConfig(lr=LR, clip_grad=CLIP, adam_eps=EPS, weight_decay=0.0, reduce_bucket_size=3000,
            param_persistence_threshold=0,
        )  # fmt: skip
        self.optimizer = build_optimizer([self.model], adam, zero_stage, groups)
        if num_steps:
            with self.optimizer.meta_weights():
                load_checkpoint(self.folder, number, self.model.sections(self.optimizer))
            common = {"optimizer_steps": num_steps}
            self.optimizer.load_common_state_dict(self.optimizer.common_state_dict() | common)
            self.optimizer.reload_model_params()

    def train(self, steps: Iterable[int]) -> list[float]:
        """The norms of some steps."""
        ranks = self.dp.rank(), self.dp.size()
        norms = [take_step(self.model, self.optimizer, batches(step, *ranks)) for step in steps]
        self.optimizer.finish_param_sync()
        return norms

    def save(self, number: int) -> None:
        with self.optimizer.meta_weights():
            sections = self.model.sections(self.optimizer)
        save_checkpoint(self.folder, number, sections, {"iteration": number})


def make_groups(tp: int, ep: int, etp: int) -> ProcessGroupCollection:
    compat.apply(cuda=False)
    experts = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    return initialize(small_run(tp, dp=dist.get_world_size() // tp, num_experts=4, **experts), CPU)


def train_alone(rank: int, world_size: int, folder: str) -> list[tuple[float, dict[str, np.ndarray]]]:
    """Norm and weights of all steps by torch's AdamW; the optimizer's first step goes into a checkpoint."""
    trained = Trained(make_groups(*ALONE[0]), ALONE, folder)
    model = Experts(trained.optimizer.groups)
    model.load_state_dict(trained.model.state_dict())
    trained.train([0])
    trained.save(0)
    adamw = torch.optim.AdamW(model.parameters(), LR, (0.9, 0.95), EPS, weight_decay=0.0)
    found = []
    for step in range(NUM_STEPS + 2):
        adamw.zero_grad()
        model(torch.cat(batches(step))).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        adamw.step()
        found.append((norm, weights_of(model)))
    return found


def train_cases(rank: int, world_size: int, folder: str) -> list[list[float]]:
    """The norms of each case, from that checkpoint to one of its own."""
    found = []
    for layout, cases in groupby(CASES, key=itemgetter(0)):
        new_job()
        groups = make_groups(*layout)
        for case in cases:
            trained = Trained(groups, case, folder, number=0, num_steps=1)
            found.append(trained.train(range(1, NUM_STEPS + 1)))
            trained.save(len(found))
    return found


def go_on(rank: int, world_size: int, folder: str) -> list[tuple[dict, float, dict]]:
    """One process with the checkpoint of each case: its weights, then norm and weights after another step."""
    found, groups = [], make_groups(*ALONE[0])
    for number in range(1, len(CASES) + 1):
        trained = Trained(groups, ALONE, folder, number, NUM_STEPS + 1)
        loaded = weights_of(trained.model)
        found.append((loaded, *trained.train([NUM_STEPS + 1]), weights_of(trained.model)))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list, list, list]:
    """All steps by torch; of each case the norms by rank, and how one process goes on."""
    folder = str(tmp_path_factory.mktemp("experts"))
    (alone,) = run_distributed(train_alone, 1, folder)
    norms = list(zip(*run_distributed(train_cases, WORLD_SIZE, folder), strict=True))
    (resumed,) = run_distributed(go_on, 1, folder)
    return alone, norms, resumed


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(CASES)), ids=map(str, CASES))
def test_experts_train_as_on_one_process_and_their_states_go_there_and_back(runs: tuple, index: int) -> None:
    (_, *alone), norms, (loaded, norm, weights) = runs[0], runs[1][index], runs[2][index]
    for found in norms:
        assert [*found, norm] == pytest.approx([expected for expected, _ in alone], rel=NORM_BOUND)
    for ours, (_, expected) in zip((loaded, weights), alone[-2:], strict=True):
        for name, values in expected.items():
            np.testing.assert_allclose(ours[name], values, rtol=0, atol=BOUND, err_msg=name)
