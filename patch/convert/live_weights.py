"""The weights of a running model: filled from a Hugging Face folder, iterated over, and exported as one.

In an export all pipeline stages write at the same time, tensor by tensor.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ModelConfig
from patch.convert.hf_config_files import write_descriptions, write_index
from patch.convert.hf_layout import FILE_BYTES, divide, name_files
from patch.convert.hf_reader import open_checked
from patch.convert.mappings import HFBlock, HFTensor, TPShard, WeightMapping
from patch.convert.merge import merged
from patch.convert.safetensors_writer import SafetensorsWriter
from patch.convert.target_folder import partial_folder, publish, staging, writing
from patch.convert.weight_table import Table, adapter_table, parameter_table, table_name, weights_table
from patch.distributed.collectives import all_or_none
from patch.errors import ConversionError, nearest
from patch.families.adapters import INSIDE, AdapterConfig
from patch.model.four_bit_product import dense_shape, dequantize, quantize
from patch.storage.places import StrPath, local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Receivers = Literal["all", "first", "stage"]
"""Which ranks receive the tensors of `iter_hf_weights`."""
_STAGE: Any = {"receivers": "stage", "device": torch.device("cpu")}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


class ExpertRanks(NamedTuple):
    """The place of this rank among those that share the experts of a layer."""

    rank: int = 0
    """The rank among those that have different experts (EP)."""
    size: int = 1
    tp: TPShard = TPShard(0, 1)
    """The shard among the ranks that share each expert (ETP)."""

    @classmethod
    def of(cls, groups: ProcessGroupCollection, model: ModelConfig) -> ExpertRanks:
        """This rank's place; its place in `groups.tp` if the model has no experts."""
        if model.num_experts is None:
            return cls(tp=TPShard(groups.tp.rank(), groups.tp.size()))
        ep, tp = groups.ep, groups.expt_tp
        return cls(ep.rank(), ep.size(), TPShard(tp.rank(), tp.size()))


class Visit(Protocol):
    """Where a parameter of which this rank keeps a shard is whole (the optimizer's `described_weights`)."""

    device: torch.device

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """For the parameter or a view of it, until the next call."""


class MappedParameter(NamedTuple):
    """A parameter of this rank with the mapping to its Hugging Face tensors."""

    name: str
    """Name in the weight table, with `*` for the layer and `#` for the expert."""
    layer: int
    """Counted from 0 over the whole model; 0 outside of layers."""
    expert: int
    """Counted from 0 over its layer; 0 for other parameters."""
    parameter: torch.Tensor
    """The shard of this tensor-parallel rank, detached."""
    mapping: WeightMapping
    """The mapping of the table for this layer and expert."""
    dtype: torch.dtype
    """The type of its values; in 4 bits that of the products that they are for."""


class _Owner(NamedTuple):
    """The pipeline rank that has a parameter, and the parameter's type."""

    pp_rank: int
    dtype: torch.dtype


