"""Packing: several conversations share a sequence, so that fewer slots of a micro-batch are padding.

`pack` chooses the conversations of each pack by best-fit decreasing, from their sizes alone. It takes the
conversations from the longest to the shortest, and puts each into the pack with the least room in which it
fits. It needs at most 11/9 of the fewest possible packs (Johnson, 1973).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from patch.config.choices import RowKind
from patch.data.samples import Batch, Sample
from patch.errors import DataError


@dataclass(frozen=True, slots=True)
class Packs:
    """Conversations of each pack; a conversation is in exactly one pack."""

    capacity: int
    """Tokens of a pack, padding included."""
    members: np.ndarray
    """int64 [N]: conversations, pack after pack; in their own order within a pack."""
    ends: np.ndarray
    """int64 [P]: end of each pack in `members`."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the conversations of a pack."""
        return self.members[self.ends[index - 1] if index else 0 : self.ends[index]]


def pack(sizes: np.ndarray, capacity: int) -> Packs:
    """Pack by best-fit decreasing. The same sizes give the same packs on every machine.

    The time is that of sorting; memory is a few words for each conversation.

    Args:
        sizes: integer [N], tokens of each conversation, from 1 to `capacity`; not empty.
    """
    assert len(sizes) and sizes.min() >= 1 and sizes.max() <= capacity, "longer ones were cut before"
    order = np.argsort(-sizes, kind="stable")
    pack_of = np.empty(len(sizes), dtype=np.int64)
    num_packs = 0
    rooms: list[int] = []  # that at least one pack has, ascending
    with_room: dict[int, deque[int]] = defaultdict(deque)
    for conversation, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        index = bisect_left(rooms, size)
        if index < len(rooms):
            room = rooms[index]
            number = with_room[room].popleft()
            if not with_room[room]:
                del rooms[index]
        else:
            room, number, num_packs = capacity, num_packs, num_packs + 1
        pack_of[conversation] = number
        if left := room - size:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(number)
    return Packs(capacity, np.argsort(pack_of, kind="stable"), np.cumsum(np.bincount(pack_of)))


class Sequences(Protocol):
    """Token sequences of conversations."""

    padding: int
    """The token id of padding."""

    def conversation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, int32 [size + 1], and whether each token is trained, bool [size + 1]."""


class Conversations(Sequences, Protocol):
    """Fine-tuning set before its conversations become samples (`SftSource`)."""

    sizes: np.ndarray
    """int64 [N]: tokens of each conversation, without the last token, which is only a label."""
    num_learned: int
    """Trained tokens of all conversations."""
    fingerprint: str
    """Identifier that is equal for equal tokens."""

    def place(self, index: int) -> str:
        """Return the place of a conversation in the data, see `SampleSource`."""


def packed_sample(
    source: Sequences, members: Iterable[int], capacity: int, slots: np.ndarray | None = None
) -> Sample:
    """Return conversations as one sample of `capacity` tokens. Padding is one more sequence at the end.

    Args:
        slots: int64 [N], tokens of each conversation with padding of its own; by default it has none.
    """
    tokens, labels = (torch.full((capacity,), source.padding) for _ in range(2))
    loss_mask = torch.zeros(capacity)
    lengths, begin = [], 0
    for member in members:
        ids, learned = source.conversation(int(member))
        size = len(ids) - 1
        part = slice(begin, begin + size)
        wide = torch.from_numpy(ids.astype(np.int64))
        tokens[part], labels[part] = wide[:-1], wide[1:]
        loss_mask[part] = torch.from_numpy(learned[1:].astype(np.float32))
        lengths.append(size if slots is None else int(slots[member]))
        begin += lengths[-1]
    if begin < capacity:
        lengths.append(capacity - begin)
    return Sample(tokens, labels, loss_mask, torch.tensor(lengths, dtype=torch.int32))


class PackedSource(Dataset[Sample]):
    """Samples of one conversation each, or of several if `is_packed`.

    Args:
        first: number of the set's first sequence among those of all sets.
        name: of the set, for the log.
    """

    is_shuffled = False
    per_row = 1
    """Conversations of a row of the data, such as a conversation or a pair."""

    def __init__(
        self, source: Conversations, capacity: int, *, is_packed: bool, first: int = 0, name: str = ""
    ) -> None:
        self.source, self.first, self.name = source, first, name
        self.sizes = self.sizes_of_rows(capacity)
        alone = np.arange(len(self.sizes))
        self.packs = pack(self.sizes, capacity) if is_packed else Packs(capacity, alone, alone + 1)

    def sizes_of_rows(self, capacity: int) -> np.ndarray:
        """Return the tokens of each row, int64 [N], at most `capacity`."""
        return self.source.sizes

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Sample:
        return packed_sample(self.source, self.packs[index], self.packs.capacity)

    def place(self, index: int) -> str:
        """See `SampleSource`: the places of its rows."""
        return " + ".join(self.source.place(self.per_row * int(row)) for row in self.packs[index])


class PairSource(PackedSource):
    """Samples of whole pairs: for each pair the preferred sequence, then the rejected sequence.

    Pair i of the source has its conversations 2 i and 2 i + 1. `of_sequences` has the `sign` of each sequence
    (1 preferred, -1 rejected, 0 padding) and its `number` over all sets of a run.
    """

    per_row = 2

    def sizes_of_rows(self, capacity: int) -> np.ndarray:
        """See `PackedSource`."""
        return np.asarray(self.source.sizes).reshape(-1, 2).sum(axis=1)

    def __getitem__(self, index: int) -> Sample:
        members = (2 * self.packs[index][:, None] + np.arange(2)).flatten()
        numbers = torch.from_numpy(members)
        sample = packed_sample(self.source, members, self.packs.capacity)
        return self._numbered(sample, 1.0 - 2 * (numbers % 2), numbers)

    def _numbered(self, sample: Sample, signs: torch.Tensor, numbers: torch.Tensor) -> Sample:
        """Return a sample with sign and number of its sequences; both are 0 for padding."""
        assert sample.lengths is not None, "a row has sequences"
        padding = 0, len(sample.lengths) - len(signs)
        of_sequences = {"sign": F.pad(signs, padding), "number": F.pad(numbers + self.first, padding)}
        return sample._replace(of_sequences=of_sequences)


class UnpairedSource(PairSource):
    """Samples of labelled answers, and of mismatched answers at the same places: see `mismatched`.

    A row has two sequences, as a pair has: its own, and its prompt with the answer of the row before it. The
    first row takes the last row's answer. `of_sequences` has the `sign` of each own sequence (1 desirable, -1
    undesirable, 0 padding) and its `number`; the mismatched sequence has the next number.
    """

    per_row = 1

    def sizes_of_rows(self, capacity: int) -> np.ndarray:
        """Return the tokens of the longer one of both sequences of a row."""
        self._others = _Mismatched(self.source, capacity)
        return np.maximum(self.source.sizes, self._others.sizes)

    def __getitem__(self, index: int) -> Sample:
        rows, capacity = self.packs[index], self.packs.capacity
        own, other = (
            packed_sample(each, rows, capacity, self.sizes) for each in (self.source, self._others)
        )
        signs = [1.0 if self.source.conversation(int(row))[1][0] else -1.0 for row in rows]
        extra = {"tokens": other.tokens, "labels": other.labels, "loss_mask": other.loss_mask}
        sample = self._numbered(own, torch.tensor(signs), 2 * torch.from_numpy(rows))
        return sample._replace(extra_tensors=extra)


class _Mismatched:
    """Each prompt of a set of answers, with the answer of the row before it, cut at the end to `capacity`."""

    def __init__(self, source: Conversations, capacity: int) -> None:
        self._source, self._capacity, self.padding = source, capacity, source.padding
        learned = (source.conversation(index)[1] for index in range(len(source.sizes)))
        self._begins = np.array([1 + int(each[1:].argmax()) for each in learned])
        """int64 [N]: tokens of each prompt."""
        if len(self._begins) < 2:
            raise DataError(
                f"{source.place(0)} is the only one with something to learn; expected another row, whose "
                "answer gives KTO's reference point; add rows"
            )
        answers = source.sizes - self._begins
        self.sizes = np.minimum(self._begins + np.roll(answers, 1), capacity)

    def conversation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Sequences`."""
        before = (index - 1) % len(self._begins)
        prompt, answer = (self._source.conversation(each)[0] for each in (index, before))
        ids = np.concatenate([prompt[: self._begins[index]], answer[self._begins[before] :]])
        ids = ids[: self._capacity + 1]
        return ids, np.arange(len(ids)) >= self._begins[index]


