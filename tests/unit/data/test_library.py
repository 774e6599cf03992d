"""Another program reads rows without megatron-core, a process group or a configuration of ours."""

import subprocess
import sys
from pathlib import Path

import pytest
from llama3_tokenizer import tiny_tokenizer

PROGRAM = """
import sys
from pathlib import Path
from patch.data import BatchReader, load_sft, load_tokenizer
source = load_sft(Path(sys.argv[1]), load_tokenizer(sys.argv[2]), sequence_length=32)
sizes = dict(micro_batch_size=2, global_batch_size=2, dp_rank=0, dp_size=1)
(batch,) = BatchReader(source, **sizes, seed=1, shuffle=True).step(0)
assert batch.tokens.shape == (2, 32) and batch.loss_mask.sum() == 4, batch
assert "megatron" not in sys.modules
"""


@pytest.mark.long
def test_rows_become_batches_without_megatron_core(tmp_path: Path) -> None:
    """The loss covers two answers of one token, and the token that ends each turn."""
    (tmp_path / "rows.jsonl").write_text('{"instruction": "hello", "output": "world"}\n' * 2)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "rows.jsonl"), str(tmp_path / "tokenizer")]
    subprocess.run(command, cwd=Path(__file__).parents[3], check=True)
