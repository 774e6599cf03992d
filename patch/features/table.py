"""The features of a run, and the pairs that exclude each other: `CONFLICTS` is the only place where two meet.

Rules and notes (patch/checks), `--transformer-impl auto` and `can_overlap_tp_comm` (backends.py), the
planner's search, the guides' tables and the rules of tests/covered_layouts.md read it. Rules about sizes are
in patch/checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from patch.config.fields import FIELDS, scalar_of, value_of
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.families import Traits, is_llama_like, traits_of
from patch.families.adapters import adapts_experts
from patch.families.selection import Selection


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that a run may use."""

    name: str
    field: str
    """The field that turns it on; refusals name it."""
    off: str
    """The values of `field` without the feature, in words."""
    on: str | bool | None = None
    """The value of `field` that turns it on; None: all but the default."""
    condition: Callable[[RunConfig], bool] = lambda run: True
    """A further condition."""
    choice: Literal["beside", "or", "shape"] = "beside"
    """How another feature's refusal mentions it: as given, as another way out, or (a model's shape) not."""
    proven: Literal["never run", "cpu", "one gpu", "several gpus"] = "cpu"
    """The largest machine that has run it: none, CPUs with several processes, one GPU, or several GPUs."""

    def is_on(self, config: RunConfig) -> bool:
        """Return whether a run uses the feature."""
        value = value_of(config, self.field)
        has_value = value != FIELDS[self.field].default if self.on is None else value == self.on
        return has_value and self.condition(config)

    def text(self, config: RunConfig) -> str:
        """Return its value in words."""
        value = scalar_of(config, self.field)
        return str(value).lower() if isinstance(value, bool) else str(value)


class Conflict(NamedTuple):
    """Two features that no run can have together."""

    refused: Feature
    """The feature whose field a refusal names."""
    other: Feature
    reason: str
    """A format of the RunConfig `run`."""
    instead: str | None = None
    """Legal values; None: those of `refused`, and how `other` is chosen."""

    def is_met(self, config: RunConfig) -> bool:
        """Return whether a run has both features."""
        return self.refused.is_on(config) and self.other.is_on(config)

    def why(self, config: RunConfig) -> str:
        """Return the reason."""
        return self.reason.format(run=config)

    def refuse(self, got: object, given: str, why: str) -> NoReturn:
        """Raise the ConfigError of two values in words: of the refused feature, and of the other."""
        flag = where(self.other.field)
        endings = {
            "beside": f" beside {flag}" + ("" if given == "true" else f" {given}"),
            "or": f", or {self.other.off} at {flag}",
            "shape": "",
        }
        refuse(self.refused.field, got, self.instead or self.refused.off + endings[self.other.choice], why)


def _has_other_norms(traits: Traits) -> bool:
    return traits.normalization != "RMSNorm" or traits.add_bias_linear


def _has_experts(run: RunConfig) -> bool:
    return run.model.num_experts is not None


_16_BITS, _TOKENS_LOSS = "bf16, fp16 or fp32", "default, sft or pretrain"

LORA = Feature("LoRA", "lora_rank", "0", condition=lambda run: run.adapter.is_on, proven="one gpu")
NF4 = Feature("nf4 weights (QLoRA)", "quantize_base", "none", proven="one gpu")
LORA_OF_EXPERTS = Feature("LoRA of experts", "lora_rank", "0",
                          condition=lambda run: adapts_experts(run.model, run.adapter))
