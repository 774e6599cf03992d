"""Guards of a run: hangs, steps that are not finite, and what ends a run early."""
