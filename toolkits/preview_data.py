"""llama-patch preview: show rows or documents as tokens with their loss mask, and statistics of the sets."""

from __future__ import annotations

import argparse
import os
import sys
from os.path import isfile
from typing import Any

from patch.checks.rules import check_range
from patch.config.choices import ROW_KINDS, RowKind
from patch.config.data_spec import parse_data
from patch.config.fields import FIELDS
from patch.config.flags import add_flags, fields_of
from patch.config.positions import read_variables
from patch.config.schema import DataConfig
from patch.config.yaml_io import read_yaml
from patch.errors import ConfigError, about
from patch.preflight.hub_names import fetch_sets, take_models
from patch.preflight.model_of_folder import refuse_other_forms
from toolkits._arguments import ArgumentParser, exit_code_of, output_file, positive, typed

_DATA_FLAGS = (
    "objective",
    "tokenizer_name_or_path",
    "seq_length",
    "max_padding_length",
    "columns",
    "alpaca_input_join",
    "chat_template",
    "chat_template_kwargs",
    "train_on",
    "allow_special_tokens",
    "long_samples",
    "max_dropped_share",
    "cache_dir",
    "data_workers",
)
"""Fields that decide how raw rows are read."""
_GONE = "the terminal shows rows and figures, and --json FILE writes them"
_LENGTH = 4096
"""Tokens of a sample if neither a flag nor --config sets them."""


def main(argv: list[str]) -> int:
    """Run the command line; return 0, or the exit code of the error."""
    from patch.config import user_message

    options = _parser().parse_args(argv)
    return exit_code_of(lambda: _preview(options), user_message)


def _preview(options: argparse.Namespace) -> int:
    from patch.compat import quick_start

    with quick_start():
        from patch.data.preview.preview import Preview
        from patch.data.preview.tokens import terminal
    from patch.data.tokenizer import load_tokenizer

    data, tokenizer, row_kind = _settings(options)
    preview = Preview(data, load_tokenizer(tokenizer), row_kind)
    console = terminal(sys.stdout)
    preview.show_rows(console, options.rows, options.row)
    if options.statistics:
        preview.show_statistics(console)
    if options.json is not None:
        preview.write(options.json)
    preview.check()
    return 0


def _settings(options: argparse.Namespace) -> tuple[DataConfig, str | None, RowKind]:
    """Return the data settings, the tokenizer's folder or name, and what its rows hold. Flags win over
    environment variables, which win over --config. For .bin/.idx `max_padding_length` is SEQ_LEN."""
    run = read_yaml(options.config) if options.config is not None else {}
    flags = fields_of(options, _DATA_FLAGS)
    values: dict[str, Any] = {**run, **read_variables(os.environ), **flags}
    take_models(values)
    refuse_other_forms(values)
    if options.data is not None:
        text = fetch_sets(options.data, "train_data_path")
        values |= {"train_data_path": text, "dataset_type": "idxmap" if _is_indexed(text) else "raw"}
    if "train_data_path" not in values:
        raise ConfigError(
            "no data is named, expected what DATASET_PATH of the run would be, or --config FILE"
        )
    length = values.get("seq_length", _LENGTH)
    if values.get("dataset_type", "idxmap") == "idxmap" and "max_padding_length" not in flags:
        values["max_padding_length"] = length
    values.setdefault("max_padding_length", length)
    for name in _DATA_FLAGS:
        if name in values:
            check_range(FIELDS[name], values[name])
    of_data = {name: value for name, value in values.items() if FIELDS[name].section == "data"}
    tokenizer = values.get("tokenizer_name_or_path") or values.get("load")
    return DataConfig(**of_data), tokenizer, ROW_KINDS.get(values.get("objective", ""), "conversation")


def _is_indexed(text: str) -> bool:
    with about("train_data_path"):
        parts = parse_data(text)
    for path in (part.path for part in parts):
        if path.endswith((".bin", ".idx")) and isfile(f"{path[:-4]}.idx"):
            raise ConfigError(
                f"got {path}, expected the path of .bin and .idx without the ending, that is {path[:-4]}",
                field="train_data_path",
            )
    return all(isfile(f"{part.path}.idx") for part in parts)


def _parser() -> argparse.ArgumentParser:
    prog = typed("python -m toolkits.preview_data")
    parser = ArgumentParser(prog=prog, description=__doc__, gone=dict.fromkeys(("--html", "--plot"), _GONE))
    parser.add_argument(
        "data", nargs="?", metavar="DATA",
        help="what DATASET_PATH is: a file, folder or glob of rows, the prefix of .bin and .idx, or several "
        "with weights in quotation marks (default: that of --config)",
    )  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="a run as YAML, such as the config.yaml of a run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--rows",
        type=positive,
        default=1,
        metavar="N",
        help="show the first N rows or documents of each set [1]",
    )
    which.add_argument(
        "--row",
        type=positive,
        metavar="N",
        help="show line N of a JSONL or CSV file, row N of another, document N of .bin/.idx",
    )
    parser.add_argument(
        "--no-statistics", dest="statistics", action="store_false", help="do not read the sets to their ends"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write all of this as JSON")
    note = f"--max-padding-length is --seq-length, or {_LENGTH} where --config does not say it either."
    add_flags(parser.add_argument_group("the run's own flags", note), _DATA_FLAGS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
