"""The model's loss over a padded vocabulary, whose gradients are parts of a sum over TP, and GPTModel."""

from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_runner import new_job, run_distributed
from megatron.core.models.gpt.gpt_model import GPTModel
from small_runs import small_run
from training_runs import build_stages

from patch.config.schema import RunConfig
from patch.model import SOURCES, LlamaModel, initialize_weights, llama
from patch.model.llama import look_up

FORMS = {"fast": frozenset(), "aligned": frozenset(SOURCES)}
VOCABULARIES = {
    "some": {"vocab_size": 250},
    "whole-rank": {"vocab_size": 100, "make_vocab_size_divisible_by": 128},
    "none": {"vocab_size": 256},
}
"""What is padding: six rows; at TP 2 all of the last rank's 128; nothing."""
PADDED = [(tp, name, form) for tp in (1, 2) for name in VOCABULARIES for form in FORMS]
QWEN = {"add_qkv_bias": True, "qk_layernorm": True}
BLOOM = {"model_type": "bloom", "use_rope_scaling": False}
CUT = [*product((("fast", QWEN), ("aligned", QWEN), ("fast", BLOOM)), (False, True))]
LOSS_BOUND = 1e-5
"""Of losses near 10 and their gradients up to 1, summed over 250 exponentials in another order."""
GRADIENT_BOUND = 2e-5
"""Relative to the largest number of a gradient: TP cuts sums of 64 and 160 numbers."""


def _model(config: RunConfig, form: str) -> tuple[LlamaModel, Any]:
    groups, stages = build_stages(config, aligned=FORMS[form])
    initialize_weights(stages, config.model, config.training.seed)
    return stages[0], groups


def _whole(local: torch.Tensor, groups: Any) -> torch.Tensor:
    """The last dimension of all TP ranks."""
    parts = [torch.empty_like(local) for _ in range(groups.tp.size())]
    dist.all_gather(parts, local.contiguous(), group=groups.tp)
    return torch.cat(parts, dim=-1)


def _operations(tensor: torch.Tensor) -> Iterator[str]:
    """Names of the operations that a tensor came from."""
    stack = [tensor.grad_fn]
    while stack:
        if (node := stack.pop()) is not None:
            yield node.name()
            stack += [before for before, _ in node.next_functions]


def _check_loss(model: LlamaModel, config: RunConfig, groups: Any, dtype: torch.dtype) -> None:
    """Losses and the gradient of logits, padding far above them, against torch on the real vocabulary."""
    vocab, padded = config.model.vocab_size, config.padded_vocab_size
    whole = torch.randn(7, 2, padded).mul(3).to(dtype)
    whole[..., vocab:] = 1e4
    labels = torch.randint(0, vocab, (2, 7))
    labels[0, 0], labels[1, 1] = 0, vocab - 1
    weights = torch.rand(2, 7)
    real = whole[..., :vocab].float().requires_grad_()
    expected = F.cross_entropy(real.permute(1, 2, 0), labels, reduction="none")
    (expected * weights).sum().backward()

    local = whole.chunk(groups.tp.size(), dim=-1)[groups.tp.rank()].clone().requires_grad_()
    losses = model.compute_language_model_loss(labels, local * 1)  # a copy: padding is masked in place
    # Writing to a part of the logits is a node whose backward copies their whole gradient: 2 GiB at 8k.
    assert not any("CopySlices" in name for name in _operations(losses))
    (losses * weights).sum().backward()
    gradient = _whole(local.grad, groups)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected, rtol=0, atol=LOSS_BOUND)
    bound = LOSS_BOUND if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(gradient[..., :vocab].float(), real.grad, rtol=0, atol=bound)
    assert not gradient[..., vocab:].any()


def _check_padded_rows(model: LlamaModel, config: RunConfig, groups: Any) -> None:
    """Rows of padding that are anything but zero change no loss, and their gradient is zero."""
    tokens, labels = torch.randint(0, config.model.vocab_size, (2, 2, 9)).unbind(0)
    before = model(tokens, None, None, labels=labels)
    rows = config.padded_vocab_size // groups.tp.size()
    real = min(max(config.model.vocab_size - groups.tp.rank() * rows, 0), rows)
    weights = [model.embedding.word_embeddings.weight, model.output_layer.weight]
    for weight in weights:
        assert weight.shape[0] == rows
        weight.data[real:] = 50.0
    losses = model(tokens, None, None, labels=labels)
    assert torch.equal(losses, before)
    losses.sum().backward()
    for weight in weights:
        assert not weight.grad[real:].any()
        assert weight.grad[:real].any() or real == 0


