"""llama-patch preprocess: write pre-training sets (.bin, .idx) from rows of text."""

from __future__ import annotations

import argparse
import os
import sys
from typing import get_args

from patch.config.choices import TokenizerType
from toolkits._arguments import ArgumentParser, exit_code_of, members, typed


def main(argv: list[str]) -> int:
    """Run the command line; return 0, or the exit code of the error."""
    options = _parse(argv)
    return exit_code_of(lambda: _preprocess(options))


def _preprocess(options: argparse.Namespace) -> None:
    # Set before the first use of a tokenizer, which would start threads. The processes use all cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from patch.compat import quick_start

    with quick_start():
        from patch.data.pretraining.preprocess import refuse_existing, write_indexed
    from patch.config.data_spec import files_of
    from patch.data.tokenizer import load_tokenizer
    from patch.errors import DataError
    from patch.storage.hub import local_model

    outputs = {key: f"{options.output_prefix}_{key}_document" for key in options.json_keys}
    refuse_existing(outputs.values())
    tokenizer = load_tokenizer(local_model(options.tokenizer_name_or_path, "tokenizer", DataError))
    files = [file for path in options.input for file in files_of(path, with_text=True)]
    written = write_indexed(
        files, tokenizer, outputs, append_eod=options.append_eod, workers=options.workers,
        splits_text=options.split_at_blank_lines,
    )  # fmt: skip
    for key, prefix in outputs.items():
        print(f"{prefix}.bin and .idx: {written[key].tokens} tokens; DATASET_PATH is {prefix}")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("python -m toolkits.preprocess_pretrain"), description=__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders or quoted globs of rows (JSON, JSONL, CSV, parquet, Arrow, gz, zst), or text "
        "(.txt): documents",
    )
    parser.add_argument(
        "--tokenizer-name-or-path", required=True, help="folder of a Hugging Face tokenizer, or org/name"
    )
    parser.add_argument(
        "--tokenizer-type",
        choices=get_args(TokenizerType),
        default="PretrainedFromHF",
        help="where it comes from, as in Megatron-LLaMA's lines (default and only one: %(default)s)",
    )
    parser.add_argument(
        "--output-prefix", required=True, help="PREFIX of PREFIX_KEY_document.bin and .idx, for each key"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], help="the keys of the texts in a row (default: text)"
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's eos token",
    )
    parser.add_argument(
        "--split-at-blank-lines", action="store_true", help="a .txt file has a document between blank lines"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=members, default=cores, help="processes (default: all cores)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
