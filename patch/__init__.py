"""An extension layer over PyPI's megatron-core that trains LLaMA-family models.

patch/README.md gives the rows of its packages and the walk of a run through them.
Importing this package changes nothing: what megatron-core 0.16.1 gets wrong is mended by an
explicit call (patch.compat.apply).
"""

__version__ = "0.1.0"
