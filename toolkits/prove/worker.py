"""A run that keeps evidence: after each step its gradients as a checkpoint, its tokens, and unequal copies.

    OUTPUT/gradients/iter_0000001    all gradients, whatever the layout
    OUTPUT/evidence.json             of each step: tokens, a sum of their hashes, tensors with unequal copies

The command line is that of `llama-patch train`; its launcher and its workers run this file.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a worker has no other way to the packages
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from patch.training import register_hook  # noqa: E402
from toolkits.train.__main__ import main  # noqa: E402

GRADIENTS, EVIDENCE = "gradients", "evidence.json"


def evidence(run: Any) -> Any:
    """The hook of a rank that keeps the evidence."""
    import torch

    from patch.checkpoint import save_checkpoint
    from patch.checkpoint.sharded_tensors import shards_of
    from patch.distributed.collectives import all_gather_object
    from patch.model import sharded_weights
    from patch.training.hooks import TrainerHook

    output, seen = Path(run.config.checkpoint.output_path), dict[int, tuple[int, int, int]]()

    def hashed(batches: list[Any]) -> tuple[int, int, int]:
        """Tokens, those with a loss, and the sum of hashes of each token with its label and weight."""
        total = count = learned = 0
        for batch in batches:
            mixed = batch.tokens.long() * 1_000_003 + batch.labels.long() * 8191 + batch.loss_mask.ne(0)
            mixed = (mixed * 2_654_435_761) % 2_147_483_647
            total, count = total + int(mixed.sum()), count + mixed.numel()
            learned += int(batch.loss_mask.ne(0).sum())
        return count, learned, total

    class Reader:
        """The run's reader; what it gives is noted."""

        def __init__(self, reader: Any) -> None:
            self._reader = reader

        def step(self, iteration: int) -> list[Any]:
            batches = list(self._reader.step(iteration))
            seen[iteration + 1] = hashed(batches)
            return batches

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reader, name)

    class Evidence(TrainerHook):
        """Writes the evidence of each step."""

        def __init__(self) -> None:
            self._steps: dict[int, Any] = {}

        def on_step(self, iteration: int, seconds: float) -> None:
            with run.optimizer.full_weights():
                weights = sharded_weights(run.stages, adapters=run.stages[0].is_adapted or None)
                gradients = run.optimizer.sharded_gradients(weights)
                state = {"model": weights, "gradient": gradients}
                own = {
                    (shard.key, shard.global_offset, tuple(shard.data.shape)): zlib.crc32(
                        shard.data.detach().cpu().contiguous().view(torch.uint8).numpy()
                    )
                    for shard in shards_of(state)
                    if getattr(shard, "data", None) is not None and hasattr(shard, "global_offset")
                }
                ranks = all_gather_object((seen[iteration], own))
            save_checkpoint(output / GRADIENTS, iteration, {"gradient": gradients}, {})
            copies: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
            for rank, (_, sums) in enumerate(ranks):
                for key, checksum in sums.items():
                    copies[key][checksum].append(rank)
            unequal = sorted({key[0] for key, found in copies.items() if len(found) > 1})
            tokens = [sum(column) for column in zip(*(each for each, _ in ranks), strict=True)]
            self._steps[iteration] = {"tokens": tokens, "unequal": unequal}
            if torch.distributed.get_rank() == 0:
                (output / EVIDENCE).write_text(json.dumps(self._steps))

    run.data.train_reader = Reader(run.data.train_reader)
    return Evidence()


if __name__ == "__main__":
    register_hook(evidence)
    sys.exit(main(sys.argv[1:], script=__file__))
