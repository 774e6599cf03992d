"""Running model -> Hugging Face folder: gathered tensor by tensor, written by every stage at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from patch.config.schema import RunConfig
from patch.convert.folder import partial_folder, publish, staging, writing
from patch.convert.hf_config_files import write_descriptions, write_index
from patch.convert.hf_reader import SINGLE
from patch.convert.live_weights import Weight, stage_weights
from patch.convert.weight_table import parameter_table
from patch.distributed.collectives import all_or_none
from patch.errors import ConversionError
from patch.families.weights import TIED_OUTPUT
from patch.logger import get_logger

_LOG = get_logger(__name__)
FILE_BYTES = 5 * 2**30
"""Largest file, unless one tensor is larger; also about what a writing rank holds in host memory."""


class Layout(NamedTuple):
    """The files of all stages: `files[i]` holds the names in file i and their bytes."""

    files: list[dict[str, int]]
    first: int
    """Index of this stage's first file."""

    def name(self, index: int) -> str:
        """The file's name as transformers spells it."""
        if len(self.files) == 1:
            return SINGLE
        return f"model-{index + 1:05d}-of-{len(self.files):05d}.safetensors"


def export_hf(
    stages: Sequence[GPTModel],
    folder: Path,
    config: RunConfig,
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
        stages: of this rank, cut over `groups.tp` and `groups.pp`.
        folder: on a file system that every writing rank sees.
        hf_source: the folder that the weights came from; its config.json and generation_config.json are
            kept but for what has changed.
        file_bytes: size at which a new safetensors file is begun.
    Raises:
        ConversionError: on every rank, when a rank cannot write or the target is something else's folder.
    """
    folder = folder.resolve()
    is_first = dist.get_rank() == 0
    partial = partial_folder(folder)
    with ExitStack() as held:
        with all_or_none():
            if is_first:
                sources = [hf_source] if hf_source else []
                held.enter_context(staging(folder, sources, overwrite=True))
        layout = _write_weights(stages, partial, config, groups, file_bytes)
        with all_or_none():
            if is_first:
                with writing(partial):
                    _write_index(partial, layout)
                    write_descriptions(
                        partial, config.model, hf_source, tokenizer, next(stages[0].parameters()).dtype
                    )
                publish(folder)
    _LOG.info("Hugging Face folder written: %s", folder)


def _write_weights(
    stages: Sequence[GPTModel],
    partial: Path,
    config: RunConfig,
    groups: ProcessGroupCollection,
    file_bytes: int,
) -> Layout:
    """Write this rank's files from its first replica; returns the files of all stages."""
    tied = not config.model.untie_embeddings_and_output_weights
    table = parameter_table(config.model, config.padded_vocab_size)
    weights = [weight for weight in stage_weights(stages, table) if not (tied and weight.name == TIED_OUTPUT)]
    files = _split(weights, file_bytes)
    layout = _lay_out(files, groups.pp)
    with all_or_none():
        if groups.dp_cp.rank() == 0:
            _write_stage(files, partial, layout, groups.tp)
    return layout


def _tensor_bytes(weight: Weight) -> dict[str, int]:
    itemsize = weight.parameter.element_size()
    return {tensor.name: torch.Size(tensor.shape).numel() * itemsize for tensor in weight.mapping.hf}


def _split(weights: list[Weight], file_bytes: int) -> list[list[Weight]]:
    """Consecutive weights, at most `file_bytes` together unless one alone is larger."""
    files: list[list[Weight]] = []
    filled = 0
    for weight in weights:
        size = sum(_tensor_bytes(weight).values())
        if not files or filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(weight)
        filled += size
    return files


def _lay_out(files: list[list[Weight]], pp: dist.ProcessGroup) -> Layout:
    """Number the files over the stages; collective over the pipeline group."""
    mine = [{name: size for weight in file for name, size in _tensor_bytes(weight).items()} for file in files]
    stages: list[list[dict[str, int]]] = [[] for _ in range(pp.size())]
    dist.all_gather_object(stages, mine, group=pp)
    return Layout([file for stage in stages for file in stage], sum(map(len, stages[: pp.rank()])))


def _write_stage(files: list[list[Weight]], partial: Path, layout: Layout, tp: dist.ProcessGroup) -> None:
    """Gather and write file by file on TP rank 0; the other TP ranks send their parts.

    After a failed write the gathers go on, so that no rank waits for one that gave up.
    """
    failure: ConversionError | None = None
    for index, weights in enumerate(files, start=layout.first):
        tensors: dict[str, torch.Tensor] = {}
        for weight in weights:
            tensors |= _gather(weight, tp)
        if tp.rank() == 0 and failure is None:
            failure = _try_save(tensors, partial / layout.name(index))
    if failure is not None:
        raise failure


def _gather(weight: Weight, tp: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The weight's whole Hugging Face tensors, on the CPU of TP rank 0; empty on the others."""
    local = weight.parameter.contiguous()
    shards = [local]
    if tp.size() > 1 and not weight.mapping.replicated:
        shards = [torch.empty_like(local) for _ in range(tp.size())] if tp.rank() == 0 else []
        dist.gather(local, shards or None, dst=dist.get_global_rank(tp, 0), group=tp)
    if tp.rank() != 0:
        return {}
    names = [tensor.name for tensor in weight.mapping.hf]
    return dict(zip(names, weight.mapping.take_apart(shards), strict=True))


def _try_save(tensors: dict[str, torch.Tensor], path: Path) -> ConversionError | None:
    try:
        with writing(path):
            path.touch()
            mode = path.stat().st_mode
            save_file(tensors, path, metadata={"format": "pt"})
            path.chmod(mode)  # safetensors lets nobody but the owner read
    except ConversionError as error:
        return error
    return None


def _write_index(partial: Path, layout: Layout) -> None:
    if len(layout.files) > 1:
        placed = {name: layout.name(index) for index, file in enumerate(layout.files) for name in file}
        write_index(partial, placed, sum(sum(file.values()) for file in layout.files), None)
