"""The same conversations as micro-batches, packed into four rows or padded to eight."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from training_runs import CPU, build_stages

from patch.config.schema import RunConfig
from patch.convert import import_hf
from patch.data import Batch
from patch.data.packing import PackedSource, Packs
from patch.data.samples import Sample, collate
from patch.training.objectives.objective import Objective
from patch.training.setup import Run, RunData

LENGTH = 32
SIZES = [32, 10, 22, 5, 9, 14, 20, 11]
ROWS = [0, 1, 3, 6, 8]
"""First conversation of each row: 0; 1 and 2; 3 to 5; 6 and 7. One row is full, two end in padding."""
PADDING = 2
STEPS = 3
PACKED = {"micro_batch_size": 2, "global_batch_size": 4, "packing": True, "train_iters": STEPS}
PADDED = {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": STEPS}


class Talks:
    """Conversations of random ids, the second half of each learned.

    Args:
        learned: conversations with learned tokens, or None for all.
        sizes: tokens of each conversation.
    """

    num_learned = 1
    """Required by the reader's interface, but not used."""

    def __init__(self, seed: int, learned: Sequence[int] | None = None, sizes: Sequence[int] = SIZES) -> None:
        random = np.random.default_rng(seed)
        self.sizes, self.fingerprint = np.array(sizes), f"talks {seed}"
        self.padding = PADDING
        self._ids = [random.integers(0, 250, size + 1).astype(np.int32) for size in sizes]
        self._learned = [
            np.arange(size + 1) > size // 2
            if learned is None or index in learned
            else np.zeros(size + 1, bool)
            for index, size in enumerate(sizes)
        ]

    def conversation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._ids[index], self._learned[index]

    def learn_one_token(self, number: int, token: int) -> None:
        """Let only this token be learned."""
        for learned in self._learned:
            learned[:] = False
        self._learned[number][token] = True

    def be_desirable_alternately(self) -> None:
        """Label conversations as KTO's rows are, in the first token."""
        for index, learned in enumerate(self._learned):
            learned[0] = index % 2 == 0

    def end_with_padding(self) -> None:
        """Let each conversation learn the padding id at its end, as if pad were the end token."""
        for ids in self._ids:
            ids[-1] = PADDING

    def packed(self) -> list[Sample]:
        source = PackedSource(self, LENGTH, is_packed=True)
        source.packs = Packs(LENGTH, np.arange(len(SIZES)), np.array(ROWS[1:]))
        return list(source)

    def padded(self) -> list[Sample]:
        samples = []
        for ids, learned in zip(self._ids, self._learned, strict=True):
            row = torch.full((LENGTH + 1,), PADDING)
            row[: len(ids)] = torch.from_numpy(ids)
            mask = torch.zeros(LENGTH)
            mask[: len(ids) - 1] = torch.from_numpy(learned[1:]).float()
            samples.append(Sample(row[:-1], row[1:], mask))
        return samples


def batches_of(config: RunConfig, *talks: Talks) -> list[Batch]:
    """Return all micro-batches of these conversations, packed or padded as the run says."""
    samples = [
        sample for each in talks for sample in (each.packed() if config.data.packing else each.padded())
    ]
    return in_batches(config, samples)


def in_batches(config: RunConfig, samples: Sequence[Sample]) -> list[Batch]:
    size = config.training.micro_batch_size
    return [collate(samples[begin : begin + size]) for begin in range(0, len(samples), size)]


def talk_batches(config: RunConfig, iteration: int) -> list[Batch]:
    """Return the micro-batches of a step, for `SeededReader`."""
    return batches_of(config, Talks(iteration))


def build_untrained(config: RunConfig, hf_folder: Path) -> Run:
    """Return a run without an optimizer, for `run_schedule`."""
    groups, stages = build_stages(config)
    import_hf(stages, hf_folder, config.model, groups)
    return Run(config, CPU.device, groups, stages, None, RunData(Objective(config), None, {}))  # type: ignore