def iter_hf_weights(
    stages: Sequence[LanguageModule],
    model: ModelConfig,
    groups: ProcessGroupCollection,
    *,
    receivers: Receivers = "all",
    device: torch.device | None = None,
    adapter: AdapterConfig | None = None,
    visit: Visit | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the Hugging Face tensors of a running model that is sharded over TP, PP and VPP.

    A collective over `groups.tp` and `groups.pp`: every rank of a replica must iterate to the end, also a
    rank that receives no tensor (`for _ in weights: pass`). Replicas do not wait for each other. The order is
    embedding, layer after layer, final norm, output layer; within a layer that of the weight table. At most
    the tensors of one parameter are in memory at a time. They are new tensors, which the next training step
    does not change. Padding of the vocabulary is removed. With tied embeddings there is no `lm_head.weight`.
    Distributed experts travel to all ranks of their stage: then every rank of the job must iterate.

    Args:
        stages: the pipeline stages of this rank in order: stages without wrappers (DDP).
        model: the shape of it all. groups: `tp` and `pp`; with experts also `ep` and `expt_tp`.
        receivers: "all": every rank gets every tensor. "first": TP rank 0 of the first pipeline rank does.
            "stage": TP rank 0 of each pipeline rank gets those of its own stages.
        device: of the tensors; None: of the parameters. visit: called before one is read, on all replicas.
        adapter: iterate over its tensors, by PEFT's names after `base_model.model.`; None: over the base's.
    Yields:
        name and full tensor, in the type of the parameter.
    Raises:
        ConversionError: the stages do not make up such a model.
    """
    tp, pp, to_all = groups.tp, groups.pp, receivers == "all"
    mapped = mapped_parameters(stages, model, tp.size(), ExpertRanks.of(groups, model), adapter)
    own = {(each.name, each.layer, each.expert): each.parameter for each in mapped}
    dtypes = {(each.name, each.layer): each.dtype for each in mapped}
    owners = {} if receivers == "stage" else _find_owners(dtypes, pp)
    table = adapter_table(model, adapter) if adapter else weights_table(model, stages[0].vocab_size)
    where = next(stages[0].parameters()).device if visit is None else visit.device
    for name, layer, expert in _in_order(table, model.num_layers):
        mapping, shard = table[name].at(layer, expert), own.get((name, layer, expert))
        if shard is not None:
            shard = _readable(shard, dtypes[name, layer], visit)
        shares = groups.expt_tp if "#" in name else tp
        shape = mapping.shard_shape(shares.size())
        if "#" in name and (name, layer) in dtypes:
            if shard is None:
                shard = torch.empty(shape, dtype=dtypes[name, layer], device=where)
            owner = expert // (mapping.num_experts // groups.ep.size())
            dist.broadcast(shard, dist.get_global_rank(groups.ep, owner), group=groups.ep)
        if receivers != "stage":
            if (name, layer) not in owners:
                raise ConversionError(
                    f"no pipeline stage has {mapping.hf[0].name}, expected all weights of the given shape"
                )
            shard = _cross_pipeline(shard, owners[name, layer], shape, where, pp, to_all=to_all)
        if shard is not None:
            shards = _gather_shards(shard, mapping, shares, to_all=to_all or "#" in name)
            if shards and (to_all or tp.rank() == 0):
                names = [tensor.name for tensor in mapping.hf]
                yield from zip(names, mapping.megatron_to_hf(shards, device), strict=True)


def _readable(shard: torch.Tensor, dtype: torch.dtype, visit: Visit | None) -> torch.Tensor:
    """A parameter's values, dense."""
    shard = shard if visit is None else visit(shard)
    return shard if shard.is_floating_point() else dequantize(shard, dtype)


class Receipt:
    """A record of the tensors sent to another program: shape, dtype and CRC-32 of the bytes, by name.

    A program that hands weights over again and again keeps one, and learns from `num_changed` whether they
    have moved, and from its own checksums whether they have arrived.
    """

    def __init__(self) -> None:
        self.entries: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {}
        self.num_changed = 0
        """Tensors of the last hand-over that differ from those of the one before, or were not in it."""

    def of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of `iter_hf_weights` as they come, noted."""
        self.num_changed = 0
        for name, tensor in weights:
            content = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
            entry = (tuple(tensor.shape), tensor.dtype, zlib.crc32(content.data))
            self.num_changed += self.entries.get(name) != entry
            self.entries[name] = entry
            yield name, tensor


def mapped_parameters(
    stages: Sequence[LanguageModule],
    model: ModelConfig,
    tp_size: int,
    experts: ExpertRanks | None = None,
    adapter: AdapterConfig | None = None,
) -> list[MappedParameter]:
    """The parameters of this rank's pipeline stages with their mappings, in the order of `iter_hf_weights`.

    The padded size of the vocabulary is read from the stages.

    Args:
        stages: stages without wrappers.
        model: the shape of the whole model.
        tp_size: number of tensor-parallel ranks.
        experts: the place of this rank among those that share experts; None: every rank has all of them, cut
            over TP.
        adapter: the parameters of these adapters; None: all others.
    Raises:
        ConversionError: a parameter has no place in such a model, or has another shape.
    """
    table = adapter_table(model, adapter) if adapter else parameter_table(model, stages[0].vocab_size)
    experts = experts or ExpertRanks(tp=TPShard(0, tp_size))
    first_expert = experts.rank * ((model.num_experts or 0) // experts.size)
    found: dict[tuple[str, int, int], MappedParameter] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if (INSIDE in name) is (adapter is None):
                continue
            layer = expert = 0
            key = name
            if match := _LAYER.match(name):
                # The number in the name counts within the stage, the layer's own from 1 over the whole model.
                layer = stage.decoder.layers[int(match[1])].layer_number - 1
                key = table_name(_LAYER.sub("decoder.layers.*.", name))
            if match := _EXPERT.search(key):
                expert, key = first_expert + int(match[1]), _EXPERT.sub(".local_experts.#.", key)
            _check_parameter(name, parameter, key, table, experts.tp.size if match else tp_size)
            mapping, own = table[key].at(layer, expert), parameter.detach()
            dtype = own.dtype if own.is_floating_point() else stage.config.params_dtype
            found[key, layer, expert] = MappedParameter(key, layer, expert, own, mapping, dtype)
    return [found[key] for key in _in_order(table, model.num_layers) if key in found]


def _check_parameter(name: str, parameter: torch.Tensor, key: str, table: Table, tp_size: int) -> None:
    if key not in table:
        raise ConversionError(
            f"the model has a parameter {name}, which its configuration has no place "
            f"for{nearest(key, list(table))}; expected a GPTModel of the given shape, without wrappers"
        )
    expected = table[key].shard_shape(tp_size)
    if (found := dense_shape(parameter)) != expected:
        raise ConversionError(
            f"{name} of the model has shape {found}, expected {expected} by its configuration at TP {tp_size}"
        )


def _in_order(table: Table, num_layers: int) -> Iterator[tuple[str, int, int]]:
    """Name, layer and expert of every parameter of the whole model, in the order of `iter_hf_weights`."""
    for is_in_layer, group in groupby(table.items(), key=lambda item: "*" in item[0]):
        rows = list(group)
        for layer in range(num_layers if is_in_layer else 1):
            for name, mapping in rows:
                if layer in mapping.layers:
                    yield from ((name, layer, expert) for expert in range(mapping.num_experts))


def _find_owners(
    own: dict[tuple[str, int], torch.dtype], pp: dist.ProcessGroup
) -> dict[tuple[str, int], _Owner]:
    """The pipeline rank of every parameter, by name and layer; a collective over the pipeline group."""
    dtypes: list[dict[tuple[str, int], torch.dtype]] = [{} for _ in range(pp.size())]
    dist.all_gather_object(dtypes, own, group=pp)
    return {
        key: _Owner(rank, dtype)
        for rank, rank_dtypes in enumerate(dtypes)
        for key, dtype in rank_dtypes.items()
    }


def _cross_pipeline(
    shard: torch.Tensor | None,
    owner: _Owner,
    shape: tuple[int, ...],
    device: torch.device,
    pp: dist.ProcessGroup,
    *,
    to_all: bool,
) -> torch.Tensor | None:
    """Send a shard from its pipeline rank to all pipeline ranks or to the first; None on the others."""
    source, rank = owner.pp_rank, pp.rank()
    if pp.size() == 1:
        return shard
    if not to_all and rank not in (0, source):
        return None
    moved = torch.empty(shape, dtype=owner.dtype, device=device) if shard is None else shard.contiguous()
    if to_all:
        dist.broadcast(moved, dist.get_global_rank(pp, source), group=pp)
    elif source == 0:
        return moved
    elif rank == source:
        dist.send(moved, dist.get_global_rank(pp, 0), group=pp)
        return None
    else:
        dist.recv(moved, dist.get_global_rank(pp, source), group=pp)
    return moved


def _gather_shards(
    shard: torch.Tensor, mapping: WeightMapping, tp: dist.ProcessGroup, *, to_all: bool
) -> list[torch.Tensor]:
    """All shards of a parameter, on every TP rank or on TP rank 0 only; [] on the others."""
    is_receiver = to_all or tp.rank() == 0
    if tp.size() == 1 or mapping.replicated:
        return [shard] if is_receiver else []
    shard = shard.contiguous()
    shards = [torch.empty_like(shard) for _ in range(tp.size())] if is_receiver else []
    if to_all:
        dist.all_gather(shards, shard, group=tp)
    else:
        dist.gather(shard, shards or None, dst=dist.get_global_rank(tp, 0), group=tp)
    return shards


def import_hf(
    stages: Sequence[LanguageModule],
    folder: StrPath,
    model: ModelConfig,
    groups: ProcessGroupCollection,
    *,
    visit: Visit | None = None,
) -> None:
    """Fill this rank's pipeline stages from a Hugging Face folder; a collective over the whole job.

    Names, shapes and types of all tensors are checked before the first byte is copied. Weights stored in
    another type are rounded to the type of the parameters (to nearest even), which is logged. Of parameters
    in 4 bits one at a time is dense.

    Args:
        stages: the pipeline stages of this rank: stages without wrappers, ours or upstream's own.
        folder: a Hugging Face folder, with config.json and the weights.
        model: the shape of the whole model, as `model_of(folder)` reads it.
        groups: only `tp` is used; with experts also `ep` and `expt_tp`.
        visit: where a parameter is to be written.
    Raises:
        ConversionError: on every rank, if the folder cannot be read or does not fit the model.
    """
    folder, shard = local_path(folder), TPShard(groups.tp.rank(), groups.tp.size())
    experts = ExpertRanks.of(groups, model)
    with all_or_none():
        if not (folder / "config.json").is_file():
            raise ConversionError(f"{folder} has no config.json, expected the folder of a Hugging Face model")
        source = open_checked(folder, model, next(stages[0].parameters()).dtype, "PR, --precision")
        for each in mapped_parameters(stages, model, shard.size, experts):
            slices = [source[tensor.name] for tensor in each.mapping.hf]
            target, is_dense = each.parameter, each.parameter.is_floating_point()
            written = target = target if visit is None else visit(target)
            if not is_dense:
                target = target.new_empty(dense_shape(target), dtype=each.dtype)
            each.mapping.hf_to_megatron(target, slices, experts.tp if "#" in each.name else shard)
            if not is_dense:
                written.copy_(quantize(target))


def export_hf(
    stages: Sequence[LanguageModule],
    folder: StrPath,
    model: ModelConfig,
    groups: ProcessGroupCollection,
    *,
    hf_source: StrPath | None,
    tokenizer: PreTrainedTokenizerBase,
    file_bytes: int = FILE_BYTES,
    adapter: AdapterConfig | None = None,
    visit: Visit | None = None,
    step: int | None = None,
) -> None:
    """Write the model as a folder that transformers loads; a collective over the whole job.

    A temporary folder replaces `folder` at the end, or never. Weights keep the parameters' dtype.
    Args:
        stages: the pipeline stages of this rank: stages without wrappers, ours or upstream's own.
        folder: the folder to write, on a file system that every writing rank can access.
        model: the shape of the whole model.
        groups: `tp`, `pp` and `dp_cp` are used; with experts also `ep` and `expt_tp`.
        hf_source: of the weights' origin, whose config files are kept where they say the same.
        tokenizer: saved beside the weights. file_bytes: of the largest safetensors file.
        adapter: of the stages, merged into the weights. visit: called, on all ranks, before one is read.
        step: the finished steps of the run.
    Raises:
        ConversionError: on every rank, if one cannot write, or `folder` has anything else than such a model.
    """
    folder, hf_source = local_path(folder).resolve(), None if hf_source is None else local_path(hf_source)
    is_first, is_writer = dist.get_rank() == 0, groups.dp_cp.rank() == 0
    experts, table, partial = ExpertRanks.of(groups, model), weights_table(model), partial_folder(folder)
    with ExitStack() as stack:
        with all_or_none():
            dtypes = {
                tensor: mapped.dtype
                for mapped in mapped_parameters(stages, model, groups.tp.size(), experts)
                if mapped.name in table  # not a tied output layer, the last stage's copy of the embedding
                for expert in range(mapped.mapping.num_experts)  # also those of other ranks
                for tensor in table[mapped.name].at(mapped.layer, expert).hf
            }
            if is_first:
                stack.enter_context(staging(folder, [hf_source] if hf_source else [], overwrite=True))
        layout, total_bytes = _lay_out(dtypes, groups.pp, file_bytes)
        with all_or_none():
            if is_writer or experts.size > 1 or visit:
                how = _STAGE | {"visit": visit}
                own = dict(iter_hf_weights(stages, model, groups, adapter=adapter, **how)) if adapter else {}
                scale, has_all = adapter.scale if adapter else 1.0, is_writer and groups.tp.rank() == 0
                write_received(
                    iter_hf_weights(stages, model, groups, **how), partial, dtypes if has_all else {}, layout,
                    lambda name, tensor: HFBlock(name, 0, 0, merged(name, tensor, own.get, scale)),
                )  # fmt: skip
        with all_or_none():
            if is_first:
                with writing(partial):
                    if len(set(layout.values())) > 1:
                        write_index(partial, layout, total_bytes, None)
                    dtype = next(stages[0].parameters()).dtype
                    write_descriptions(partial, model, hf_source, tokenizer, dtype, step)
                publish(folder, "Hugging Face folder", step)


def _lay_out(
    dtypes: dict[HFTensor, torch.dtype], pp: dist.ProcessGroup, file_bytes: int
) -> tuple[dict[str, str], int]:
    """The file name of every tensor, and the bytes of all tensors; no file is shared between pipeline ranks.

    A collective over the pipeline group.

    Args:
        dtypes: types of the tensors of this pipeline rank, in the order of writing.
        pp: the pipeline group.
        file_bytes: largest size of a file.
    """
    own = {name: torch.Size(shape).numel() * dtype.itemsize for (name, shape), dtype in dtypes.items()}
    sizes: list[dict[str, int]] = [{} for _ in range(pp.size())]
    dist.all_gather_object(sizes, own, group=pp)
    layout = name_files([file for rank_sizes in sizes for file in divide(rank_sizes, file_bytes)])
    return layout, sum(sum(rank_sizes.values()) for rank_sizes in sizes)


def write_received(
    weights: Iterator[tuple[str, torch.Tensor]],
    partial: Path,
    dtypes: dict[HFTensor, torch.dtype],
    layout: Mapping[str, str],
    block_of: Callable[[str, torch.Tensor], HFBlock],
) -> None:
    """Write the tensors that this rank receives.

    After a failed write the iteration still runs to its end, because other ranks wait for this rank's shards.

    Args:
        weights: the iterator of `iter_hf_weights`.
        partial: the folder to write to.
        dtypes: types of the tensors that this rank writes; empty on a rank that writes none.
        layout: file name by tensor name.
        block_of: what is written of a tensor.
    """
    try:
        with SafetensorsWriter(partial, dtypes, layout) as files:
            for received in weights if dtypes else ():
                files.write(block_of(*received))
            files.check_complete()
    finally:
        deque(weights, maxlen=0)
