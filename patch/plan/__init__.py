"""Parameters, FLOPs, memory and time of a run, computed from its configuration. Imports no torch."""
