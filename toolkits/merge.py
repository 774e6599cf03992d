"""llama-patch merge: merge a LoRA adapter of PEFT into the weights of a Hugging Face folder.

W + scale * B A is computed in fp32 and rounded once to the dtype of the weight.
"""

from __future__ import annotations

import argparse
import sys

from toolkits._arguments import ArgumentParser, exit_code_of, local, typed


def main(argv: list[str]) -> int:
    """Run the command line; return 0, or the exit code of the error."""
    options = _parse(argv)
    return exit_code_of(lambda: _merge(options))


def _merge(options: argparse.Namespace) -> None:
    from patch.compat import quick_start

    with quick_start():
        from patch.convert import merge_adapter

    merge_adapter(options.base, options.adapter, options.save, overwrite=options.overwrite)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("python -m toolkits.merge"), description=__doc__)
    parser.add_argument(
        "--base", type=local, metavar="HF_DIR",
        help="the model that the adapter is of: a folder, or a name of the hub (org/name, safetensors); of a "
        "run its own",
    )  # fmt: skip
    parser.add_argument(
        "--adapter", required=True, metavar="DIR",
        help="a folder of PEFT (adapter_config.json, adapter_model.safetensors); or a LoRA run's folder, URL "
        "or checkpoint, which becomes what --export-hf writes",
    )  # fmt: skip
    parser.add_argument("--save", type=local, required=True, metavar="HF_DIR", help="the folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the folder at --save, if it is a model"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
