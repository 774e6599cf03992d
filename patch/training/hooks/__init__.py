"""Hooks: actions of a run after a step, an evaluation or a save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patch.training.hooks.hook import TrainerHook

__all__ = ["TrainerHook"]


def __getattr__(name: str) -> Any:
    """Import TrainerHook at its first use (PEP 562): the process of a service needs no torch."""
    if name != "TrainerHook":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from patch.training.hooks.hook import TrainerHook

    return TrainerHook
