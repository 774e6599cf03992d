"""argparse flags generated from the fields, and `--help`.

The result contains only the flags that the user wrote, so that they can override positions and files.
A boolean flag takes no value; its `--no-NAME` overrides a true from a position, a preset or the file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from patch.config.fields import FIELDS, SECTIONS, Field, coerce
from patch.config.foreign_flags import answers, is_meant_otherwise
from patch.config.positions import POSITIONS, VARIABLES
from patch.errors import ConfigError, shown
from patch.text import NEGATIVE, to_float


class Flags(NamedTuple):
    """Values that the user has set by named flags."""

    fields: dict[str, Any]
    config: str | None
    deepspeed_config: str | None
    dry_run: bool
    force: bool
    """Start the run even if the plan says that it does not fit."""


_MOST_USED = """
    model_size load train_data_path valid_data_path tokenizer_name_or_path output_path sft packing lora_rank
    lr train_iters train_epochs micro_batch_size global_batch_size seq_length precision save_interval
    export_hf tensor_model_parallel_size pipeline_model_parallel_size recompute_granularity
    optimizer_offload_policy
""".split()


_ORDER = """\
Flags beat positions, positions beat --config, --config beats --deepspeed-config, MODEL_SIZE's shape and
defaults.
Every flag without a value can be taken back with --no-NAME."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the flags")


def _positions_help() -> str:
    lines = ["The 25 positions (then named flags; or named flags alone):", ""]
    for index, position in enumerate(POSITIONS, 1):
        lines.append(f"  {index:2}  {position.name:24}  {position.help}")
        lines += [f"  {'':30}{'|'.join(position.words)}"] * bool(position.words)
    lines += ["", "Environment variables beside the positions:", ""]
    number = "processes on this machine (default: its GPUs, else TP x PP x CP)"
    variables = {name: help for name, (_, help) in VARIABLES.items()} | {"NPROC_PER_NODE": number}
    lines += [f"      {name:24}  {help}" for name, help in variables.items()]
    return "\n".join([*lines, "", _ORDER])


def _help(field: Field) -> str:
    has_default = field.kind is not bool and not field.required
    default = f" [{field.to_scalar(field.default)}]" if has_default else ""
    return (field.help + default).replace("%", "%%")


def help_text(topic: str = "") -> str:
    """Return `--help` (sections, most used flags) or `--help TOPIC` (positions, all flags, a section).

    Raises:
        ConfigError: there is no such topic.
    """
    topics = {"positions": "the 25 positions, and environment variables", "all": "all of this"}
    topics |= {section: str(cls.__doc__).splitlines()[0] for section, cls in SECTIONS.items()}
    lines = ["The most used flags, below, and all flags by section:", ""]
    lines += [f"  --help {name:12} {text}" for name, text in topics.items()]
    described = {"": "\n".join(lines), "positions": _positions_help(), "all": _positions_help()}
    if topic not in topics | described:
        raise ConfigError(f"--help: got {shown(topic)}, expected one of {', '.join(topics)}, or nothing")
    of_section = [field.name for field in FIELDS.values() if field.section == topic]
    parser = build_parser({"": _MOST_USED, "positions": [], "all": [*FIELDS]}.get(topic, of_section))
    parser.description = described.get(topic)
    return parser.format_help()


