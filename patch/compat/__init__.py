"""The only package that uses private names, and corrects what megatron-core gets wrong; see README.md.

Importing it changes nothing and does not import megatron-core, because `quick_start` must come before that.
`apply` changes functions of megatron-core for the whole process, so the program that starts a process calls
it: the worker of a run, a command line, a host program. No other package does.
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
    """Whether `apply(cuda=False)` was called, without which megatron-core's models need a GPU."""
    from patch.compat import cpu

    return cpu.is_applied()
