"""Process groups, collectives and the launcher of local workers; see README.md.

Import names from the modules: `launch` must not wait for the import of torch and megatron-core, which the
other modules need.
"""
