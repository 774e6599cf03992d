"""Parameters against transformers' modules and our own, FLOPs against torch's counter, bytes by hand."""

import dataclasses

import hf_families
import pytest
import torch
from megatron.core import parallel_state
from training_runs import CPU

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.distributed.groups import initialize
from patch.families import PRESETS
from patch.model import build_llama_model
from patch.plan.activation_peak import activation_peak
from patch.plan.activations import activation_bytes
from patch.plan.describe import describe_plan
from patch.plan.flops import flops_per_step, flops_per_token, peak_flops
from patch.plan.memory import bytes_per_rank, offloaded_bytes, staging_bytes
from patch.plan.parameters import parameters_per_rank, total_parameters
from patch.preflight.parse import parse_args
from patch.storage.sizes import size_text

UNKNOWN = MachineFacts(0, 2)
"""A machine whose memory is not known."""


def _run(size: str, *flags: str, length: int = 2048) -> RunConfig:
    argv = (
        f"--model-size {size} --seq-length {length} --micro-batch-size 2 --global-batch-size 16 "
        "--train-iters 10 --lr 1 --train-data-path a --output-path b"
    )
    return parse_args([*argv.split(), *flags], {}, MachineFacts(0, 2)).config


def _flops_per_token(config: RunConfig) -> float:
    return flops_per_token(config.model, config.sample_length, config.parallel.tensor_model_parallel_size)


def _parameters_per_rank(config: RunConfig) -> list[int]:
    return parameters_per_rank(config.model, config.parallel)


def _activation_bytes(config: RunConfig) -> dict:
    sections = config.model, config.parallel, config.training
    return activation_bytes(*sections, length=config.sample_length, cuda=True)


def _hf_model(config: RunConfig) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = config.model
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=model.vocab_size,
                hidden_size=model.hidden_size,
                intermediate_size=model.ffn_hidden_size,
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_attention_heads,
                num_key_value_heads=model.num_query_groups,
                head_dim=model.kv_channels,
                tie_word_embeddings=not model.untie_embeddings_and_output_weights,
            )
        )


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


@pytest.mark.parametrize("name", hf_families.FAMILIES)
def test_parameters_of_every_family_are_those_of_transformers_and_of_the_model_that_trains(
    one_process, tmp_path, name
):
    model = hf_families.family_model(name, tmp_path)
    config = hf_families.family_run(tmp_path)
    assert total_parameters(config.model) == sum(p.numel() for p in model.parameters())
    assert sum(_parameters_per_rank(config)) == _built_parameters(config)


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


def test_flops_are_six_per_matrix_element_and_token():
    config = _run("8B")
    matrices = sum(
        p.numel() for n, p in _hf_model(config).named_parameters() if p.ndim == 2 and "embed" not in n
    )
    attention = 6 * 32 * 4096 * 2049  # layers x width x sequence: half of PaLM's 12, for the causal mask
    assert _flops_per_token(config) == 6 * matrices + attention


def test_flops_of_a_step_count_all_samples():
    config = _run("tiny")
    assert flops_per_step(config).model == _flops_per_token(config) * 16 * 2048


def test_flops_agree_with_torchs_own_counter():
    from torch.utils.flop_counter import FlopCounterMode

    config = _run("tiny", "--vocab-size=512", length=32)
    model = _hf_model(config).to_empty(device="cpu")
    model.config._attn_implementation = "eager"  # its two score matmuls are whole squares
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, 32, dtype=torch.long), use_cache=False)
    hidden_scores = 4 * (32 * 31 // 2) * 64 * 2  # scores and values, above the diagonal, width, layers
    assert _flops_per_token(config) * 32 == 3 * (counter.get_total_flops() - hidden_scores)


def test_bytes_follow_the_precision():
    bf16, fp8, fp32 = (bytes_per_rank(_run("tiny", f"--precision={p}")) for p in ("bf16", "fp8", "fp32"))
    count = total_parameters(_run("tiny").model)
    assert bf16 == (2 * count, 4 * count, 10 * count) and bf16.total == 16 * count
    assert fp8 == bf16 and fp32 == (4 * count, 4 * count, 8 * count)


def test_ranks_that_share_sequences_share_states_and_hold_their_part_of_activations():
    whole = _run("tiny", "--use-distributed-optimizer")
    cut = _run("tiny", "--use-distributed-optimizer", "--context-parallel-size=2", "--cp-comm-type=p2p")
    assert (cut.world_size, cut.data_parallel_size) == (2, 1)
    assert bytes_per_rank(cut).optimizer == bytes_per_rank(whole).optimizer // 2
    assert bytes_per_rank(cut).weights == bytes_per_rank(whole).weights
    full = _activation_bytes(whole)["full"], _activation_bytes(cut)["full"]
    assert full[1] == full[0] // 2
    assert flops_per_step(cut) == flops_per_step(whole)
    assert "TP 1 x PP 1 x CP 2 x DP 1" in describe_plan(cut, UNKNOWN)


def test_offloaded_states_are_in_host_memory():
    count = total_parameters(_run("tiny").model)
    run = _run("tiny", "--optimizer-offload-policy=static", "--optimizer-offload-fraction=0.25")
    assert offloaded_bytes(run) == 5 * count // 2
    assert bytes_per_rank(run) == (2 * count, 4 * count, 15 * count // 2)
    device, host = (f"{times * count / 2**30:.2f} GiB" for times in (7.5, 2.5))
    assert f"optimizer {device} ({host} more in host memory)" in describe_plan(run, UNKNOWN)
    assert offloaded_bytes(_run("tiny", "--optimizer-offload-policy=auto")) == 0
    assert offloaded_bytes(_run("tiny", "--optimizer-offload-fraction=0.25")) == 0


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
    ],
)
def test_peak_is_found_by_the_drivers_name(name, tflops):
    assert peak_flops(name) == peak_flops(name, "fp32") == tflops * 1e12
    assert peak_flops(name, "fp8") == 2 * tflops * 1e12


