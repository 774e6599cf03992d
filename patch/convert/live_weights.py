"""The weights of a running model: filled from a Hugging Face folder, iterated over, and exported as one.

In an export all pipeline stages write at the same time, tensor by tensor.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ModelConfig
from patch.convert.hf_config_files import write_descriptions, write_index
from patch.convert.hf_layout import FILE_BYTES, divide, name_files
from patch.convert.hf_reader import HFFolder, open_checked
from patch.convert.mappings import HFBlock, HFTensor, TPShard, WeightMapping
from patch.convert.merge import merged
from patch.convert.safetensors_writer import SafetensorsWriter
from patch.convert.target_folder import partial_folder, publish, staging, writing
from patch.convert.weight_table import Table, adapter_table, parameter_table, weights_table
from patch.distributed.collectives import all_or_none
from patch.errors import ConversionError, nearest
from patch.families.adapters import INSIDE, PEFT_PREFIX, AdapterConfig
from patch.families.weights import BUFFERS, table_name
from patch.logger import get_logger
from patch.model.nf4_product import dense_shape, dequantize, scale_table, write
from patch.storage.places import StrPath, local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = get_logger(__name__)

Receivers = Literal["all", "first", "stage"]
"""The ranks that receive the tensors of `iter_hf_weights`."""
_STAGE: Any = {"receivers": "stage", "device": torch.device("cpu")}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


class ExpertRanks(NamedTuple):
    """The place of this rank among the ranks that share the experts of a layer."""

    rank: int = 0
    """The rank in the EP group; its ranks have different experts."""
    size: int = 1
    tp: TPShard = TPShard(0, 1)
    """The shard in the ETP group; its ranks share each expert."""

    @classmethod
    def of(cls, groups: ProcessGroupCollection, model: ModelConfig) -> ExpertRanks:
        """Return this rank's place, with `groups.tp` as ETP if the model has no experts."""
        if model.num_experts is None:
            return cls(tp=TPShard(groups.tp.rank(), groups.tp.size()))
        ep, tp = groups.ep, groups.expt_tp
        return cls(ep.rank(), ep.size(), TPShard(tp.rank(), tp.size()))


class GatherOne(Protocol):
    """Gathers a parameter of which this rank keeps a shard (the optimizer's `meta_weights`)."""

    device: torch.device

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor for a parameter or a view of it; valid until the next call."""


class MappedParameter(NamedTuple):
    """A parameter of this rank with the mapping to its Hugging Face tensors."""

    name: str
    """Name in the weight table, with `*` for the layer and `#` for the expert."""
    layer: int
    """0-based over the whole model; 0 outside of layers."""
    expert: int
    """0-based in its layer; 0 for other parameters."""
    parameter: torch.Tensor
    """The shard of this tensor-parallel rank, detached."""
    mapping: WeightMapping
    """The table's mapping for this layer and expert."""
    dtype: torch.dtype
    """Dtype of the values; for nf4 weights the dtype of the matrix products."""
    owner: torch.Tensor
    """The parameter or buffer itself."""


class _Owner(NamedTuple):
    """The pipeline rank that has a parameter, and the parameter's dtype."""

    pp_rank: int
    dtype: torch.dtype


_Owners = dict[tuple[str, int], _Owner]
"""Name and layer -> owner."""


