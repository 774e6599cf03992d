"""The rules of what is read and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator

from patch.config.data_spec import parse_columns, split_shares
from patch.config.fields import FIELDS, scalar_of, value_of
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts


def columns_are_pairs(config: RunConfig, machine: MachineFacts) -> None:
    """The map of columns can be read, and its names are known."""
    parse_columns(config.data.columns)


def pretraining_reads_indexed_sets(config: RunConfig, machine: MachineFacts) -> None:
    """Pre-training reads .bin/.idx, SFT also raw rows."""
    if not config.training.sft and config.data.dataset_type == "raw":
        why = "pre-training reads .bin/.idx, which llama-patch preprocess makes from rows"
        refuse("dataset_type", "raw", "idxmap, or SFT=true", why)


def documents_are_pretraining(config: RunConfig, machine: MachineFacts) -> None:
    """What is done with documents fits together, and is asked for in pre-training only."""
    data = config.data
    for field in ("split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if config.training.sft and value_of(config, field):
            why = "it is about the documents of a pre-training set"
            refuse(field, str(scalar_of(config, field)).lower(), "none or false, or SFT=false", why)
    if data.reset_position_ids and not data.reset_attention_mask:
        why = "positions that begin again while attention goes on are not built; RoPE knows distances only"
        refuse("reset_position_ids", "true", "false, or --reset-attention-mask too", why)
    if data.split is None:
        return
    _, validation, _ = split_shares(data.split)
    if validation and data.valid_data_path is not None:
        why = "the split names the validation documents already"
        refuse("valid_data_path", data.valid_data_path, "none, or a --split without a second share", why)


def packing_has_conversations(config: RunConfig, machine: MachineFacts) -> None:
    """Conversations are packed; a pre-training sequence is full already."""
    if config.data.packing and not config.training.sft:
        why = "sequences of pre-training are full; --reset-attention-mask keeps their documents apart"
        refuse("packing", "true", "false, or SFT=true", why)


def data_notes(config: RunConfig) -> Iterator[str]:
    """What the data decides instead of a flag, and flags that have no effect on its kind."""
    if config.data.dataset_type == "idxmap" and config.data.max_padding_length != config.model.seq_length:
        yield f"{where('max_padding_length')} has no effect on .bin/.idx: sequences are SEQ_LEN long"
    if config.data.dataset_type == "idxmap":
        for field in ("columns", "alpaca_input_join"):
            if value_of(config, field) != FIELDS[field].default:
                yield f"{where(field)} has no effect on .bin/.idx"
    if config.data.dataset_type == "idxmap" and config.training.sft and config.data.packing:
        yield f"{where('packing')} has no effect on .bin/.idx: the set is packed, or not, as it was made"
    if config.data.reset_attention_mask and not config.data.reset_position_ids:
        yield (
            f"{where('reset_attention_mask')}: positions begin again at each document too, which RoPE, which "
            "knows distances only, does not notice"
        )
