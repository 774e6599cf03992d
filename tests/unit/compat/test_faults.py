"""Numbers that megatron-core computes wrongly in silence, measured with and without this project.

    make upstream-faults     prints the table; docs/migrating.md tells what the rows are

Each row runs upstream's own classes on two processes, made to run on a CPU (compat/cpu.py) without any
correction, and then this project's. What is right is known: one process, a formula, or transformers.
A row names the releases that are wrong. When a new one has mended a figure, its test fails: note the release.
"""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from distributed_runner import new_job, run_distributed
from hf_families import MIXTURES, SHAPE
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from optimizer_runs import build_optimizer
from small_runs import hf_llama, small_run
from torch.nn.functional import scaled_dot_product_attention
from training_runs import CPU

from patch import compat
from patch.checks.experts import experts_are_distributed
from patch.compat import cpu
from patch.compat.corrections import StageLayout
from patch.config.choices import ZeroStage
from patch.device import MachineFacts
from patch.distributed.groups import initialize
from patch.errors import ConfigError
from patch.families import read_config
from patch.families.config_json import ConfigReader
from patch.model import build_llama_model, initialize_weights
from patch.model.attention.rotary import inverse_frequencies
from patch.model.experts.layer import Router
from patch.optimizer import ParamGroup
from toolkits.benchmarks._contenders import prepare_cpu

_EXPERTS = {"num_experts": 2, "moe_router_topk": 1, "expert_tensor_parallel_size": 1}
_DEEPSEEK = {"model_type": "deepseek_v2", **SHAPE, **MIXTURES["deepseek-v2-lite"][1]}
_CPU_CONFIG: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4,
    "use_cpu_initialization": True, "attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False,
    "persist_layer_norm": False, "init_method": partial(torch.nn.init.normal_, std=0.3),
}  # fmt: skip


