"""python -m toolkits.preprocess_pretrain: makes a pre-training set (.bin, .idx) from JSON rows."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run the command line; returns 0, or the exit code of the error."""
    options = _parse(argv)
    # Set before the tokenizer's thread pool starts, which reads these variables once.
    os.environ.update(RAYON_NUM_THREADS=str(options.workers), TOKENIZERS_PARALLELISM="true")
    from patch.data.pretraining.preprocess import write_indexed
    from patch.data.tokenizer import load_tokenizer
    from patch.errors import PatchError
    from patch.logger import configure_logging

    configure_logging()
    try:
        tokenizer = load_tokenizer(options.tokenizer)
        tokens = write_indexed(
            options.input,
            tokenizer,
            options.output_prefix,
            json_key=options.json_key,
            append_eod=options.append_eod,
        )
    except PatchError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return error.exit_code
    print(f"{options.output_prefix}.bin and .idx: {tokens} tokens")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m toolkits.preprocess_pretrain", description=__doc__)
    parser.add_argument(
        "--input", type=Path, required=True, help="JSONL or a JSON list, one document per row"
    )
    parser.add_argument("--tokenizer", required=True, help="folder of a Hugging Face tokenizer")
    parser.add_argument("--output-prefix", required=True, help="PREFIX of PREFIX.bin and PREFIX.idx")
    parser.add_argument("--json-key", default="text", help="the key of the text (default: text)")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's eos token",
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=_positive, default=cores, help="threads (default: all cores)")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
