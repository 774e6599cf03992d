"""The formulas of papers for GPT layers, item by item, beside the exact figures of a run's own model.

The formulas are those of the documents that the project implements. Sources: Korthikanti et al.,
arXiv:2205.05198, section 4 (bytes of 16-bit activations; 2 s^2 a are scores, and s^2 a each dropout mask),
section 5 and appendix A (FLOPs); Narayanan et al., arXiv:2104.04473, sections 2 and 5.1 (messages; FLOPs over
the whole square of scores). Sizes: b micro-batch, B batch, s tokens, h hidden size, a heads, t TP, p PP,
L layers, V vocabulary. Exact figures are the planner's own counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from patch.config import RunConfig
from patch.config.choices import PRECISIONS
from patch.families import traits_of, weight_rows
from patch.plan.activations import activation_bytes, boundary_bytes, saved_bytes
from patch.plan.flops import flops_per_step, forward_of_layers, mean_pairs
from patch.plan.parameters import element_bytes, layer_kinds, total_parameters
from patch.plan.timing.communication import tp_message_bytes, tp_products
from patch.text import size_text

_HALF = 2


def formulas_of_documents(config: RunConfig, *, cuda: bool) -> dict[str, list[str]]:
    """Return, by row of the plan, lines with a formula, its value and the exact value; first why they differ.

    Args:
        cuda: whether layers run on GPUs, see `activation_bytes`.
    """
    found = {"processes": _messages(config), "parameters": _parameters(config), "step": _flops(config)}
    if config.model.precision_align is None:
        found["activations"] = _activations(config, cuda=cuda)
    return {name: list(lines) for name, lines in found.items()}


def _beside(what: str, formula: str, theirs: float, ours: float, text: Callable[[int], str] = str) -> str:
    return f"papers, {what}: {formula} = {text(round(theirs))}; this model {text(round(ours))}"


def _differences(config: RunConfig) -> str:
    """Return what a run has unlike the papers' layers."""
    model, traits = config.model, traits_of(config.model)
    heads, groups, experts = model.num_attention_heads, model.num_query_groups, model.num_experts
    width = model.expert_width if experts else model.ffn_hidden_size
    own, size = heads * model.kv_channels, element_bytes(config.training.precision)
    found = {
        f"elements of {size} bytes": size != _HALF,
        "latent attention": model.is_latent,
        f"keys and values in {groups} of {heads} heads (GQA)": groups < heads and not model.is_latent,
        f"heads of {own} in total": own != model.hidden_size and not model.is_latent,
        f"{experts} experts, {model.moe_router_topk} for a token, and a router": bool(experts),
        "a shared expert": bool(model.moe_shared_expert_intermediate_size),
        f"SwiGLU of width {width}": traits.gated_linear_unit,
        "no biases" if not model.add_qkv_bias else "biases on q, k, v alone": not (
            traits.add_bias_linear or model.add_proj_bias or model.add_mlp_bias
        ),
        "RMSNorm": traits.normalization == "RMSNorm",
        "an output layer of its own": model.untie_embeddings_and_output_weights,
        "adapters on frozen weights": config.adapter.is_on,
        f"products in {config.training.precision}": PRECISIONS[config.training.precision].has_casts,
    }
    always = "no dropout, and scores under the mask, which are computed again"
    return ", ".join([*(name for name, is_so in found.items() if is_so), always])


def _parameters(config: RunConfig) -> Iterator[str]:
    model, h, count = config.model, config.model.hidden_size, {"attention": 0.0, "mlp": 0.0, "norm": 0.0}
    for row in (row for row in weight_rows(model) if row.is_per_layer):
        elements = row.num_elements * len(row.layers) / model.num_layers
        count[row.part if row.part in count else "mlp"] += elements
    yield f"papers have GPT's layers; this run has {_differences(config)}"
    layer = 12 * h**2 + 13 * h
    yield _beside("attention of a layer", "4 h^2 + 4 h", 4 * h**2 + 4 * h, count["attention"])
    yield _beside("MLP of a layer", "8 h^2 + 5 h", 8 * h**2 + 5 * h, count["mlp"])
    yield _beside("norms of a layer", "4 h", 4 * h, count["norm"])
    yield _beside("a layer", "12 h^2 + 13 h", layer, sum(count.values()))
    theirs = model.num_layers * layer + model.vocab_size * h
    yield _beside("the model", "L (12 h^2 + 13 h) + V h", theirs, total_parameters(model))


