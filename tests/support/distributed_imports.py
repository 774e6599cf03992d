"""Imports of multi-process tests, loaded once by the server that forks their processes."""

from patch.compat import quick_start

with quick_start():
    import pytest  # noqa: F401
    import torch.distributed  # noqa: F401
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    import patch.training.objectives.preference  # noqa: F401
    import patch.training.worker  # noqa: F401
