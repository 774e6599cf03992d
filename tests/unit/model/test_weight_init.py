"""Random weights: distributed as upstream's, the same at every layout, whatever else was drawn."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import new_job, run_distributed
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors
from small_runs import small_run
from training_runs import build_stages
from upstream_models import upstream_stage

from patch.model import initialize_weights, sharded_weights
from patch.plan.parameters import parameters_per_rank

VOCAB = 90
"""Padded to 96 rows."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "add_qkv_bias": True, "qk_layernorm": True,
    "untie_embeddings_and_output_weights": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 48, "global_batch_size": 8}
BLOOM = {"model_type": "bloom", "add_qkv_bias": False, "qk_layernorm": False, "use_rope_scaling": False}
BLOOM |= {"init_method_xavier_uniform": True}
RUNS = {
    "whole": {"dp": 4},
    "seed": {"dp": 4, "seed": 4321},
    "bf16": {"dp": 4, "precision": "bf16"},
    "tp": {"tp": 2, "dp": 2},
    "tp-sp": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "pp": {"pp": 2, "dp": 2},
    "vpp": {"pp": 2, "stage": 1, "dp": 2},
    "tp-pp": {"tp": 2, "pp": 2},
    "untied": {"dp": 4, "untie_embeddings_and_output_weights": True},
    "experts": {"dp": 4, **EXPERTS},
    "experts ep": {"dp": 4, "expert_model_parallel_size": 2, **EXPERTS},
    "experts tp": {"tp": 2, "dp": 2, "sequence_parallel": True, **EXPERTS},
    "experts pp": {"pp": 2, "dp": 2, "expert_model_parallel_size": 2, **EXPERTS},
    "bloom": {"dp": 4, **BLOOM},
    "bloom-tp-pp": {"tp": 2, "pp": 2, "sequence_parallel": True, **BLOOM},
}
STD_BOUND = 0.05
"""Relative: of 4096 numbers, the fewest, two estimates differ by 0.016, one standard error."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")

Weights = dict[str, np.ndarray]
"""By name in a checkpoint; layers are stacked on a leading axis."""


def _parts(name: str) -> list[tuple]:
    """This rank's parts of a run's weights: name, shape of the whole, place in it, values."""
    config = small_run(**SHAPE | RUNS[name])
    groups, stages = build_stages(config)
    held = sum(p.numel() for stage in stages for p in stage.parameters())
    if not config.model.num_experts:
        assert held == parameters_per_rank(config)[groups.pp.rank()]
    torch.manual_seed(torch.distributed.get_rank())
    before = torch.get_rng_state()
    initialize_weights(stages, config.model, config.training.seed)
    assert torch.equal(torch.get_rng_state(), before), "drawn from the generator that the run goes on with"
    state = sharded_weights(stages)
    apply_factories(state)
    parts = []
    for shard in nested_values(extract_sharded_tensors(state)[0]):
        lengths = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
        place = tuple(slice(begin, begin + n) for begin, n in zip(shard.global_offset, lengths, strict=True))
        values = shard.data.detach().float().view(lengths).numpy()
        parts.append((shard.key, shard.global_shape, place, values))
    new_job()
    return parts


def _upstream_stds() -> dict[str, tuple[float, float]]:
    """Upstream's own initialisation of the whole model beside ours: standard deviations by parameter."""
    config = small_run(**SHAPE | RUNS["untied"], num_layers=2)
    groups, (ours,) = build_stages(config)
    initialize_weights([ours], config.model, config.training.seed)
    weights = dict(upstream_stage(config, groups, 0).named_parameters())
    stds = {}
    for name, weight in ours.named_parameters():
        rows = VOCAB if name in VOCABULARY else len(weight)
        stds[name] = weight[:rows].std().item(), weights[name][:rows].std().item()
    new_job()
    return stds


def run_all(rank: int, world_size: int) -> tuple[dict[str, list[tuple]], dict]:
    return {name: _parts(name) for name in RUNS}, _upstream_stds()


@pytest.fixture(scope="module")
def ranks() -> list[tuple]:
    """What each of four ranks drew, and the standard deviations of upstream's weights."""
    return run_distributed(run_all, 4)


