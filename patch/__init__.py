"""An extension layer over PyPI's megatron-core that trains LLaMA-family models.

patch/README.md lists the packages, and the path of a run through them. Importing this package changes no
function: the fixes of megatron-core 0.16.1 need an explicit call (patch.compat.apply). The import silences
one kind of warning, below.
"""

import warnings

# megatron-core warns at import that Apex and Transformer Engine are missing. This project does not need them.
warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex (is|are) not installed", module="megatron")

__version__ = "0.1.0"
