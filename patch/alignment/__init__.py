"""Is the difference between a checkpoint and its Hugging Face folder normal? See README.md.

`verify` compares two folders in one process and returns a `Report` (JSON, table, plot) with a `Verdict`.
It builds models of megatron-core: on a machine without a GPU the program calls
`patch.compat.apply(cuda=False)` before.
"""

from patch.alignment.report import Report, verify
from patch.alignment.verdict import Verdict

__all__ = ["Report", "Verdict", "verify"]