def _activations(config: RunConfig, *, cuda: bool) -> Iterator[str]:
    """Lines of one layer and micro-batch on a rank, in the order of forward."""
    _, config = layer_kinds(config)
    model, parallel = config.model, config.parallel
    a, h, t = model.num_attention_heads, model.hidden_size, parallel.tensor_model_parallel_size
    s, tokens = config.sample_length // parallel.context_parallel_size, config.micro_batch_tokens
    own, whole = saved_bytes(config, cuda=cuda), activation_bytes(config, cuda=cuda)
    is_cut, total = parallel.sequence_parallel, 0.0
    for what, formula, theirs, over_tp, ours in (
        ("inputs of norms", "4 s b h", 4.0 * h, is_cut, own["attention_norm"] + own["mlp_norm"]),
        ("input of q, k, v", "2 s b h", 2.0 * h, is_cut, own["qkv_input"]),
        ("q, k, v", "6 s b h", 6.0 * h, True, own["qkv"]),
        ("scores and dropout", "5 a s^2 b", 5.0 * a * s, True, 0.0),
        ("attention's result", "2 s b h", 2.0 * h, True, own["attention_result"]),
        ("input of the MLP", "2 s b h", 2.0 * h, is_cut, own["mlp_input"]),
        ("inside the MLP", "16 s b h", 16.0 * h, True, own["gate_up"] + own["product"] + own["expert_input"]),
        ("dropout masks", "2 s b h", 2.0 * h, is_cut, 0.0),
    ):
        parts = t if over_tp else 1
        total += tokens * theirs / parts
        formula += f" / {parts}" * (parts > 1)
        yield _beside(what, formula, tokens * theirs / parts, tokens * ours, size_text)
    cut = f" / {t}" * (t > 1 and is_cut)
    formula = f"s b h (34 + 5 a s / h){cut}" if t == 1 or cut else "s b h (10 + 24 / t + 5 a s / (h t))"
    yield _beside("a layer, nothing recomputed", formula, total, whole[None], size_text)
    theirs = 2 * tokens * h / (t if is_cut else 1)
    yield _beside("a layer, all recomputed", f"2 s b h{cut}", theirs, whole["full"], size_text)


def _flops(config: RunConfig) -> Iterator[str]:
    model, flops, samples = config.model, flops_per_step(config), config.training.global_batch_size
    s, h, count, rows = config.sample_length, model.hidden_size, model.num_layers, config.padded_vocab_size
    pairs = mean_pairs([s], model)
    products, attention = (each / count for each in forward_of_layers(model, samples * s, samples * pairs))
    of_all, squares = samples * 24 * s * h**2, samples * 4 * s**2 * h
    step = 3 * (count * (of_all + squares) + 2 * samples * s * h * rows)
    # The papers count attention twice; its forward again would be s / (4.5 h).
    again = "72 B L s h^2 (1 + s / (3 h) + V / (12 h L))"
    for what, formula, theirs, ours in (
        ("products of a layer's forward", "24 B s h^2", of_all, products),
        ("attention of a layer's forward", "4 B s^2 h", squares, attention),
        ("a layer's forward", "24 B s h^2 + 4 B s^2 h", of_all + squares, products + attention),
        ("a step", "72 B L s h^2 (1 + s / (6 h) + V / (12 h L))", step, flops.model),
        ("with recomputation", again, step + 3 * count * squares, flops.hardware),
    ):
        yield _beside(what, formula, theirs, ours, "{:.4g}".format)


def _messages(config: RunConfig) -> Iterator[str]:
    parallel, hidden = config.parallel, config.micro_batch_tokens * config.model.hidden_size
    if (t := parallel.tensor_model_parallel_size) > 1:
        summed, cut = map(len, tp_products(config.model))
        # An all-reduce sends 2 (t - 1) / t of its data, the other two half as much (communication.py).
        halves = 2 * (summed + cut) + cut * parallel.sequence_parallel
        sent = halves * tp_message_bytes(config) * (t - 1) / t
        what, theirs = "TP, sent by a rank for a layer and micro-batch", 16 * hidden * (t - 1) / t
        yield _beside(what, "4 all-reduces of 2 s b h, 16 s b h (t - 1) / t", theirs, sent, size_text)
    if parallel.pipeline_model_parallel_size > 1:
        what = "PP, sent by a stage in one direction for a micro-batch"
        yield _beside(what, "2 s b h", 2 * hidden, boundary_bytes(config), size_text)
