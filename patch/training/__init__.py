"""The training run, built from the other packages, and what another program adds to it; see README.md.

Importing it needs no torch: a launcher, which only starts workers, registers the same things as they do. What
is registered is a function that each worker calls once; it imports what needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patch.config import RunConfig
    from patch.training.hooks import TrainerHook
    from patch.training.objective import Objective
    from patch.training.setup import Run

__all__ = ["HOOKS", "OBJECTIVES", "register_hook", "register_objective"]


def _preference(config: RunConfig) -> Objective:
    from patch.training.preference import Preference

    return Preference(config)


OBJECTIVES: dict[str, Callable[[RunConfig], Objective] | None] = {
    **dict.fromkeys(("default", "sft", "pretrain")),
    "dpo": _preference,
}
"""Factories of the objectives that `--objective` names; None: the built-in one."""
HOOKS: list[Callable[[Run], TrainerHook | None]] = []
"""Factories of further hooks of a rank."""


def register_objective(name: str, make: Callable[[RunConfig], Objective]) -> None:
    """Add an objective; call it before the command line is read, in the launcher and in workers.

    Args:
        name: for `--objective`.
        make: called once in each worker, and by `--dry-run`.
    Raises:
        ValueError: there is one of this name.
    """
    if name in OBJECTIVES:
        raise ValueError(f"there is an objective {name!r} already")
    OBJECTIVES[name] = make


def register_hook(make: Callable[[Run], TrainerHook | None]) -> None:
    """Add a hook.

    Args:
        make: called in each worker before its first step; None: this rank has none (see `TrainerHook`).
    """
    HOOKS.append(make)
