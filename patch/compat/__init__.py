"""The only package that uses private names, and corrects faults of megatron-core; see README.md.

Importing it changes nothing. It does not import megatron-core either, because `quick_start` must come first.
`apply` changes functions of megatron-core for the whole process. So only the program that starts a process
calls it: a run's worker, a command line, or a host program.
"""

from patch.compat.overhead import quick_start
from patch.compat.release import RELEASE

__all__ = ["RELEASE", "apply", "is_applied_on_cpu", "quick_start"]


def apply(cuda: bool) -> None:
    """Apply the corrections of the installed megatron-core in this process; a second call changes nothing.

    Args:
        cuda: whether this process computes on a GPU, which needs no CPU stand-ins.
    """
    from patch.compat import corrections, cpu

    corrections.apply()
    if not cuda:
        cpu.apply()


def is_applied_on_cpu() -> bool:
    """Return whether `apply(cuda=False)` was called, without which megatron-core's models need a GPU."""
    from patch.compat import cpu

    return cpu.is_applied()
