"""The one door to private megatron-core names and to what 0.16.1 gets wrong; see README.md.

Nothing happens at import: `apply` is called once by whoever starts a process.
"""

from patch.compat import cpu, dist_checkpointing, reduce


def apply(cuda: bool) -> None:
    """Mend megatron-core 0.16.1 in this process; a second call changes nothing more.

    Args:
        cuda: whether this process computes on a GPU; the CPU stand-ins are left out then.
    """
    reduce.apply()
    if not cuda:
        cpu.apply()
    dist_checkpointing.apply(cuda)
