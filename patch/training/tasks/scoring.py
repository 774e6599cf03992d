"""Log-probabilities of many short texts, by forwards on the run's schedule at any layout.

Texts are packed into rows like training sets, and rows are divided over data-parallel ranks. Texts with equal
tokens are computed once: four one-token answers to the same question are one text.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from patch.config.choices import PRECISIONS
from patch.data import Batch, Sample, collate
from patch.data.packing import pack
from patch.data.samples import cut_batch
from patch.distributed.context_group import Zigzag
from patch.model import ScoredTokens
from patch.training.evaluation import forward_only
from patch.training.guards.phases import Phase
from patch.training.objectives.objective import TokenQuery
from patch.training.setup import Run

_ROWS_OF_A_STAGE = 4
"""Rows per pipeline stage in one pass of the schedule: enough to keep the bubble small."""
_SLACKS = (0, 0.02, 0.05, 0.1, 0.25)
"""Candidates for the padded share of a row; the best is taken, because padding may save a whole row."""
_UNIT = max(each.size_multiple for each in PRECISIONS.values())
"""A rank's part of a row is a multiple of this number of tokens, for the products of every precision."""


class Question(NamedTuple):
    """A text, and candidates for the tokens that follow its last tokens."""

    tokens: Sequence[int]
    """The tokens that the model reads."""
    answers: Sequence[int]
    """Tokens whose log-probabilities are asked; answer i of n follows `tokens[i - n]`."""


class Answer(NamedTuple):
    """The model's answer to a question."""

    log_probability: float
    """The sum of the log-probabilities of all asked tokens."""
    is_greedy: bool
    """Whether each asked token is the likeliest token."""
    likeliest: int
    """For a question of one token: the likeliest token after the text."""


def answers_to(run: Run, questions: Sequence[Question]) -> list[Answer]:
    """Ask the model; a collective over the job, inside `evaluating`, with the same questions on all ranks.

    No question may be longer than the model's longest sequence.
    """
    if not questions:
        return []
    texts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, question in enumerate(questions):
        texts[tuple(question.tokens)].append(number)
    rows = _Rows(run, questions, texts)
    scores = torch.zeros(len(questions), 3, dtype=torch.float64)
    query = TokenQuery(run.config, lambda batch: ScoredTokens(batch.extra_tensors["choices"]))
    scored = dataclasses.replace(run, data=dataclasses.replace(run.data, objective=query))
    for batches in rows.passes():
        run.phases.enter(Phase.EVALUATION)
        for batch, report in zip(batches, forward_only(scored, batches), strict=False):
            _add(scores, batch, report["found"].cpu())
    if run.groups.tp.rank():
        scores.zero_()  # TP rank 0 has the same scores
    scores = scores.to(run.device)
    torch.distributed.all_reduce(scores)
    return [Answer(total, misses == 0, int(best)) for total, misses, best in scores.tolist()]


class _Rows:
    """Packed rows of texts, and this data-parallel rank's part; `texts`: tokens -> indices of questions."""

    def __init__(
        self, run: Run, questions: Sequence[Question], texts: Mapping[tuple[int, ...], list[int]]
    ) -> None:
        config, self._groups = run.config, run.groups
        self._texts, self._questions = list(texts.items()), questions
        sizes = np.array([len(text) for text, _ in self._texts])
        self._count, is_fixed = 1, config.virtual_pipeline_size > 1
        if is_fixed:  # interleaved stages need their fixed number of micro-batches
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
        """Yield this rank's one-row micro-batches of each pass; all ranks yield the same number."""
        dp, zigzag = self._groups.dp, Zigzag.of(self._groups.cp)
        rows = [number * dp.size() + dp.rank() for number in range(self._num_own)]
        for begin in range(0, len(rows), self._count):
            own = rows[begin : begin + self._count]
            yield [cut_batch(collate([self._sample(row)]), zigzag) for row in own]

    def _sample(self, row: int) -> Sample:
        """Return a row as a sample; rows after the last have no texts."""
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


def _add(scores: torch.Tensor, batch: Batch, found: torch.Tensor) -> None:
    """Add a row's results `found` [B, S, 1 + K] (see `answers`) to `scores`, float64 [N, 3]."""
    # The columns are log-probability, number of tokens that are not the likeliest, and likeliest token.
    choices, numbers = batch.extra_tensors["choices"], batch.extra_tensors["numbers"]
    is_asked = numbers >= 0
    likeliest, logs = found[..., :1].expand_as(choices), found[..., 1:]
    values = (logs, likeliest != choices, likeliest)
    of_tokens = torch.stack([value[is_asked].double() for value in values], dim=1)
    scores.index_add_(0, numbers[is_asked], of_tokens)