def groups_of(tp: int = 1, pp: int = 1, cp: int = 1, **layout: Any) -> ProcessGroupCollection:
    """Of a new job of two processes; what a layout does not divide has replicas."""
    new_job()
    return initialize(small_run(tp, pp, 2 // (tp * pp * cp), cp=cp, **layout), CPU)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def transposed_gradient(is_ours: bool) -> float:
    groups = groups_of(2)
    hidden = torch.zeros(3, 2, 4, requires_grad=True)
    gradient = torch.full((2, 3, 4), groups.tp.rank() + 1.0)
    copy_to_tensor_model_parallel_region(hidden).transpose(0, 1).backward(gradient)
    assert hidden.grad is not None
    return hidden.grad.max().item()


def new_router(is_ours: bool, groups: ProcessGroupCollection, share: float, **settings: Any) -> TopKRouter:
    tp_size, cp_size = groups.tp.size(), groups.cp.size()
    config = TransformerConfig(
        num_moe_experts=8, calculate_per_token_loss=True, tensor_model_parallel_size=tp_size,
        sequence_parallel=tp_size > 1, context_parallel_size=cp_size, **_CPU_CONFIG,
        **{"moe_router_topk": 2, **settings},
    )  # fmt: skip
    router = Router(config, groups, share=share) if is_ours else TopKRouter(config, groups)
    router.weight.data = random(8, 64) / 8
    return router


def router_gradient(is_ours: bool, layout: dict[str, int], rows: int, **settings: Any) -> torch.Tensor:
    """Of two rows of 8 tokens in micro-batches of so many, as after upstream's finalize_model_grads."""
    groups = groups_of(**layout)
    batch, parts = random(8, 2, 64, seed=1).split(rows, dim=1), groups.tp_cp
    router = new_router(is_ours, groups, 1 / len(batch), **settings)
    for tokens in batch:
        (0 * router(tokens.chunk(parts.size())[parts.rank()])[0]).sum().backward()
    assert router.weight.grad is not None
    dist.all_reduce(router.weight.grad, group=parts)
    return router.weight.grad if is_ours else router.weight.grad / 16


def router_loss(is_ours: bool, layout: dict[str, int], rows: int = 1, **settings: Any) -> float:
    """Its gradient as a multiple of that of one process and single rows."""
    shapes = (layout, rows), ({}, 1)
    found, right = (router_gradient(is_ours, *shape, **settings).norm() for shape in shapes)
    return (found / right).item()


_GROUPS = {
    "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4,
    "moe_router_pre_softmax": True,
}  # fmt: skip


def other_groups(is_ours: bool) -> float:
    """Share of tokens with other experts than the rule of its paper gives (arXiv:2405.04434, 2.2.3)."""
    router, tokens = new_router(is_ours, groups_of(), 1.0, **_GROUPS), random(256, 1, 64, seed=1)
    scores = (tokens[:, 0] @ router.weight.T).softmax(-1)
    allowed = torch.zeros(256, 4).scatter(1, scores.unflatten(1, (4, 2)).amax(-1).topk(2).indices, 1.0)
    right = allowed.repeat_interleave(2, dim=1).bool()  # four experts of the two groups, which have four
    return (router(tokens)[1] != right).any(-1).float().mean().item()


def forgotten_groups(is_ours: bool) -> float:
    """Relative difference of the loss's gradient to that of its formula over the experts visited."""
    kind = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    router, tokens = new_router(is_ours, groups_of(), 1.0, **_GROUPS, **kind), random(64, 1, 64, seed=1)
    weights, visited = router(tokens)
    (0 * weights).sum().backward()
    scores = (tokens[:, 0] @ router.weight.T).softmax(-1)
    loss = 0.1 * 8 / 4 * (visited.float().mean(0) * scores.mean(0)).sum()
    (right,) = torch.autograd.grad(loss, router.weight)
    assert router.weight.grad is not None
    found = router.weight.grad if is_ours else router.weight.grad / 64
    return ((found - right).norm() / right.norm()).item()


class Weights(torch.nn.Module):
    """A weight that all ranks have, and one of an expert of this rank; Transformer Engine marks them so."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        self.expert.allreduce = False  # type: ignore[attr-defined]

    def forward(self) -> torch.Tensor:
        return (self.dense + self.expert).sum()


def wrapped(module: torch.nn.Module) -> DistributedDataParallel:
    config = TransformerConfig(**_CPU_CONFIG, calculate_per_token_loss=True)
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)


def upstream_norm(module: torch.nn.Module) -> float:
    """Of gradients of one."""
    ddp = wrapped(module)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3)
    optimizer = get_megatron_optimizer(settings, [ddp], use_gloo_process_groups=False)
    for parameter in module.parameters():
        parameter.main_grad.fill_(1.0)  # type: ignore[attr-defined]
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def norm_of_experts(is_ours: bool) -> float:
    groups, module = groups_of(2, **_EXPERTS, expert_model_parallel_size=2), Weights()
    if not is_ours:
        return upstream_norm(module)
    of_expert = ParamGroup([module.expert], 0.0, data_parallel_group=groups.expt_dp)
    groups_of_both = [ParamGroup([module.dense], 0.0), of_expert]
    optimizer = build_optimizer(module, ZeroStage.NONE, param_groups=groups_of_both)
    optimizer.zero_grad(0.0)
    module().backward()
    optimizer.finish_grad_sync()
    return optimizer.get_grad_norm()


def sum_of_an_expert(is_ours: bool) -> float:
    if is_ours:
        experts_are_distributed(small_run(2, **_EXPERTS), MachineFacts(cuda_devices=0, cpu_cores=2))
    groups = groups_of(2, **_EXPERTS)
    config = TransformerConfig(**_CPU_CONFIG, tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    how = {"init_method": _CPU_CONFIG["init_method"], "bias": False, "is_expert": True}
    layer = ColumnParallelLinear(4, 4, config=config, tp_group=groups.expt_tp, **how)
    ddp = wrapped(layer)
    layer.weight.main_grad.fill_(groups.tp.rank() + 1.0)  # type: ignore[attr-defined]
    ddp.finish_grad_sync()
    return float(layer.weight.main_grad.max())  # type: ignore[attr-defined]


class Attention(torch.nn.Module):
    """torch's, in place of one that takes no latents."""

    def __init__(self, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, *heads: torch.Tensor, **unused: Any) -> torch.Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in heads[:3])
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def upstream_latents(groups: ProcessGroupCollection, q_latents: int | None = 24) -> torch.nn.Module:
    config = MLATransformerConfig(
        **_CPU_CONFIG, normalization="RMSNorm", q_lora_rank=q_latents, kv_lora_rank=24, qk_head_dim=16,
        qk_pos_emb_head_dim=8, v_head_dim=12, rope_type="rope", tensor_model_parallel_size=groups.tp.size(),
        qk_layernorm=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    spec = spec.submodules.self_attention
    spec.submodules.core_attention = Attention
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    for seed, (name, weight) in enumerate(layer.named_parameters()):
        if weight.ndim > 1:
            axis = int("linear_proj" in name)
            shape = [size * (groups.tp.size() if i == axis else 1) for i, size in enumerate(weight.shape)]
            weight.data = random(*shape, seed=seed).chunk(groups.tp.size(), axis)[groups.tp.rank()] / 3
    return layer


def gradient_of_latents(is_ours: bool, tp: int) -> torch.Tensor:
    """Of the weight of the keys' part with RoPE, [8, H], after one attention."""
    groups, tokens = groups_of(tp, num_experts=4, moe_router_topk=2), random(8, 1, 64, seed=9)
    if is_ours:
        config = small_run(tp, **read_config(ConfigReader(Path("config.json"), _DEEPSEEK)))
        (model,) = build_llama_model(config, groups, CPU.device)
        initialize_weights([model], config.model, seed=1)
        layer = model.decoder.layers[0].self_attention
        output, _ = layer(tokens, None, rotary_pos_emb=model.rotary_pos_emb(8))
    else:
        layer = upstream_latents(groups)
        output, _ = layer(tokens, None)
    (output * random(8, 1, 64, seed=8)).sum().backward()
    gradient = layer.linear_kv_down_proj.weight.grad
    if len(gradient) < 32:  # upstream cuts it
        parts = [torch.empty_like(gradient) for _ in range(tp)]
        dist.all_gather(parts, gradient, group=groups.tp)
        gradient = torch.cat(parts)
    return gradient[24:]


def shared_key(is_ours: bool) -> float:
    """Relative difference of its gradient to one process's."""
    found, right = (gradient_of_latents(is_ours, tp) for tp in (2, 1))
    return ((found - right).norm() / right.norm()).item()


def label_smoothing(is_ours: bool) -> float:
    """Largest difference of a token's loss to one process's."""
    losses = []
    for tp in (2, 1):
        logits = random(4, 1, 16).chunk(tp, -1)[groups_of(tp).tp.rank()].clone()
        losses.append(vocab_parallel_cross_entropy(logits, torch.arange(4)[:, None], 0.1))
    return (losses[0] - losses[1]).abs().max().item()


def norm_of_sinks(is_ours: bool) -> float:
    """Of gradients of one, of the sinks of four heads."""
    groups_of(2)
    config = TransformerConfig(**_CPU_CONFIG, softmax_type="learnable", tensor_model_parallel_size=2)
    return upstream_norm(DotProductAttention(config, 1, AttnMaskType.causal, "self"))


def residual_after_norm(is_ours: bool) -> float:
    """Largest difference of a BLOOM layer, `apply_residual_connection_post_layernorm`, to its formula."""
    flag = {"apply_residual_connection_post_layernorm": True}
    if is_ours:
        read_config(ConfigReader(Path("config.json"), {"model_type": "bloom", **flag}))
    groups, tokens = groups_of(), random(8, 1, 64)
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Attention
    config = TransformerConfig(**_CPU_CONFIG, **flag)
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    normed = layer.input_layernorm(tokens)
    normed = layer.pre_mlp_layernorm(normed + layer.self_attention(normed, None)[0])
    right = normed + layer.mlp(normed)[0]
    return (layer(tokens, attention_mask=None)[0] - right).abs().max().item()


def frequencies(is_ours: bool) -> float:
    """Largest factor between an angle of RoPE and that of transformers, for an original length of 64."""
    groups, config = groups_of(), small_run()
    theirs = RotaryEmbedding(
        16, 1.0, rotary_base=500000, rope_scaling=True, use_cpu_initialization=True, cp_group=groups.cp
    )
    found = inverse_frequencies(config.model) if is_ours else theirs.inv_freq
    return (found / hf_llama(config).model.rotary_emb.inv_freq).max().item()


def layers_of_stages(is_ours: bool) -> float:
    """Layers of the first rank, whose two stages have one and three."""
    groups, sizes = groups_of(pp=2), [1, 2, 3, 2]
    stages = [[LayerType.decoder] * size for size in sizes]
    stages[0].insert(0, LayerType.embedding)
    stages[-1].append(LayerType.loss)
    layout = StageLayout(sizes, 2, groups.pp.rank()) if is_ours else PipelineParallelLayerLayout(stages, 2)
    return sum(layout.get_num_layers_to_build(vp_stage=stage) for stage in range(2))


def layers_without_q_latents(is_ours: bool) -> float:
    """Layers of DeepSeek-V2-Lite's latent attention that can be built."""
    groups = groups_of(num_experts=4, moe_router_topk=2)
    if is_ours:
        config = small_run(**read_config(ConfigReader(Path("config.json"), _DEEPSEEK)))
        return float(len(build_llama_model(config, groups, CPU.device)))
    try:
        upstream_latents(groups, q_latents=None)
    except ValueError:
        return 0.0
    return 1.0


class Row(NamedTuple):
    """A fault; figures are those of the first process."""

    threads: str
    """Issues and pull requests of NVIDIA/Megatron-LM; without one: found here."""
    what: str
    right: float
    measure: Callable[[bool], float]
    word: str = ""
    """Why this project has no figure."""
    wrong: tuple[tuple[int, int], tuple[int, int]] = ((0, 16), (1, 0))
    """The first release that is wrong, and the first that is right again."""


_AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
_SEQ = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
_Z = {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1}
_BEFORE_19 = ((0, 16), (0, 19))
ROWS = [
    Row("", "gradient of a transposed view, TP 2", 3.0, transposed_gradient, wrong=_BEFORE_19),
    Row("#5047", "load loss of a router, TP 2", 1.0, partial(router_loss, layout={"tp": 2}, **_AUX),
        wrong=_BEFORE_19),
    Row("#1652", "load loss of a router, CP 2", 1.0, partial(router_loss, layout={"cp": 2}, **_AUX),
        wrong=_BEFORE_19),
    Row("#5047", "z loss of a router, TP 2", 1.0, partial(router_loss, layout={"tp": 2}, **_Z),
        wrong=_BEFORE_19),
    Row("#5798", "load loss of two rows", 1.0, partial(router_loss, layout={}, rows=2, **_SEQ),
        wrong=_BEFORE_19),
    Row("", "groups of experts (DeepSeek-V2)", 0.0, other_groups),
    Row("", "load loss of groups of experts", 0.0, forgotten_groups),
    Row("#5916, #6470", "gradient norm, TP 2, EP 2, ETP 1", 3**0.5, norm_of_experts, wrong=_BEFORE_19),
    Row("#5916", "gradient of an expert, TP 2, EP 1, ETP 1", 3.0, sum_of_an_expert, "refused",
        wrong=_BEFORE_19),
    Row("#1699, #6839", "shared key of latent attention, TP 2", 0.0, shared_key),
    Row("Bridge #5261", "latent attention without latents of q (DeepSeek-V2-Lite)", 1.0,
        layers_without_q_latents, wrong=((0, 19), (1, 0))),
    Row("#7452 (1)", "label smoothing, TP 2", 0.0, label_smoothing, "not offered"),
    Row("#7452 (8)", "norm of attention sinks, TP 2", 2.0, norm_of_sinks, "not offered"),
    Row("", "BLOOM's residual after its norm", 0.0, residual_after_norm, "refused"),
    Row("", "llama3's RoPE, another original length", 1.0, frequencies),
    Row("", "layers of interleaved stages", 4.0, layers_of_stages),
]  # fmt: skip


def measured(rank: int, world_size: int, is_ours: bool) -> list[float | str]:
    if is_ours:
        compat.apply(cuda=False)
    else:  # what upstream needs to run on this machine, nothing that mends a number
        cpu.apply()
        prepare_cpu()
    found: list[float | str] = []
    for row in ROWS:
        try:
            found.append(row.word if is_ours and row.word == "not offered" else row.measure(is_ours))
        except ConfigError:
            found.append("refused")
    return found


@pytest.fixture(scope="module")
def figures() -> dict[str, tuple[Any, Any]]:
    upstream, ours = (run_distributed(measured, 2, is_ours)[0] for is_ours in (False, True))
    release = f"megatron-core {version('megatron-core')}"
    print(f"\n| Megatron-LM | what | right | {release} | here |\n|{' --- |' * 5}")
    for row, *both in zip(ROWS, upstream, ours, strict=True):
        shown = [f"{each:.3g}" if isinstance(each, float) else str(each) for each in (row.right, *both)]
        print(f"| {row.threads} | {row.what} | {' | '.join(shown)} |")
    return {row.what: both for row, *both in zip(ROWS, upstream, ours, strict=True)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_upstream_alone_is_wrong_and_here_it_is_right(row: Row, figures: dict[str, tuple[Any, Any]]) -> None:
    upstream, ours = figures[row.what]
    assert (abs(upstream - row.right) > 0.02) is (row.wrong[0] <= compat.RELEASE < row.wrong[1])
    assert ours == (row.word or pytest.approx(row.right, rel=1e-5, abs=1e-5))
