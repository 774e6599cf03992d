"""Chat rows as a torch data set: print the tokens of the first sample with their loss mask.

    python examples/llama3_1/library/chat_dataset.py ROWS.jsonl HF_FOLDER

A row has OpenAI's `messages`, or alpaca's `instruction`, `input` and `output`. The tokenizer's chat template
renders it. The assistant's words and the token that ends its turn have a loss.
"""

import sys

from torch.utils.data import DataLoader

from patch.data import collate, load_sft, load_tokenizer

tokenizer = load_tokenizer(sys.argv[2])
dataset = load_sft(sys.argv[1], tokenizer, sequence_length=512)
loader = DataLoader(dataset, batch_size=1, collate_fn=collate)
batch = next(iter(loader))  # tokens, labels, loss_mask: [1, 512] each; labels are one token ahead
labels, learned = batch.labels[0].tolist(), batch.loss_mask[0]
last = int(learned.nonzero().max())  # after it come padding, and tokens without a loss
for label, is_learned in zip(labels[: last + 1], learned, strict=False):
    print(f"{label:6d} {'learned' if is_learned else '-':8}{tokenizer.decode([label])!r}")
