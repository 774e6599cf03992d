"""Layers of stages against megatron-core's own split and reading of layouts; what becomes of each layer."""

import itertools
import random

import pytest
import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from refusals import refused
from small_runs import small_run

from patch.compat.corrections import StageLayout
from patch.errors import ConfigError
from patch.layout.pipeline_stages import (
    can_be_micro_batch_group,
    layout_layers,
    layout_text,
    smallest_micro_batch_group,
    split_layers,
    stage_activations,
)

LAYOUT = "--pipeline-model-parallel-layout"


def upstream_config(num_layers, pp, vp, **changes):
    changes |= {"virtual_pipeline_model_parallel_size": vp} if vp > 1 else {}
    return TransformerConfig(
        num_layers=num_layers, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pp, **changes,
    )  # fmt: skip


def upstream_stages(config, pp, vp, what):
    return [what(config, stage if vp > 1 else None, rank) for stage in range(vp) for rank in range(pp)]


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_where_all_divides_the_split_is_upstreams_with_embedding_and_loss_counted(embedding, loss):
    accounts = {
        "account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss,
    }  # fmt: skip
    for pp, vp, each in itertools.product((2, 3, 4), (1, 2, 3), (1, 2, 5)):
        num_layers = pp * vp * each - embedding - loss
        if num_layers < 1:
            continue
        config = upstream_config(num_layers, pp, vp, **accounts)
        expected = upstream_stages(config, pp, vp, get_num_layers_to_build)
        layers = split_layers(num_layers, pp * vp, with_embedding=embedding, with_loss=loss)
        assert layers == expected, (pp, vp, num_layers)
        layout = upstream_config(num_layers, pp, vp)
        offsets = upstream_stages(config, pp, vp, get_transformer_layer_offset)
        for rank, stage in itertools.product(range(pp), range(vp)):
            layout.pipeline_model_parallel_layout = StageLayout(layers, pp, rank)
            of_rank = [get_num_layers_to_build(layout, stage, rank)]
            of_rank.append(get_transformer_layer_offset(layout, stage, rank))
            assert of_rank == [expected[stage * pp + rank], offsets[stage * pp + rank]]


SPLITS = [
    (126, 16, True, True, [7, *[8] * 14, 7]), (70, 12, True, True, [5, *[6] * 10, 5]),
    (9, 4, True, True, [2, 3, 3, 1]), (8, 4, True, True, [1, 3, 3, 1]), (7, 4, False, True, [2, 2, 2, 1]),
    (5, 3, True, False, [1, 2, 2]), (2, 4, True, True, [0, 1, 1, 0]), (3, 1, True, True, [3]),
]  # fmt: skip


@pytest.mark.parametrize(("num_layers", "stages", "embedding", "loss", "expected"), SPLITS)
def test_what_does_not_divide_goes_to_the_middle(num_layers, stages, embedding, loss, expected):
    assert split_layers(num_layers, stages, with_embedding=embedding, with_loss=loss) == expected


LAYOUTS = [
    ("Et*3|t*4|t*4L", 3), ("Ettt|tttt|tttt|ttttL", 4), ("Et,t|(tt|)*6tL", 8), ("E|(t|)*3tt,L", 5),
    ("E,(tt|)*3,(t|)*2,tL", 3), ("E|t|t|L", 2), ("Ett|t|t*3|t*2L", 2), ("Et*12L", 1),
]  # fmt: skip


def upstream_layers(text, pp):
    found = PipelineParallelLayerLayout(text, pp)
    vp = found.virtual_pipeline_model_parallel_size
    return [found.layout[rank][stage].count(LayerType.decoder) for stage in range(vp) for rank in range(pp)]


@pytest.mark.parametrize(("text", "pp"), LAYOUTS)
def test_layout_is_read_as_upstream_reads_it(text, pp):
    layers = layout_layers(text)
    assert layers == upstream_layers(text, pp)
    assert layout_layers(layout_text(layers)) == layers
    validated = PipelineParallelLayerLayout(text, pp)
    validated.validate_layer_layout(num_layers=sum(layers), mtp_num_layers=None)


