"""Parameters against transformers' modules and our own, FLOPs against torch's counter, bytes by hand."""

import hf_families
import pytest
import torch
from megatron.core import parallel_state
from training_runs import CPU

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.distributed.groups import initialize
from patch.families import PRESETS, SHAPE_FIELDS, family_of
from patch.model import build_llama_model
from patch.plan.activations import activation_bytes, activation_peak
from patch.plan.describe import describe_plan
from patch.plan.fits import fit_of
from patch.plan.flops import flops_per_step, peak_flops
from patch.plan.memory import bytes_per_rank, host_bytes, staging_bytes
from patch.plan.parameters import parameters_per_rank, total_parameters
from patch.preflight.parse import parse_args


def _run(size: str, *flags: str, length: int = 2048) -> RunConfig:
    argv = (
        f"--model-size {size} --seq-length {length} --micro-batch-size 2 --global-batch-size 16 "
        "--train-iters 10 --lr 1 --train-data-path a --output-path b"
    )
    return parse_args([*argv.split(), *flags], {}, MachineFacts(0, 2)).config


TINY = total_parameters(_run("tiny").model)


def _parameters_per_rank(config: RunConfig) -> list[int]:
    return parameters_per_rank(config.model, config.parallel)


def _activation_bytes(config: RunConfig) -> dict:
    return activation_bytes(config, cuda=True)


def _hf_model(config: RunConfig) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    described: dict = {}
    family = family_of(config.model)
    assert family is not None
    family.write_type(described, config.model)
    family.write_shape(described, config.model, SHAPE_FIELDS)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**described))


def _built_parameters(config: RunConfig) -> int:
    """Elements of the model that trains, on one rank; it gets no memory."""
    parallel_state.destroy_model_parallel()
    groups = initialize(config, CPU)
    with torch.device("meta"):
        stages = build_llama_model(config.model, groups, torch.device("meta"), config.execution)
    return sum(p.numel() for stage in stages for p in stage.parameters())


@pytest.mark.parametrize("size", PRESETS)
def test_parameters_are_those_of_transformers_and_of_the_model_that_trains(one_process, size):
    config = _run(size)
    assert total_parameters(config.model) == sum(p.numel() for p in _hf_model(config).parameters())
    assert sum(_parameters_per_rank(config)) == _built_parameters(config)


@pytest.mark.parametrize("name", [*hf_families.FAMILIES, *hf_families.MIXTURES])
def test_parameters_of_every_family_are_those_of_transformers_and_of_the_model_that_trains(
    one_process, tmp_path, name
):
    model = hf_families.family_model(name, tmp_path)
    config = hf_families.family_run(tmp_path)
    assert total_parameters(config.model) == sum(p.numel() for p in model.parameters())
    assert sum(_parameters_per_rank(config)) == _built_parameters(config)


# parameters that a token uses, as the models' cards and papers give them, in billions
PUBLIC_ACTIVE = {"8x7B": 12.9, "A2.7B": 2.7, "57B-A14B": 14.2, "30B-A3B": 3.35, "235B-A22B": 22.2}


@pytest.mark.parametrize(("size", "billions"), PUBLIC_ACTIVE.items())
def test_active_parameters_are_those_that_are_published(size, billions):
    model = _run(size).model
    active = total_parameters(model, active=True)
    of_embedding = model.vocab_size * model.hidden_size
    assert any(found / 1e9 == pytest.approx(billions, rel=0.01) for found in (active, active - of_embedding))


