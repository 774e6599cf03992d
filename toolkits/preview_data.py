"""llama-patch preview: shows rows or documents as tokens, learned or not, and figures."""

from __future__ import annotations

import argparse
import os
import sys

from patch.config.flags import add_flags, fields_of
from patch.errors import PatchError
from toolkits._arguments import ArgumentParser, output_file, positive, typed
from toolkits._data_settings import DATA_FLAGS, DEFAULT_LENGTH


def main(argv: list[str]) -> int:
    """Run the command line; returns 0, or the exit code of the error."""
    from patch.config import user_message
    from patch.logger import configure_logging

    configure_logging()
    try:
        return _preview(_parser().parse_args(argv))
    except PatchError as error:
        print(f"ERROR {user_message(error)}", file=sys.stderr)
        return error.exit_code


def _preview(options: argparse.Namespace) -> int:
    from patch.compat import quick_start

    with quick_start():
        from patch.data.preview import Preview, terminal
    from patch.data.tokenizer import load_tokenizer
    from toolkits._data_settings import read_data_settings

    flags = fields_of(options, DATA_FLAGS)
    settings = read_data_settings(options.data, flags, options.config, os.environ)
    preview = Preview(settings.data, load_tokenizer(settings.tokenizer))
    console = terminal(sys.stdout)
    preview.show_rows(console, options.rows, options.row)
    if options.statistics:
        preview.show_statistics(console)
    preview.write(options.html, options.json)
    preview.check()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=typed("python -m toolkits.preview_data"), description=__doc__)
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
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="also write one HTML page with all of this"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write all of this as JSON")
    note = f"--max-padding-length is --seq-length, or {DEFAULT_LENGTH} where --config does not say it either."
    add_flags(parser.add_argument_group("the run's own flags", note), DATA_FLAGS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
