"""Input of a proof: a tokenizer of 300 words; short chats, pairs or documents; weights of an nf4 base."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from patch.config import RunConfig
from toolkits.prove.shrink import PADDED
from toolkits.quickstart.seed_model import END, write_tokenizer

_WORDS = "the a small red old cat dog tree sees finds likes near under two rivers and then sings".split()
_NUM_ROWS = 200


def make_data(folder: Path, run: RunConfig) -> None:
    """Write `tokenizer`, and `rows.jsonl` or `text.bin`, into a new folder.

    Args:
        run: the shrunk run, which decides the kind of data.
    """
    chance = random.Random(run.training.seed)
    tokenizer = write_tokenizer(folder / "tokenizer", [" ".join(_WORDS)], PADDED)

    def text(fewest: int, most: int) -> str:
        return " ".join(chance.choices(_WORDS, k=chance.randint(fewest, most)))

    # Every CP rank's part of a row has a loss; a packed row contains several sequences.
    longest = run.sample_length // (8 if run.is_packed else 2)
    rows: list[dict[str, object]] = []
    for _ in range(_NUM_ROWS):
        prompt = [{"role": "user", "content": text(1, 3)}]
        answers = ([{"role": "assistant", "content": text(1, longest)}] for _ in range(2))
        if run.row_kind == "pair":
            rows.append({"prompt": prompt, **dict(zip(("chosen", "rejected"), answers, strict=True))})
        elif run.row_kind == "unpaired":
            label = chance.random() < 0.5
            rows.append({"prompt": prompt, "completion": next(answers), "label": label})
        elif run.training.sft:
            rows.append({"messages": prompt + next(answers)})
        else:
            rows.append({"text": text(4, run.sample_length)})
    if run.adapter.quantize_base:  # the quantized base is read from a Hugging Face folder
        _write_base(folder / "model", run, tokenizer)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if run.data.dataset_type == "idxmap":
        from patch.data.pretraining.preprocess import write_indexed

        tokenizer.eos_token = END
        write_indexed([file], tokenizer, {"text": str(folder / "text")}, append_eod=True)


def _write_base(folder: Path, run: RunConfig, tokenizer: Any) -> None:
    import torch
    from safetensors.torch import save_file

    from patch.convert.hf_config_files import write_descriptions
    from patch.families.adapters import hf_tensors

    folder.mkdir()
    torch.manual_seed(run.training.seed)
    weights = {name: torch.randn(shape) * 0.05 + (len(shape) == 1) for name, shape in hf_tensors(run.model)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_descriptions(folder, run.model, None, tokenizer, torch.float32)
