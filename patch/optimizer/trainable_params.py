"""The trained parameters, roughly in the order of backward; unsupported parameters are refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from patch.compat.torch_internals import is_watched, own_parameters
from patch.config.choices import MOMENT_BLOCK, ZeroStage
from patch.config.schema import OptimizerConfig
from patch.errors import ConfigError, TrainingError
from patch.layout.buckets import ParamSpec
from patch.optimizer.param_groups import ParamGroup, assign_groups

Named = Sequence[tuple[str, torch.nn.Parameter]]
"""Parameters, each with its name in its stage."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_arguments(stages: object, zero_stage: object) -> None:
    """Refuse wrong types that Python would accept, for example a torch container instead of a list."""
    if isinstance(stages, torch.nn.Module):
        raise ConfigError(f"`stages`: got a module ({type(stages).__name__}), expected a list: [model]")
    if not isinstance(zero_stage, ZeroStage):
        names = ", ".join(f"ZeroStage.{stage.name}" for stage in ZeroStage)
        raise ConfigError(f"`zero_stage`: got {zero_stage!r}, expected one of {names}")


def _check_parameters(stages: Sequence[torch.nn.Module], trained: Named, *, is_offloading: bool) -> None:
    for name, parameter in trained:
        if parameter.dtype not in _DTYPES:
            raise ConfigError(
                f"{name} has dtype {parameter.dtype}, expected float32, bfloat16 or float16 (--precision)"
            )
        if parameter.device.type == "meta":
            raise ConfigError(f"{name} is on the meta device, expected values: load or initialize them first")
    one_dtype = "with --optimizer-offload-policy: use false, or one dtype"
    for what, attribute, cure in (("dtypes", "dtype", one_dtype), ("devices", "device", "")):
        found = {str(getattr(parameter, attribute)): name for name, parameter in trained}
        if len(found) > 1 and (is_offloading or attribute != "dtype"):
            each = ", ".join(f"{value} ({name})" for value, name in sorted(found.items()))
            raise ConfigError(f"trainable parameters have {what} {each}, expected one {cure}".rstrip())
    uses = Counter(id(parameter) for _, parameter in trained)
    for name, parameter in trained:
        if uses[id(parameter)] > 1:
            raise ConfigError(f"{name} is in several stages, expected one: put them in one stage")
    for name, module in chain.from_iterable(stage.named_modules() for stage in stages):
        if is_watched(module):
            raise ConfigError(
                f"module {name or type(module).__name__}: another optimizer trains its parameters, expected "
                "one: build the model anew, or train other modules"
            )


class UnitModule(NamedTuple):
    """A module whose parameters are gathered before it runs and freed after it."""

    stage: int
    module: torch.nn.Module
    parameters: list[torch.nn.Parameter]
    place_in_backward: int
    """Position among all units of the rank, in the order of backward."""

    @property
    def has_submodules(self) -> bool:
        """Return whether the module contains other modules with parameters."""
        return len([*self.module.parameters()]) > len(self.parameters)


def unit_modules(stages: Sequence[torch.nn.Module]) -> list[UnitModule]:
    """Return the modules whose parameters are gathered and freed together, in the order of forward.

    A unit is an element of a module list (a layer). Elsewhere each module with own parameters is a unit.
    """
    found: list[UnitModule] = []
    for number, stage in enumerate(stages):
        forward, backward = _walk(stage)
        places = {module: place for place, (module, _) in enumerate(backward, len(found))}
        found += [UnitModule(number, module, own, places[module]) for module, own in forward]
    return found


_Walk = list[tuple[torch.nn.Module, list[torch.nn.Parameter]]]


def _walk(module: torch.nn.Module) -> tuple[_Walk, _Walk]:
    """Return the units in a module, with their parameters, in the order of forward and of backward."""
    forward: _Walk = [(module, own)] if (own := list(own_parameters(module).values())) else []
    backward: _Walk = []
    for child in module.children():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            parts = list(chain.from_iterable(own_parameters(part).values() for part in child.modules()))
            within = ([(child, parts)], [(child, parts)]) if parts else ([], [])
        else:
            within = _walk(child)
        forward, backward = forward + within[0], within[1] + backward
    return forward, [*forward[: bool(own)], *backward]


