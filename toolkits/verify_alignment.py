"""llama-patch align: is the difference between a checkpoint and its Hugging Face folder normal?

It compares every weight bit by bit, and the logits of several prompts. It names the first operation that
differs, and the difference that each fast kernel adds. Exit code 0: normal; 4: not normal; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import sys

from toolkits._arguments import ArgumentParser, exit_code_of, local, output_file, typed


def main(argv: list[str]) -> int:
    """Run the command line; return 0, 4 if the difference is not normal, or the exit code of an error."""
    options = _parse(argv)
    return exit_code_of(lambda: _verify(options))


def _verify(options: argparse.Namespace) -> int:
    import torch

    from patch import compat

    with compat.quick_start():
        from patch.alignment import verify

    compat.apply(torch.cuda.is_available())
    how = {"precision": options.params_dtype, "attention": options.attention, "adapter": options.adapter}
    report = verify(options.hf, options.mcore, **how)
    print("\n".join([*report.table(), report.verdict.text]))
    if options.json is not None:
        report.write(options.json)
    return 0 if report.verdict.is_normal else 4


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("python -m toolkits.verify_alignment"), description=__doc__)
    parser.add_argument("--hf", type=local, required=True, help="the Hugging Face folder")
    parser.add_argument(
        "--mcore",
        type=local,
        required=True,
        help="the checkpoint: a converted folder, a run's folder, its checkpoint/, or one iter_* in it",
    )
    parser.add_argument(
        "--params-dtype",
        choices=("fp32", "fp16", "bf16"),
        help="type in which both models compute (default: the type of the checkpoint's weights)",
    )
    parser.add_argument(
        "--attention",
        choices=("eager", "sdpa"),
        default="sdpa",
        help="transformers' attention to compare with (default: sdpa)",
    )
    parser.add_argument("--adapter", type=local, help="a folder of PEFT, or a run's: adapters of both models")
    parser.add_argument(
        "--json", type=output_file, help="file for the report; a plot (.png) is written beside it"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
