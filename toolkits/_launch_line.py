"""The command line of run_mcore_llama.sh that gives a run: its 25 positions, and flags for all else."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from patch.config.fields import FIELDS, scalar_of
from patch.config.flags import flag_words
from patch.config.positions import POSITIONS, VARIABLES, position_word
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.preflight.parse import parse_args

_BY_THE_MACHINE = ("nnodes", "nproc_per_node")


def launch_argv(config: RunConfig, environ: Mapping[str, str], machine: MachineFacts) -> list[str]:
    """The arguments of run_mcore_llama.sh that give a run on this machine with these variables.

    Args:
        config: the run, of a preset's size or with its shape in position 22.
        environ: the environment variables that say how many machines there are, and which one this is.
        machine: one of them.
    Returns:
        ENV `dsw`, or `dlc` for several machines, the other positions, and a flag for each field that they
        leave different.
    """
    positions = [_position(config, position.name, position.fields) for position in POSITIONS]
    found = parse_args(positions, environ, machine).config
    flags = []
    for field in FIELDS.values():
        wanted = scalar_of(config, field.name)
        if field.name in _BY_THE_MACHINE or scalar_of(found, field.name) == wanted:
            continue
        flags.append("=".join(flag_words(field, wanted)))
    return positions + flags


def launch_line(config: RunConfig, environ: Mapping[str, str], machine: MachineFacts) -> str:
    """`launch_argv` as a line for a shell, with the environment variables that set fields.

    Args:
        config, environ, machine: see `launch_argv`.
    """
    argv = launch_argv(config, environ, machine)
    variables = [f"{name}={shlex.quote(environ[name])} " for name in VARIABLES if name in environ]
    return "".join(variables) + shlex.join(["bash", "examples/llama3_1/run_mcore_llama.sh", *argv])


def _position(config: RunConfig, name: str, fields: tuple[str, ...]) -> str:
    training = config.training
    if name == "ENV":
        return "dlc" if config.parallel.nnodes > 1 else "dsw"
    if name == "FL":
        return "true" if scalar_of(config, "attention_backend") == "flash" else "false"
    if name == "AC":
        word = position_word("recompute_granularity", scalar_of(config, "recompute_granularity"))
        return "offload" if training.cpu_offloading and word == "none" else word
    value = scalar_of(config, fields[0])
    if fields[0] in ("train_iters", "lr_warmup_iters") and not training.sft:
        # A run whose length is in epochs has no steps yet; the flags say so.
        steps = max(int(value), 1) if fields[0] == "train_iters" else int(value)
        value = steps * training.global_batch_size * config.model.seq_length
    return position_word(fields[0], value)
