"""Guards of a run: hangs, steps that are not finite, spikes, and what ends a run early."""
