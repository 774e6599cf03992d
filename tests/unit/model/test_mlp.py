"""The MLP with biases and someone else's activation, gated or plain: the bits of upstream's MLP."""

import itertools

import torch
from distributed_runner import run_distributed
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from small_runs import small_run
from training_runs import CPU

from patch import compat
from patch.distributed.groups import initialize
from patch.families import Traits
from patch.model.linear import Column, Row
from patch.model.mlp import LayerPart, RecomputableMLP, activation_of


def relu_squared(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.relu().square()


def run_two(rank: int, world_size: int) -> None:
    compat.apply(cuda=False)
    group = initialize(small_run(tp=2), CPU).tp
    for is_gated, is_recomputed, in_pieces in itertools.product((False, True), repeat=3):
        config = TransformerConfig(
            num_layers=1, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, add_bias_linear=True,
            gated_linear_unit=is_gated, activation_func=relu_squared, tensor_model_parallel_size=2,
            use_cpu_initialization=True, gradient_accumulation_fusion=False, tp_comm_overlap=in_pieces,
        )  # fmt: skip
        plain = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        theirs = MLP(config, plain, tp_group=group)
        column, row = (ModuleSpec(module=kind, params={"in_pieces": in_pieces}) for kind in (Column, Row))
        activate = activation_of(Traits(gated_linear_unit=is_gated), relu_squared, is_fused=False)
        parts = MLPSubmodules(linear_fc1=column, linear_fc2=row)
        params = {"activate": activate, "is_recomputed": is_recomputed, "num_chunks": 1, "tp_group": group}
        ours = build_module(LayerPart(RecomputableMLP, parts, params), config=config)
        for name, weight in theirs.named_parameters():
            torch.nn.init.normal_(weight)
            ours.get_parameter(name).data.copy_(weight.data)
        torch.manual_seed(3)
        hidden, found = torch.randn(6, 2, 32), []
        for mlp in (theirs, ours):
            leaf = hidden.clone().requires_grad_()
            output, bias = mlp(leaf)
            (output * 2 + bias).square().sum().backward()
            found.append([output, bias, leaf.grad, *(weight.grad for weight in mlp.parameters())])
        assert len(found[0]) == 7 and all(map(torch.equal, *found)), (is_gated, is_recomputed, in_pieces)


def test_biases_and_activations_are_upstreams() -> None:
    run_distributed(run_two, 2)
