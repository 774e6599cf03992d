"""An extension layer over PyPI's megatron-core that trains LLaMA-family models.

`ls patch` tells the story of a run; patch/README.md gives the rows and the walk through them.
Importing this package changes nothing: what megatron-core 0.16.1 gets wrong is mended by an
explicit call (patch.compat.apply).
"""

__version__ = "0.1.0"
