"""The adapters of a running model: filled from a PEFT folder, and written as one, at any layout.

    FOLDER/adapter_config.json          the configuration, and the name of the base
    FOLDER/adapter_model.safetensors    A and B of every target, in the adapters' dtype
    FOLDER/tokenizer.json ...           the run's tokenizer with its chat template
    FOLDER/trainer_state.json           the step

`PeftModel.from_pretrained` loads it. Experts have the names of transformers 4; each has its own A and B.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ModelConfig
from patch.convert.hf_config_files import write_tokenizer
from patch.convert.live_weights import ExpertRanks, fill, iter_hf_weights, write_received
from patch.convert.mappings import HFBlock, HFTensor
from patch.convert.merge import open_adapter
from patch.convert.target_folder import partial_folder, publish, staging, writing
from patch.distributed.collectives import all_or_none
from patch.families.adapters import PEFT_PREFIX, AdapterConfig, hf_tensors, loads_whole, write_adapter
from patch.logger import get_logger
from patch.storage.hub import snapshot_name
from patch.storage.names import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from patch.storage.places import StrPath, local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = get_logger(__name__)


def import_adapter(
    stages: Sequence[LanguageModule],
    folder: StrPath,
    model: ModelConfig,
    adapter: AdapterConfig,
    groups: ProcessGroupCollection,
) -> None:
    """Fill the adapters of this rank's pipeline stages from a PEFT folder; a collective over the job.

    Args:
        stages: pipeline stages of this rank, with adapters.
        model: the shape of the whole model.
        adapter: the adapters of the stages; `adapter_of(folder)` reads those of the folder.
        groups: only `tp` is used; with experts also `ep` and `expt_tp`.
    Raises:
        ConversionError: on every rank, if the folder cannot be read or does not have these adapters.
    """
    with all_or_none():
        fill(stages, model, groups, open_adapter(local_path(folder), model, adapter), adapter=adapter)


def export_adapter(
    stages: Sequence[LanguageModule],
    folder: StrPath,
    model: ModelConfig,
    adapter: AdapterConfig,
    groups: ProcessGroupCollection,
    *,
    base: str | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    step: int | None = None,
) -> None:
    """Write the adapters as a folder that PEFT loads; a collective over the whole job.

    Rank 0 writes tensor by tensor to a temporary folder beside `folder`, which replaces `folder` at the end.
    On failure `folder` is unchanged.

    Args:
        stages: pipeline stages of this rank, with adapters.
        model: the shape of the whole model.
        groups: `tp`, `pp` and `dp_cp` are used; with experts also `ep` and `expt_tp`.
        base: the base model's folder or hub name.
        tokenizer: saved beside the adapters; None: the base's tokenizer applies.
        step: the finished steps of the run.
    Raises:
        ConversionError: on every rank, if rank 0 cannot write, or `folder` holds anything but adapters.
    """
    folder, is_first = local_path(folder).resolve(), dist.get_rank() == 0
    with ExitStack() as stack:
        with all_or_none():
            if is_first:
                stack.enter_context(staging(folder, [], overwrite=True, kind="PEFT adapter"))
        with all_or_none():
            if groups.dp_cp.rank() == 0 or ExpertRanks.of(groups, model).size > 1:
                cpu = torch.device("cpu")
                weights = iter_hf_weights(
                    stages, model, groups, receivers="first", device=cpu, adapter=adapter
                )
                named = [(PEFT_PREFIX + name, shape) for name, shape in hf_tensors(model, adapter)]
                dtypes = {HFTensor(*each): stages[0].config.params_dtype for each in named}
                write_received(
                    weights, partial_folder(folder), dtypes if is_first else {},
                    {name: ADAPTER_WEIGHTS_NAME for name, _ in named},
                    lambda name, values: HFBlock(PEFT_PREFIX + name, 0, 0, values),
                )  # fmt: skip
        with all_or_none():
            if is_first:
                name = snapshot_name(base or "")
                described = write_adapter(model, adapter, name.repo if name else base)
                text = json.dumps(described | ({"revision": name.revision} if name else {}), indent=2)
                with writing(partial_folder(folder)):
                    (partial_folder(folder) / ADAPTER_CONFIG_NAME).write_text(f"{text}\n")
                    write_tokenizer(partial_folder(folder), tokenizer, step)
                publish(folder, "PEFT adapter", step)
    if is_first and not loads_whole(model, adapter):
        _logger.warning(
            "PEFT on transformers 5 loads only a part of %s, as this model has MLPs beside its experts: use "
            "the merged model there (--export-hf, llama-patch merge), or transformers 4", folder,
        )  # fmt: skip
