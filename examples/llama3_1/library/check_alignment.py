"""Is the difference between a checkpoint and its Hugging Face folder normal? Verdict, and report with plot.

    python examples/llama3_1/library/check_alignment.py HF_FOLDER MCORE_FOLDER REPORT.json

One process compares weights bit by bit, and logits with those of transformers on several prompts.
"""

import sys

import torch

from patch import compat
from patch.alignment import verify

if not torch.cuda.is_available():
    compat.apply(cuda=False)  # without it megatron-core's layers need a GPU
report = verify(sys.argv[1], sys.argv[2])
report.write(sys.argv[3])
print(report.verdict.text)
