"""Is a checkpoint's difference from its Hugging Face folder normal? The verdict, and a report with a plot.

    python examples/llama3_1/library/check_alignment.py HF_FOLDER MCORE_FOLDER REPORT.json

Weights are compared bit by bit, logits with transformers' on several prompts, in one process.
"""

import sys

import torch

from patch import compat
from patch.alignment import verify

if not torch.cuda.is_available():
    compat.apply(cuda=False)  # megatron-core's layers ask for a GPU otherwise
report = verify(sys.argv[1], sys.argv[2])
report.write(sys.argv[3])
print(report.verdict.text)
