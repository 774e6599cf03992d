"""The only package that uses private names, and corrects what megatron-core 0.16.1 gets wrong; see README.md.

Importing it changes nothing and does not import megatron-core, because `quick_start` must come before that.
Each process calls `apply` once, when it starts.
"""

from patch.compat.fast_import import quick_start

__all__ = ["apply", "quick_start"]


def apply(cuda: bool) -> None:
    """Apply the corrections of megatron-core 0.16.1 in this process; a second call changes nothing.

    Args:
        cuda: whether this process computes on a GPU, which needs no CPU stand-ins.
    """
    from patch.compat import cpu, dist_checkpointing, recompute, tp_reduce

    tp_reduce.apply()
    recompute.apply()
    if not cuda:
        cpu.apply()
    dist_checkpointing.apply(cuda)
