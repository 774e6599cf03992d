"""Guards of a run: hangs, non-finite steps, early stops."""
