"""Thin command lines over patch; each has --help."""

import warnings

# Upstream warns at import of Apex and Transformer Engine, which this project does without.
warnings.filterwarnings("ignore", module=r"megatron\.")
