"""Running model -> Hugging Face folder: all pipeline stages write at the same time, tensor by tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ModelConfig
from patch.convert.hf_config_files import write_descriptions, write_index
from patch.convert.hf_layout import FILE_BYTES, divide, name_files
from patch.convert.live_weights import exported_parameters, iter_hf_weights
from patch.convert.mappings import HFBlock, HFTensor
from patch.convert.safetensors_writer import SafetensorsWriter
from patch.convert.target_folder import partial_folder, publish, staging, writing
from patch.distributed.collectives import all_or_none
from patch.logger import get_logger
from patch.storage.places import StrPath, local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = get_logger(__name__)


def export_hf(
    stages: Sequence[GPTModel],
    folder: StrPath,
    model: ModelConfig,
    groups: ProcessGroupCollection,
    *,
    hf_source: StrPath | None,
    tokenizer: PreTrainedTokenizerBase,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the model as a folder that transformers loads; a collective over the whole job.

    All files are written to a temporary folder beside `folder`, which replaces `folder` at the end; on
    failure `folder` stays as it was. Weights keep the dtype of the parameters.

    Args:
        stages: the pipeline stages of this rank: GPTModels without wrappers, ours or upstream's own.
        folder: the folder to write, on a file system that every writing rank can access.
        model: the shape of the whole model.
        groups: `tp`, `pp` and `dp_cp` are used.
        hf_source: the folder that the weights came from; in its config.json and generation_config.json only
            the changed values are replaced. None: there is no such folder.
        tokenizer: the tokenizer to save beside the weights.
        file_bytes: largest size of a safetensors file.
    Raises:
        ConversionError: on every rank, if a rank cannot write or `folder` contains something else than a
            Hugging Face model.
    """
    folder, hf_source = local_path(folder).resolve(), None if hf_source is None else local_path(hf_source)
    is_first = dist.get_rank() == 0
    partial = partial_folder(folder)
    with ExitStack() as stack:
        with all_or_none():
            dtypes = {
                tensor: mapped.parameter.dtype
                for mapped in exported_parameters(stages, model, groups.tp.size())
                for tensor in mapped.mapping.hf
            }
            if is_first:
                sources = [hf_source] if hf_source else []
                stack.enter_context(staging(folder, sources, overwrite=True))
        layout, total_bytes = _lay_out(dtypes, groups.pp, file_bytes)
        with all_or_none():
            if groups.dp_cp.rank() == 0:
                weights = iter_hf_weights(
                    stages, model, groups, receivers="stage", device=torch.device("cpu")
                )
                _write_weights(weights, partial, dtypes if groups.tp.rank() == 0 else {}, layout)
        with all_or_none():
            if is_first:
                with writing(partial):
                    if len(set(layout.values())) > 1:
                        write_index(partial, layout, total_bytes, None)
                    dtype = next(stages[0].parameters()).dtype
                    write_descriptions(partial, model, hf_source, tokenizer, dtype)
                publish(folder)
    _logger.info("Hugging Face folder written: %s", folder)


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


def _write_weights(
    weights: Iterator[tuple[str, torch.Tensor]],
    partial: Path,
    dtypes: dict[HFTensor, torch.dtype],
    layout: dict[str, str],
) -> None:
    """Write the tensors that this rank receives.

    After a failed write the iteration still runs to its end, because other ranks wait for this rank's shards.

    Args:
        weights: the iterator of `iter_hf_weights`.
        partial: the folder to write to.
        dtypes: types of the tensors that `weights` yields on this rank; empty on a rank that only sends
            shards.
        layout: file name by tensor name.
    """
    by_name = {tensor.name: dtype for tensor, dtype in dtypes.items()}
    try:
        with SafetensorsWriter(partial, list(dtypes), layout, by_name) as files:
            for name, tensor in weights:
                files.write(HFBlock(name, 0, 0, tensor))
            files.check_complete()
    finally:
        deque(weights, maxlen=0)