def test_biases_are_cut_and_head_norms_are_not():
    plain, own = _run("tiny"), ("--add-qkv-bias", "--qk-layernorm")
    for tp_size, vectors in ((1, 8 * 16 + 2 * 16), (2, 8 * 16 // 2 + 2 * 16)):
        cut = f"--tensor-model-parallel-size={tp_size}"
        more = _parameters_per_rank(_run("tiny", cut, *own))[0] - _parameters_per_rank(_run("tiny", cut))[0]
        assert more == plain.model.num_layers * vectors


def test_one_rank_holds_the_whole_padded_model():
    config = _run("tiny", "--vocab-size=500")
    padding = 2 * (512 - 500) * 64
    assert _parameters_per_rank(config) == [total_parameters(config.model) + padding]


def test_ranks_share_matrices_and_repeat_norms():
    config = _run("1B", "--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=4")
    stages = _parameters_per_rank(config)
    norms = (2 * 16 + 1) * 2048
    copy_of_tied_embedding = 128256 * 2048
    assert len(stages) == 4 and stages[1] == stages[2] < stages[0] < stages[3]
    assert 2 * sum(stages) == total_parameters(config.model) + norms + copy_of_tied_embedding


def test_bytes_follow_the_precision():
    bf16, fp8, fp32 = (bytes_per_rank(_run("tiny", f"--precision={p}")) for p in ("bf16", "fp8", "fp32"))
    assert bf16 == (2 * TINY, 4 * TINY, 10 * TINY) and bf16.total == 16 * TINY
    assert fp8 == bf16 and fp32 == (4 * TINY, 4 * TINY, 8 * TINY)


def test_ranks_that_share_sequences_share_states_and_hold_their_part_of_activations():
    whole = _run("tiny", "--use-distributed-optimizer")
    cut = _run("tiny", "--use-distributed-optimizer", "--context-parallel-size=2", "--cp-comm-type=p2p")
    assert (cut.world_size, cut.data_parallel_size) == (2, 1)
    assert bytes_per_rank(cut).optimizer == bytes_per_rank(whole).optimizer // 2
    assert bytes_per_rank(cut).weights == bytes_per_rank(whole).weights
    assert _activation_bytes(cut)["full"] == _activation_bytes(whole)["full"] // 2
    assert flops_per_step(cut) == flops_per_step(whole)


def test_offloaded_states_are_in_host_memory():
    run = _run("tiny", "--optimizer-offload-policy=static", "--optimizer-offload-fraction=0.25")
    assert host_bytes(run).total == 5 * TINY // 2
    assert bytes_per_rank(run) == (2 * TINY, 4 * TINY, 15 * TINY // 2)
    assert host_bytes(_run("tiny", "--optimizer-offload-policy=auto")).total == 0
    assert host_bytes(_run("tiny", "--optimizer-offload-fraction=0.25")).total == 0


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        *((name, None) for name in ("", "Tesla V100-SXM2-16GB", "NVIDIA A10G", "NVIDIA H1000")),
    ],
)
def test_peak_is_found_by_the_drivers_name(name, tflops):
    assert peak_flops(name) == peak_flops(name, "fp32") == (tflops and tflops * 1e12)
    assert peak_flops(name, "fp8") == (tflops and 2 * tflops * 1e12)


def test_what_a_layer_keeps_by_hand():
    """LLaMA-3 8B, 2 x 8192 tokens in bf16 on a GPU, by values of a token: widths 4096, 14336; fp32 sums."""
    attention = 2 * (4096 + 1024) + 32 * 2
    kept = {
        None: 4 * 4096 + 2 * 2 + attention + 3 * 14336,
        "selective": 2 * 4096 + attention + 2 * 14336,
        "full": 4096,
    }
    found = _activation_bytes(_run("8B", length=8192))
    assert found == {setting: 2 * 2 * 8192 * values for setting, values in kept.items()}


def test_a_rank_keeps_its_part_of_a_layers_activations():
    whole = _activation_bytes(_run("8B"))
    cut = _activation_bytes(_run("8B", "--tensor-model-parallel-size=2", "--sequence-parallel"))
    assert 2 * cut["full"] == whole["full"]
    assert 2 * cut["selective"] == pytest.approx(whole["selective"], rel=0.01)  # RoPE's factors are not cut
    blocks = _run("8B", "--recompute-granularity=full", "--recompute-num-layers=4")
    assert 4 * _activation_bytes(blocks)["full"] == whole["full"]


STATIC_HALF = ("--optimizer-offload-policy=static", "--optimizer-offload-fraction=0.5")
AUTO = ("--optimizer-offload-policy=auto",)
EAGER = ("--precision-align=eager",)


@pytest.mark.parametrize(
    ("flags", "cuda", "on_device", "on_host"),
    [
        ((), True, 16, 0),
        (STATIC_HALF, True, 11, 5),
        (AUTO, True, 6, 0),
        (EAGER, True, 16, 0),  # of the order of operations of transformers only the state is planned
        ((), False, 16, 16),
        (("--nproc-per-node=2",), False, 16, 32),
        (("--simulated-device-memory=1e6", *STATIC_HALF), False, 11, 16),
    ],
)
def test_what_a_run_needs_is_state_and_activations(flags, cuda, on_device, on_host):
    """16 bytes of state a parameter; the host of a CPU run holds all of each process."""
    config = _run("tiny", *flags)
    peak, staging = activation_peak(config, 0, cuda=cuda).total, staging_bytes(config, 0, cuda=cuda)
    beside = 0 if flags == EAGER else peak + staging
    of_host = 0 if cuda else beside * config.parallel.nproc_per_node
    device, host = on_device * TINY + beside, on_host * TINY + of_host
    fit = fit_of(config, MachineFacts(2 * cuda, 2, 2**33 * cuda, host))
    assert (fit.device_needed, fit.host_needed) == (device, host) and fit.is_on_host
    assert fit_of(config, MachineFacts(2 * cuda, 2, 2**33, host - 1)).is_on_host == (host == 0)
    assert fit.is_on_device == ("--simulated-device-memory=1e6" not in flags)


@pytest.mark.parametrize(("cuda", "usable"), [(True, 1), (False, 0)])
def test_a_device_that_is_too_small_is_not_taken_for_an_unknown_one(cuda, usable):
    fit = fit_of(_run("tiny"), MachineFacts(2 * cuda, 2, 2**20 * cuda))
    assert fit.device_usable == usable and fit.is_on_device == (not cuda)


def test_memory_of_a_cpu_that_is_too_small_is_warned_of():
    run = _run("tiny", "--simulated-device-memory=1e6", "--nproc-per-node=2")
    text = describe_plan(run, MachineFacts(0, 2, host_memory_bytes=2**20))
    assert "of model state and activations on a simulated device that has 0.95 MiB" in text
    assert "of model state and activations in the host memory of 2 processes, a machine has 1.00 MiB" in text
    assert "warning" not in describe_plan(_run("tiny"), MachineFacts(0, 2))


@pytest.mark.parametrize("kept", [None, "selective"])
def test_the_first_stage_holds_its_layers_of_all_micro_batches_in_flight(kept):
    """LLaMA-3 8B over four stages: four micro-batches of eight layers, and the table of RoPE."""
    recomputed = f"--recompute-granularity={kept or 'none'}"
    config = _run("8B", "--pipeline-model-parallel-size=4", "--nproc-per-node=4", recomputed, length=8192)
    peak = activation_peak(config, 0, cuda=True)
    assert (peak.in_flight, peak.layers) == (4, 4 * 8 * _activation_bytes(config)[kept])
    assert peak.ends == 4 * 4 * 8192 * 128
    zeros = 2 * 2 * 14336 * 4096  # in the size of gate and up, beside sums that layers make
    assert staging_bytes(config, 0, cuda=True) == zeros


def test_the_last_stage_keeps_the_gradients_of_the_loss():
    config = _run("8B", "--pipeline-model-parallel-size=4", length=8192)
    peak = activation_peak(config, 3, cuda=True)
    tokens, hidden, vocabulary = 2 * 8192, 4096, 128256
    gradients = hidden * (2 * tokens + 4 * vocabulary)  # the weight's stays in float32
    norm = tokens * (2 * hidden + 4)
    cosines_and_sines = 4 * 8192 * 128
    assert (peak.in_flight, peak.ends) == (1, gradients + norm + cosines_and_sines)
    logits = 4096 // 4 * vocabulary * 2  # of a CPU's chunk; a GPU's has 2048 tokens
    weight_sum = 4 * hidden * vocabulary
    messages = 2 * 2 * tokens * hidden
    gate_and_up = 2 * tokens * 2 * 14336  # their gradients, in a layer's backward
    assert peak.transient == max(2 * logits, gate_and_up) + messages
    # A CPU has the logits in float32 too, and another type is added to the sum through a copy.
    on_cpu = activation_peak(config, 3, cuda=False)
    assert on_cpu.transient == 3 * logits + 2 * weight_sum + messages
