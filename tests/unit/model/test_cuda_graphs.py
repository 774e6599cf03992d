"""CUDA graphs of layers, as far as a CPU goes: what is replayed, and what a capture leaves behind.

In place of a graph stands a layer that keeps a graph's protocol: it reads the weights' memory without asking
anybody, and its input, output and gradients have the same memory in every micro-batch.
"""

from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from megatron.core.transformer.transformer_layer import TransformerLayer
from small_runs import small_run
from torch.autograd.graph import get_gradient_edge
from training_runs import CPU, build_seeded_run, train_run

from patch.model import build_llama_model
from patch.model.cuda_graphs import GraphedForward, LayerAlone
from patch.training.setup import Run

STAGES = ["optimizer", "gradients"]
STEPS, MICRO_BATCHES, LAYERS = 2, 2, 2


class Replayed:
    """A layer's forward and backward with everything at fixed addresses.

    Args:
        alone: a layer that nobody watches, whose weights have the memory of `layer`'s.
        layer: that of the run; its weights get the gradients.
        example: the input's memory.
    """

    def __init__(self, alone: LayerAlone, layer: TransformerLayer, example: torch.Tensor) -> None:
        self._weights = tuple(layer.parameters())
        self.alone, self.input, self.own = alone, example, tuple(alone.parameters())
        self.result = torch.empty_like(example)
        self.gradients = [torch.empty_like(weight) for weight in (example, *self.own)]
        self.count = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return _Replay.apply(hidden, self, *self._weights)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, replayed: Replayed, *weights: Any) -> torch.Tensor:
        ctx.replayed = replayed
        for gradient in replayed.gradients:  # nobody may still need those of the micro-batch before
            gradient.fill_(torch.nan)
        replayed.input.copy_(hidden)
        with torch.enable_grad():
            output = replayed.alone(replayed.input)
        return replayed.result.copy_(output).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        replayed = ctx.replayed
        new = torch.autograd.grad(replayed.alone.output, (replayed.input, *replayed.own), gradient)
        for place, values in zip(replayed.gradients, new, strict=True):
            place.copy_(values)
        of_input, *of_weights = (place.detach() for place in replayed.gradients)
        return of_input, None, *of_weights


def _replay_layers(run: Run) -> list[Replayed]:
    """Put such layers in place of a run's."""
    model, config = run.stages[0], run.config
    (unwatched,) = build_llama_model(config.model, run.groups, CPU.device, config.execution)
    table = model.rotary_pos_emb(config.sample_length)
    replayed = []
    for layer, own in zip(model.decoder.layers, unwatched.decoder.layers, strict=True):
        for weight, parameter in zip(own.parameters(), layer.parameters(), strict=True):
            weight.data = parameter.data
        example = torch.ones(config.sample_length, 2, config.model.hidden_size, requires_grad=True)
        replayed.append(Replayed(LayerAlone(own, table), layer, example))
        layer.forward = GraphedForward(layer, replayed[-1], example)
    return replayed


def _compare(rank: int, world_size: int) -> None:
    for stage in STAGES:
        config = small_run(
            dp=2, num_layers=LAYERS, train_iters=STEPS, global_batch_size=4 * MICRO_BATCHES,
            data_parallel_sharding=stage, reduce_bucket_size=20_000, gradient_accumulation_fusion=False,
        )  # fmt: skip
        plain = train_run(build_seeded_run(config))
        new_job()
        run = build_seeded_run(config)
        replayed = _replay_layers(run)
        found = train_run(run)  # which raises at operations on weights that are on their way
        assert [step[:2] for step in found] == [step[:2] for step in plain]
        assert {one.count for one in replayed} == {STEPS * MICRO_BATCHES}  # and none in the evaluation
        new_job()
    _leaves_other_rows_alone(run, replayed[0])


def _leaves_other_rows_alone(run: Run, replayed: Replayed) -> None:
    layer, before = run.stages[0].decoder.layers[0], replayed.count
    shorter = torch.ones(7, 2, run.config.model.hidden_size, requires_grad=True)
    table = run.stages[0].rotary_pos_emb(7)
    layer(hidden_states=shorter, rotary_pos_emb=table)
    with torch.no_grad():
        layer(hidden_states=replayed.input, rotary_pos_emb=run.stages[0].rotary_pos_emb(len(replayed.input)))
    assert replayed.count == before


def test_replayed_layers_train_as_plain_ones() -> None:
    run_distributed(_compare, 2)


class _Doubling(torch.nn.Module):
    layer_number = 3

    def forward(self, hidden_states: torch.Tensor, packed_seq_params: None) -> tuple[torch.Tensor, None]:
        return 2 * hidden_states, None


def test_a_layer_behind_frozen_ones_runs_plain_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    example = torch.ones(4, 1, 8, requires_grad=True)
    forward = GraphedForward(_Doubling(), lambda hidden: 3 * hidden, example)  # type: ignore[arg-type]
    with torch.no_grad():
        forward(example)
    forward(torch.ones(2, 1, 8))
    assert not caplog.messages
    for _ in range(2):
        assert torch.equal(forward(torch.ones(4, 1, 8))[0], torch.full([4, 1, 8], 2.0))
    (message,) = caplog.messages
    assert message.startswith("layer 3 runs without its CUDA graph")
    assert torch.equal(forward(example)[0], torch.full([4, 1, 8], 3.0))


def _capture_ends(rank: int, world_size: int) -> None:
    run = build_seeded_run(small_run(num_layers=1, gradient_accumulation_fusion=False))
    (layer,) = run.stages[0].decoder.layers
    before = [flat.clone() for flat in run.optimizer.grad_buffer._flats]
    hidden = torch.ones(32, 2, run.config.model.hidden_size, requires_grad=True)
    alone = LayerAlone(layer, run.stages[0].rotary_pos_emb(32))
    output = alone(hidden)
    weights = tuple(layer.parameters())
    gradients = torch.autograd.grad(output, (hidden, *weights), torch.ones_like(output))  # as torch captures
    assert all(
        gradient.shape == weight.shape for gradient, weight in zip(gradients[1:], weights, strict=True)
    )
    flats = run.optimizer.grad_buffer._flats
    assert all(torch.equal(*pair) for pair in zip(before, flats, strict=True)), "no hook of the optimizer ran"
    for weight in weights:
        get_gradient_edge(weight).node.metadata["is_of_capture"] = True
    assert all("is_of_capture" in get_gradient_edge(weight).node.metadata for weight in weights)
    alone.end_autograd_graph()
    assert not any("is_of_capture" in get_gradient_edge(weight).node.metadata for weight in weights)
    assert output.grad_fn is None and alone.output is None  # torch goes on to hold `output` itself


def test_a_capture_leaves_no_node_of_autograd_and_no_gradient() -> None:
    run_distributed(_capture_ends, 1)
