"""Chat rows as a torch data set: the tokens of the first sample, and which of them are learned.

    PYTHONPATH=. python examples/llama3_1/library/chat_dataset.py ROWS.jsonl HF_FOLDER

A row has OpenAI's `messages`, or alpaca's `instruction`, `input` and `output`. The tokenizer's chat template
renders it; learned are the assistant's words and the token that ends its turn.
"""

import sys
from pathlib import Path

from torch.utils.data import DataLoader

from patch.data import load_sft, load_tokenizer

tokenizer = load_tokenizer(sys.argv[2])
dataset = load_sft(Path(sys.argv[1]), tokenizer, sequence_length=512)
loader = DataLoader(dataset, batch_size=1)
tokens, labels, loss_mask = next(iter(loader))  # [1, 512] each; labels are one token ahead
last = int(loss_mask[0].nonzero().max())  # what follows is padding, or not learned
for label, is_learned in zip(labels[0, : last + 1].tolist(), loss_mask[0], strict=False):
    print(f"{label:6d} {'learned' if is_learned else '-':8}{tokenizer.decode([label])!r}")