def build_parser(names: Iterable[str] = FIELDS) -> argparse.ArgumentParser:
    """Return the parser of some fields' flags. The last of repeated flags counts; unset flags are absent."""
    parser = _Parser(
        prog="run_mcore_llama.sh",
        usage="run_mcore_llama.sh ENV MODEL_SIZE ... OUTPUT_BASEPATH [FLAGS] | pretrain_llama.py FLAGS",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser._negative_number_matcher = NEGATIVE
    parser.add_argument("--config", metavar="FILE", help="a run as YAML, such as config.yaml")
    parser.add_argument(
        "--deepspeed-config",
        metavar="FILE",
        help="DeepSpeed's JSON: batch sizes, optimizer, precision, ZeRO stage and offload; below --config",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check all, also weights' headers; print the run as YAML, its plan, the first row and the steps",
    )
    parser.add_argument(
        "--force", action="store_true", help="start a run that by its plan needs more memory than there is"
    )
    for section, cls in SECTIONS.items():
        if fields := [FIELDS[name] for name in names if FIELDS[name].section == section]:
            group = parser.add_argument_group(section, cls.__doc__)
            for field in fields:
                _add(group, field)
    return parser


def add_flags(parser: argparse._ActionsContainer, names: Iterable[str]) -> None:
    """Add the flags of some fields to another program's parser or group; `fields_of` reads them."""
    for name in names:
        _add(parser, FIELDS[name])


def fields_of(namespace: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields that flags of `add_flags` set.

    Raises:
        ConfigError: a value is wrong.
    """
    given = {name: value for name in names if (value := getattr(namespace, name, None)) is not None}
    return {name: coerce(FIELDS[name], value, FIELDS[name].flag) for name, value in given.items()}


def spellings(field: Field) -> list[str]:
    """Return the flag, and for a boolean also its `--no-` form."""
    return [field.flag, "--no-" + field.flag[2:]] if field.kind is bool else [field.flag]


def flag_words(field: Field, scalar: object) -> list[str]:
    """Return the words that set a field to a scalar: flag and value, or a boolean's flag or `--no-` form."""
    if field.kind is bool:
        return [spellings(field)[0 if scalar else 1]]
    return [field.flag, str(scalar)]


def _add(group: argparse._ActionsContainer, field: Field) -> None:
    if field.kind is bool:
        for flag, const, text in zip(
            spellings(field), (True, False), (_help(field), argparse.SUPPRESS), strict=True
        ):
            group.add_argument(flag, dest=field.name, action="store_const", const=const, help=text)
    else:
        metavar = "|".join(field.choices) or {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}[field.kind]
        group.add_argument(field.flag, dest=field.name, metavar=metavar, help=_help(field))


def read_flags(argv: Sequence[str]) -> Flags:
    """Return the fields that `argv` sets. The last of repeated flags counts.

    Raises:
        ConfigError: a flag is unknown (the message has all unknown flags, each with advice), or a value is
            missing or wrong.
        SystemExit: --help, after printing it.
    """
    if found := _unknown(argv):
        if len(found) == 1:
            raise ConfigError(f"unknown argument {found[0]} (--help lists the flags)")
        lines = "".join(f"\n  {line}" for line in found)
        raise ConfigError(f"unknown arguments (--help lists the flags):{lines}")
    parser = build_parser()
    namespace = parser.parse_args(list(argv))
    dry_run, force = (getattr(namespace, name, False) for name in ("dry_run", "force"))
    config, deepspeed = (getattr(namespace, name, None) for name in ("config", "deepspeed_config"))
    return Flags(fields_of(namespace, FIELDS), config, deepspeed, dry_run, force)


def _unknown(argv: Sequence[str]) -> list[str]:
    """Return advice for unknown arguments: another program's flags, misspelled flags, stray words."""
    takes_value = {flag: field.kind is not bool for field in FIELDS.values() for flag in spellings(field)}
    takes_value |= {"--config": True, "--deepspeed-config": True, "--dry-run": False, "--force": False}
    given = [(flag, " ".join(values[:1]), values) for flag, values in grouped(argv, takes_value)]
    is_foreign = any(flag not in takes_value for flag, _, _ in given)
    foreign = [
        (flag, value)
        for flag, value, _ in given
        if flag not in takes_value or (is_foreign and is_meant_otherwise(flag, value))
    ]
    lines = answers(foreign, takes_value)
    for flag, value, values in given:
        if (flag, value) not in foreign and (stray := " ".join(values[takes_value[flag] :])):
            name = flag.replace("--no-", "--").removeprefix("--")
            cure = f"--{name} is true, --no-{name} false"
            lines.append(
                f"{stray!r} after {flag}: {'a value with spaces is quoted' if takes_value[flag] else cure}"
            )
    return lines


def is_flag(text: str) -> bool:
    """Return whether an argument begins a flag: it begins with a hyphen and is not a number."""
    return text.startswith("-") and to_float(text.split()[0]) is None


def is_setting(text: str) -> bool:
    """Return whether a word has the form of another program's setting: overlap_grad_sync=true."""
    return re.match(r"[A-Za-z_]\w*=", text) is not None


def grouped(argv: Sequence[str], takes_value: Mapping[str, bool]) -> list[tuple[str, list[str]]]:
    """Pair each flag, and each setting that no flag takes, with the arguments after it."""
    groups: list[tuple[str, list[str]]] = []
    for text in argv:
        if is_flag(text) or (is_setting(text) and _is_complete(groups, takes_value)):
            flag, sign, value = text.partition("=")
            groups.append((flag, [value] if sign else []))
        else:
            groups[-1][1].append(text)
    return groups


def _is_complete(groups: Sequence[tuple[str, list[str]]], takes_value: Mapping[str, bool]) -> bool:
    """Return whether the last flag has its value, or takes none."""
    return not groups or len(groups[-1][1]) >= takes_value.get(groups[-1][0], True)
