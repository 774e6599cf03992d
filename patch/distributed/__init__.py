"""Process groups, collectives and the launcher of local workers; see README.md.

Names are imported from the modules: `launch` must not pay for torch and megatron-core, which the
others import.
"""
