"""Fields that need another field: set without it, they would have no effect or a wrong one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from patch.config.choices import ROW_KINDS, ZeroStage
from patch.config.fields import FIELDS, scalar_of, value_of
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.families import traits_of
from patch.families.shape import LATENT_SIZES
from patch.features.table import FP8, LATENTS

_Need = tuple[bool, Collection[str], str, str]
"""(is the need met, the fields that have it, their legal values without it in words, the reason)."""
_OBJECTIVES = {
    ("dpo_beta",): tuple(ROW_KINDS),
    ("dpo_loss_type", "dpo_label_smoothing", "dpo_sft_weight"): ("dpo",),
    ("simpo_gamma",): ("simpo",),
    ("desirable_weight", "undesirable_weight"): ("kto",),
}
"""Fields, and the objectives that have them."""
_OF_DOCUMENTS = ("split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
_OF_TASKS = [*(name for name in FIELDS if name.startswith("eval_tasks_")), "metric_for_best_model"]
_OF_FP8 = (
    "fp8_format", "fp8_recipe", "first_last_layers_bf16", "disable_parameter_transpose_cache",
    "fp8_param_gather",
)  # fmt: skip
_OF_ROPE = ("no_rope_freq", "rotary_percent", "llama_4_scaling_beta", "rotary_base_local")


def needs_of_data_are_met(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse a field about data that is not at its default if what it needs is not there."""
    _refuse_unmet(config, _of_data(config))


def needs_are_met(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse another field that is not at its default if what it needs is not there."""
    _refuse_unmet(config, chain(_of_model(config), _of_run(config)))


def _refuse_unmet(config: RunConfig, needs: Iterable[_Need]) -> None:
    for is_met, fields, expected, why in needs:
        for field in () if is_met else fields:
            if value_of(config, field) != FIELDS[field].default:
                got = scalar_of(config, field)
                refuse(field, str(got).lower() if isinstance(got, bool) else got, expected, why)


def _of_data(config: RunConfig) -> Iterator[_Need]:
    training, data = config.training, config.data
    why = "pre-training reads .bin/.idx, which llama-patch preprocess makes from rows"
    yield training.sft, ("dataset_type",), "idxmap, or SFT=true", why
    why = "sequences of pre-training are full; --reset-attention-mask keeps their documents apart"
    yield training.sft, ("packing",), "false, or SFT=true", why
    why = "it is about the documents of a pre-training set"
    yield not training.sft, _OF_DOCUMENTS, "none or false, or SFT=false", why
    why = "positions that restart while attention goes on are not supported; RoPE uses only distances"
    yield data.reset_attention_mask, ("reset_position_ids",), "false, or --reset-attention-mask too", why
    for fields, names in _OBJECTIVES.items():
        expected = f"--objective {' or '.join(names)} too"
        yield training.objective in names, fields, expected, "other losses do not have it"
    expected, why = "0, or --dpo-loss-type robust", "the other losses of pairs are not smoothed"
    yield training.dpo_loss_type == "robust", ("dpo_label_smoothing",), expected, why
    yield data.eval_tasks is not None, _OF_TASKS, "--eval-tasks too", "no task is named"
    expected, why = "--eval-tasks-path too", "it allows the code in that folder"
    yield data.eval_tasks_path is not None, ("eval_tasks_allow_code",), expected, why
    expected, why = "--eval-tasks-apply-chat-template too", "without a chat template there are no turns"
    yield data.eval_tasks_apply_chat_template, ("eval_tasks_fewshot_as_multiturn",), expected, why


def _of_model(config: RunConfig) -> Iterator[_Need]:
    model, adapter = config.model, config.adapter
    is_yarn = model.use_rope_scaling and model.rope_scaling_type == "yarn"
    expected = f"yarn at {where('rope_scaling_type')}"
    yield is_yarn, ("mscale", "mscale_all_dim"), expected, "it is a part of YaRN"
    why = "without it the frequencies are not scaled"
    yield model.use_rope_scaling, ("rope_scaling_type",), "--use-rope-scaling beside it", why
    why = f"only latent attention ({where(LATENTS.field)}) has it"
    yield model.is_latent, sorted(LATENT_SIZES), "0", why
    of_windows = ("window_attn_skip_freq", "rotary_base_local")
    why = f"no layer has a window ({where('window_size')})"
    yield model.window_size is not None, of_windows, "none or 0", why
    yield traits_of(model).has_rope, _OF_ROPE, "its default", "ALiBi is in place of RoPE"
    of_adapters = f"or a rank at {where('lora_rank')}"
    why = "nf4 weights are frozen, so the run needs adapters"
    yield adapter.is_on, ("quantize_base",), f"none, {of_adapters}", why
    yield adapter.is_on, ("lora_alpha",), f"0, {of_adapters}", "a run without adapters trains all weights"
    is_dense = not model.num_experts
    is_sigmoid = is_dense or model.moe_router_score_function == "sigmoid"
    why = "the bias is added to sigmoid scores (DeepSeek-V3)"
    yield is_sigmoid, ("moe_router_enable_expert_bias",), "false, or sigmoid scores", why
    expected = f"false, or a width at {where('moe_shared_expert_intermediate_size')}"
    has_shared = is_dense or bool(model.moe_shared_expert_intermediate_size)
    yield has_shared, ("moe_shared_expert_gate",), expected, "no expert has all tokens"
    expected, why = f"fp8 at {where('precision')} beside it", "it has an effect only with fp8"
    yield FP8.is_on(config), _OF_FP8, expected, why


def _of_run(config: RunConfig) -> Iterator[_Need]:
    parallel, optimizer, checkpoint = config.parallel, config.optimizer, config.checkpoint
    expected = f"0, or {where('pipeline_model_parallel_size')} above 1"
    interleaved = ("num_layers_per_virtual_pipeline_stage",)
    yield parallel.pipeline_model_parallel_size > 1, interleaved, expected, "one process has all layers"
    flush = ("overlap_p2p_communication_warmup_flush",)
    expected = f"false, or true at {where('overlap_p2p_communication')}"
    yield parallel.overlap_p2p_communication, flush, expected, "it extends the overlap"
    expected = f"{where('use_distributed_optimizer')} true"
    why = "it shards gradients in addition to the optimizer's states"
    yield parallel.use_distributed_optimizer, ("overlapped_distributed_optimizer",), expected, why
    expected = f"false, or {where('data_parallel_sharding')} parameters"
    why = "only there are weights gathered for each pass, and freed after it"
    yield config.sharding in ("auto", ZeroStage.PARAMETERS), ("cpu_offloading_weights",), expected, why
    why = "it goes with --decoupled-lr, which is none"
    yield optimizer.decoupled_lr is not None, ("decoupled_min_lr",), "none", why
    of_teachers, has_teacher = ("distill_alpha", "distill_temperature"), config.data.distill_from is not None
    yield has_teacher, of_teachers, "--distill-from too", "no teacher is named"
    why = "there is no --push-to-hub"
    yield checkpoint.push_to_hub is not None, ("push_to_hub_as",), "private", why
    yield checkpoint.export_hf, ("push_to_hub",), "none, or --export-hf", "nothing is exported"
