"""Log-probabilities of many short texts, by forwards on the run's schedule at any layout.

Texts are packed into rows like training sets, and rows are divided over data-parallel ranks. Texts with equal
tokens are computed once: four one-token answers to the same question are one text.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
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
    scores = torch.zeros(len(questions), 3, dtype=torch.float64)
    query = TokenQuery(run.config, lambda batch: ScoredTokens(batch.extra_tensors["choices"]))
    scored = dataclasses.replace(run, data=dataclasses.replace(run.data, objective=query))
    for batches in _passes(run, questions, texts):
        run.phases.enter(Phase.EVALUATION)
        for batch, report in zip(batches, forward_only(scored, batches), strict=False):
            _add(scores, batch, report["found"].cpu())
    if run.groups.tp.rank():
        scores.zero_()  # TP rank 0 has the same scores
    scores = scores.to(run.device)
    torch.distributed.all_reduce(scores)
    return [Answer(total, misses == 0, int(best)) for total, misses, best in scores.tolist()]


def _passes(
    run: Run, questions: Sequence[Question], texts: Mapping[tuple[int, ...], list[int]]
) -> Iterator[list[Batch]]:
    """Pack texts into rows, and yield this data-parallel rank's one-row micro-batches of each pass.

    All ranks yield the same number. `texts`: tokens -> indices of questions.
    """
    config, groups, dp_size, asked = run.config, run.groups, run.groups.dp.size(), list(texts.items())
    sizes = np.array([len(text) for text, _ in asked])
    count, is_fixed = 1, config.virtual_pipeline_size > 1
    if is_fixed:  # interleaved stages need their fixed number of micro-batches
        count = config.num_micro_batches
    elif groups.pp.size() > 1:
        count = _ROWS_OF_A_STAGE * groups.pp.size()
    unit = _UNIT * 2 * groups.cp.size() * groups.tp.size()
    share = math.ceil(sizes.sum() / (count * dp_size))
    most = config.training.micro_batch_size * config.sample_length
    shares = [share / math.ceil(share / most) * (1 + slack) for slack in _SLACKS]
    lengths = {math.ceil(max(sizes.max(), each) / unit) * unit for each in shares}
    multiple = dp_size * (count if is_fixed else 1)
    found = [pack(sizes, length) for length in sorted(lengths)]
    packs = min(found, key=lambda packs: math.ceil(len(packs) / multiple) * packs.capacity)
    width = max(map(len, texts.values()))
    rows = range(groups.dp.rank(), math.ceil(len(packs) / multiple) * multiple, dp_size)
    members = (packs[row].tolist() if row < len(packs) else [] for row in rows)
    samples = (_sample([asked[i] for i in own], questions, packs.capacity, width) for own in members)
    batches = (cut_batch(collate([sample]), Zigzag.of(groups.cp)) for sample in samples)
    while of_pass := list(islice(batches, count)):
        yield of_pass


def _sample(
    texts: Sequence[tuple[tuple[int, ...], list[int]]], questions: Sequence[Question], size: int, width: int
) -> Sample:
    """Return a row of texts as a sample of `size` tokens; a row may have no texts."""
    tokens = torch.zeros(size, dtype=torch.int64)
    choices, numbers = (torch.full((size, width), -1) for _ in range(2))
    lengths, begin = [], 0
    for text, asking in texts:
        end = begin + len(text)
        tokens[begin:end] = torch.tensor(text)
        for column, number in enumerate(asking):
            answers = questions[number].answers
            choices[end - len(answers) : end, column] = torch.tensor(answers)
            numbers[end - len(answers) : end, column] = number
        lengths.append(len(text))
        begin = end
    if begin < size:
        lengths.append(size - begin)
    of_tokens = {"choices": choices, "numbers": numbers}
    return Sample(tokens, tokens, torch.zeros(size), torch.tensor(lengths, dtype=torch.int32), of_tokens)


def _add(scores: torch.Tensor, batch: Batch, found: torch.Tensor) -> None:
    """Add a row's results `found` [B, S, 1 + K] (see `answers`) to `scores`, float64 [N, 3]."""
    # The columns are log-probability, number of tokens that are not the likeliest, and likeliest token.
    choices, numbers = batch.extra_tensors["choices"], batch.extra_tensors["numbers"]
    is_asked = numbers >= 0
    likeliest, logs = found[..., :1].expand_as(choices), found[..., 1:]
    values = (logs, likeliest != choices, likeliest)
    of_tokens = torch.stack([value[is_asked].double() for value in values], dim=1)
    scores.index_add_(0, numbers[is_asked], of_tokens)
