"""Thin command lines over `patch`. Each one has --help."""

import warnings

# megatron-core warns at import that Apex and Transformer Engine are missing; this project does not need them.
warnings.filterwarnings("ignore", module=r"megatron\.")