PIECES = ["t", "t*2", "|", "(t|)*2", "(tt)*2", ",", "*", "x", "E", "L"]


def test_what_is_taken_of_random_texts_is_what_upstream_takes():
    """Whatever is no layout for upstream is refused; of its layouts, only those with an empty stage."""
    draw = random.Random(0)
    taken = refusals = 0
    for _ in range(4000):
        pieces = draw.choices(PIECES, k=draw.randint(1, 6))
        text = "E" * draw.choice([1, 1, 1, 0]) + "".join(pieces) + "L" * draw.choice([1, 1, 1, 0])
        try:
            expected = upstream_layers(text, 1)
            PipelineParallelLayerLayout(text, 1).validate_layer_layout(sum(expected), None)
            parts = PipelineParallelLayerLayout.parse_str_to_list(text)
        except (AssertionError, IndexError):
            parts = []
        if parts and all(parts):
            assert layout_layers(text) == expected, text
            taken += 1
        else:
            with refused(ConfigError, rf"^{LAYOUT}: got .*, expected "):
                layout_layers(text)
            refusals += 1
    assert min(taken, refusals) > 500


ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
RUNS = [
    (4, {"num_layers": 2, **ENDS}, [0, 1, 1, 0]),
    (2, {"num_layers": 6, "stage": 2, **ENDS}, [1, 2, 2, 1]),
    (2, {"num_layers": 6, "pipeline_model_parallel_layout": "E|ttt|tt|tL"}, [0, 3, 2, 1]),
]


@pytest.mark.parametrize(("pp", "changes", "layers"), RUNS)
def test_stages_of_a_run_follow_the_flags(pp, changes, layers):
    config = small_run(pp=pp, **changes)
    assert config.stage_layers == layers and config.virtual_pipeline_size == len(layers) // pp


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_groups_of_micro_batches_are_those_that_upstream_takes(pp):
    """Its schedule (schedules.py:995-1018) raises for the others; the smallest is chosen."""
    for count in range(pp, 24):
        legal = [size for size in range(pp, count + 1) if not 0 < count % size < pp]
        assert [n for n in range(1, 30) if can_be_micro_batch_group(n, count, pp)] == legal
        assert smallest_micro_batch_group(count, pp) == min(legal)


FULL = {"recompute_granularity": "full"}
BLOCK = FULL | {"recompute_method": "block"}
OFFLOAD = {"cpu_offloading": True}


BOTH = OFFLOAD | BLOCK
KINDS = [
    ({}, 4, (0, 0, 4)),
    ({"recompute_granularity": "selective"}, 4, (0, 0, 4)),
    (FULL, 4, (0, 4, 0)),
    (BLOCK | {"recompute_num_layers": 3}, 4, (0, 3, 1)),
    (BLOCK | {"recompute_num_layers": 3}, 2, (0, 2, 0)),
    (OFFLOAD, 4, (3, 0, 1)),
    (OFFLOAD, 1, (1, 0, 0)),
    (OFFLOAD, 0, (0, 0, 0)),
    (OFFLOAD | {"cpu_offloading_num_layers": 3}, 2, (2, 0, 0)),
    (BOTH, 4, (2, 1, 1)),
    (BOTH | {"recompute_num_layers": 3}, 4, (1, 3, 0)),
    (BOTH | {"cpu_offloading_num_layers": 1, "recompute_num_layers": 2}, 4, (1, 2, 1)),
    (BOTH | {"cpu_offloading_num_layers": 2, "recompute_num_layers": 2}, 3, (2, 1, 0)),
]


@pytest.mark.parametrize(("changes", "layers", "expected"), KINDS)
def test_layers_are_offloaded_then_recomputed_then_kept(changes, layers, expected):
    assert stage_activations(layers, small_run(**changes).training) == expected
