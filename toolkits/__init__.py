"""Thin command lines over patch; each has --help."""

import warnings

# Upstream warns at import that Apex and Transformer Engine are missing; this project does not use them.
warnings.filterwarnings("ignore", module=r"megatron\.")
