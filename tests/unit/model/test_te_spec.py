"""Layers of Transformer Engine against upstream's specification of them, and against ours by checkpoint key.

Transformer Engine's own classes are built here, without a GPU: their kernels are not run, but names, shapes,
marks and keys are those of a GPU. Its constructor asserts that there is one, which `te_constructors` affirms.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from safetensors.torch import load_file
from small_runs import hf_llama, small_run
from training_runs import CPU
from upstream_models import described, te_constructors, upstream_stage

from patch import compat
from patch.checkpoint import save_checkpoint
from patch.checkpoint.load import load_checkpoint
from patch.config.schema import OptimizerConfig, RunConfig
from patch.convert import import_hf, iter_hf_weights
from patch.convert.live_weights import mapped_parameters
from patch.distributed.groups import initialize
from patch.model import build_llama_model, initialize_weights, sharded_weights
from patch.optimizer.param_groups import default_param_groups

pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")

QWEN = {"add_qkv_bias": True, "qk_layernorm": True, "untie_embeddings_and_output_weights": False}
RUNS: dict[int, dict[str, RunConfig]] = {
    1: {"llama": small_run(), "qwen": small_run(**QWEN), "window": small_run(window_size=(15, 0))},
    2: {
        "sp": small_run(tp=2, sequence_parallel=True),
        "qwen-tp": small_run(tp=2, **QWEN),
        "tied-vpp": small_run(pp=2, stage=1, untie_embeddings_and_output_weights=False),
    },
}
NAMES = [(size, name) for size, runs in RUNS.items() for name in runs]


def _engine(config: RunConfig, groups: Any) -> list:
    model = dataclasses.replace(config.model, transformer_impl="transformer_engine")
    return build_llama_model(dataclasses.replace(config, model=model), groups, CPU.device)


def _upstream(config: RunConfig, groups: Any, vp_stage: int) -> Any:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.model.qk_layernorm)
    number = config.stage_layers[vp_stage * groups.pp.size() + groups.pp.rank()]
    return upstream_stage(config, groups, vp_stage, TransformerBlockSubmodules([layer] * number, TENorm))


def _by_key(stages: list, config: RunConfig, tp_size: int) -> dict[tuple[str, int], tuple]:
    """Of each parameter, by its name in the weight table: what the optimizer and a checkpoint see of it."""
    decaying = {
        id(p) for p in default_param_groups(stages, OptimizerConfig(lr=1.0, weight_decay=1.0))[0].params
    }
    marks = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")
    own = {parameter.data_ptr(): parameter for stage in stages for parameter in stage.parameters()}
    found = {}
    for mapped in mapped_parameters(stages, config.model, tp_size):
        parameter = own[mapped.parameter.data_ptr()]
        defaults = {"partition_dim": -1, "partition_stride": 1, "allreduce": True}
        found[mapped.name, mapped.layer] = (
            tuple(parameter.shape), parameter.dtype, id(parameter) in decaying,
            *(getattr(parameter, mark, defaults.get(mark, False)) for mark in marks),
        )  # fmt: skip
    return found


def build(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, Any]]:
    """By run: what is said of Transformer Engine's stages, of upstream's and of ours; conversions."""
    compat.apply(cuda=False)
    found: dict[str, dict[str, Any]] = {}
    for name, config in RUNS[world_size].items():
        groups = initialize(config, CPU)
        tp_size = groups.tp.size()
        local = build_llama_model(config, groups, CPU.device)
        with te_constructors():
            engine = _engine(config, groups)
            theirs = [_upstream(config, groups, stage) for stage in range(config.virtual_pipeline_size)]
        found[name] = {
            "engine": [described(stage) for stage in engine],
            "upstream": [described(stage) for stage in theirs],
            "local": [described(stage) for stage in local],
            "engine by key": _by_key(engine, config, tp_size),
            "local by key": _by_key(local, config, tp_size),
            "seeded": _are_seeded_alike(local, engine, config),
        }
        if name in ("llama", "sp"):
            found[name]["converted"] = _convert_over_both(local, engine, config, groups, folder)
        new_job()
    return found


def _are_seeded_alike(local: list, engine: list, config: RunConfig) -> bool:
    """Whether random initial weights are the same."""
    weights = []
    for stages in (local, engine):
        initialize_weights(stages, config.model, seed=5)
        weights.append(mapped_parameters(stages, config.model, stages[0].pg_collection.tp.size()))
    assert len(weights[0]) == len(weights[1])
    return all(torch.equal(mine.parameter, other.parameter) for mine, other in zip(*weights, strict=True))


def _convert_over_both(local: list, engine: list, config: RunConfig, groups: Any, folder: Path) -> list[bool]:
    """Hugging Face -> ours -> checkpoint -> Transformer Engine's -> Hugging Face, and the other way round."""
    kept = []
    for number, (first, second) in enumerate([(local, engine), (engine, local)]):
        initialize_weights(second, config.model, seed=6)
        import_hf(first, folder / "hf", config.model, groups)
        root = folder / f"{groups.tp.size()} {number}"
        save_checkpoint(root, 1, {"model": sharded_weights(first)}, {})
        load_checkpoint(root, 1, {"model": sharded_weights(second)})
        exported = dict(iter_hf_weights(second, config.model, groups))
        stored = load_file(folder / "hf" / "model.safetensors")
        kept.append(
            exported.keys() == stored.keys()
            and all(torch.equal(tensor, stored[name]) for name, tensor in exported.items())
        )
    return kept


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """By run: what each rank found."""
    folder = tmp_path_factory.mktemp("te")
    hf_llama(small_run(), folder / "hf")
    by_rank = {size: run_distributed(build, size, folder) for size in RUNS}
    return {(size, name): [rank[name] for rank in by_rank[size]] for size, name in NAMES}


@pytest.mark.parametrize("run", NAMES, ids=str)
def test_every_stage_is_upstreams_and_has_the_parameters_of_our_own_layers(found: dict, run: tuple) -> None:
    """But for attention; as checkpoints and the optimizer see the parameters."""
    for rank in found[run]:
        stages = zip(rank["engine"], rank["upstream"], rank["local"], strict=True)
        for mine, theirs, local in stages:
            for what in ("parameters", "state", "tensors", "objects"):
                assert mine[what] == theirs[what], what
            modules, expected = (
                {name: kind for name, kind in stage["modules"].items() if "core_attention" not in name}
                for stage in (mine, theirs)
            )
            assert modules == expected
            assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= {*modules.values()}
            assert mine["tensors"] == local["tensors"]
        assert rank["engine by key"] == rank["local by key"] and rank["seeded"]


@pytest.mark.parametrize("run", [(1, "llama"), (2, "sp")], ids=str)
def test_weights_survive_checkpoints_between_both_kinds_of_layers(found: dict, run: tuple) -> None:
    assert [rank["converted"] for rank in found[run]] == [[True, True]] * run[0]
