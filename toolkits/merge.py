"""llama-patch merge: a Hugging Face folder with a LoRA adapter of PEFT merged into its weights.

W + scale * B A in fp32, rounded once to the type of the weight.
"""

from __future__ import annotations

import argparse
import sys

from toolkits._arguments import ArgumentParser, exit_code_of, local, typed


def main(argv: list[str]) -> int:
    """Run the command line; returns 0, or the exit code of the error."""
    options = _parse(argv)
    return exit_code_of(lambda: _merge(options))


def _merge(options: argparse.Namespace) -> None:
    from patch.compat import quick_start

    with quick_start():
        from patch.convert import merge_adapter
        from patch.convert.offline import tokenizer_of
    from patch.errors import ConversionError
    from patch.preflight.stored_shape import run_behind
    from patch.storage.hub import fetch_model, hub_name
    from patch.storage.names import ADAPTER_FOLDER

    run, adapter, base = run_behind(options.adapter), options.adapter, options.base
    if run is not None:
        adapter, base = options.adapter / ADAPTER_FOLDER, base or run.checkpoint.load
    if base is None:
        raise ConversionError(f"{adapter} is no folder of a run that names its base: give it (--base)")
    name = hub_name(str(base), "model")
    base = base if name is None else fetch_model(name, weights=True, error=ConversionError)
    otherwise = f"give {adapter} as --adapter beside --base, whose chat template stays then"
    template = tokenizer_of(run, otherwise).chat_template if run is not None else None
    merge_adapter(base, adapter, options.save, overwrite=options.overwrite, chat_template=template)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("python -m toolkits.merge"), description=__doc__)
    parser.add_argument(
        "--base", type=local, metavar="HF_DIR",
        help="the model that the adapter is of: a folder, or a name of the hub (org/name, safetensors); of a "
        "run's folder its own",
    )  # fmt: skip
    parser.add_argument(
        "--adapter", type=local, required=True, metavar="DIR",
        help="a folder of PEFT (adapter_config.json, adapter_model.safetensors), or of a run, whose adapter/ "
        "and chat template are taken",
    )  # fmt: skip
    parser.add_argument("--save", type=local, required=True, metavar="HF_DIR", help="the folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the folder at --save, if it is a model"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
