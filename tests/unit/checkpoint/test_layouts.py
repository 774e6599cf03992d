"""Upstream's plain GPTModel through every layout of four processes, and through upstream's own load."""

from dataclasses import replace
from pathlib import Path

import torch
from distributed_runner import new_job, run_distributed
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from patch import compat
from patch.checkpoint import load_checkpoint, save_checkpoint
from patch.checkpoint.folder import iteration_folder
from patch.checkpoint.sharded_tensors import shards_of
from patch.compat.gloo import shared_devices

LAYOUTS = [(2, 1), (1, 2), (2, 2), (1, 1)]
VOCAB, HIDDEN, FFN, LAYERS = 64, 32, 48, 2


def build(tp: int, pp: int, seed: int) -> GPTModel:
    """LLaMA-like (SwiGLU, RMSNorm, GQA, untied), with weights that differ between any two layouts."""
    new_job()
    with shared_devices():
        parallel_state.initialize_model_parallel(tp, pp)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=4,
        num_query_groups=2, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, use_cpu_initialization=True,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), VOCAB, 16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    own = 1000 * parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            replicated = parameter.ndim == 1
            torch.manual_seed(seed + index + (0 if replicated else own))
            parameter.uniform_(-1, 1)
    return model


def optimizer_state(model: GPTModel) -> dict[str, ShardedTensor]:
    """One state of each weight: its negative, where the model's own shards lie."""
    return {
        str(place(shard)): replace(shard, key=f"optimizer.{shard.key}", data=-shard.data.detach())
        for shard in shards_of(model.sharded_state_dict())
        if isinstance(shard, ShardedTensor)
    }


def place(shard: ShardedBase) -> tuple:
    """Which piece of which weight a shard is, whether it holds the weight or its state."""
    return shard.key.removeprefix("optimizer."), tuple(shard.global_offset)


def run_chain(rank: int, world_size: int, folder: str) -> list[str]:
    """Carry one set of weights through all layouts; the names of the parameters that changed on the way."""
    compat.apply(cuda=False)
    root = Path(folder)
    original = build(1, 1, seed=0)
    save_checkpoint(root, 0, state_of(original), {"iteration": 0})
    wanted = {name: parameter.detach().clone() for name, parameter in original.named_parameters()}
    for step, (tp, pp) in enumerate(LAYOUTS, start=1):
        model = build(tp, pp, seed=100 * step)
        state = state_of(model)
        loaded = load_checkpoint(root, step - 1, state)
        assert loaded["iteration"] == step - 1
        weights = {place(shard): shard.data for shard in shards_of({"model": state["model"]})}
        for shard in shards_of({"optimizer": state["optimizer"]}):
            assert torch.equal(shard.data, -weights[place(shard)]), shard.key
        save_checkpoint(root, step, state_of(model), {"iteration": step})
    return [name for name, parameter in model.named_parameters() if not torch.equal(parameter, wanted[name])]


def state_of(model: GPTModel) -> dict:
    return {"model": model.sharded_state_dict(), "optimizer": optimizer_state(model)}


def run_upstream_load(rank: int, world_size: int, folder: str) -> None:
    """Upstream's strict load of a weights-only checkpoint, written under another layout."""
    compat.apply(cuda=False)
    root = Path(folder)
    saved = build(2, 2, seed=0)
    save_checkpoint(root, 1, {"model": saved.sharded_state_dict()}, {})
    ours, theirs = build(2, 1, seed=300), build(2, 1, seed=400)
    load_checkpoint(root, 1, {"model": ours.sharded_state_dict()})
    upstream = dist_checkpointing.load(
        theirs.sharded_state_dict(), str(iteration_folder(root, 1)), strict=StrictHandling.RAISE_ALL
    )
    theirs.load_state_dict(upstream, strict=True)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


def run_four(rank: int, world_size: int, folder: str) -> list[str]:
    changed = run_chain(rank, world_size, f"{folder}/chain")
    run_upstream_load(rank, world_size, f"{folder}/upstream")
    return changed


def test_weights_and_states_are_bitwise_the_same_after_every_layout(tmp_path):
    assert run_distributed(run_four, 4, str(tmp_path), timeout_s=200) == [[]] * 4
