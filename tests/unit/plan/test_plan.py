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
from patch.plan.flops import peak_flops
from patch.plan.memory import bytes_per_rank, kept_weight_bytes, staging_bytes
from patch.plan.parameters import parameters_per_rank, total_parameters
from patch.preflight.parse import parse_args


def _run(size: str, *flags: str, length: int = 2048) -> RunConfig:
    argv = (
        f"--model-size {size} --seq-length {length} --micro-batch-size 2 --global-batch-size 16 "
        "--train-iters 10 --lr 1 --train-data-path a --output-path b"
    )
    return parse_args([*argv.split(), *flags], {}, MachineFacts(0, 2)).config


TINY = total_parameters(_run("tiny").model)


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
        stages = build_llama_model(config, groups, torch.device("meta"))
    return sum(p.numel() for stage in stages for p in stage.parameters())


@pytest.mark.long
@pytest.mark.parametrize("size", PRESETS)
def test_parameters_are_those_of_transformers_and_of_the_model_that_trains(one_process, size):
    config = _run(size)
    assert total_parameters(config.model) == sum(p.numel() for p in _hf_model(config).parameters())
    assert sum(parameters_per_rank(config)) == _built_parameters(config)


@pytest.mark.parametrize("name", [*hf_families.FAMILIES, *hf_families.MIXTURES])
def test_parameters_of_every_family_are_those_of_transformers_and_of_the_model_that_trains(
    one_process, tmp_path, name
):
    model = hf_families.family_model(name, tmp_path)
    config = hf_families.family_run(tmp_path)
    assert total_parameters(config.model) == sum(p.numel() for p in model.parameters())
    assert sum(parameters_per_rank(config)) == _built_parameters(config)


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
        more = parameters_per_rank(_run("tiny", cut, *own))[0] - parameters_per_rank(_run("tiny", cut))[0]
        assert more == plain.model.num_layers * vectors


def test_bytes_follow_the_precision():
    bf16, fp8, fp32 = (bytes_per_rank(_run("tiny", f"--precision={p}")) for p in ("bf16", "fp8", "fp32"))
    assert bf16 == (2 * TINY, 4 * TINY, 10 * TINY) and bf16.total == 16 * TINY
    assert fp8 == bf16 and fp32 == (4 * TINY, 4 * TINY, 8 * TINY)


PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.5, "NVIDIA H100 PCIe": 756.0, "NVIDIA H200": 989.5, "NVIDIA H20": 148.0,
    "NVIDIA L4": 121.0, "NVIDIA L40S": 362.0, "": None, "NVIDIA A10G": None, "NVIDIA H1000": None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "tflops"), PEAKS.items())
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


@pytest.mark.parametrize(("host", "kept"), [(0, 2), (18, 0), (22, 1), (100, 2)])
def test_weights_that_the_host_keeps_take_half_of_what_states_leave(host, kept):
    """In half bytes a parameter: half of the weights, beside 10 bytes of states, all of which may come."""
    found = kept_weight_bytes(_run("tiny", *STATIC_HALF), MachineFacts(1, 2, 2**33, host * TINY // 2))
    assert found == pytest.approx(kept * TINY / 2, abs=1)


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