DECOUPLED_LR = Feature("--decoupled-lr", "decoupled_lr", "none")
FREEZE = Feature("frozen weights", "freeze", "none")
TRAIN_ONLY = Feature("--train-only", "train_only", "none")
SGD = Feature("SGD", "optimizer", "adam", on="sgd")
MUON = Feature("Muon", "optimizer", "adam", on="muon")
DISK_STATES = Feature("optimizer states on a disk", "offload_folder", "none", proven="one gpu")
STREAMED_STATES = Feature(
    "streamed optimizer states", "optimizer_offload_streamed", "0",
    condition=lambda run: bool(run.optimizer.optimizer_offload_streamed),
)  # fmt: skip
FIRST_MOMENTS = Feature("first moments in fewer bytes", "exp_avg_dtype", "fp32", proven="one gpu")
SECOND_MOMENTS = Feature("second moments in fewer bytes", "exp_avg_sq_dtype", "fp32", proven="one gpu")
FP8 = Feature("fp8", "precision", _16_BITS, on="fp8", proven="one gpu")
FP32 = Feature("fp32", "precision", "bf16, fp16 or fp8", on="fp32", proven="one gpu")
FP8_GATHER = Feature("fp8 gathers of weights", "fp8_param_gather", "false", proven="one gpu")
ALIGNMENT = Feature("--precision-align", "precision_align", "none", choice="or", proven="one gpu")
EXPERTS = Feature("experts", "num_experts", "0", choice="shape", proven="one gpu")
EXPERT_PARALLEL = Feature("EP", "expert_model_parallel_size", "1", condition=_has_experts, proven="one gpu")
TP_OF_EXPERTS = Feature("TP with experts", "tensor_model_parallel_size", "1", condition=_has_experts,
                        proven="one gpu")
CAPACITY = Feature("expert capacity", "moe_expert_capacity_factor", "0", condition=_has_experts)
EXPERT_BIAS = Feature("biases of the experts' choice", "moe_router_enable_expert_bias", "false")
LATENTS = Feature("latent attention", "kv_lora_rank", "0", choice="shape", proven="one gpu")
QKV_BIAS = Feature("biases of q, k and v", "add_qkv_bias", "false", proven="one gpu")
QK_NORM = Feature("norms of heads", "qk_layernorm", "false", proven="one gpu")
WINDOW = Feature("sliding window", "window_size", "none", proven="one gpu")
ROPE_SCALING = Feature("scaled RoPE", "use_rope_scaling", "false", proven="one gpu")
OTHER_LAYERS = Feature("layers unlike LLaMA's", "model_type", "auto", choice="shape",
                       condition=lambda run: not is_llama_like(run.model), proven="one gpu")
ALIBI = Feature("ALiBi", "model_type", "auto", choice="shape",
                condition=lambda run: not traits_of(run.model).has_rope, proven="one gpu")
OTHER_NORMS = Feature("LayerNorm, or biases of all linear layers", "model_type", "auto", choice="shape",
                      condition=lambda run: _has_other_norms(traits_of(run.model)), proven="one gpu")
CAPPED = Feature("capped scores", "attn_logit_softcapping", "0", choice="shape")
RING = Feature("ring attention", "context_parallel_size", "1",
               condition=lambda run: run.parallel.cp_comm_type == "p2p" or (
                   run.parallel.cp_comm_type is None and not run.heads_divide_by_cp), proven="one gpu")
ONE_ORDER = Feature("layers unlike LLaMA's and BLOOM's", "model_type", "auto", choice="shape",
                    condition=lambda run: OTHER_LAYERS.is_on(run) and not traits_of(run.model).is_bloom_like,
                    proven="one gpu")
CP = Feature("CP", "context_parallel_size", "1", proven="one gpu")
TP_OVERLAP = Feature("TP overlap", "tp_comm_overlap", "false", on=True,
                     condition=lambda run: run.parallel.tensor_model_parallel_size > 1, proven="one gpu")
INSTANCES = Feature("several optimizer instances", "num_distributed_optimizer_instances", "1")
HOST_STATES = Feature("offload of optimizer states", "optimizer_offload_policy", "false", proven="one gpu")
HOST_WEIGHTS = Feature("offload of weights", "cpu_offloading_weights", "false", proven="one gpu")
HOST_ACTIVATIONS = Feature("offload of activations", "cpu_offloading", "false", proven="one gpu")
AUTO_RECOMPUTE = Feature("AC=auto", "recompute_granularity", "none, selective or full", on="auto")
FULL_RECOMPUTE = Feature("AC=full of all layers", "recompute_method", "block", on="uniform",
                         condition=lambda run: run.training.recompute_granularity == "full", proven="one gpu")
MLP_CHUNKS = Feature("MLPs in chunks", "mlp_chunks_for_training", "1")
DISTILLATION = Feature("distillation", "distill_from", "none")
OWN_OBJECTIVE = Feature("an objective with its own loss", "objective", _TOKENS_LOSS, choice="or",
                        condition=lambda run: run.training.objective not in ("sft", "pretrain"),
                        proven="one gpu")
