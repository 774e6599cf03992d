"""Several conversations in one sequence, so that no slot of a micro-batch is padding that could be data.

    pack           which conversations share a sequence: best-fit decreasing, from their sizes alone
    packed         a set as one whose samples are packs; the log says what that gains

Best-fit decreasing takes the conversations from the longest to the shortest, and puts each into the pack with
the least room in which it fits; it needs at most 11/9 of the fewest possible packs (Johnson, 1973).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from patch.data.samples import Sample
from patch.logger import get_logger

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Packs:
    """Which conversations each pack has; each conversation is in exactly one."""

    capacity: int
    """Tokens of a pack, padding included."""
    members: np.ndarray
    """int64 [N]: conversations, pack after pack; within a pack they keep their order."""
    ends: np.ndarray
    """int64 [P]: where each pack ends in `members`."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        """The conversations of a pack."""
        return self.members[self.ends[index - 1] if index else 0 : self.ends[index]]


def pack(sizes: np.ndarray, capacity: int) -> Packs:
    """Pack by best-fit decreasing: the same packs for the same sizes, on every machine.

    All conversations of one size are placed together, and so are all packs with the same room, so the time is
    that of sorting; memory is a few words for each conversation.

    Args:
        sizes: integer [N], tokens of each conversation, from 1 to `capacity`; not empty.
        capacity: tokens of a pack.
    """
    assert len(sizes) and sizes.min() >= 1 and sizes.max() <= capacity, "longer ones were cut before"
    pack_of = np.empty(len(sizes), dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    starts = np.flatnonzero(np.diff(sizes[order], prepend=-1))
    packs = _OpenPacks(capacity)
    for begin, end in zip(starts, [*starts[1:], len(sizes)], strict=True):
        packs.place(int(sizes[order[begin]]), order[begin:end], pack_of)
    return Packs(capacity, np.argsort(pack_of, kind="stable"), np.cumsum(np.bincount(pack_of)))


class _OpenPacks:
    """Packs by the room that is left in them.

    Args:
        capacity: tokens of a pack.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_packs = 0
        self._rooms: list[int] = []
        """The rooms that some pack has, ascending."""
        self._with_room: dict[int, list[np.ndarray]] = defaultdict(list)
        """The packs of each room."""

    def place(self, size: int, conversations: np.ndarray, pack_of: np.ndarray) -> None:
        """Place conversations of one size, and note the pack of each in `pack_of`."""
        while len(conversations):
            room, packs = self._tightest(size, len(conversations))
            # Best fit puts the next ones into the same pack, which now has the least room, while they fit.
            each = room // size
            full, rest = divmod(len(conversations), each)
            used = packs[: full + (rest > 0)]
            placed = conversations[: len(used) * each]
            pack_of[placed] = used.repeat(each)[: len(placed)]
            self._leave(room, packs[len(used) :])
            if full < len(used):
                self._leave(room - rest * size, used[full:])
            self._leave(room - each * size, used[:full])
            conversations = conversations[len(placed) :]

    def _tightest(self, size: int, count: int) -> tuple[int, np.ndarray]:
        """The least room that takes `size`, and the packs that have it; new packs for `count` if none has."""
        index = bisect_left(self._rooms, size)
        if index < len(self._rooms):
            room = self._rooms.pop(index)
            return room, np.concatenate(self._with_room.pop(room))
        new = -(-count // (self._capacity // size))
        self._num_packs += new
        return self._capacity, np.arange(self._num_packs - new, self._num_packs)

    def _leave(self, room: int, packs: np.ndarray) -> None:
        """Note that these packs have this room left."""
        if not len(packs) or not room:
            return
        if room not in self._with_room:
            insort(self._rooms, room)
        self._with_room[room].append(packs)


class Conversations(Protocol):
    """A fine-tuning set before its conversations become samples (`SftSource`)."""

    sizes: np.ndarray
    """int64 [N]: tokens of each conversation, without the last one, which is only a label."""
    num_learned: int
    """Tokens that the loss covers, over all conversations."""
    padding: int
    """The token id of padding."""
    fingerprint: str
    """The same for the same tokens."""

    def conversation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [size + 1] of a conversation, and bool [size + 1], whether each is learned."""

    def place(self, index: int) -> str:
        """Where a conversation comes from, see `SampleSource`."""


def packed_sample(source: Conversations, members: Iterable[int], capacity: int) -> Sample:
    """Conversations in one sample; padding at its end is one more sequence, with nothing to learn.

    Args:
        source: the conversations.
        members: which of them the sample has.
        capacity: tokens of the sample.
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
        lengths.append(size)
        begin += size
    if begin < capacity:
        lengths.append(capacity - begin)
    return Sample(tokens, labels, loss_mask, torch.tensor(lengths, dtype=torch.int32))


class PackedSource(Dataset[Sample]):
    """Samples of several conversations each.

    Args:
        source: the conversations.
        packs: which of them share a sample.
    """

    is_shuffled = False

    def __init__(self, source: Conversations, packs: Packs) -> None:
        self._source, self._packs = source, packs

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> Sample:
        return packed_sample(self._source, self._packs[index], self._packs.capacity)

    def place(self, index: int) -> str:
        """See `SampleSource`: the places of its conversations."""
        return " + ".join(self._source.place(int(member)) for member in self._packs[index])


class PairSource(PackedSource):
    """Samples of whole pairs: of each the preferred sequence, and after it the other one.

    `of_sequences` has the `sign` of each: 1, -1, or 0 of padding; and its `number` over all sets of a run.

    Args:
        source: the sequences of pair i are its conversations 2 i and 2 i + 1.
        capacity: tokens of a sample.
        is_packed: several pairs share a sample; else each has one.
        first: the number of the set's first sequence.
        name: of the set, for the log.
    """

    def __init__(
        self, source: Conversations, capacity: int, *, is_packed: bool, first: int = 0, name: str = ""
    ) -> None:
        self.source, self.first, self.num_learned, self.name = source, first, source.num_learned, name
        self.sizes = np.asarray(source.sizes).reshape(-1, 2).sum(axis=1)
        """int64 [N]: tokens of each pair."""
        alone = np.arange(len(self.sizes))
        self.packs = pack(self.sizes, capacity) if is_packed else Packs(capacity, alone, alone + 1)
        """Which pairs each sample has."""
        members = np.stack([2 * self.packs.members, 2 * self.packs.members + 1], axis=1).flatten()
        super().__init__(source, Packs(capacity, members, 2 * self.packs.ends))

    def __getitem__(self, index: int) -> Sample:
        sample, members = super().__getitem__(index), torch.from_numpy(self._packs[index])
        assert sample.lengths is not None, "a pair has two sequences"
        sign, number = torch.zeros(len(sample.lengths)), torch.zeros(len(sample.lengths), dtype=torch.int64)
        sign[: len(members)] = torch.tensor([1.0, -1.0]).repeat(len(members) // 2)
        number[: len(members)] = self.first + members
        return sample._replace(of_sequences={"sign": sign, "number": number})

    def place(self, index: int) -> str:
        """See `SampleSource`: the places of its pairs."""
        return " + ".join(self.source.place(2 * int(pair)) for pair in self.packs[index])


@dataclass(frozen=True, slots=True)
class PackingSummary:
    """How the tokens of a packed set are used, against one conversation a sample."""

    num_conversations: int
    num_packs: int
    capacity: int
    """Tokens of a sample, packed or not."""
    num_tokens: int
    """Tokens of all conversations, without padding."""
    num_learned: int

    @classmethod
    def of(cls, source: Conversations | PairSource, packs: Packs) -> PackingSummary:
        """The summary of a packed set of conversations or pairs, of which packs are made."""
        sizes = source.sizes
        return cls(len(sizes), len(packs), packs.capacity, int(sizes.sum()), source.num_learned)

    @property
    def gain(self) -> float:
        """How many times fewer samples there are: the gain in throughput if each takes equally long."""
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


def packed(source: Conversations, capacity: int, name: str) -> PackedSource:
    """Pack a set, and log what that gains.

    Args:
        source: the conversations, of at most `capacity` tokens each.
        capacity: tokens of a sample.
        name: of the set, for the log.
    """
    packs = pack(source.sizes, capacity)
    _logger.info("%s: %s", name, PackingSummary.of(source, packs))
    return PackedSource(source, packs)