@pytest.mark.parametrize("name", ["", "Tesla V100-SXM2-16GB", "NVIDIA A10G", "NVIDIA H1000"])
def test_unknown_device_has_no_peak(name):
    assert peak_flops(name) is None


def test_description_names_the_layout_and_the_length():
    text = describe_plan(_run("8B", "--tensor-model-parallel-size=2", "--nproc-per-node=4"), UNKNOWN)
    assert "4 = TP 2 x PP 1 x CP 1 x DP 2 on 1 machine" in text
    assert "8.03 G (8B)" in text and "interleaved" not in text
    assert "16 samples x 2048 tokens = 32768 tokens, 4 micro-batches a replica" in text
    assert "10 steps = 328 k tokens" in text


def test_description_names_interleaved_stages():
    flags = ("--pipeline-model-parallel-size=4", "--num-layers-per-virtual-pipeline-stage=2")
    assert "PP 4 x CP 1 x DP 1 on 1 machine, 4 interleaved stages each" in describe_plan(
        _run("8B", *flags), UNKNOWN
    )


def test_description_splits_layers_that_do_not_divide():
    flags = ("--num-layers=10", "--pipeline-model-parallel-size=4")
    assert "layers      10 = 2 + 3 + 3 + 2 over the pipeline stages" in describe_plan(
        _run("8B", *flags), UNKNOWN
    )
    assert "layers     " not in describe_plan(_run("8B", "--pipeline-model-parallel-size=4"), UNKNOWN)


def test_small_sizes_are_in_mib():
    run = _run("tiny", "--vocab-size=512")
    assert f"= weights {2 * total_parameters(run.model) / 2**20:.2f} MiB + " in describe_plan(run, UNKNOWN)


def test_description_says_what_a_layer_keeps_at_each_recomputation():
    """LLaMA-3 8B, 2 x 8192 tokens in bf16 on a GPU, by values of a token: widths 4096, 14336; fp32 sums."""
    attention = 2 * (4096 + 1024) + 32 * 2
    kept = {
        "none": 4 * 4096 + 2 * 2 + attention + 3 * 14336,
        "sel": 2 * 4096 + attention + 2 * 14336,
        "full": 4096,
    }
    texts = {word: f"{word} {2 * 2 * 8192 * values / 2**30:.2f} GiB" for word, values in kept.items()}
    gpu = MachineFacts(1, 2)
    line = f"activations a layer and micro-batch keep {', '.join(texts.values())} for backward"
    assert f"{line}; this run: none (AC)" in describe_plan(_run("8B", length=8192), gpu)
    selective = _run("8B", "--recompute-granularity=selective", length=8192)
    assert "this run: sel" in describe_plan(selective, gpu)
    offloading = _run("8B", "--cpu-offloading", "--cpu-offloading-num-layers=3", length=8192)
    assert "this run: none, 3 of each stage's layers offloaded (AC)" in describe_plan(offloading, gpu)
    assert "activations a layer" not in describe_plan(_run("8B", "--precision-align=eager"), gpu)


def test_a_rank_keeps_its_part_of_a_layers_activations():
    whole = _activation_bytes(_run("8B"))
    cut = _activation_bytes(_run("8B", "--tensor-model-parallel-size=2", "--sequence-parallel"))
    assert 2 * cut["full"] == whole["full"]
    assert 2 * cut["selective"] == pytest.approx(whole["selective"], rel=0.01)  # RoPE's factors are not cut
    blocks = _run("8B", "--recompute-granularity=full", "--recompute-num-layers=4")
    assert 4 * _activation_bytes(blocks)["full"] == whole["full"]