def mismatched(batch: Batch) -> Batch:
    """Return the micro-batch of the mismatched sequences beside those of `UnpairedSource`, without noise."""
    of_sequences = {**batch.of_sequences, "number": batch.of_sequences["number"] + 1}
    own = {name: each for name, each in batch.extra_tensors.items() if name in Batch._fields}
    return batch._replace(**own, extra_tensors={}, of_sequences=of_sequences)


SOURCES: dict[RowKind, type[PackedSource]] = {
    "conversation": PackedSource, "pair": PairSource, "unpaired": UnpairedSource,
}  # fmt: skip
"""Source of each kind of rows."""


@dataclass(frozen=True, slots=True)
class PackingSummary:
    """Use of the tokens of a packed set, compared with one conversation per sample."""

    num_conversations: int
    num_packs: int
    capacity: int
    """Tokens of a sample, packed or not."""
    num_tokens: int
    """Tokens of all conversations, without padding."""
    num_learned: int

    @classmethod
    def of(cls, packed: PackedSource) -> PackingSummary:
        """Return the summary of a packed set of conversations or pairs."""
        sizes, packs = packed.sizes, packed.packs
        return cls(len(sizes), len(packs), packs.capacity, int(sizes.sum()), packed.source.num_learned)

    @property
    def gain(self) -> float:
        """Ratio of unpacked to packed samples: the gain in throughput if each sample takes equally long."""
        return self.num_conversations / self.num_packs

    def __str__(self) -> str:
        packed, unpacked = (count * self.capacity for count in (self.num_packs, self.num_conversations))
        learned, context = self.num_learned / packed, (self.num_tokens - self.num_learned) / packed
        padding, padding_unpacked = 1 - self.num_tokens / packed, 1 - self.num_tokens / unpacked
        return (
            f"{self.num_conversations} conversations in {self.num_packs} packs of {self.capacity} tokens: "
            f"{learned:.1%} learned, {context:.1%} context, {padding:.1%} padding (unpacked "
            f"{padding_unpacked:.1%} padding); a step holds {self.gain:.2f} times as much"
        )
