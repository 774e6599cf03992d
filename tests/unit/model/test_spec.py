"""The layer spec against upstream's: names, module classes, sharding, marks of its own initialisation.

Both are built from one configuration at each layout; upstream decides by itself which layers a stage holds.
"""

from typing import Any

import pytest
from distributed_runner import new_job, run_distributed
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from small_runs import small_run
from training_runs import CPU

from patch import compat
from patch.config.schema import RunConfig
from patch.distributed.groups import initialize
from patch.model import SOURCES, build_llama_model
from patch.model.llama import transformer_config

TIED = {"untie_embeddings_and_output_weights": False}
QWEN = {"add_qkv_bias": True, "qk_layernorm": True}
ACCOUNTED = {
    "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
}  # fmt: skip
RUNS: dict[int, dict[str, RunConfig]] = {
    1: {"qwen": small_run(**QWEN), "tied": small_run(**TIED)},
    2: {
        "qwen-tp": small_run(tp=2, **QWEN),
        "tied-tp": small_run(tp=2, **TIED),
        "tied-pp": small_run(pp=2, **TIED),
        "uneven-pp": small_run(pp=2, num_layers=5),
        "tied-vpp": small_run(pp=2, stage=1, **TIED),
        "vpp-by-hand": small_run(pp=2, pipeline_model_parallel_layout="E|ttt|t|L"),
        "vpp-accounted": small_run(pp=2, stage=1, **ACCOUNTED, **TIED),
        "dp": small_run(dp=2),
    },
    3: {"uneven-pp": small_run(pp=3, num_layers=5)},
}
NAMES = [(size, name) for size, runs in RUNS.items() for name in runs]
MARKS = (
    "tensor_model_parallel", "partition_dim", "partition_stride", "allreduce",
    "is_embedding_or_output_parameter", "shared", "shared_embedding",
)  # fmt: skip
OURS = ("layernorm", "self_attention", "core_attention", ".mlp", "rotary_pos_emb")
"""Ends of the names of modules that are ours instead of upstream's."""

OWN_LINEAR = {
    "OverlappedColumn": "ColumnParallelLinear", "OverlappedRow": "RowParallelLinear",
    "AccumulatingColumn": "ColumnParallelLinear", "AccumulatingRow": "RowParallelLinear",
}  # fmt: skip
"""Subclasses of upstream's, with tensor parallelism."""


class Upstream(GPTModel):
    """Upstream's model but for one step: it copies a tied embedding to the last stage on a GPU."""

    def _is_in_embd_group(self) -> bool:
        return False


def _upstream(config: RunConfig, groups: Any, vp_stage: int) -> Upstream:
    """Upstream's model, initialised by itself, which is where it sets its marks."""
    upstream = transformer_config(config.model, groups, config.execution, cuda=False)
    upstream.perform_initialization = True
    _let_upstream_cut(upstream, config)
    stage = vp_stage * groups.pp.size() + groups.pp.rank()
    return Upstream(
        config=upstream,
        transformer_layer_spec=get_gpt_layer_local_spec(
            normalization="RMSNorm", qk_layernorm=config.model.qk_layernorm
        ),
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.model.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == config.virtual_pipeline_size * groups.pp.size() - 1,
        share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        pg_collection=groups,
        vp_stage=vp_stage,
    )


def _let_upstream_cut(upstream: TransformerConfig, config: RunConfig) -> None:
    """Give upstream its own flags for what it cuts by itself; interleaved layouts need its global state."""
    parallel, pp_size = config.parallel, config.parallel.pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(
        upstream.virtual_pipeline_model_parallel_size
    )
    if parallel.pipeline_model_parallel_layout is not None:
        upstream.pipeline_model_parallel_layout = PipelineParallelLayerLayout(
            parallel.pipeline_model_parallel_layout, pp_size
        )
    elif parallel.account_for_loss_in_pipeline_split:
        upstream.pipeline_model_parallel_layout = None
        for field in ACCOUNTED:
            setattr(upstream, field, True)


