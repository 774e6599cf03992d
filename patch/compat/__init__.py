"""The one door to private megatron-core and torch names and to what 0.16.1 gets wrong; see README.md.

Nothing happens at import, of megatron-core either, which `quick_start` has to come before. `apply` changes
functions of megatron-core for the whole process, so it belongs to whoever starts one: the worker of a run,
a command line, a host program. No other package calls it.
"""

from patch.compat.fast_import import quick_start

__all__ = ["apply", "is_applied_on_cpu", "quick_start"]


def apply(cuda: bool) -> None:
    """Mend megatron-core 0.16.1 in this process; a second call changes nothing more.

    Args:
        cuda: whether this process computes on a GPU; the CPU stand-ins are left out then.
    """
    from patch.compat import cpu, dist_checkpointing, recompute, tp_reduce

    tp_reduce.apply()
    recompute.apply()
    if not cuda:
        cpu.apply()
    dist_checkpointing.apply(cuda)


def is_applied_on_cpu() -> bool:
    """Whether `apply(cuda=False)` was called, without which megatron-core's models need a GPU."""
    from patch.compat import cpu

    return cpu.is_applied()