PREFERENCES = Feature("ORPO, SimPO, KTO", "objective", _TOKENS_LOSS,
                      condition=lambda run: run.training.objective in ("orpo", "simpo", "kto"))
NOISE = Feature("NEFTune", "neftune_noise_alpha", "0")
LORA_PLUS = Feature("LoRA+", "lora_plus_ratio", "none")
DOUBLE_NF4 = Feature("double quantization", "quantize_base", "none or nf4", on="nf4-double")
ENGINE = Feature("Transformer Engine's layers", "transformer_impl", "auto or local", on="transformer_engine",
                 proven="one gpu")
FROZEN_ENGINE = Feature("frozen weights in Transformer Engine's layers", "transformer_impl", "auto or local",
                        on="transformer_engine", proven="never run",
                        condition=lambda run: run.selection != Selection())
"""Its modules (2.11) ask each weight whether it requires a gradient, before the product and main_grad."""

FEATURES = tuple(each for each in tuple(globals().values()) if isinstance(each, Feature))

_LATENT = f"it is not supported with latent attention ({where('kv_lora_rank')})"
_FROZEN = FREEZE, TRAIN_ONLY
_ITS = "{run.model.model_type}'s layers have"
_ONE_PROCESS = "transformers sums the outputs of a token's experts in one process"

