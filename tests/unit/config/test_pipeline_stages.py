"""The cut of layers into stages against megatron-core's own split and reading of layouts; refusals."""

import random

import pytest
import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from refusals import refused

from patch.compat.stage_layout import StageLayout
from patch.config import user_message
from patch.config.pipeline_stages import (
    can_be_micro_batch_group,
    layout_layers,
    layout_text,
    smallest_micro_batch_group,
    split_layers,
)
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.preflight import validate_run

GPUS = MachineFacts(cuda_devices=4, cpu_cores=2)
LAYOUT = "--pipeline-model-parallel-layout"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
PP = "--pipeline-model-parallel-size (position 11 PP)"
VPP = "--num-layers-per-virtual-pipeline-stage"


def upstream_config(num_layers, pp, vp, **changes):
    return TransformerConfig(
        num_layers=num_layers, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        **changes,
    )  # fmt: skip


def upstream_stages(config, pp, vp, what):
    return [what(config, stage if vp > 1 else None, rank) for stage in range(vp) for rank in range(pp)]


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_where_all_divides_the_split_is_upstreams_with_embedding_and_loss_counted(embedding, loss):
    accounts = {
        "account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss,
    }  # fmt: skip
    seen = 0
    for pp in (2, 3, 4):
        for vp in (1, 2, 3):
            for each in (1, 2, 5):
                num_layers = pp * vp * each - embedding - loss
                if num_layers < 1:
                    continue
                config = upstream_config(num_layers, pp, vp, **accounts)
                expected = upstream_stages(config, pp, vp, get_num_layers_to_build)
                layers = split_layers(num_layers, pp * vp, with_embedding=embedding, with_loss=loss)
                assert layers == expected, (pp, vp, num_layers)
                layout = upstream_config(num_layers, pp, vp)
                offsets = upstream_stages(config, pp, vp, get_transformer_layer_offset)
                for rank in range(pp):
                    layout.pipeline_model_parallel_layout = StageLayout(layers, pp, rank)
                    for stage in range(vp):
                        of_rank = [get_num_layers_to_build(layout, stage, rank)]
                        of_rank.append(get_transformer_layer_offset(layout, stage, rank))
                        assert of_rank == [expected[stage * pp + rank], offsets[stage * pp + rank]]
                seen += 1
    assert seen > 20


@pytest.mark.parametrize(
    ("num_layers", "stages", "embedding", "loss", "expected"),
    [
        (126, 16, True, True, [7, *[8] * 14, 7]),
        (70, 12, True, True, [5, *[6] * 10, 5]),
        (9, 4, True, True, [2, 3, 3, 1]),
        (8, 4, True, True, [1, 3, 3, 1]),
        (7, 4, False, True, [2, 2, 2, 1]),
        (5, 3, True, False, [1, 2, 2]),
        (2, 4, True, True, [0, 1, 1, 0]),
        (3, 1, True, True, [3]),
    ],
)
def test_what_does_not_divide_goes_to_the_middle_also_with_embedding_and_loss(
    num_layers, stages, embedding, loss, expected
):
    assert split_layers(num_layers, stages, with_embedding=embedding, with_loss=loss) == expected


LAYOUTS = [
    ("Et*3|t*4|t*4L", 3),
    ("Ettt|tttt|tttt|ttttL", 4),
    ("Et,t|(tt|)*6tL", 8),
    ("E|(t|)*3tt,L", 5),
    ("E,(tt|)*3,(t|)*2,tL", 3),
    ("E|t|t|L", 2),
    ("Ett|t|t*3|t*2L", 2),
    ("Et*12L", 1),
]


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
        pieces = draw.choices(
            ["t", "t*2", "|", "(t|)*2", "(tt)*2", ",", "*", "x", "E", "L"], k=draw.randint(1, 6)
        )
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