def iter_hf_weights(
    stages: Sequence[LanguageModule],
    model: ModelConfig,
    groups: ProcessGroupCollection,
    *,
    receivers: Receivers = "all",
    device: torch.device | None = None,
    adapter: AdapterConfig | None = None,
    visit: GatherOne | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and full tensor, in the parameter's dtype, of a live model that is sharded over TP, PP, VPP.

    A collective over `groups.tp` and `groups.pp`: every rank of a replica must iterate to the end, also a
    rank that receives no tensor (`for _ in weights: pass`). Replicas do not wait for each other. If experts
    are distributed (EP), each expert is broadcast over the EP group, and every rank of the job must iterate.

    The order is embedding, layer after layer, final norm, output layer; within a layer the order of the
    weight table. At most one parameter's tensors are in memory. They are new tensors, which the next training
    step does not change. Vocabulary padding is removed. With tied embeddings there is no `lm_head.weight`.

    Args:
        stages: the pipeline stages of this rank in order, without wrappers (DDP).
        groups: `tp` and `pp`; with experts also `ep` and `expt_tp`.
        receivers: "all": every rank gets every tensor. "first": only TP rank 0 of the first pipeline rank.
            "stage": TP rank 0 of each pipeline rank gets the tensors of its own stages.
        device: of the tensors, or None for the parameters' device.
        adapter: iterate over its tensors, by PEFT's names after `base_model.model.`; None: the base's.
        visit: gathers a parameter before it is read; called on all replicas.
    Raises:
        ConversionError: the stages do not make up such a model.
    """
    tp, pp, to_all = groups.tp, groups.pp, receivers == "all"
    mapped = mapped_parameters(stages, model, tp.size(), ExpertRanks.of(groups, model), adapter)
    own = {(each.name, each.layer, each.expert): each.parameter for each in mapped}
    owners = {(each.name, each.layer): _Owner(pp.rank(), each.dtype) for each in mapped}
    if receivers != "stage":
        owners = _of_all_stages(owners, pp)
    table = adapter_table(model, adapter) if adapter else weights_table(model, stages[0].vocab_size)
    where = next(stages[0].parameters()).device if visit is None else visit.device
    for name, layer, expert, owner in _owned(table, model.num_layers, owners, may_lack=receivers == "stage"):
        mapping, shard = table[name].at(layer, expert), own.get((name, layer, expert))
        if shard is not None:
            shard = shard if visit is None else visit(shard)
            shard = shard if shard.is_floating_point() else dequantize(shard, owner.dtype)
        shares = groups.expt_tp if "#" in name else tp
        shape = mapping.shard_shape(shares.size())
        if "#" in name and owner.pp_rank == pp.rank():
            if shard is None:
                shard = torch.empty(shape, dtype=owner.dtype, device=where)
            ep_rank = expert // (mapping.num_experts // groups.ep.size())
            dist.broadcast(shard, dist.get_global_rank(groups.ep, ep_rank), group=groups.ep)
        if receivers != "stage":
            shard = _cross_pipeline(shard, owner, shape, where, pp, to_all=to_all)
        if shard is not None:
            shards = _gather_shards(shard, mapping, shares, to_all=to_all or "#" in name)
            if shards and (to_all or tp.rank() == 0):
                names = [tensor.name for tensor in mapping.hf]
                yield from zip(names, mapping.megatron_to_hf(shards, device), strict=True)


class Receipt:
    """A record of the tensors sent to another program: shape, dtype and CRC-32 of the bytes, by name.

    A sender keeps one receipt over repeated transfers. `num_changed` tells whether weights have changed, and
    the receiver's own checksums tell whether they have arrived.
    """

    def __init__(self) -> None:
        self.entries: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {}
        self.num_changed = 0
        """Tensors of the last transfer that differ from the previous transfer or were not in it."""

    def of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of `iter_hf_weights` and record them."""
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
    """Return this rank's parameters and stored buffers with mappings, in the order of `iter_hf_weights`.

    The padded vocabulary size is read from the stages.

    Args:
        stages: stages without wrappers.
        model: the shape of the whole model.
        experts: this rank's place among the ranks that share experts, or None if TP divides each expert.
        adapter: return the parameters of these adapters; None: all other parameters.
    Raises:
        ConversionError: a parameter has no place in such a model, or has another shape.
    """
    table = adapter_table(model, adapter) if adapter else parameter_table(model, stages[0].vocab_size)
    experts = experts or ExpertRanks(tp=TPShard(0, tp_size))
    first_expert = experts.rank * ((model.num_experts or 0) // experts.size)
    found: dict[tuple[str, int, int], MappedParameter] = {}
    for stage in stages:
        for name, parameter in chain(stage.named_parameters(), stage.named_buffers()):
            is_buffer = not isinstance(parameter, torch.nn.Parameter)
            if (INSIDE in name) is (adapter is None) or (is_buffer and not name.endswith(BUFFERS)):
                continue
            layer = expert = 0
            key = name
            if match := _LAYER.match(name):
                # The name's number is 0-based in the stage; layer_number is 1-based in the whole model.
                layer = stage.decoder.layers[int(match[1])].layer_number - 1
                key = table_name(_LAYER.sub("decoder.layers.*.", name))
            if match := _EXPERT.search(key):
                expert, key = first_expert + int(match[1]), _EXPERT.sub(".local_experts.#.", key)
            _check_parameter(name, parameter, key, table, experts.tp.size if match else tp_size)
            mapping, own = table[key].at(layer, expert), parameter.detach()
            dtype = own.dtype if own.is_floating_point() else stage.config.params_dtype
            found[key, layer, expert] = MappedParameter(key, layer, expert, own, mapping, dtype, parameter)
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
    """Yield name, layer and expert of the whole model's parameters, in the order of `iter_hf_weights`."""
    for is_in_layer, group in groupby(table.items(), key=lambda item: "*" in item[0]):
        rows = list(group)
        for layer in range(num_layers if is_in_layer else 1):
            for name, mapping in rows:
                if layer in mapping.layers:
                    yield from ((name, layer, expert) for expert in range(mapping.num_experts))


def _owned(
    table: Table, num_layers: int, owners: _Owners, *, may_lack: bool
) -> Iterator[tuple[str, int, int, _Owner]]:
    """Yield the parameters of `_in_order` with their owners; all of them, or those that have one."""
    for name, layer, expert in _in_order(table, num_layers):
        if (owner := owners.get((name, layer))) is not None:
            yield name, layer, expert, owner
        elif not may_lack:
            lacking = table[name].at(layer, expert).hf[0].name
            raise ConversionError(f"no pipeline stage has {lacking}, expected all weights of the given shape")


def _of_all_stages(own: _Owners, pp: dist.ProcessGroup) -> _Owners:
    """Return the owners of the parameters of all pipeline ranks; a collective over `pp`."""
    found: list[_Owners] = [{} for _ in range(pp.size())]
    dist.all_gather_object(found, own, group=pp)
    return {key: owner for of_rank in found for key, owner in of_rank.items()}


def _cross_pipeline(
    shard: torch.Tensor | None,
    owner: _Owner,
    shape: tuple[int, ...],
    device: torch.device,
    pp: dist.ProcessGroup,
    *,
    to_all: bool,
) -> torch.Tensor | None:
    """Send a shard from its pipeline rank to all pipeline ranks or the first; return None on other ranks."""
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
    """Gather all shards of a parameter on every TP rank or TP rank 0; return [] on other ranks."""
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
    visit: GatherOne | None = None,
) -> None:
    """Fill this rank's pipeline stages from a Hugging Face folder; a collective over the whole job.

    Names, shapes and dtypes of all tensors are checked before the first byte is copied. Weights of another
    dtype are rounded to the parameters' dtype (to nearest even), which is logged. Only one nf4 weight at a
    time is dense.

    Args:
        stages: pipeline stages of this rank without wrappers, ours or upstream's own.
        folder: a Hugging Face folder, with config.json and the weights.
        model: the shape of the whole model, as from `model_of(folder)`.
        groups: only `tp` is used; with experts also `ep` and `expt_tp`.
        visit: returns the tensor to write for a parameter.
    Raises:
        ConversionError: on every rank, if the folder cannot be read or does not fit the model.
    """
    folder = local_path(folder)
    with all_or_none():
        if not (folder / "config.json").is_file():
            raise ConversionError(f"{folder} has no config.json, expected the folder of a Hugging Face model")
        source = open_checked(folder, model, next(stages[0].parameters()).dtype, "PR, --precision")
        if source.further:
            _logger.info("%s: its MTP layers are not trained; exports of this run will lack them", folder)
        fill(stages, model, groups, source, visit=visit)


def fill(
    stages: Sequence[LanguageModule],
    model: ModelConfig,
    groups: ProcessGroupCollection,
    source: HFFolder,
    *,
    adapter: AdapterConfig | None = None,
    visit: GatherOne | None = None,
) -> None:
    """Fill the parameters of `import_hf`, or those of adapters from a PEFT folder, from a checked folder."""
    shard, experts = TPShard(groups.tp.rank(), groups.tp.size()), ExpertRanks.of(groups, model)
    prefix = PEFT_PREFIX if adapter else ""
    for each in mapped_parameters(stages, model, shard.size, experts, adapter):
        slices = [source[prefix + tensor.name] for tensor in each.mapping.hf]
        tp = experts.tp if "#" in each.name else shard
        target = each.parameter if visit is None else visit(each.parameter)
        is_dense = target.is_floating_point()
        values = target if is_dense else target.new_empty(dense_shape(target), dtype=each.dtype)
        each.mapping.hf_to_megatron(values, slices, tp)
        if not is_dense:
            write(target, values, partial(_part_of_scales, each.mapping, slices, values, tp))


def _part_of_scales(
    mapping: WeightMapping, slices: Sequence[Any], shard: torch.Tensor, tp: TPShard
) -> torch.Tensor:
    """Return the part of the whole tensors' `scale_table` that belongs to a shard [O, I]: [O, I / 16]."""
    tables = [scale_table(each[:].to(shard.dtype)) for each in slices]
    hf = tuple(HFTensor("scales", (*table.shape,)) for table in tables)
    part = shard.new_empty(len(shard), shard.shape[1] // 16, dtype=torch.float32)
    dataclasses.replace(mapping, hf=hf).hf_to_megatron(part, tables, tp)
    return part


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
    visit: GatherOne | None = None,
    step: int | None = None,
) -> None:
    """Write the model as a folder that transformers loads; a collective over the whole job.

    A temporary folder replaces `folder` at the end, or never. Weights keep the parameters' dtype.

    Args:
        stages: pipeline stages of this rank without wrappers, ours or upstream's own.
        folder: the target, on a file system that every writing rank can access.
        groups: `tp`, `pp` and `dp_cp` are used; with experts also `ep` and `expt_tp`.
        hf_source: the folder of the original weights; its unchanged config files are kept.
        file_bytes: the largest safetensors file.
        adapter: adapters of the stages, merged into the weights.
        visit: gathers a parameter before it is read; called on all ranks.
    Raises:
        ConversionError: on every rank, if a rank cannot write, or `folder` holds anything but such a model.
    """
    folder, hf_source = local_path(folder).resolve(), None if hf_source is None else local_path(hf_source)
    is_first, is_writer = dist.get_rank() == 0, groups.dp_cp.rank() == 0
    experts, table, partial = ExpertRanks.of(groups, model), weights_table(model), partial_folder(folder)
    with ExitStack() as stack:
        with all_or_none():
            dtypes = {
                tensor: mapped.dtype
                for mapped in mapped_parameters(stages, model, groups.tp.size(), experts)
                if mapped.name in table  # not a tied output layer: a copy of the embedding
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
    """Return the file name of every tensor, and the bytes of all tensors; a collective over `pp`.
    No file is shared between pipeline ranks. `dtypes` is in the order of writing.
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
        dtypes: dtypes of the tensors that this rank writes; empty on a rank that writes none.
        layout: file name by tensor name.
        block_of: returns the block to write for a tensor.
    """
    try:
        with closing(SafetensorsWriter(partial, dtypes, layout)) as files:
            for received in weights if dtypes else ():
                files.write(block_of(*received))
            files.check_complete()
    finally:
        deque(weights, maxlen=0)
