"""A run planned for another machine: its command line, read as if it started there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from patch.checks.rules import RULES
from patch.config import RunConfig
from patch.config.fields import FIELDS, with_values
from patch.config.flags import flag_words, read_flags
from patch.config.positions import VARIABLES, read_variables
from patch.config.yaml_io import read_yaml
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.resolve import resolve_run
from patch.plan.timing.machine import PRESETS, Machine, preset, read_machine, this_machine
from patch.preflight.parse import parse_args, split_positions
from patch.text import to_int

_TOKENS_OF_A_STEP = 2**22
"""Default tokens of the global batch: LLaMA's own."""
_DEFAULTS = {
    "micro_batch_size": "1", "train_iters": "1000", "lr": "3e-4", "seq_length": "8192",
    "train_data_path": "DATASET_PATH", "tokenizer_name_or_path": "TOKENIZER_PATH",
    "output_path": "OUTPUT_BASEPATH",
}  # fmt: skip
"""Fields that do not change a plan, for a run that flags alone describe."""
NAMED_LATER = ("DATASET_PATH", "TOKENIZER_PATH", "OUTPUT_BASEPATH")
"""Placeholders of paths that such a run does not name."""
_REPLACED = ("global_batch_size", "micro_batch_size", "tensor_model_parallel_size", "sequence_parallel")
"""Fields that a search replaces; their values need not be legal."""
_CLUSTER = {
    "NODE_RANK": "0", "MASTER_ADDR": "planned", "MASTER_PORT": "29500", "RANK": "0", "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "planned", "SLURM_JOB_ID": "0",
}  # fmt: skip


class PlannedRun(NamedTuple):
    """A run and the machine that it is planned for."""

    run: RunConfig
    resolved: RunConfig
    notes: list[str]
    """Lines about the automatic choices."""
    machine: Machine
    environ: dict[str, str]
    """Variables of the planned cluster, and the user's variables that set fields."""
    assumed: frozenset[str]
    """Fields without a given value, if flags alone describe the run."""


def plan_run(
    argv: Sequence[str],
    machine: str = "here",
    nodes: int | None = None,
    devices: int | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    here: MachineFacts | None = None,
    for_search: bool = False,
) -> PlannedRun:
    """Read a run for a machine.

    Args:
        argv: the run: 25 positions and flags, flags alone (a model's size is enough), or --config FILE.
        machine: a100, h100, h200, b200, `here`, or a machine file.
        nodes: number of nodes, or None for the run's.
        devices: devices per node, or None for the machine's.
        environ: environment variables that belong to the run, such as MP_VP.
        here: facts of this machine, or None to probe them.
        for_search: whether a search will replace the layout: then it need not be legal, and `auto` stays.
    Raises:
        ConfigError: the machine or the run cannot be read, or a rule refuses the run.
    """
    environ, here = environ or {}, here or MachineFacts.probe()
    given = _given(argv, environ)
    argv = [*argv, *_defaults(given)]
    own = environ.get("NPROC_PER_NODE") if machine == "here" else None
    found = machine_named(machine, here, devices or to_int(own) or 1)
    if devices:
        found = dataclasses.replace(found, devices_per_node=devices)
    facts = found.facts
    planned = {key: environ[key] for key in VARIABLES if key in environ}
    planned |= _CLUSTER | {"WORLD_SIZE": str(nodes or 1), "SLURM_NNODES": str(nodes or 1)}
    if found.is_gpu or devices or own:
        planned["NPROC_PER_NODE"] = str(devices or own or found.devices_per_node)
    if nodes:
        argv = [*argv, f"--nnodes={nodes}"]
    run = _on_all_devices(_parsed(argv, planned, facts), found, argv)
    for rule in RULES:
        try:
            rule(run, facts)
        except ConfigError as error:
            if not (for_search and error.field in _REPLACED):
                raise
    resolved, notes = (run, []) if for_search else resolve_run(run, facts)
    parallel = run.parallel
    found = dataclasses.replace(found, nodes=parallel.nnodes, devices_per_node=parallel.nproc_per_node)
    planned["WORLD_SIZE"] = str(parallel.nnodes)
    assumed = frozenset() if given is None else frozenset(FIELDS) - set(given)
    return PlannedRun(run, resolved, notes, found, planned, assumed)


def _parsed(argv: Sequence[str], environ: Mapping[str, str], facts: MachineFacts) -> RunConfig:
    try:
        return parse_args(argv, environ, facts).config
    except ConfigError as error:
        if error.field not in ("load", "tokenizer_name_or_path"):
            raise
        cure = (
            "a plan needs only the shape: give a preset (--model-size 8B) without it, or a folder that has it"
        )
        raise ConfigError(f"{error}; {cure}", field=error.field) from error


def _on_all_devices(run: RunConfig, machine: Machine, argv: Sequence[str]) -> RunConfig:
    """The run on all devices of each node, unless `--nproc-per-node` is given.
    Without GPUs, on as many processes as whole replicas need: a flag may have changed the layout.
    """
    if any(text.startswith("--nproc-per-node") for text in argv):
        return run
    parallel, number = run.parallel, machine.devices_per_node
    if not machine.is_gpu:
        sizes = [parallel.tensor_model_parallel_size, parallel.context_parallel_size]
        of_experts = [run.etp_size, run.experts.expert_model_parallel_size] if run.model.num_experts else [1]
        whole = math.lcm(math.prod(sizes), math.prod(of_experts)) * parallel.pipeline_model_parallel_size
        whole //= math.gcd(whole, parallel.nnodes)
        number = -(-parallel.nproc_per_node // whole) * whole
    return with_values(run, nproc_per_node=number)


def machine_named(name: str, here: MachineFacts, processes: int) -> Machine:
    """Return a preset, the machine of a file, or `here` with this number of processes.

    Raises:
        ConfigError: there is no such preset, or the file cannot be read.
    """
    if name == "here":
        return this_machine(here, processes)
    if name.lower() in PRESETS or not any(mark in name for mark in "./"):
        return preset(name, "--machine")
    return read_machine(name)


def _given(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Fields of a run that flags alone describe, or None for a run with positions."""
    positions, flags = split_positions(argv)
    if positions:
        return None
    read = read_flags(flags)
    file = read_yaml(read.config) if read.config else {}
    return {**file, **read_variables(environ), **read.fields}


def _defaults(given: Mapping[str, Any] | None) -> list[str]:
    """Flags that a plan needs and the user has not given."""
    if given is None:
        return []
    others = {"train_iters": "train_epochs", "tokenizer_name_or_path": "load"}  # which give the same
    lacking = {name: value for name, value in _DEFAULTS.items() if not {name, others.get(name)} & set(given)}
    length = int(given.get("seq_length", lacking.get("seq_length", 1)))
    if "global_batch_size" not in given:
        lacking["global_batch_size"] = str(max(1, _TOKENS_OF_A_STEP // length))
    return ["=".join(flag_words(FIELDS[field], value)) for field, value in lacking.items()]
