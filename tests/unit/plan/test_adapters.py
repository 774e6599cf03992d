"""Adapters in the plan: parameters and FLOPs against PEFT's model and torch's counter, bytes by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_families import family_model, family_run
from planned_runs import H100, planned_run
from torch.utils.flop_counter import FlopCounterMode

from patch.plan.fits import fit_of
from patch.plan.flops import flops_per_step
from patch.plan.memory import bytes_per_rank
from patch.plan.parameters import parameters_of, total_parameters, trained_parameters
from patch.plan.resolve import resolve_run
from patch.plan.suggest import lora_hint, refuse_what_cannot_fit, suggest
from patch.plan.timing.step_time import step_time

REASON = "peft is not installed: make test installs it"
OF_8B = 41_943_040
"""What PEFT prints for LLaMA 3 8B at rank 16 in all linear layers."""


@pytest.mark.parametrize(
    ("size", "targets", "shape"),
    [("8B", "all-linear", (4096, 14336, 32, 32)), ("70B", "q_proj,v_proj", (8192, 28672, 64, 80))],
)
@pytest.mark.long
def test_parameters_are_those_that_peft_counts(size: str, targets: str, shape: tuple[int, ...]) -> None:
    peft = pytest.importorskip("peft", reason=REASON)
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, ffn, heads, layers = shape
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=8,
        num_hidden_layers=layers, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        names = targets if targets == "all-linear" else targets.split(",")
        found = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=names, task_type="CAUSAL_LM"))
    run = planned_run(size=size, dp=8, flags=f"--lora-rank 16 --lora-target-modules {targets}")
    trained, total = found.get_nb_trainable_parameters()
    assert trained_parameters(run) == trained == parameters_of(run, 0).trained.total
    assert total_parameters(run.model) == total - trained


@pytest.mark.parametrize("changes", [{"lora_rank": 4}, {"freeze": r"o_proj|layers\.1\..*mlp|lm_head|norm"}])
def test_flops_are_those_of_torchs_counter_for_pefts_model(tmp_path: Path, changes: dict) -> None:
    """Sequences of one token, so that a mask hides nothing; gradients reach the first layer's input."""
    peft = pytest.importorskip("peft", reason=REASON)
    model = family_model("llama-2-70B", tmp_path, attn_implementation="eager")
    if "freeze" in changes:
        for name, weight in model.train().named_parameters():
            weight.requires_grad_(re.search(changes["freeze"], name) is None)
    else:
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model.train(), lora)
    model.enable_input_require_grads()
    ids = torch.arange(16).view(16, 1)
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    run = family_run(
        tmp_path, **changes, global_batch_size=16, max_padding_length=1, make_vocab_size_divisible_by=1
    )
    assert flops_per_step(run).model == counter.get_total_flops()
    if "freeze" in changes:
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        assert trained_parameters(run) == trained == parameters_of(run, 0).trained.total


def test_70b_on_eight_gpus_is_planned_and_named_beside_the_cures() -> None:
    with pytest.raises(ValueError, match="this run cannot fit") as error:
        refuse_what_cannot_fit(planned_run(tp=8, size="70B"), H100.facts)
    line = lora_hint(planned_run(tp=8, size="70B"), H100.facts, H100)
    assert line.startswith("LoRA of this run fits: --lora-rank 16 (") and line[:60] in str(error.value)
    run = planned_run(tp=8, size="70B", flags="--lora-rank 16")
    state = bytes_per_rank(run)
    assert 16.5 < state.weights / 2**30 < 16.7 and state.total < 18 * 2**30
    assert fit_of(run, H100.facts).is_whole and not suggest(run, H100.facts)
    assert not lora_hint(run, H100.facts)
    mixed = planned_run(tp=2, size="deepseek-v2-lite", flags="--lora-rank 8 --sequence-parallel")
    assert resolve_run(mixed, H100.facts)  # the first layer has other adapters than those with experts


def test_8b_in_4_bits_on_a_gpu_of_24_gb_is_planned_and_named() -> None:
    card = replace(H100, devices_per_node=1, device_memory_bytes=int(23.6 * 2**30))
    flags = "--lora-rank 16 --quantize-base nf4"
    lora, run = (planned_run(length=2048, machine=card, flags=each) for each in ("--lora-rank 16", flags))
    matrices = 32 * (4096 * (4096 * 2 + 2 * 1024) + 3 * 4096 * 14336)
    others = total_parameters(run.model) - matrices + OF_8B
    assert bytes_per_rank(run) == (2 * others + matrices * 36 // 64, *bytes_per_rank(lora)[1:])
    assert parameters_of(planned_run(tp=2, pp=2, flags=flags), 1).in_4_bits.total == matrices // 4
    rows = 16 * (6144 // 2 + 4096 + 14336 + 4096)  # each with an index, a mean and two scales
    double = parameters_of(planned_run(tp=2, pp=2, flags=f"{flags}-double"), 1)
    assert double.packed.total == matrices // 4 * 33 // 64 + 16 * rows
    assert lora_hint(lora, card.facts).startswith("QLoRA of this run fits: --quantize-base nf4 (")
    assert fit_of(run, card.facts).is_whole and not lora_hint(run, card.facts)
    assert step_time(lora, H100).seconds < step_time(run, H100).seconds
