"""Convert a Hugging Face folder to a megatron-core checkpoint for any TP and PP, and back.

    python examples/llama3_1/library/convert_weights.py HF_FOLDER MCORE_FOLDER NEW_HF_FOLDER

It runs in one process on a CPU with the memory of a few tensors, without a process group and without a
model. The new folder has the same bits.
"""

import sys

from patch.convert import ConversionError, hf_to_mcore, mcore_to_hf

source, checkpoint, target = sys.argv[1:4]
try:
    hf_to_mcore(source, checkpoint)
    mcore_to_hf(checkpoint, target)
except ConversionError as error:  # the message names the found and the expected value
    sys.exit(f"ERROR {error}")
