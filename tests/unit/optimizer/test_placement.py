"""Placement driven by recorded memory traces: no device, only the decisions and what they lead to.

The traces are of the sizes of an 8B model on a GPU of 139 GiB, in MiB: 240 chunks of 32 Mi elements.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import pytest

from patch.memory.cuda_device import Fragmentation
from patch.optimizer.states.placement import (
    WINDOW,
    AutoPlacementPolicy,
    DeviceMemory,
    LateUpdates,
    MemStatsCollector,
    StaticPlacementPolicy,
    StreamedShare,
)

MIB = 2**20
USABLE, FIXED, THRESHOLD = 141_000, 46_000, 2_048
CHUNK_NUMEL = 32 * MIB
BYTES_PER_ELEMENT = 12
CHUNK = CHUNK_NUMEL * BYTES_PER_ELEMENT // MIB
NUM_CHUNKS = 240
ALL = 2 * NUM_CHUNKS * CHUNK * MIB


@dataclass(eq=False)
class Chunk:
    """A chunk as placement sees it."""

    index: int
    numel: int = CHUNK_NUMEL
    is_on_host: bool = True
    stays_on_host: bool = False
    is_streamed: bool = False

    @property
    def num_bytes(self) -> int:
        return self.numel * BYTES_PER_ELEMENT


def make_chunks(numels: Sequence[int] = (CHUNK_NUMEL,) * NUM_CHUNKS, is_on_host: bool = True) -> list:
    """Of these sizes, in one place; the last of a real run is smaller too."""
    return [Chunk(index, numel, is_on_host) for index, numel in enumerate(numels)]


@dataclass
class Step:
    """One step of a trace, in MiB."""

    peak: int
    usable: int = USABLE
    others: dict[str, int] = field(default_factory=dict)
    """Peaks of what comes after the step: evaluation, save."""


def steady(count: int, peak: int = 19_420, **changes) -> list[Step]:
    return [Step(peak, **changes) for _ in range(count)]


TRACES = {
    "warm-up growth": [Step(peak) for peak in (14_180, 17_912, 19_350, 19_350, 19_402)] + steady(55),
    "a long sequence at step 40": [*steady(40), Step(31_806), *steady(19)],
    "evaluation": [*steady(19), Step(19_420, others={"evaluate": 24_512}), *steady(20)],
    "checkpoint": [*steady(24), Step(19_420, others={"save": 27_130}), *steady(15)],
    "noise": [Step(19_420 + wobble) for wobble in (0, 61, -140, 22, 148, -95, 7, 112, -33, 150, -8, 74)],
    "another process": [*steady(30), *steady(40, usable=USABLE - 30_000), *steady(90)],
    "another process, flickering": [
        Step(19_420, usable=USABLE - taken) for taken in (0, 3_000, 0, 0, 5_100, 0, 0, 0, 3_900, 0)
    ],
}
"""Of one pass; evaluations and checkpoints come back in the same place of each."""
SURPRISES = ("a long sequence at step 40", "evaluation", "checkpoint")
"""Where a step needs much more than the one before."""


class Outcome(NamedTuple):
    """What a simulated run did, by step."""

    over: list[int]
    """MiB by which a step, an evaluation or a save exceeded what the process could have."""
    device: list[int]
    """MiB of chunks on the device."""
    moves: list[list]


def simulate(policy, chunks: list, trace: Iterable[Step], fixed: int = FIXED) -> Outcome:
    """Let `policy` place the chunks before each step and record the step's peaks behind it."""
    outcome = Outcome([], [], [])
    for step in trace:
        moves = policy.moves(chunks, DeviceMemory(step.usable * MIB, fixed * MIB))
        for move in moves:
            assert move.chunk.is_on_host != move.to_host, "a move that moves nothing"
            assert move.reason
            move.chunk.is_on_host = move.to_host
        device = sum(chunk.num_bytes for chunk in chunks if not chunk.is_on_host) // MIB
        peaks = {"train": step.peak, **step.others}
        for kind, peak in peaks.items():
            policy.stats.record(kind, (fixed + device + peak) * MIB, (fixed + device) * MIB)
        outcome.over.append(fixed + device + max(peaks.values()) - step.usable)
        outcome.device.append(device)
        outcome.moves.append(moves)
    return outcome


def auto(threshold: int = THRESHOLD) -> AutoPlacementPolicy:
    return AutoPlacementPolicy(threshold * MIB)