TINY = total_parameters(_run("tiny").model)
STATIC_HALF = ("--optimizer-offload-policy=static", "--optimizer-offload-fraction=0.5")
AUTO = ("--optimizer-offload-policy=auto",)


@pytest.mark.parametrize(
    ("flags", "device_state", "host_state"),
    [((), 16, 0), (STATIC_HALF, 11, 5), (AUTO, 6, 0), (("--nproc-per-node=2",), 16, 0)],
)
def test_a_gpu_without_room_for_state_and_activations_is_warned_of(flags, device_state, host_state):
    config = _run("tiny", *flags)
    beside = activation_peak(config, 0, cuda=True).total + staging_bytes(config, 0, cuda=True)
    needed = device_state * TINY + beside
    on_host = host_state * TINY
    fits = MachineFacts(2, 2, needed, on_host + 1)
    assert "warning" not in describe_plan(config, fits)
    text = describe_plan(config, dataclasses.replace(fits, cuda_memory_bytes=needed - 1))
    size = size_text(needed)
    assert f"warning     {size} of model state and activations on a GPU that has {size}" in text
    if on_host:
        text = describe_plan(config, dataclasses.replace(fits, host_memory_bytes=on_host - 1))
        assert f"warning     {size_text(on_host)} of model state in the host memory of 1 process," in text


@pytest.mark.parametrize("processes", [1, 2])
def test_a_host_without_room_for_its_processes_is_warned_of(processes):
    config = _run("tiny", f"--nproc-per-node={processes}")
    needed = processes * (16 * TINY + activation_peak(config, 0, cuda=False).total)
    assert "warning" not in describe_plan(config, MachineFacts(0, 2, host_memory_bytes=needed))
    text = describe_plan(config, MachineFacts(0, 2, host_memory_bytes=needed - 1))
    what = f"{size_text(needed)} of model state and activations in the host memory of {processes} process"
    assert f"warning     {what}" in text and f"a machine has {size_text(needed)}" in text


def test_a_simulated_device_without_room_is_warned_of():
    config = _run("tiny", *STATIC_HALF, "--simulated-device-memory=1e6")
    assert "model state and activations on a simulated device that has 0.95 MiB" in describe_plan(
        config, UNKNOWN
    )


def test_memory_of_transformers_order_is_that_of_the_state_alone():
    text = describe_plan(_run("tiny", "--precision-align=eager"), MachineFacts(1, 2, 16 * TINY - 1))
    assert "memory/rank" not in text
    assert f"warning     {size_text(16 * TINY)} of model state on a GPU" in text


def test_memory_of_a_rank_is_its_state_and_what_waits_for_backward():
    """LLaMA-3 8B over four stages: the first one holds four micro-batches of eight layers."""
    flags = ("--pipeline-model-parallel-size=4", "--nproc-per-node=4")
    config = _run("8B", *flags, length=8192)
    layers = 4 * 8 * _activation_bytes(config)[None]
    text = describe_plan(config, MachineFacts(4, 2))
    state = size_text(bytes_per_rank(config, 0).total)
    zeros = size_text(2 * 2 * 14336 * 4096)  # in the size of gate and up, beside sums that layers make
    assert f"at most on pipeline rank 0 of 4 = state {state} + gradients under way {zeros} + act" in text
    kept = f"layers {size_text(layers)}, loss, borders and RoPE {size_text(4 * 4 * 8192 * 128)}"
    assert f"(4 micro-batches in flight: {kept}" in text
    selective = _run("8B", *flags, "--recompute-granularity=selective", length=8192)
    kept_layers = activation_peak(selective, 0, cuda=True).layers
    assert kept_layers == 4 * 8 * _activation_bytes(config)["selective"]


def test_the_last_stage_keeps_the_gradients_of_the_loss():
    config = _run("8B", "--pipeline-model-parallel-size=4", length=8192)
    peak = activation_peak(config, 3, cuda=True)
    tokens, hidden, vocabulary = 2 * 8192, 4096, 128256
    gradients = 2 * hidden * (tokens + vocabulary)
    norm = tokens * (2 * hidden + 4)
    cosines_and_sines = 4 * 8192 * 128
    assert (peak.in_flight, peak.ends) == (1, gradients + norm + cosines_and_sines)
    logits = 4096 // 4 * vocabulary * 2  # a chunk's logits have a quarter of the weight's elements
    weight_sum = 4 * hidden * vocabulary
    messages = 2 * 2 * tokens * hidden
    assert peak.transient == logits + weight_sum + messages
    # A CPU has the logits in float32 too, and another type is added to the sum through a copy.
    on_cpu = activation_peak(config, 3, cuda=False)
    assert on_cpu.transient == 3 * logits + 2 * weight_sum + messages
