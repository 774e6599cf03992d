"""An extension layer over PyPI's megatron-core that trains LLaMA-family models.

patch/README.md gives the rows of its packages and the walk of a run through them.
Importing this package changes no function: what megatron-core 0.16.1 gets wrong is mended by an
explicit call (patch.compat.apply). It silences one kind of warning, below.
"""

import warnings

# megatron-core warns at import that Apex and Transformer Engine are missing. This project does not need them.
warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex (is|are) not installed", module="megatron")

__version__ = "0.1.0"
