"""Judge whether the difference between a checkpoint and its Hugging Face folder is normal. See README.md.

`verify` compares two folders in one process and returns a `Report` (JSON, table, plot) with a `Verdict`. It
builds megatron-core models. On a machine without a GPU the caller first calls
`patch.compat.apply(cuda=False)`.
"""

from patch.alignment.report import Report, verify
from patch.alignment.verdict import Verdict

__all__ = ["Report", "Verdict", "verify"]
