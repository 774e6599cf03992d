"""llama-patch convert: converts Hugging Face folders to megatron-core checkpoints and back."""

from __future__ import annotations

import argparse
import sys

from patch.device import FLOAT_TYPES
from toolkits._arguments import ArgumentParser, exit_code_of, local, typed


def main(argv: list[str]) -> int:
    """Run the command line; return 0, or the exit code of the error."""
    options = _parse(argv)
    return exit_code_of(lambda: _convert(options))


def _convert(options: argparse.Namespace) -> None:
    import torch

    from patch.compat import quick_start
    from patch.preflight.model_of_folder import has_hf_config

    with quick_start():
        from patch.convert import hf_to_mcore, mcore_to_hf

        if options.direction == "mcore2hf" and not has_hf_config(options.hf_config or options.load):
            import patch.data.chat_templates  # noqa: F401 - for a run's tokenizer; later it takes 0.5 s more
    torch.set_num_threads(1)  # OpenMP's threads would spin and slow the threads that read and write
    from patch.device import torch_dtype
    from patch.errors import ConversionError
    from patch.storage.hub import local_model

    if options.direction == "hf2mcore":
        dtype = torch_dtype(options.params_dtype) if options.params_dtype else None
        load = local_model(str(options.load), "weights", ConversionError)
        hf_to_mcore(load, options.save, dtype, overwrite=options.overwrite)
    else:
        mcore_to_hf(options.load, options.save, options.hf_config, overwrite=options.overwrite)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=typed("python -m toolkits.convert"), description=__doc__)
    directions = parser.add_subparsers(dest="direction", required=True, parser_class=ArgumentParser)
    hf2mcore = directions.add_parser("hf2mcore", help="Hugging Face folder -> torch_dist checkpoint")
    hf2mcore.add_argument(
        "--load", type=local, required=True, metavar="HF_DIR",
        help="a folder with safetensors or .bin, or a name of the hub (org/name, safetensors)",
    )  # fmt: skip
    hf2mcore.add_argument(
        "--save",
        type=local,
        required=True,
        metavar="DIR",
        help="the folder to write; loads at any TP, PP, VPP",
    )
    hf2mcore.add_argument(
        "--params-dtype", choices=FLOAT_TYPES, help="type of all weights (default: as stored)"
    )
    mcore2hf = directions.add_parser("mcore2hf", help="checkpoint -> Hugging Face folder")
    mcore2hf.add_argument(
        "--load", required=True, metavar="DIR",
        help="a converted folder, a run's folder or URL (--save), one iter_* in it, or one of Megatron-LM "
        "(torch_dist or mp_rank_*)",
    )  # fmt: skip
    mcore2hf.add_argument("--save", type=local, required=True, metavar="HF_DIR", help="the folder to write")
    mcore2hf.add_argument(
        "--hf-config", type=local, metavar="HF_DIR",
        help="describes the model, if DIR does not: config.json, tokenizer, layout of the files",
    )  # fmt: skip
    for direction in (hf2mcore, mcore2hf):
        direction.add_argument(
            "--overwrite", action="store_true", help="replace the folder at --save, if it is of the same kind"
        )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