class ManagedParams:
    """Parameters of a rank, with their names in their stages, that have places in flat buffers."""

    groups: Sequence[ParamGroup] = ()
    """The parameter groups; none of frozen parameters."""

    def __init__(self, stages: Sequence[torch.nn.Module], named: Named) -> None:
        self.stages, self.named = stages, named
        self.parameters = [parameter for _, parameter in named]
        all_parameters = chain.from_iterable(stage.parameters() for stage in stages)
        like = next(chain(self.parameters, all_parameters), torch.empty(0))
        self.device, self.dtype = like.device, like.dtype
        """Device and dtype of the first parameter; without one, of any parameter of the stages."""

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Record that the optimizer has re-pointed these parameters to their current memory."""


def check_rows(trained: Named, config: OptimizerConfig) -> None:
    """Raise ConfigError for parameters whose rows are not whole blocks of 8-bit moments."""
    for field in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        for name, parameter in trained:
            if getattr(config, field) == "8bit" and parameter.shape[-1] % MOMENT_BLOCK:
                why = f"a row of {name} has {parameter.shape[-1]} elements on a rank, which are cut in blocks"
                raise ConfigError(
                    f"got 8bit, expected bf16 or fp32, or rows that are multiples of {MOMENT_BLOCK}: {why}",
                    field=field,
                )


class TrainableParams(ManagedParams):
    """The trainable parameters, roughly in the order in which backward completes them.

    Raises:
        ConfigError: an unsupported dtype or device; several devices; several dtypes with offload; a parameter
            in several stages or not in exactly one group; or a module that another optimizer trains.
    """

    def __init__(
        self, stages: Sequence[torch.nn.Module], groups: Sequence[ParamGroup], *, is_offloading: bool
    ) -> None:
        found = [
            (index, name, parameter)
            for index, stage in reversed(list(enumerate(stages)))
            for name, parameter in reversed(list(stage.named_parameters()))
            if parameter.requires_grad
        ]
        self._stage_indices = [index for index, _, _ in found]
        super().__init__(stages, [(name, parameter) for _, name, parameter in found])
        self.groups = groups
        _check_parameters(stages, self.named, is_offloading=is_offloading)
        self.group_indices = assign_groups(self.named, groups)
        self._addresses: dict[int, int] = {}

    def specs(self, buffer_group_indices: list[int], units: Sequence[int]) -> list[ParamSpec]:
        """Return the specs of the parameters for the bucket layout, in the units in which they are gathered.

        A tied embedding has its own bucket, because two stages must cut it alike. Parameters with the same
        attribute `contiguous_with` stay contiguous. Unit 0 stays whole.
        """
        indices = zip(self.group_indices, self._stage_indices, buffer_group_indices, units, strict=True)
        series: dict[object, int] = {None: 0}
        return [
            ParamSpec(
                parameter.numel(), group, getattr(parameter, "shared_embedding", False), stage, buffer_group,
                series.setdefault(getattr(parameter, "contiguous_with", None), len(series)), unit,
            )
            for parameter, (group, stage, buffer_group, unit) in zip(self.parameters, indices, strict=True)
        ]  # fmt: skip

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Record that the optimizer has re-pointed these parameters to their current memory."""
        self._addresses |= {id(parameter): parameter.data_ptr() for parameter in parameters}

    def check(self) -> None:
        """Refuse a trainable parameter that was frozen, unfrozen, added, removed or moved since construction.

        Raises:
            TrainingError: there is such a parameter.
        """
        found = {id(parameter): parameter.data_ptr() for parameter in self._trainable()}
        if found == self._addresses:
            return
        known = set(map(id, self.parameters))
        for name, parameter in chain.from_iterable(stage.named_parameters() for stage in self.stages):
            if parameter.requires_grad and id(parameter) not in known:
                raise _changed(name, "unfrozen or added")
        for name, parameter in self.named:
            if id(parameter) not in found:
                raise _changed(name, "removed or replaced" if parameter.requires_grad else "frozen")
            if found[id(parameter)] != self._addresses[id(parameter)]:
                raise _changed(name, "moved to other memory (by `to`, `half` or an assignment to `.data`)")

    def _trainable(self) -> Iterator[torch.nn.Parameter]:
        for module in chain.from_iterable(stage.modules() for stage in self.stages):
            yield from (p for p in own_parameters(module).values() if p.requires_grad)


def _changed(name: str, what: str) -> TrainingError:
    return TrainingError(
        f"{name} was {what} after the optimizer was built, expected the parameters of then: "
        "change the model before, and load weights by load_state_dict and `reload_model_params`"
    )
