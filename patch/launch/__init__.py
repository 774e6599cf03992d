"""The launcher: starts and restarts local workers, and connects the machines of a job; see README.md.

Import names from the modules, because `launcher` must not wait for the import of torch and megatron-core.
"""
