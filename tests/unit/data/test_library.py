"""Another program reads rows without megatron-core, a process group or a configuration of ours."""

import json
import subprocess
import sys
from pathlib import Path

from llama3_tokenizer import tiny_tokenizer

PROGRAM = """
import json
import sys
from pathlib import Path
from patch.data import BatchReader, load_sft, load_tokenizer

source = load_sft(Path(sys.argv[1]), load_tokenizer(sys.argv[2]), sequence_length=32)
sizes = dict(micro_batch_size=2, global_batch_size=2, dp_rank=0, dp_size=1)
reader = BatchReader(source, **sizes, seed=1, shuffle=True)
(batch,) = reader.step(0)
assert not source.is_shuffled
print(json.dumps([list(batch.tokens.shape), int(batch.loss_mask.sum()), "megatron" in sys.modules]))
"""


def test_rows_become_batches_without_megatron_core(tmp_path: Path) -> None:
    rows = [{"instruction": "hello", "output": answer} for answer in ("world", "again")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "rows.jsonl"), str(tmp_path / "tokenizer")],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True,
    )  # fmt: skip
    # The loss covers the answers and the token that ends each turn.
    learned = sum(len(tokenizer(row["output"], add_special_tokens=False)["input_ids"]) + 1 for row in rows)
    assert json.loads(answer.stdout) == [[2, 32], learned, False]
