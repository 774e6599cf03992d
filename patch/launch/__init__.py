"""The launcher: starts and restarts local workers, and connects the machines of a job; see README.md.

Import other names from the modules, because `launcher` must not wait for the import of torch and
megatron-core.
"""

RESOLVED = "--resolved-run"
"""Flag before the file from which workers read the run that their launcher has resolved."""
