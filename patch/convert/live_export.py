"""Running model -> Hugging Face folder: gathered tensor by tensor, written by every stage at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import PreTrainedTokenizerBase

from patch.config.schema import ModelConfig
from patch.convert.folder import partial_folder, publish, staging, writing
from patch.convert.hf_config_files import write_descriptions, write_index
from patch.convert.hf_layout import FILE_BYTES, divide, name_files
from patch.convert.live_weights import exported_parameters, iter_hf_weights
from patch.convert.mappings import HFBlock, HFTensor
from patch.convert.safetensors_writer import SafetensorsWriter
from patch.distributed.collectives import all_or_none
from patch.logger import get_logger

_logger = get_logger(__name__)


def export_hf(
    stages: Sequence[GPTModel],
    folder: Path,
    model: ModelConfig,
    groups: ProcessGroupCollection,
    *,
    hf_source: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the model as a folder that transformers loads; collective over the job.

    Everything goes into a temporary folder beside `folder`, which replaces it at the end; on failure the
    target stays as it was. Weights keep the parameters' dtype.

    Args:
        stages: the pipeline stages of this rank: GPTModels without wrappers, ours or upstream's own.
        folder: on a file system that every writing rank sees.
        model: the shape of the whole model.
        groups: `tp`, `pp` and `dp_cp` are used.
        hf_source: the folder that the weights came from; its config.json and generation_config.json are
            kept but for what has changed.
        tokenizer: is written beside the weights.
        file_bytes: size at which a new safetensors file is begun.
    Raises:
        ConversionError: on every rank, when a rank cannot write or the target is something else's folder.
    """
    folder = folder.resolve()
    is_first = dist.get_rank() == 0
    partial = partial_folder(folder)
    with ExitStack() as held:
        with all_or_none():
            dtypes = {
                tensor: found.parameter.dtype
                for found in exported_parameters(stages, model, groups.tp.size())
                for tensor in found.mapping.hf
            }
            if is_first:
                sources = [hf_source] if hf_source else []
                held.enter_context(staging(folder, sources, overwrite=True))
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
    """The file name of every tensor, and the bytes of all; each pipeline rank begins files of its own.

    Collective over the pipeline group.

    Args:
        dtypes: of the tensors of this pipeline rank, in the order in which they are to be stored.
    """
    own = {name: torch.Size(shape).numel() * dtype.itemsize for (name, shape), dtype in dtypes.items()}
    sizes: list[dict[str, int]] = [{} for _ in range(pp.size())]
    dist.all_gather_object(sizes, own, group=pp)
    layout = name_files([file for of_rank in sizes for file in divide(of_rank, file_bytes)])
    return layout, sum(sum(of_rank.values()) for of_rank in sizes)


def _write_weights(
    weights: Iterator[tuple[str, torch.Tensor]],
    partial: Path,
    dtypes: dict[HFTensor, torch.dtype],
    layout: dict[str, str],
) -> None:
    """Write the tensors that this rank receives.

    After a failed write the iteration goes on, so that no rank waits for one that gave up.

    Args:
        dtypes: of the tensors that `weights` gives to this rank; empty where it only sends shards.
    """
    by_name = {tensor.name: dtype for tensor, dtype in dtypes.items()}
    try:
        with SafetensorsWriter(partial, list(dtypes), layout, by_name) as files:
            for name, tensor in weights:
                files.write(HFBlock(name, 0, 0, tensor))
            files.check_complete()
    finally:
        deque(weights, maxlen=0)