def _described(model: GPTModel) -> dict[str, dict]:
    """What may be asked of a stage without its weights' values."""
    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    shards = list(nested_values(sharded))
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    modules = {
        name: OWN_LINEAR.get(type(module).__name__, type(module).__name__)
        for name, module in model.named_modules()
        if ".core_attention." not in name
    }
    return {
        "parameters": {
            name: (tuple(weight.shape), weight.dtype) for name, weight in model.named_parameters()
        },
        "state": {
            name: None if value is None else tuple(value.shape) for name, value in model.state_dict().items()
        },
        "marks": {
            name: {mark: getattr(weight, mark, False) for mark in MARKS}
            for name, weight in model.named_parameters()
        },
        "modules": {
            name: "ours" if name.endswith(OURS) and kind != "IdentityOp" else kind
            for name, kind in modules.items()
            if name
        },
        "tensors": {
            (shard.key, shard.global_offset): (
                shard.global_shape, shard.local_shape, shard.axis_fragmentations, shard.replica_id,
                shard.prepend_axis_num, shard.dtype, shard.allow_shape_mismatch,
            )
            for shard in tensors
        },
        "objects": {
            shard.unique_key: shard.replica_id for shard in shards if not isinstance(shard, ShardedTensor)
        },
    }  # fmt: skip


def run_layouts(rank: int, world_size: int) -> dict[str, dict[str, list]]:
    """By run and by what builds it: what each of this rank's stages says."""
    compat.apply(cuda=False)
    found = {}
    for name, config in RUNS[world_size].items():
        groups = initialize(config, CPU)
        fast, aligned = (
            build_llama_model(config.model, groups, CPU.device, config.execution, aligned=form)
            for form in (frozenset(), frozenset(SOURCES))
        )
        theirs = [_upstream(config, groups, stage) for stage in range(config.virtual_pipeline_size)]
        built = {"fast": fast, "aligned": aligned, "upstream": theirs}
        found[name] = {form: [_described(stage) for stage in stages] for form, stages in built.items()}
        new_job()
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, str], dict[str, list]]:
    """By run and builder: the stages of all ranks."""
    stages: dict[tuple[int, str], dict[str, list]] = {}
    for size in RUNS:
        for of_rank in run_distributed(run_layouts, size):
            for name, forms in of_rank.items():
                for form, described in forms.items():
                    stages.setdefault((size, name), {}).setdefault(form, []).extend(described)
    return stages


@pytest.mark.parametrize("run", NAMES, ids=str)
@pytest.mark.parametrize("what", ["parameters", "state", "tensors", "objects", "marks"])
@pytest.mark.parametrize("form", ["fast", "aligned"])
def test_every_stage_is_described_as_upstreams_is(found: dict, run: tuple, what: str, form: str) -> None:
    ours, theirs = ([stage[what] for stage in found[run][which]] for which in (form, "upstream"))
    num_stages = RUNS[run[0]][run[1]].virtual_pipeline_size
    assert len(ours) == len(theirs) == run[0] * num_stages
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.keys() == expected.keys()
        assert {key: (mine[key], expected[key]) for key in mine if mine[key] != expected[key]} == {}


@pytest.mark.parametrize("run", NAMES, ids=str)
def test_modules_are_upstreams_but_for_norms_and_attention(found: dict, run: tuple) -> None:
    for ours, theirs in zip(found[run]["fast"], found[run]["upstream"], strict=True):
        assert ours["modules"] == theirs["modules"]
        assert "ours" in ours["modules"].values()


@pytest.mark.parametrize("run", NAMES, ids=str)
def test_stages_hold_every_layer_once_and_as_many_as_the_configuration_says(found: dict, run: tuple) -> None:
    size, name = run
    config = RUNS[size][name]
    held = [
        sorted({key[1][0] for key in stage["tensors"] if "layer_norm" in key[0]})
        for stage in found[run]["fast"]
    ]
    stages = sorted({tuple(layers) for layers in held if layers})  # replicas and TP ranks hold the same
    assert [len(layers) for layers in stages] == [layers for layers in config.stage_layers if layers]
    assert [layer for layers in stages for layer in layers] == list(range(config.model.num_layers))
