"""The layer spec against upstream's: names, module classes, sharding, marks of its own initialisation.

Both are built from one configuration at each layout; upstream decides by itself which layers a stage holds.
"""

import pytest
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from training_runs import CPU
from upstream_models import described, upstream_stage

from patch import compat
from patch.checks.layout import SPLIT_ACCOUNTING_FLAGS
from patch.config.schema import RunConfig
from patch.distributed.groups import initialize
from patch.model import SOURCES, build_llama_model

TIED = {"untie_embeddings_and_output_weights": False}
QWEN = {"add_qkv_bias": True, "qk_layernorm": True}
RUNS: dict[int, dict[str, RunConfig]] = {
    1: {"qwen": small_run(**QWEN), "tied": small_run(**TIED)},
    2: {
        "qwen-tp": small_run(tp=2, **QWEN),
        "tied-tp": small_run(tp=2, **TIED),
        "tied-pp": small_run(pp=2, **TIED),
        "uneven-pp": small_run(pp=2, num_layers=5),
        "tied-vpp": small_run(pp=2, stage=1, **TIED),
        "vpp-by-hand": small_run(pp=2, pipeline_model_parallel_layout="E|ttt|t|L"),
        "vpp-accounted": small_run(pp=2, stage=1, **dict.fromkeys(SPLIT_ACCOUNTING_FLAGS, True), **TIED),
        "dp": small_run(dp=2),
    },
    3: {"uneven-pp": small_run(pp=3, num_layers=5)},
}
FORMS = ("fast", "aligned", "upstream")
NAMES = [(size, name) for size, runs in RUNS.items() for name in runs]


def run_layouts(rank: int, world_size: int) -> dict[str, dict[str, list]]:
    """By run and by what builds it: what each of this rank's stages says."""
    compat.apply(cuda=False)
    found = {}
    for name, config in RUNS[world_size].items():
        groups = initialize(config, CPU)
        theirs = [upstream_stage(config, groups, stage) for stage in range(config.virtual_pipeline_size)]
        built = {"upstream": theirs}
        for form, aligned in (("fast", frozenset()), ("aligned", frozenset(SOURCES))):
            built[form] = build_llama_model(config, groups, CPU.device, aligned=aligned)
        found[name] = {form: [described(stage) for stage in stages] for form, stages in built.items()}
        new_job()
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, str], dict[str, list]]:
    """By run and builder: the stages of all ranks."""
    ranks = {size: run_distributed(run_layouts, size) for size in RUNS}
    return {
        (size, name): {form: [each for rank in ranks[size] for each in rank[name][form]] for form in FORMS}
        for size, name in NAMES
    }


@pytest.mark.parametrize("run", NAMES, ids=str)
@pytest.mark.parametrize("what", ["parameters", "state", "tensors", "objects", "marks"])
@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.long
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