def _gradients(config: RunConfig, form: str) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Name -> gradient, summed over TP if its weight is marked so, and the dimension that TP cuts."""
    model, groups = _model(config, form)
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, config.model.vocab_size, (2, 2, 12)).unbind(0)
    model(tokens, None, None, labels=labels).sum().backward()
    found = {}
    for name, weight in model.named_parameters():
        if getattr(weight, "sequence_parallel", False):
            dist.all_reduce(weight.grad, group=groups.tp)
        is_cut = getattr(weight, "tensor_model_parallel", False)
        found[name] = weight.grad, weight.partition_dim if is_cut else None
    new_job()
    return found


def _check_gradients(form: str, changes: dict[str, Any], is_sp: bool) -> None:
    """At TP 2 a marked gradient's sum, and any other as it is, is the one of TP 1, or its part."""
    alone = _gradients(small_run(dp=2, **changes), form)
    cut = _gradients(small_run(tp=2, sequence_parallel=is_sp, **changes), form)
    assert alone.keys() == cut.keys()
    for name, (gradient, dim) in cut.items():
        expected = alone[name][0]
        if dim is not None:
            has_gate = "linear_fc1" in name and changes is not BLOOM
            halves = expected.chunk(2) if has_gate else [expected]  # gate and up
            expected = torch.cat([half.chunk(2, dim)[dist.get_rank()] for half in halves])
        error = (gradient - expected).abs().max() / expected.abs().max()
        assert error < GRADIENT_BOUND, (name, error)


def _check_lookup(is_sp: bool) -> None:
    """The lookup of GPUs, whose gradient tests/unit/model/kernels checks, gives what upstream's does."""
    model, _ = _model(small_run(tp=2, sequence_parallel=is_sp), "fast")
    layer, tokens = model.embedding.word_embeddings, torch.randint(0, 250, (3, 16))
    dist.broadcast(tokens, 0)
    expected = layer(tokens)
    layer.weight.main_grad_writer = None
    assert torch.equal(look_up(layer, tokens), expected) and expected.any()
    new_job()


class UpstreamTable(torch.nn.Module):
    """Our RoPE's table as GPTModel asks for its own."""

    def __init__(self, model: LlamaModel) -> None:
        super().__init__()
        self._table = model.rotary_pos_emb

    def get_rotary_seq_len(self, context: None, decoder: Any, hidden: torch.Tensor, *unused: Any) -> int:
        return len(hidden) * dist.get_world_size()  # with SP

    def forward(self, length: int, **unused: Any) -> torch.Tensor:
        return self._table(length)


def _check_upstreams_model() -> None:
    """GPTModel of our specification, with our table, has our names and the bits of our logits."""
    config = small_run(tp=2, sequence_parallel=True, **QWEN)
    with mock.patch.object(llama, "LlamaModel", wraps=LlamaModel) as build:
        model, groups = _model(config, "fast")
    builder, vp_stage = build.call_args.args
    theirs = GPTModel(
        builder.upstream, builder.stage_spec(vp_stage), model.vocab_size, 64,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type="rope", pg_collection=groups,
    )  # fmt: skip
    theirs.load_state_dict(model.state_dict())
    theirs.rotary_pos_emb = UpstreamTable(model)
    tokens = torch.arange(32).view(2, 16)
    assert torch.equal(theirs(tokens, None, None), model(tokens, None, None))
    new_job()


def run_all(rank: int, world_size: int) -> None:
    _check_upstreams_model()
    for tp, name, form in PADDED:
        config = small_run(tp=tp, dp=2 // tp, num_layers=1, **VOCABULARIES[name])
        model, groups = _model(config, form)
        torch.manual_seed(1)
        for dtype in (torch.float32, torch.bfloat16):
            _check_loss(model, config, groups, dtype)
        _check_padded_rows(model, config, groups)
        new_job()
    for (form, changes), is_sp in CUT:
        _check_gradients(form, changes, is_sp)
    for is_sp in (False, True):
        _check_lookup(is_sp)


def test_padding_marked_gradients_and_lookups_are_right_and_upstreams_model_takes_our_specification() -> None:
    run_distributed(run_all, 2)