@pytest.mark.parametrize("name", TRACES)
def test_auto_is_never_over_budget_and_fills_to_within_one_chunk_without_ping_pong(name):
    """No hysteresis (the original's defect 10): there a chunk came and went with every wobble."""
    trace = TRACES[name]
    length = len(trace)
    outcome = simulate(auto(), make_chunks(), trace * (3_000 // length))

    assert max(outcome.over[length:]) <= -THRESHOLD, "once the trace repeats"
    if name not in SURPRISES:
        assert max(outcome.over) <= 0
    peak = max(max(step.peak, *step.others.values(), 0) for step in trace)
    possible = min(step.usable for step in trace) - FIXED - peak - THRESHOLD
    assert 0 <= possible - min(outcome.device[11 * length : 12 * length]) < CHUNK
    count = Counter(move.chunk.index for moves in outcome.moves for move in moves)
    assert max(count.values()) <= 7
    assert not any(outcome.moves[-1_000:])


def test_what_comes_back_just_when_it_was_forgotten_is_a_surprise_a_few_times_only():
    trace = [Step(31_806), *steady(WINDOW + 6)]
    outcome = simulate(auto(), make_chunks(), trace * 30)

    assert sum(over > 0 for over in outcome.over) <= 2
    assert not any(outcome.moves[len(outcome.moves) // 2 :])


def test_auto_waits_for_the_end_of_growth():
    trace = [Step(10_000 + 1_000 * index) for index in range(9)] + steady(9, 18_000)
    outcome = simulate(auto(), make_chunks(), trace)

    assert outcome.device[:10] == [0] * 10 and outcome.device[-1] > 0
    assert max(outcome.over) <= -THRESHOLD


def test_auto_evicts_at_once_no_more_than_it_must_and_keeps_on_the_host_what_is_needed_first():
    policy, chunks, found = auto(), make_chunks(), []
    for trace in (steady(10), steady(1, usable=USABLE - 5_000), steady(200)):
        found.append(simulate(policy, chunks, trace))
        on_host = [chunk.is_on_host for chunk in chunks]
        assert on_host == sorted(on_host, reverse=True)
        assert 0 < sum(on_host) < NUM_CHUNKS
    assert found[1].over[0] <= -THRESHOLD
    assert 5_000 - CHUNK < found[0].device[-1] - found[1].device[0] < 5_000 + CHUNK


def test_all_chunks_fit_or_none_do():
    roomy, chunks = auto(), make_chunks()
    simulate(roomy, chunks, steady(10, usable=3 * USABLE))
    assert not any(chunk.is_on_host for chunk in chunks)
    cramped, chunks = auto(), make_chunks()
    outcome = simulate(cramped, chunks, steady(200, usable=FIXED + 19_420 + THRESHOLD + CHUNK - 1))
    assert not any(outcome.moves)


@pytest.mark.parametrize("threshold", [0, 1, 2_048, 30_000])
def test_the_threshold_stays_free(threshold):
    outcome = simulate(auto(threshold), make_chunks(), steady(40))

    assert -threshold - CHUNK < outcome.over[-1] <= -threshold


def test_a_device_that_has_no_room_after_all_is_asked_less_and_less():
    """Free memory in fragments: the device refuses what by its numbers would fit."""
    policy, chunks, asked = auto(), make_chunks(), []
    policy.stats.record("train", (FIXED + 19_420) * MIB, FIXED * MIB)
    for step in range(1_000):
        if policy.moves(chunks, DeviceMemory(USABLE * MIB, FIXED * MIB)):
            asked.append(step)
            policy.back_off()

    assert len(asked) <= 5 and asked[1] - asked[0] == WINDOW


def test_out_of_memory_takes_the_lowest_indices_first_and_is_remembered():
    evicted = auto().evict(make_chunks(is_on_host=False), CHUNK * MIB + 1)
    assert [move.chunk.index for move in evicted] == [0, 1]
    policy, chunks = auto(), make_chunks()
    held = simulate(policy, chunks, steady(10)).device[-1] // CHUNK
    everything = policy.evict(chunks, ALL)
    assert len(everything) == held
    for move in everything:
        move.chunk.is_on_host = True
    assert policy.evict(chunks, ALL) == []

    outcome = simulate(policy, chunks, steady(3 * WINDOW))
    assert outcome.device[WINDOW - 2] == 0 and outcome.device[-1] // CHUNK == held


def test_an_early_peak_is_forgotten():
    """Max over all history (the original's defect 10): one large step kept its memory to the end."""
    outcome = simulate(auto(), make_chunks(), [*steady(5), Step(50_000), *steady(3 * WINDOW)])

    assert outcome.device[6] < outcome.device[5] - 20_000
    assert outcome.device[-1] == outcome.device[5]


def test_only_non_model_memory_is_a_peak():
    stats = MemStatsCollector()
    assert stats.max_non_model is None
    stats.record("save", 10, 4)
    assert stats.max_non_model is None, "nothing is known of training"
    for _ in range(10 * WINDOW):  # of other kinds of work nothing is forgotten
        stats.record("train", 3, 4)
    assert stats.max_non_model == 6


def place(policy, chunks: list) -> list:
    """The policy's moves, which are made."""
    moves = policy.moves(chunks, DeviceMemory(0, 0))
    for move in moves:
        move.chunk.is_on_host = move.to_host
    return [(move.chunk.index, move.to_host) for move in moves]


@pytest.mark.parametrize("numels", [[7, 7, 7, 3], [5], [1, 9, 2, 8, 3, 7], [100, 1, 1], [1] * NUM_CHUNKS])
@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.25, 0.3, 0.65, 1.0])
@pytest.mark.parametrize("is_on_host", [True, False])
def test_static_keeps_the_users_fraction_to_half_a_chunk(numels, fraction, is_on_host):
    """Fraction mis-scaled (the original's defect 3): 0.65 offloaded 0.53 there, and 0.25 nothing."""
    policy, chunks = StaticPlacementPolicy(fraction), make_chunks(numels, is_on_host)
    place(policy, chunks)
    on_host = [chunk.is_on_host for chunk in chunks]
    assert on_host == sorted(on_host, reverse=True), "the first ones"
    assert abs(sum(c.numel for c in chunks if c.is_on_host) - fraction * sum(numels)) <= max(numels) / 2
    assert place(policy, chunks) == [], "it is decided once"


def test_static_takes_evictions_first_and_keeps_what_out_of_memory_moved():
    policy, chunks = StaticPlacementPolicy(0.5), make_chunks([1] * 4)
    for chunk in chunks[:2]:
        chunk.is_on_host = False
    assert place(policy, chunks) == [(0, True), (1, True), (2, False), (3, False)]
    for move in policy.evict(chunks, 1):
        move.chunk.is_on_host = True
    assert [chunk.is_on_host for chunk in chunks] == [True, True, True, False]
    assert place(policy, chunks) == []


GIB = 2**30
TOTAL, HELD, WASTE = 139 * GIB, 46 * GIB, 6 * GIB


class Fragmented:
    """A GPU whose allocator can use all but WASTE of what it reserves, and keeps what was given up."""

    def __init__(self) -> None:
        self.chunks, self.fragmentation = make_chunks([GIB // BYTES_PER_ELEMENT] * 100), Fragmentation()
        self.reserved, self.needed = 90 * GIB, 0  # loading left it behind

    def step(self, policy: AutoPlacementPolicy, activations: int) -> None:
        for move in policy.moves(self.chunks, DeviceMemory(TOTAL - self.fragmentation.num_bytes, HELD)):
            move.chunk.is_on_host = move.to_host
            if move.to_host:
                self.fragmentation.invalidate()
        before = HELD + sum(chunk.num_bytes for chunk in self.chunks if not chunk.is_on_host)
        peak = before + activations
        self.needed = peak + WASTE
        self.reserved = max(self.reserved, self.needed)
        policy.stats.record("train", peak, before)
        if self.fragmentation.update(peak, self.reserved):
            self.reserved = before


@pytest.mark.parametrize("grows_by", [0, 9 * GIB])
def test_auto_leaves_room_for_fragments_and_fills_the_rest(grows_by):
    """Only what is allocated was counted: the device was filled with WASTE still to come."""
    device, policy = Fragmented(), AutoPlacementPolicy(2 * GIB)
    for step in range(200):
        device.step(policy, 20 * GIB + (grows_by if step == 100 else 0))
        assert device.needed <= TOTAL or step == 100, step
    kept_free = 3 * GIB + (0 if grows_by == 0 else grows_by + GIB)
    assert TOTAL - kept_free <= device.needed <= TOTAL - 2 * GIB


def test_what_a_longer_step_left_reserved_counts_until_something_moves():
    fragmentation = Fragmentation()
    for peak, reserved, is_left, counted in ((5, 90, True, 0), (5, 7, False, 2), (5, 8, False, 3)):
        assert fragmentation.update(peak, reserved) == is_left and fragmentation.num_bytes == counted
    fragmentation.invalidate()
    assert fragmentation.update(4, 8) and fragmentation.num_bytes == 0
    assert not fragmentation.update(4, 6) and fragmentation.num_bytes == 2


def late_seconds(number: int, host: float, device: float, early: float) -> tuple[float, float]:
    """Seconds after the norm on host and device, if `number` chunks are streamed, each in so many seconds.

    The host updates at most half of its chunks before, in `early` seconds.
    """
    on_host = (NUM_CHUNKS - number) * host
    return on_host - min(on_host / 2, early), number * device


@pytest.mark.parametrize("early", [0.0, 0.1, 9.0])
@pytest.mark.parametrize(("host", "device"), [(8e-3, 3e-3), (8e-3, 8e-2), (1e-3, 6e-3), (2e-2, 2e-3)])
def test_the_streamed_share_becomes_the_best_one_in_few_moves_and_stays(host, device, early):
    share, chunks, random, changes = StreamedShare(), make_chunks(), Random(0), []
    late = [max(late_seconds(number, host, device, early)) for number in range(NUM_CHUNKS + 1)]
    for step in range(400):
        seconds = late_seconds(sum(chunk.is_streamed for chunk in chunks), host, device, early)
        now = [
            LateUpdates(second * random.uniform(0.96, 1.04), round(second / rate * CHUNK_NUMEL))
            for second, rate in zip(seconds, (host, device), strict=True)
        ]
        share.steps.append((now[0], now[1]))
        if moves := share.moves(chunks):
            changes.append(step)
        for move in moves:
            assert move.to_host and move.is_streamed != move.chunk.is_streamed
            move.chunk.is_streamed = move.is_streamed
    number = sum(chunk.is_streamed for chunk in chunks)
    assert late[number] <= 1.13 * min(late) + 1.01 * (host + device), (number, late.index(min(late)))
    assert len(changes) < 20 and changes[-1] < 200
