"""Fine-tune so that each conversation counts the same, whatever its length; write a table of the losses.

python examples/llama3_1/library/sequence_mean.py --objective sequence-mean FLAGS...  # or the 25 positions
"""

import os
import sys
from typing import Any

from patch.training import register_hook, register_objective
from toolkits.train.__main__ import main


def _sequence_mean(config: Any) -> Any:
    from patch.training.objectives import Objective  # imported here, because the launcher needs no torch
    class SequenceMean(Objective):
        unit = "sequences"  # all loss weights sum to this number, which divides the loss of a step
        def collate(self, samples: Any) -> Any:
            batch = super().collate(samples)
            length, borders = batch.tokens.shape[1], batch.cu_seqlens  # borders of packed conversations
            sizes = length if borders is None else borders.diff().tolist()
            for weights in batch.loss_mask.flatten().split(sizes):
                weights /= weights.sum().clamp(min=1)
            return batch
    return SequenceMean(config)


def _loss_table(run: Any) -> Any:
    from patch.training.hooks import TrainerHook
    class LossTable(TrainerHook):
        def on_log(self, record: Any) -> None:
            with open(f"{run.config.checkpoint.output_path}/losses.csv", "a") as file:
                file.write(f"{record['iteration']},{record['loss']}\n")
    return LossTable() if os.environ["RANK"] == "0" else None


register_objective("sequence-mean", _sequence_mean)
register_hook(_loss_table)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], script=__file__))
