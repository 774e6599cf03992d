"""The training run, and the registries of hooks and objectives for external programs; see README.md.

Importing this package needs no torch, because the launcher registers the same functions as the workers.
Each worker calls a registered function once; that function imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from patch.config.choices import ROW_KINDS

if TYPE_CHECKING:
    from patch.config import RunConfig
    from patch.training.hooks.hook import TrainerHook
    from patch.training.objectives.objective import Objective
    from patch.training.setup import Run

__all__ = ["HOOKS", "OBJECTIVES", "register_hook", "register_objective"]


def _token_mean(config: RunConfig) -> Objective:
    from patch.training.objectives.distillation import Distillation
    from patch.training.objectives.objective import Objective

    return (Distillation if config.data.distill_from else Objective)(config)


def _preference(config: RunConfig) -> Objective:
    from patch.training.objectives.preference import CLASSES

    return CLASSES[config.training.objective](config)


OBJECTIVES: dict[str, Callable[[RunConfig], Objective]] = {
    **dict.fromkeys(("default", "sft", "pretrain"), _token_mean),
    **dict.fromkeys(ROW_KINDS, _preference),
}
"""Factories of the objectives that `--objective` names."""
HOOKS: list[Callable[[Run], TrainerHook | None]] = []
"""Factories of additional hooks."""


def register_objective(name: str, make: Callable[[RunConfig], Objective]) -> None:
    """Add an objective for `--objective`. Call this in launcher and workers, before the command line is read.

    Args:
        make: called once in each worker, and by `--dry-run`.
    Raises:
        ValueError: an objective of this name exists.
    """
    if name in OBJECTIVES:
        raise ValueError(f"objective {name!r} is already registered; choose another name")
    OBJECTIVES[name] = make


def register_hook(make: Callable[[Run], TrainerHook | None]) -> None:
    """Add a hook. Each worker calls `make` before its first step; `make` may return None for some ranks."""
    HOOKS.append(make)