OVERLAP = "--overlap-p2p-communication"
WAITING, FLUSH = "--no-overlap-p2p-communication", "--overlap-p2p-communication-warmup-flush"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
INTERLEAVED = ["--num-layers=4", f"{VPP}=1"]
FORM = "a form such as Et*3|t*4|t*4L: E embedding, t layer, L loss, | between stages"
REFUSED = [
    # PP, flags, parts of the message
    (2, [f"{LAYOUT}=Et|m|tL"], [f"{LAYOUT}: got Et|m|tL, expected no m: layers that predict several tokens"]),
    (2, [f"{LAYOUT}=E2t|tL"], [f"{LAYOUT}: got E2t|tL, expected {FORM}", "2 has no meaning here"]),
    (2, [f"{LAYOUT}=tt"], [f"expected {FORM}", "the first stage begins with the embedding"]),
    (2, [f"{LAYOUT}=EtL|t"], ["the last one ends with the loss"]),
    (2, [f"{LAYOUT}=tE|tL"], ["the first stage begins with the embedding"]),
    (3, [f"{LAYOUT}=Et||tL"], ["stage 2 of 3 would be empty"]),
    (2, [f"{LAYOUT}=Et*1000000|tL"], ["expected at most 100000 letters"]),
    (2, [f"{LAYOUT}=Et*{'9' * 5000}|tL"], ["expected at most 100000 letters"]),
    (2, [f"{LAYOUT}=E(t*9999)*9999|tL"], ["expected at most 100000 letters"]),
    (2, [f"{LAYOUT}=E|t|tL"], [f"expected a multiple of {PP} 2 stages"]),
    (2, [f"{LAYOUT}=E|t|tL"], ["such as Et|tL: it has 3"]),
    (1, [f"{LAYOUT}=Et|tL"], [f"expected one stage at {PP} 1"]),
    (2, [f"{LAYOUT}=Ett|tL"], ["got Ett|tL, expected 2 t, such as Et|tL: it has 3 layers, the model 2"]),
    (4, [f"{LAYOUT}=E|tt|t|L"], ["expected 2 t, such as E|t|t|L"]),
    (5, [f"{LAYOUT}=E|tt|t|t|L"], ["expected 2 t: it has 4 layers"]),
    (2, [f"{LAYOUT}=Et|tL", f"{VPP}=1"], [f"{VPP} (MP_VP): got 1, expected 0, or none at {LAYOUT}"]),
    (2, [f"{LAYOUT}=Et|tL", LOSS], [f"{LOSS}: got true, expected false, or none at {LAYOUT}"]),
    (5, [EMBEDDING, LOSS], ["expected at most 4: the model has 4 layers (embedding and loss counted)"]),
    (3, [EMBEDDING, f"{VPP}=2"], ["expected 0 or one of 1: a process has 1 layers (embedding counted)"]),
    (2, [LOSS, f"{VPP}=1"], [f"or stages by hand ({LAYOUT}): 3 layers (loss counted) do not divide by PP=2"]),
    (2, [*INTERLEAVED, WAITING], [f"{OVERLAP}: got false, expected true, or {PP} above 2: two"]),
    (2, [*INTERLEAVED, WAITING], ["could take a gradient for an activation"]),
    (2, [WAITING, FLUSH], [f"{FLUSH}: got true, expected false, or true at {OVERLAP}"]),
    (2, [*INTERLEAVED, f"{GROUP}=3"], [f"{GROUP}: got 3, expected 0 or one of 2, 4: each group of"]),
    (2, [*INTERLEAVED, f"{GROUP}=5"], ["micro-batches, also the last one, has at least PP=2"]),
    (2, ["--rank-order=tp-pp-pp"], ["--rank-order: got tp-pp-pp, expected tp, cp, dp and pp in any order"]),
    (2, ["--rank-order=tp-xp-pp"], ["such as tp-cp-pp-dp: it names each axis once, the fastest first"]),
    (1, ["--rank-order=TP-PP"], ["--rank-order: got TP-PP, expected tp, cp, dp and pp"]),
    (2, ["--rank-order=tp-cp-dp"], ["pp is missing, its size is 2"]),
    (1, ["--rank-order=tp-pp", "--nproc-per-node=2"], ["dp is missing, its size is 2"]),
]  # fmt: skip


@pytest.mark.parametrize(("pp", "flags", "parts"), REFUSED)
def test_stages_that_cannot_be_cut_so_are_refused(command, pp, flags, parts):
    processes = [] if "--nproc-per-node=2" in flags else [f"--nproc-per-node={pp}"]
    config = command.parse(*processes, *flags, PP=str(pp)).config
    with pytest.raises(ConfigError) as caught:
        validate_run(config, command.machine)
    for part in parts:
        assert part in user_message(caught.value)


def test_stages_of_a_run_follow_the_flags_and_repeat(command):
    by_flags = {
        (4, 2, "none"): ([EMBEDDING, LOSS], [0, 1, 1, 0]),
        (2, 6, "interleaved"): ([EMBEDDING, LOSS, f"{VPP}=2"], [1, 2, 2, 1]),
        (2, 6, "by hand"): ([f"{LAYOUT}=E|ttt|tt|tL"], [0, 3, 2, 1]),
    }
    for (pp, num_layers, _), (flags, layers) in by_flags.items():
        argv = [f"--num-layers={num_layers}", f"--nproc-per-node={pp}", *flags]
        config = command.parse(*argv, PP=str(pp)).config
        assert validate_run(config, GPUS) == []
        assert config.stage_layers == layers and config.virtual_pipeline_size == len(layers) // pp
        assert config.execution.stage_layers == tuple(layers)


@pytest.mark.parametrize("flag", [WAITING, FLUSH, f"{GROUP}=2"])
def test_messages_of_stages_that_do_not_alternate_are_noted(command, flag):
    name = flag.split("=")[0].replace("--no-", "--")
    config = command.parse(flag, "--nproc-per-node=2", PP="2").config
    assert validate_run(config, GPUS) == [f"{name} has no effect without interleaved stages (MP_VP)"]


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_groups_of_micro_batches_are_those_that_upstream_takes(pp):
    """Its schedule (schedules.py:995-1018) raises for the others; the smallest is chosen."""
    for count in range(pp, 24):
        legal = [
            size for size in range(1, 30)
            if pp <= size <= count and not 0 < count % size < pp
        ]  # fmt: skip
        assert [n for n in range(1, 30) if can_be_micro_batch_group(n, count, pp)] == legal
        assert smallest_micro_batch_group(count, pp) == min(legal)


def test_a_cut_without_stages_is_noted(command):
    config = command.parse(EMBEDDING, f"{LAYOUT}=none").config
    assert validate_run(config, GPUS) == [f"{EMBEDDING} has no effect at PP=1"]