CONFLICTS: tuple[Conflict, ...] = (
    Conflict(ENGINE, ALIGNMENT, "--precision-align computes in transformers' order of operations"),
    Conflict(ENGINE, EXPERTS, "experts exist only in our own layers"),
    Conflict(ENGINE, LORA, "adapters exist only in our own layers"),
    Conflict(ENGINE, LATENTS, "latent attention exists only in our own layers"),
    Conflict(ENGINE, OTHER_LAYERS,
             "its layers are built for LLaMA's parts, and {run.model.model_type} has others"),
    Conflict(ENGINE, FP32, f"{where('precision')} fp32: Transformer Engine multiplies float32 in TF32"),
    Conflict(ENGINE, TP_OVERLAP,
             "--tp-comm-overlap needs our own layers; Transformer Engine's need user buffers for it"),
    Conflict(ENGINE, FP8_GATHER, f"{where('fp8_param_gather')} needs our own layers"),
    Conflict(LATENTS, OTHER_LAYERS, f"{_ITS} parts that latent attention lacks"),
    Conflict(HOST_ACTIVATIONS, CAPPED, "backward computes the scores again from queries and keys on the GPU"),
    Conflict(RING, CAPPED, "the kernels of a ring cannot cap scores",
             f"1, or a2a at {where('cp_comm_type')}, which needs heads that CP divides"),
    Conflict(QKV_BIAS, LATENTS, _LATENT),
    Conflict(QK_NORM, LATENTS, _LATENT),
    Conflict(WINDOW, LATENTS, _LATENT),
    Conflict(FP8, LATENTS, "latent attention has no fp8 matmuls yet"),
    Conflict(NF4, LATENTS, _LATENT),
    Conflict(ROPE_SCALING, ALIBI, f"{_ITS} ALiBi instead of RoPE"),
    Conflict(QKV_BIAS, OTHER_NORMS, f"{_ITS} biases anyway"),
    Conflict(QK_NORM, OTHER_NORMS, f"{_ITS} no RMSNorm of heads"),
    Conflict(ALIGNMENT, ONE_ORDER,
             f"{_ITS} one order of operations, within 1e-4 of transformers' logits in fp32"),
    Conflict(AUTO_RECOMPUTE, ALIGNMENT, "the plan has no memory model for --precision-align"),
    Conflict(HOST_ACTIVATIONS, AUTO_RECOMPUTE, "--recompute-granularity auto chooses the layers itself",
             "false, or --recompute-granularity none or selective"),
    Conflict(FULL_RECOMPUTE, HOST_ACTIVATIONS,
             "it recomputes all layers, so no layer is left for --cpu-offloading",
             "block, or --recompute-granularity selective or none"),
    Conflict(MLP_CHUNKS, ALIGNMENT, "transformers computes all tokens at once"),
    Conflict(MLP_CHUNKS, EXPERTS, "the tokens of experts are not in the order of the sequence"),
    Conflict(MLP_CHUNKS, FP8, "each chunk would have fp8 scales of its own"),
    Conflict(MLP_CHUNKS, HOST_ACTIVATIONS, "backward of a chunk reads its input on the GPU"),
    Conflict(MLP_CHUNKS, AUTO_RECOMPUTE, "it chooses among layers without chunks",
             "none, selective or full"),
    Conflict(FP8, ALIGNMENT, "transformers' order of operations has no fp8 matmuls"),
    Conflict(HOST_STATES, FP8_GATHER,
             "fp8 scales are computed after the GPU's update, and a host updates its weights later"),
    Conflict(CP, ALIGNMENT,
             "transformers sums the scores of a whole sequence in one process, parts of it have other bits"),
    Conflict(FP8, EXPERTS, "experts have no fp8 matmuls yet"),
    Conflict(EXPERT_PARALLEL, ALIGNMENT, _ONE_PROCESS),
    Conflict(TP_OF_EXPERTS, ALIGNMENT, _ONE_PROCESS),
    Conflict(CAPACITY, ALIGNMENT, "in transformers no expert is full"),
    Conflict(INSTANCES, EXPERT_PARALLEL,
             "an instance holds all experts, which are distributed over more ranks"),
    Conflict(INSTANCES, HOST_WEIGHTS, "instances sum gradients on the device, but gradients of offloaded "
             "weights are in host memory"),
    Conflict(ALIGNMENT, LORA_OF_EXPERTS,
             "PEFT adds adapters of experts to their weights: they have no matmuls of their own",
             f"none, or targets at {where('lora_target_modules')} that are not of experts"),
    Conflict(FP8_GATHER, LORA, "the fp8 weights are frozen, so they are never all-gathered"),
    *(Conflict(each, LORA, "adapters train, and the weights are frozen anyway") for each in _FROZEN),
    *(Conflict(each, FP8_GATHER, "a matrix in fp8 is gathered after its update") for each in _FROZEN),
    Conflict(DECOUPLED_LR, LORA, "embedding and output layer are not trained"),
    Conflict(ALIGNMENT, NF4, "an nf4 matrix is dequantized before each matmul"),
    Conflict(FIRST_MOMENTS, SGD, "SGD's momentum is fp32"),
    Conflict(SECOND_MOMENTS, SGD, "SGD has no second moments"),
    *(Conflict(each, MUON, "Muon's momentum is fp32, and so are the moments of the AdamW beside it")
      for each in (FIRST_MOMENTS, SECOND_MOMENTS)),
    Conflict(MUON, DISK_STATES, "each step would read and write the momentum of matrices twice"),
    Conflict(FP8, NF4, "an nf4 matrix is multiplied in bf16, fp16 or fp32"),
    Conflict(DISTILLATION, OWN_OBJECTIVE, "{run.training.objective} has its own loss"),
    Conflict(DISTILLATION, ALIGNMENT, "transformers' order of operations has no loss of a teacher"),
)  # fmt: skip
"""All conflicts, each once, in the order in which they are refused."""

WITHOUT_TP_OVERLAP = {
    ALIGNMENT: f" with {where('precision_align')}",
    FP8: " on layers with fp8 matmuls",
    NF4: " on nf4 weights",
}
"""Features on whose layers TP overlap has no effect, and the end of the sentence that says so."""


def features_agree(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse two features that exclude each other; the rule of patch/checks.

    Raises:
        ConfigError: the run has two features that exclude each other.
    """
    for conflict in CONFLICTS:
        if conflict.is_met(config):
            got, given = conflict.refused.text(config), conflict.other.text(config)
            conflict.refuse(got, given, conflict.why(config))


def refuse_pair(refused: Feature, other: Feature, got: object) -> NoReturn:
    """Raise the ConfigError of a conflict with a flag that is true, where there is no RunConfig."""
    conflict = next(each for each in CONFLICTS if each[:2] == (refused, other))
    conflict.refuse(got, "true", conflict.reason)
