"""Log-probabilities of many short texts by forwards of a run's own schedule, at any layout.

Texts are packed into rows as training sets are, and rows are divided over data-parallel ranks. Texts of equal
tokens are computed once, whatever is asked of them: four answers of one token to a question are one text.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from patch.data import Batch, Sample, collate
from patch.data.packing import pack
from patch.data.samples import cut_batch
from patch.distributed.context_group import Zigzag
from patch.model import LlamaModel, PackedSequences, ScoredTokens
from patch.training.evaluation import forward_only
from patch.training.guards.phases import Phase
from patch.training.objective import Objective
from patch.training.setup import Run

_ROWS_OF_A_STAGE = 4
"""Rows for each pipeline stage in one pass of the schedule: enough that stages seldom wait."""
_SLACKS = (0, 0.02, 0.05, 0.1, 0.25)
"""Shares of a row that may stay empty, of which the best is taken: without any there may be one more row."""
_UNIT = 16
"""Tokens of which a rank's part of a row is a multiple: 8-bit products ask for it."""


class Question(NamedTuple):
    """A text, and tokens that may follow its last ones."""

    tokens: Sequence[int]
    """The tokens that the model reads."""
    answers: Sequence[int]
    """Asked: the log-probability of each after one of the last tokens; of the last one after the last."""


class Answer(NamedTuple):
    """The model's answer to a question."""

    log_probability: float
    """The log-probability of all asked tokens together."""
    is_greedy: bool
    """Whether each of them is the likeliest one."""
    likeliest: int
    """The token that is likeliest after the text, for a question of one token."""


def answers_to(run: Run, questions: Sequence[Question]) -> list[Answer]:
    """Ask the model; a collective over the job within `evaluating`, with the same questions on all ranks.

    Args:
        run: this rank's parts of the run.
        questions: of at most the model's longest sequence.
    """
    if not questions:
        return []
    texts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, question in enumerate(questions):
        texts[tuple(question.tokens)].append(number)
    rows = _Rows(run, questions, texts)
    scores = torch.zeros(len(questions), 3, dtype=torch.float64)
    scored = dataclasses.replace(run, data=dataclasses.replace(run.data, objective=_Scores(run.config)))
    for batches in rows.passes():
        run.phases.enter(Phase.EVALUATION)
        for batch, report in zip(batches, forward_only(scored, batches), strict=False):
            _add(scores, batch, report["scores"].cpu())
    if run.groups.tp.rank():
        scores.zero_()  # the same as that of the first one
    scores = scores.to(run.device)
    torch.distributed.all_reduce(scores)
    return [Answer(total, misses == 0, int(best)) for total, misses, best in scores.tolist()]


class _Rows:
    """The rows into which texts are packed, and this data-parallel rank's part of them.

    Args:
        run: this rank's parts of the run.
        questions: see `answers_to`.
        texts: the questions of each text, by their numbers.
    """

    def __init__(
        self, run: Run, questions: Sequence[Question], texts: Mapping[tuple[int, ...], list[int]]
    ) -> None:
        config, self._groups = run.config, run.groups
        self._texts, self._questions = list(texts.items()), questions
        sizes = np.array([len(text) for text, _ in self._texts])
        self._count, is_fixed = 1, config.virtual_pipeline_size > 1
        if is_fixed:  # interleaved stages need the number that they were built for
            self._count = config.num_micro_batches
        elif run.groups.pp.size() > 1:
            self._count = _ROWS_OF_A_STAGE * run.groups.pp.size()
        unit = _UNIT * 2 * run.groups.cp.size() * run.groups.tp.size()
        share = math.ceil(sizes.sum() / (self._count * run.groups.dp.size()))
        most = config.training.micro_batch_size * config.sample_length
        shares = [share / math.ceil(share / most) * (1 + slack) for slack in _SLACKS]
        lengths = {math.ceil(max(sizes.max(), each) / unit) * unit for each in shares}
        multiple = run.groups.dp.size() * (self._count if is_fixed else 1)
        found = [pack(sizes, length) for length in sorted(lengths)]
        self._packs = min(found, key=lambda packs: math.ceil(len(packs) / multiple) * packs.capacity)
        self._length = self._packs.capacity
        self._num_own = math.ceil(len(self._packs) / multiple) * multiple // run.groups.dp.size()
        self._width = max(len(numbers) for _, numbers in self._texts)

    def passes(self) -> Iterable[list[Batch]]:
        """This rank's micro-batches of one row each, as many on every rank, for each pass of the schedule."""
        dp, zigzag = self._groups.dp, Zigzag.of(self._groups.cp)
        rows = [number * dp.size() + dp.rank() for number in range(self._num_own)]
        for begin in range(0, len(rows), self._count):
            own = rows[begin : begin + self._count]
            yield [cut_batch(collate([self._sample(row)]), zigzag) for row in own]

    def _sample(self, row: int) -> Sample:
        """A row; one after the last has no texts."""
        members = self._packs[row] if row < len(self._packs) else ()
        tokens = torch.zeros(self._length, dtype=torch.int64)
        choices, numbers = (torch.full((self._length, self._width), -1) for _ in range(2))
        lengths, begin = [], 0
        for member in map(int, members):
            text, asking = self._texts[member]
            end = begin + len(text)
            tokens[begin:end] = torch.tensor(text)
            for column, number in enumerate(asking):
                answers = self._questions[number].answers
                choices[end - len(answers) : end, column] = torch.tensor(answers)
                numbers[end - len(answers) : end, column] = number
            lengths.append(len(text))
            begin = end
        if begin < self._length:
            lengths.append(self._length - begin)
        of_tokens = {"choices": choices, "numbers": numbers}
        borders = torch.tensor(lengths, dtype=torch.int32)
        return Sample(tokens, tokens, torch.zeros(self._length), borders, of_tokens)


class _Scores(Objective):
    """Reports what `log_probabilities` finds; nothing is learned."""

    def forward(
        self, model: LlamaModel, batch: Batch, packed: PackedSequences | None, gradient: float
    ) -> torch.Tensor:
        """See `Objective`."""
        asked = ScoredTokens(batch.further["choices"])
        return model(
            batch.tokens, None, None, labels=batch.labels, loss_mask=asked, packed_seq_params=packed
        )

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """The output itself, beside a loss that upstream's schedules ask for."""
        return {"loss": output.new_zeros(()), "scores": output}


def _add(scores: torch.Tensor, batch: Batch, found: torch.Tensor) -> None:
    """Add what a row says to its questions: log-probabilities, tokens not the likeliest, the likeliest.

    Args:
        scores: float64 [N, 3], of all questions.
        batch: the row, on the CPU.
        found: [1 + K, B, S], see `log_probabilities`.
    """
    choices, numbers = batch.further["choices"], batch.further["numbers"]
    is_asked = numbers >= 0
    likeliest, logs = found[0][..., None].expand_as(choices), found[1:].permute(1, 2, 0)
    values = (logs, likeliest != choices, likeliest)
    of_tokens = torch.stack([value[is_asked].double() for value in values], dim=1)
    scores.index_add_(0, numbers[is_asked], of_tokens)
