"""The rules of a run that need arithmetic only, by subject. Imports neither torch nor megatron."""

from patch.checks.layout import set_spares_aside, usable_sizes
from patch.checks.rules import RULES, check_range, is_legal, notes

__all__ = ["RULES", "check_range", "is_legal", "notes", "set_spares_aside", "usable_sizes"]
