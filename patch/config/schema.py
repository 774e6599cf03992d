"""The resolved run as frozen dataclasses: the only list of fields. Flags, `--help` and YAML are made from it.

Each field is a flag: `hidden_size` is `--hidden-size`, `model.hidden_size` in YAML. The help text, the
legal values (annotation and bounds) and the default are stated only here. A field without a default must be
given or derived (from MODEL_SIZE, a Hugging Face config.json or the machine) before a RunConfig is built.
A RunConfig never changes. Rules between several fields are in `patch/checks`.

A value that is off or absent is None here. Flags, positions and YAML write words for it ("none", "false", 0);
`fields.py` translates.

Other sections: model and adapter in `patch/families` (`shape.py`, `adapters.py`), data and checkpoint in
`data_schema.py`, `optimizer_schema.py`, `experts.py`. Imports neither torch nor megatron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from patch.config.choices import (
    PRECISIONS,
    Casts,
    ContextCommunication,
    Fp8Format,
    Fp8Scaling,
    OnNonFinite,
    Precision,
    PreferenceLoss,
    Recompute,
    RecomputeChoice,
    RecomputeMethod,
    RowKind,
    Sharding,
    ZeroStage,
    objective_traits,
)
from patch.config.data_schema import CheckpointConfig, DataConfig
from patch.config.experts import ExpertsConfig
from patch.config.optimizer_schema import OptimizerConfig
from patch.families import ModelConfig
from patch.families.adapters import AdapterConfig
from patch.families.selection import Selection
from patch.flag_field import flag
from patch.layout import rank_stride
from patch.layout.pipeline_stages import layout_layers, smallest_micro_batch_group, split_layers
from patch.storage.names import STOP_FILE

RANK_AXES = ("tp", "cp", "dp", "pp")
"""Axes along which ranks are numbered, in the default order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the model and the batch are split over processes, and how many processes there are."""

    tensor_model_parallel_size: int = flag("processes that share each layer (TP)", 1, at_least=1)
    pipeline_model_parallel_size: int = flag("stages that share the layers (PP)", 1, at_least=1)
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        "PP: each process has several interleaved stages of this many layers (VPP); 0: one stage", none=0
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        "PP: the embedding counts as a layer of the first stage", False
    )
    account_for_loss_in_pipeline_split: bool = flag(
        "PP: output layer and loss count as a layer of the last stage", False
    )
    pipeline_model_parallel_layout: str | None = flag(
        "PP: the stages by hand, such as Et*3|t*4|t*4L: E embedding, t layer, L loss; PP x N: N stages each",
        none="none",
    )
    overlap_p2p_communication: bool = flag(
        "interleaved PP: overlap p2p communication with compute; off: wait for it, and free outputs",
        True,
    )
    overlap_p2p_communication_warmup_flush: bool = flag(
        "interleaved PP: also while the pipeline fills and empties", False
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        "interleaved PP: micro-batches that pass a stage in a row, PP or more; 0: as few as fit", none=0
    )
    context_parallel_size: int = flag("processes that share each sequence (CP)", 1, at_least=1)
    rank_order: str = flag(
        "axes along which processes are numbered, the fastest first; tp-cp-pp-dp is Megatron-LM's "
        "--use-tp-pp-dp-mapping",
        "tp-cp-dp-pp",
    )
    cp_comm_type: ContextCommunication | None = flag(
        "CP: ring attention (p2p), or all-to-all over heads (a2a); auto: by the bytes sent",
        none="auto",
    )
    sequence_parallel: bool = flag("cut norms and residuals along the sequence over TP", False)
    tp_comm_overlap: bool | None = flag(
        "TP: overlap communication with matmuls, in chunks; auto, the default: on CPUs, and on GPUs where "
        "the plan says that a layer takes less time",
        none="auto",
    )
    use_distributed_optimizer: bool = flag("shard optimizer states over replicas (ZeRO-1)", False)
    overlapped_distributed_optimizer: bool = flag(
        "with --use-distributed-optimizer: gradients are sharded too (ZeRO-2)", False
    )
    data_parallel_sharding: Sharding | None = flag(
        "state that replicas shard: none, optimizer (ZeRO-1), gradients (ZeRO-2), parameters (ZeRO-3) or "
        "auto; default: as the two flags above say",
        none="default",
    )
    num_distributed_optimizer_instances: int = flag(
        "divide the replicas into N groups (such as nodes) that shard states inside the group: all-gathers "
        "stay inside, gradients cross groups once a step",
        1,
        at_least=1,
    )
    nnodes: int = flag("machines", 1, at_least=1)
    nproc_per_node: int = flag("processes on this machine", at_least=1)
    max_restarts: int = flag(
        "number of restarts from the newest complete checkpoint after a process or machine is lost",
        0,
        at_least=0,
    )
    min_nodes: int | None = flag(
        "with --max-restarts: fewest machines on which the run may continue; 0: all of --nnodes", none=0
    )
    log_dir: str | None = flag(
        "folder for a log file of each process's output, which is also shown; default: none",
        none="none",
        is_path=True,
    )
    distributed_timeout_minutes: int = flag(
        "the run ends if a collective or its start waits longer than this", 30, at_least=1
    )
    hang_timeout: float | None = flag(
        "seconds that a rank may make no progress in a step before the run ends; 0: 20 steps, at least 300 s",
        none=0,
    )

    @property
    def rank_axes(self) -> tuple[str, ...]:
        """Axes of --rank-order without ep; axes that --rank-order omits, of size 1, come last."""
        named = [axis for axis in self.rank_order.split("-") if axis != "ep"]
        return (*named, *(axis for axis in RANK_AXES if axis not in named))

    @property
    def order_of_experts(self) -> str:
        """--rank-order with ep, for megatron-core; if ep is not named, ep comes after cp."""
        if "ep" in self.rank_order.split("-"):
            return self.rank_order
        return "-".join(self.rank_axes).replace("cp", "cp-ep")

    def num_split_layers(self, num_layers: int) -> int:
        """Return the layers that stages split evenly, with embedding and loss if their flags count them."""
        with_embedding = self.account_for_embedding_in_pipeline_split
        return num_layers + with_embedding + self.account_for_loss_in_pipeline_split

    def virtual_pipeline_size(self, num_layers: int) -> int:
        """Return the pipeline stages of one rank for a model of this many layers."""
        pp_size, layers = self.pipeline_model_parallel_size, self.num_layers_per_virtual_pipeline_stage
        if self.pipeline_model_parallel_layout is not None:
            return len(layout_layers(self.pipeline_model_parallel_layout)) // pp_size
        return self.num_split_layers(num_layers) // (layers * pp_size) if layers else 1

    def stage_layers(self, num_layers: int) -> list[int]:
        """Return the layers of each pipeline stage for a model of this many layers."""
        if self.pipeline_model_parallel_layout is not None:
            return layout_layers(self.pipeline_model_parallel_layout)
        return split_layers(
            num_layers,
            self.pipeline_model_parallel_size * self.virtual_pipeline_size(num_layers),
            with_embedding=self.account_for_embedding_in_pipeline_split,
            with_loss=self.account_for_loss_in_pipeline_split,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Batch size, precision, length of the run, and what is recomputed to save memory."""

    micro_batch_size: int = flag("samples of one forward on one data-parallel rank", at_least=1)
    global_batch_size: int = flag("samples of one optimizer step over all ranks", at_least=1, at_most=10**6)
    train_iters: int = flag(
        "optimizer steps of the whole run; 0: as many as --train-epochs needs", at_least=0
    )
    train_epochs: float | None = flag(
        "passes over the training set, which decide the steps of the run; 0: --train-iters counts", none=0
    )
    sft: bool = flag("supervised fine-tuning: the loss covers only assistant tokens", False)
    objective: str = flag(
        "training objective: sft or pretrain (default: as --sft says), dpo, orpo or simpo (pairs of "
        "chosen and rejected answers), kto (answers with a label), or one that your program registered",
        "default",
    )
    dpo_beta: float = flag("dpo, orpo, simpo, kto: beta, the weight of log-probabilities", 0.1, above=0)
    dpo_loss_type: PreferenceLoss = flag("dpo: the loss of a pair's margin", "sigmoid")
    dpo_sft_weight: float = flag(
        "dpo: weight of an added SFT loss, the mean over the chosen answer's tokens; 0: none", 0.0, at_least=0
    )
    freeze: str | None = flag(
        "weights that do not train: a regular expression, searched in their Hugging Face names, such as "
        "embed_tokens|layers\\.[0-7]\\.; none: all train",
        none="none",
    )
    train_only: str | None = flag(
        "the only weights that train, as in --freeze, which may take some away; none: all", none="none"
    )
    neftune_noise_alpha: float | None = flag(
        "NEFTune: alpha of the uniform noise on embeddings in training; 5 is usual; 0: none", none=0, above=0
    )
    dpo_label_smoothing: float = flag(
        "dpo: the share of pairs in the wrong order that the loss robust expects", 0.0, at_least=0, below=0.5
    )
    simpo_gamma: float = flag("simpo: the margin of rewards that a pair should have", 0.5, at_least=0)
    desirable_weight: float = flag("kto: weight of the loss of desirable answers", 1.0, at_least=0)
    undesirable_weight: float = flag("kto: weight of the loss of undesirable answers", 1.0, at_least=0)
    precision: Precision = flag(
        "dtype of weights and activations; masters stay fp32; fp8: bf16 with fp8 matmuls in the layers",
        "bf16",
    )
    fp8_format: Fp8Format | None = flag(
        "fp8: inputs and weights in e4m3 and gradients in e5m2 (hybrid), or all in e4m3; default: hybrid",
        none="default",
    )
    fp8_recipe: Fp8Scaling | None = flag(
        "fp8: one scale a tensor (tensorwise), or the scale of the step before (delayed, Transformer Engine "
        "only); default: tensorwise (rowwise, mxfp8, blockwise are refused)",
        none="default",
    )
    first_last_layers_bf16: bool = flag("fp8: keep the first and last layer in bf16", False)
    num_layers_at_start_in_bf16: int = flag("--first-last-layers-bf16: number of first layers", 1, at_least=0)
    num_layers_at_end_in_bf16: int = flag("--first-last-layers-bf16: number of last layers", 1, at_least=0)
    disable_parameter_transpose_cache: bool = flag(
        "fp8: quantize weights in every micro-batch (same result, less memory); off: once a step if they fit",
        False,
    )
    fp8_param_gather: bool = flag(
        "fp8: all-gather the layers' weights in fp8, half the bytes (our own layers, tensorwise)", False
    )
    recompute_granularity: RecomputeChoice | None = flag(
        "activations to recompute in backward: none, selective (norms and MLP activations), full (layers) or "
        "auto (also --cpu-offloading: what fits the device at the least cost)",
        none="none",
    )
    recompute_method: RecomputeMethod = flag(
        "full recompute: uniform (all layers, block by block) or block (some layers of each stage)", "uniform"
    )
    recompute_num_layers: int = flag(
        "full recompute: layers of a block (uniform), or of each stage that are recomputed (block)",
        1,
        at_least=1,
    )
    mlp_chunks_for_training: int = flag(
        "long sequences: chunks of tokens in which MLPs compute; backward recomputes each", 1, at_least=1
    )
    cpu_offloading: bool = flag(
        "the activations of the first layers of each stage are in host memory until backward", False
    )
    cpu_offloading_num_layers: int | None = flag(
        "--cpu-offloading: number of layers; 0: all layers except recomputed layers and the last layer of "
        "each stage",
        none=0,
    )
    on_non_finite: OnNonFinite = flag(
        "after a step whose loss or gradient is not finite: stop, or skip its update (at most 9 in a row)",
        "stop",
    )
    exit_duration_in_mins: float | None = flag(
        "minutes after which the run saves a checkpoint and exits with code 75; 0: no limit", none=0
    )
    seed: int = flag("seed of weights and data order", 1234, at_least=0)
    deterministic_mode: bool = flag("only kernels that give the same bits each time", False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything a run depends on. config.yaml in the run's folder stores it, section by section."""

    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    experts: ExpertsConfig = ExpertsConfig()
    adapter: AdapterConfig = AdapterConfig()

    @classmethod
    def of_model(
        cls, model: ModelConfig, *, precision: Precision = "bf16", adapter: AdapterConfig | None = None
    ) -> Self:
        """Return the run of a program that only computes with a model, without pipeline stages."""
        return cls(
            model=model,
            parallel=ParallelConfig(nproc_per_node=1),
            training=TrainingConfig(
                micro_batch_size=1, global_batch_size=1, train_iters=1, precision=precision
            ),
            optimizer=OptimizerConfig(lr=1.0),
            data=DataConfig(train_data_path="", max_padding_length=model.seq_length),
            checkpoint=CheckpointConfig(output_path=""),
            adapter=adapter or AdapterConfig(),
        )

    @property
    def world_size(self) -> int:
        """Ranks over all machines."""
        return self.parallel.nnodes * self.parallel.nproc_per_node

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model: world size over TP x PP x CP."""
        parallel = self.parallel
        replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        return self.world_size // (replica * parallel.context_parallel_size)

    @property
    def is_packed(self) -> bool:
        """Whether several sequences share a row: packed samples, or both sequences of a pair."""
        return self.data.packing or self.row_kind != "conversation"

    @property
    def row_kind(self) -> RowKind:
        """Kind of rows that the objective reads."""
        return objective_traits(self.training.objective).row_kind

    @property
    def etp_size(self) -> int:
        """Ranks that share an expert (ETP)."""
        return self.experts.etp_size(self.parallel.tensor_model_parallel_size)

    @property
    def sp_size(self) -> int:
        """Ranks that share the tokens outside of products: TP with sequence parallelism."""
        return self.parallel.tensor_model_parallel_size if self.parallel.sequence_parallel else 1

    @property
    def num_expert_copies(self) -> int:
        """Ranks that have the same experts: world size over ETP x EP x PP; 1 without experts."""
        sizes = self.etp_size * self.parallel.pipeline_model_parallel_size
        sizes *= self.experts.expert_model_parallel_size
        return self.world_size // sizes if self.model.num_experts else 1

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes along which ranks are numbered, the fastest first."""
        parallel = self.parallel
        sizes = {
            "tp": parallel.tensor_model_parallel_size,
            "cp": parallel.context_parallel_size,
            "dp": self.data_parallel_size,
            "pp": parallel.pipeline_model_parallel_size,
        }
        return {axis: sizes[axis] for axis in parallel.rank_axes}

    @property
    def expert_axes(self) -> dict[str, int]:
        """Axes of the experts, as in `axes`, but without cp; tp is ETP, dp is EDP."""
        sizes = {"tp": self.etp_size, "ep": self.experts.expert_model_parallel_size}
        sizes |= {"dp": self.num_expert_copies, "pp": self.parallel.pipeline_model_parallel_size}
        order = self.parallel.order_of_experts.split("-")
        return {axis: sizes[axis] for axis in order if axis != "cp"}

    @property
    def experts_share_pipelines(self) -> bool:
        """Whether experts have the same pipelines as the layers around them in this order of ranks.

        Source: the layouts that megatron-core can place, parallel_state.py:793-817.
        """
        axes, of_experts = self.axes, self.expert_axes
        if math.prod(of_experts.values()) != self.world_size:  # an axis that --rank-order leaves out
            return False
        is_placed = self.parallel.order_of_experts.endswith("pp") or axes["dp"] == of_experts["dp"]
        return axes["pp"] == 1 or (is_placed and rank_stride(axes, "pp") == rank_stride(of_experts, "pp"))

    @property
    def selection(self) -> Selection:
        """The weights that train, by Hugging Face names."""
        return Selection(self.training.freeze, self.training.train_only)

    @property
    def state_group_size(self) -> int:
        """Ranks that shard optimizer states, if states are sharded: DP x CP, or the ranks of one instance."""
        return self.num_weight_copies // self.parallel.num_distributed_optimizer_instances

    @property
    def gathers_weights_per_pass(self) -> bool:
        """Whether each pass gathers weights, from other ranks or host memory, and frees them after it."""
        share = self.optimizer.cpu_offloading_weights_fraction
        comes = self.state_group_size > 1 or (self.optimizer.cpu_offloading_weights and share != 0)
        return self.zero_stage.shards_parameters and comes

    @property
    def reductions_per_step(self) -> int:
        """Gradient reductions in one step."""
        return self.num_micro_batches if self.zero_stage.shards_gradients else 1

    @property
    def num_weight_copies(self) -> int:
        """Ranks with the same weights: DP x CP."""
        return self.data_parallel_size * self.parallel.context_parallel_size

    @property
    def heads_divide_by_cp(self) -> bool:
        """Whether context-parallel ranks can share the query heads of a TP rank evenly (a2a)."""
        heads = self.model.num_attention_heads // self.parallel.tensor_model_parallel_size
        return heads % self.parallel.context_parallel_size == 0

    @property
    def virtual_pipeline_size(self) -> int:
        """Pipeline stages of one rank; several with interleaved pipelining (VPP)."""
        return self.parallel.virtual_pipeline_size(self.model.num_layers)

    @property
    def stage_layers(self) -> list[int]:
        """Layers of each pipeline stage in the order in which a batch passes them."""
        return self.parallel.stage_layers(self.model.num_layers)

    @property
    def bf16_ends(self) -> tuple[int, int]:
        """Numbers of first and of last layers that stay in bf16 while others cast weights."""
        ends = self.training.num_layers_at_start_in_bf16, self.training.num_layers_at_end_in_bf16
        return ends if self.training.first_last_layers_bf16 else (0, 0)

    @property
    def casts(self) -> Casts:
        """The layers that cast weights for their matmuls, and how long the casts live."""
        training, (first, last) = self.training, self.bf16_ends
        if not PRECISIONS[training.precision].has_casts:
            return Casts()
        has_cache = not training.disable_parameter_transpose_cache and self.num_micro_batches > 1
        shares_states = self.state_group_size > 1 and self.sharding is not ZeroStage.NONE
        return Casts(
            layers=range(first, self.model.num_layers - last),
            are_kept=has_cache and self.sharding is not ZeroStage.PARAMETERS,
            are_gathered=training.fp8_param_gather and shares_states,
            has_old_scales=training.fp8_recipe == "delayed",
        )

    @property
    def sharding(self) -> Sharding:
        """The ZeRO stage, or auto until `resolve_sharding` chooses."""
        parallel = self.parallel
        if parallel.data_parallel_sharding is not None:
            return parallel.data_parallel_sharding
        if not parallel.use_distributed_optimizer:
            return ZeroStage.NONE
        return ZeroStage.GRADIENTS if parallel.overlapped_distributed_optimizer else ZeroStage.OPTIMIZER

    @property
    def zero_stage(self) -> ZeroStage:
        """The ZeRO stage of a run whose `auto` has been resolved."""
        assert self.sharding != "auto", "resolve_sharding chooses before anything is built"
        return self.sharding

    @property
    def recompute(self) -> Recompute | None:
        """The recompute granularity of a run whose `auto` has been resolved."""
        assert self.training.recompute_granularity != "auto", "resolve_activations chooses before all else"
        return self.training.recompute_granularity

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.data_parallel_size)

    @property
    def micro_batch_group(self) -> int:
        """Micro-batches that pass a stage before its rank switches stages (VPP)."""
        given = self.parallel.microbatch_group_size_per_virtual_pipeline_stage
        pp_size = self.parallel.pipeline_model_parallel_size
        return given or smallest_micro_batch_group(self.num_micro_batches, pp_size)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary, padded so that TP divides it."""
        return self.model.padded_vocab_size(self.parallel.tensor_model_parallel_size)

    @property
    def tokenizer_folder(self) -> str | None:
        """Folder of the tokenizer: --tokenizer-name-or-path, or else the folder of the weights."""
        return self.data.tokenizer_name_or_path or self.checkpoint.load

    @property
    def stop_file(self) -> str:
        """The path of the file that stops the run."""
        return self.checkpoint.stop_file or f"{self.checkpoint.output_path}/{STOP_FILE}"

    @property
    def sample_length(self) -> int:
        """Tokens of one sample as the model sees it: PAD_LEN for raw rows, SEQ_LEN otherwise."""
        return self.data.max_padding_length if self.data.dataset_type == "raw" else self.model.seq_length

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch on a rank; context-parallel ranks share each sample."""
        return self.training.micro_batch_size * self.sample_length // self.parallel.context_parallel_size
