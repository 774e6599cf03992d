"""Hooks: actions of a run after a step, an evaluation or a save."""

from patch.training.hooks.hook import TrainerHook

__all__ = ["TrainerHook"]
