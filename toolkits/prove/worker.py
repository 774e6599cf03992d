"""Training run that keeps evidence after each step: gradients as a checkpoint, token hashes, unequal copies.

    OUTPUT/gradients/iter_0000001    all gradients, in any layout
    OUTPUT/evidence.json             step -> tokens, sum of their hashes, tensors with unequal copies

The command line is that of `llama-patch train`. Its launcher and its workers run this file.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a worker finds no packages otherwise
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from patch.training import register_hook  # noqa: E402
from toolkits.train.__main__ import main  # noqa: E402

GRADIENTS, EVIDENCE = "gradients", "evidence.json"


class TokenCounter:
    """A run's reader that counts per step: tokens, tokens with a loss, and the sum of their hashes."""

    def __init__(self, reader: Any) -> None:
        self._reader, self.seen = reader, dict[int, list[int]]()

    def step(self, iteration: int) -> list[Any]:
        """Return the reader's micro-batches, and count their tokens."""
        batches, seen = self._reader.step(iteration), [0, 0, 0]
        for batch in batches:
            learned = batch.loss_mask.ne(0)
            mixed = batch.tokens.long() * 1_000_003 + batch.labels.long() * 8191 + learned
            hashes = mixed * 2_654_435_761 % 2_147_483_647
            sums = (mixed.numel(), int(learned.sum()), int(hashes.sum()))
            seen = [before + more for before, more in zip(seen, sums, strict=True)]
        self.seen[iteration + 1] = seen
        return list(batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def evidence(run: Any) -> Any:
    """Return the hook of a rank that keeps the evidence."""
    import torch

    from patch.checkpoint import save_checkpoint
    from patch.checkpoint.sharded_tensors import shards_of
    from patch.distributed.collectives import all_gather_object
    from patch.model import sharded_weights
    from patch.training.hooks.hook import TrainerHook

    output, steps = Path(run.config.checkpoint.output_path), dict[int, Any]()
    reader = run.data.train_reader = TokenCounter(run.data.train_reader)

    def checksum(shard: Any) -> int:
        return zlib.crc32(shard.data.detach().cpu().contiguous().view(torch.uint8).numpy())

    class Evidence(TrainerHook):
        """Writes the evidence of each step."""

        def on_step(self, iteration: int, seconds: float) -> None:
            with run.optimizer.full_weights():
                weights = sharded_weights(run.stages, adapters=run.stages[0].is_adapted or None)
                state = {"gradient": run.optimizer.sharded_gradients(weights)}
                own = {
                    f"{shard.key} {shard.global_offset} {shard.data.shape}": checksum(shard)
                    for shard in shards_of({"model": weights, **state})
                    if isinstance(getattr(shard, "data", None), torch.Tensor)
                }
            ranks, first = all_gather_object((reader.seen[iteration], own)), dict[str, int]()
            copies = [copy for _, each in ranks for copy in each.items()]
            save_checkpoint(output / GRADIENTS, iteration, state, {})
            steps[iteration] = {
                "tokens": [sum(numbers) for numbers in zip(*(seen for seen, _ in ranks), strict=True)],
                "unequal": sorted({key for key, bits in copies if first.setdefault(key, bits) != bits}),
            }
            if torch.distributed.get_rank() == 0:
                (output / EVIDENCE).write_text(json.dumps(steps), encoding="utf-8")

    return Evidence()


if __name__ == "__main__":
    register_hook(evidence)
    sys.exit(main(sys.argv[1:], script=__file__))
