"""Convert a Hugging Face folder to a megatron-core checkpoint that every TP and PP loads, and back.

    python examples/llama3_1/library/convert_weights.py HF_FOLDER MCORE_FOLDER NEW_HF_FOLDER

One process on a CPU, with the memory of a few tensors; no process group and no model is needed. The
weights come back to the bit.
"""

import sys

from patch.convert import ConversionError, hf_to_mcore, mcore_to_hf

source, checkpoint, target = sys.argv[1:4]
try:
    hf_to_mcore(source, checkpoint)
    mcore_to_hf(checkpoint, target)
except ConversionError as error:  # the message says what was found and what was expected
    sys.exit(f"ERROR {error}")