@pytest.fixture(scope="module")
def runs(ranks: list) -> dict[str, Weights]:
    """Each run's whole weights, put together from all ranks; parts that several hold are alike."""
    found: dict[str, Weights] = {name: {} for name in RUNS}
    for parts_of_runs, _ in ranks:
        for name, parts in parts_of_runs.items():
            for key, shape, place, values in parts:
                whole = found[name].setdefault(key, np.full(shape, np.nan, np.float32))
                assert np.isnan(whole[place]).all() or np.array_equal(whole[place], values), (name, key)
                whole[place] = values
    assert not any(np.isnan(whole).any() for weights in found.values() for whole in weights.values())
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["tp", "tp-sp", "pp", "vpp", "tp-pp", "bloom-tp-pp", "experts ep", "experts tp", "experts pp"]
)
def test_every_layout_begins_with_the_same_weights(runs: dict[str, Weights], name: str) -> None:
    whole = runs[next((kind for kind in ("bloom", "experts") if name.startswith(kind)), "whole")]
    assert runs[name].keys() == whole.keys()
    for key, weight in whole.items():
        assert np.array_equal(runs[name][key], weight), key


@pytest.mark.long
def test_bf16_is_rounded_norms_are_one_and_biases_and_padding_zero(runs: dict[str, Weights]) -> None:
    assert {"output_layer.weight"} == runs["untied"].keys() - runs["whole"].keys()
    for key, weight in runs["whole"].items():
        assert np.array_equal(runs["bf16"][key], torch.from_numpy(weight).bfloat16().float().numpy()), key
    for key, weight in itertools.chain(runs["untied"].items(), runs["bloom"].items()):
        if key in VOCABULARY:
            assert weight.shape[0] == 96 and not weight[VOCAB:].any() and weight[:VOCAB].all(), key
        elif key.endswith("bias") or "norm" in key:
            assert (weight == (not key.endswith("bias"))).all(), key


def _drawn(weights: Weights) -> list[np.ndarray]:
    """All that is random, layer by layer."""
    found = []
    for key, weight in weights.items():
        if key in VOCABULARY:
            found.append(weight[:VOCAB])
        elif key.startswith("decoder.layers") and weight.ndim == 3:
            found.extend(weight)
    return found


def test_values_are_normal_around_zero_and_no_two_weights_and_no_two_seeds_are_alike(runs: dict) -> None:
    drawn = _drawn(runs["untied"])
    assert len(drawn) == 2 + 4 * 4
    # The same generator gives the same first values, scaled by the weight's own deviation.
    starts = {tuple(np.round(weight.ravel()[:4] / weight.std(), 1)) for weight in drawn}
    assert len(starts) == len(drawn)
    for mine, other in zip(_drawn(runs["whole"]), _drawn(runs["seed"]), strict=True):
        assert abs(np.corrcoef(mine.ravel(), other.ravel())[0, 1]) < 0.1
    for weight in drawn:
        scaled = weight / weight.std()
        assert abs(scaled.mean()) < 0.06  # 4096 numbers: four standard errors
        for within, share in ((1.0, 0.683), (2.0, 0.954)):
            assert (np.abs(scaled) < within).mean() == pytest.approx(share, abs=0.03)
    for name in ("linear_fc1", "linear_fc2"):
        experts = runs["experts"][f"decoder.layers.mlp.experts.experts.{name}.weight"].reshape(4 * 4, -1)
        assert len(np.unique(experts[:, :8], axis=0)) == 16, name


def test_embedding_is_drawn_as_torchs_xavier_uniform(runs: dict[str, Weights]) -> None:
    """Not the layers' weights, which have their own deviation."""
    embedding = runs["bloom"]["embedding.word_embeddings.weight"][:VOCAB]
    theirs = torch.nn.init.xavier_uniform_(torch.empty(embedding.shape)).numpy()
    for of in (np.min, np.max, np.std):
        assert of(embedding) == pytest.approx(of(theirs), rel=STD_BOUND)
    first = "decoder.layers.self_attention.linear_qkv.weight"
    assert np.array_equal(runs["bloom"][first], runs["whole"][first])


def test_deviations_are_those_of_upstreams_own_initialisation(ranks: list) -> None:
    for name, (ours, upstreams) in ranks[0][1].items():
        assert ours == pytest.approx(upstreams, rel=STD_BOUND), name
