"""Agreement on failure, and sums and maxima of host values: what each of three ranks gets."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed

from patch.distributed.collectives import (
    agree,
    all_gather_object,
    all_or_none,
    fail_together,
    from_rank_0,
    is_on_all_ranks,
    max_over_world,
    sum_over,
)
from patch.errors import CheckpointError, DataError, PatchError

CPU = torch.device("cpu")
NUMBERS = [[0.1, 2.0**53 - 1, -5.5], [0.2, -(2.0**52), -7.25], [math.nan] * 3]
"""By rank; float32 would lose all but the last column, and the sum is over the first two ranks."""

CASES: dict[str, Callable[[int], Exception | None]] = {
    "none": lambda rank: None,
    "one": lambda rank: {1: DataError("row 3 of a.jsonl")}.get(rank),
    "two": lambda rank: {1: CheckpointError("disk"), 2: DataError("row")}.get(rank),
    "all": lambda rank: DataError(f"row {rank}"),
    "foreign": lambda rank: {2: OSError("no space")}.get(rank),
}
"""Name -> the error of each rank."""


def _raised(act: Callable[[], None]) -> Exception | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return error
    return None


def _in_block(error: Exception | None, inner: Callable[[], None] = lambda: None) -> None:
    with all_or_none():
        inner()
        if error is not None:
            raise error


def _seen(rank: int, make: Callable[[int], Exception | None]) -> tuple[bool, str, str]:
    """Whether this rank raises its own error itself, and class and message of what it raises."""
    error = make(rank)
    plain = _raised(lambda: agree(error))
    in_block = _raised(lambda: _in_block(error))
    nested = _raised(lambda: _in_block(None, partial(_in_block, error)))
    assert plain is None or is_on_all_ranks(plain)
    assert (type(in_block), str(in_block)) == (type(plain), str(plain)), "all_or_none is not agree"
    assert (type(nested), str(nested)) == (type(plain), str(plain)), "an inner block's error changed"
    assert (plain is error) == (in_block is error) == (nested is error)
    return plain is error, type(plain).__name__, str(plain)


def run_agreement(rank: int, world_size: int) -> dict[str, tuple]:
    found = {name: _seen(rank, make) for name, make in CASES.items()}
    # After an inner block in which all succeeded, the outer one fails on one rank.
    late = _raised(lambda: _in_block(CASES["one"](rank), _in_block_of_none))
    return found | {"late": (type(late).__name__, str(late))}


def _in_block_of_none() -> None:
    _in_block(None)


def run_numbers(rank: int, world_size: int) -> dict[str, list]:
    group = dist.new_group([0, 1])
    return {
        "sums": sum_over(group, NUMBERS[rank], CPU) if rank < 2 else [],
        "maxima": max_over_world([2.0**53 - rank, -rank, math.inf if rank == 1 else 0.0], CPU),
        "nan": [max_over_world([math.nan if rank == bad else -1.0, 2.0], CPU) for bad in range(3)],
    }


def _fail_together(error: Exception | None) -> None:
    with fail_together("file X was not written", CheckpointError):
        if error is not None:
            raise error


def run_objects(rank: int, world_size: int) -> dict[str, object]:
    """What rank 0 finds, what each rank has, and what is raised where one rank fails in several ways."""

    def find() -> str:
        if rank != 0:
            raise AssertionError("another rank looks")
        return "seen by rank 0"

    def refuse() -> str:
        raise DataError("row 3")

    failures = {
        "foreign": {2: OSError("no space\non the device")},
        "ours": {1: CheckpointError("damaged")},
        "none": {},
    }
    return {
        "found": from_rank_0(find),
        "refused": repr(_raised(lambda: from_rank_0(refuse))),
        "gathered": all_gather_object({"rank": rank}),
        **{
            name: repr(_raised(partial(_fail_together, errors.get(rank))))
            for name, errors in failures.items()
        },
    }


def run_both(rank: int, world_size: int) -> tuple[dict, dict, dict]:
    return run_agreement(rank, world_size), run_numbers(rank, world_size), run_objects(rank, world_size)


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict, dict, dict]]:
    """What each of three ranks saw."""
    return run_distributed(run_both, 3, timeout_s=60)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("none", [(True, "NoneType", "None")] * 3),
        (
            "one",
            [
                (False, "DataError", "rank 1: row 3 of a.jsonl"),
                (True, "DataError", "row 3 of a.jsonl"),
                (False, "DataError", "rank 1: row 3 of a.jsonl"),
            ],
        ),
        (
            "two",
            [
                (False, "CheckpointError", "rank 1: disk"),
                (True, "CheckpointError", "disk"),
                (True, "DataError", "row"),
            ],
        ),
        ("all", [(True, "DataError", f"row {rank}") for rank in range(3)]),
        ("foreign", [(False, "PatchError", "rank 2: no space")] * 2 + [(True, "OSError", "no space")]),
    ],
)
def test_all_ranks_raise_or_none(ranks: list, case: str, expected: list) -> None:
    assert [found[case] for found, _, _ in ranks] == expected


def run_made_class(rank: int, world_size: int) -> None:
    made = type("MadeHere", (ValueError,), {})
    error = made("nobody else can import me")
    with pytest.raises(made if rank == 0 else PatchError, match="nobody else can import me") as caught:
        agree(error if rank == 0 else None)
    assert caught.value is error or type(caught.value) is PatchError


def test_a_class_made_while_a_library_runs_is_heard_of_too() -> None:
    """As botocore's are: pickle cannot take them, and the other ranks would wait for ever."""
    run_distributed(run_made_class, 2, timeout_s=30)


def test_an_outer_block_still_agrees_after_an_inner_one(ranks: list) -> None:
    heard = ("DataError", "rank 1: row 3 of a.jsonl")
    assert [found["late"] for found, _, _ in ranks] == [heard, ("DataError", "row 3 of a.jsonl"), heard]


def test_what_is_no_failure_of_the_work_passes_through_a_block() -> None:
    with pytest.raises(KeyboardInterrupt), all_or_none():
        raise KeyboardInterrupt


def test_without_a_job_each_process_is_for_itself() -> None:
    error = DataError("row 3")
    agree(None)
    _in_block(None)
    for act in (lambda: agree(error), lambda: _in_block(error)):
        assert _raised(act) is error
    assert issubclass(DataError, PatchError)


def test_sums_are_those_of_float64_over_the_group_only(ranks: list) -> None:
    exact = [float(Fraction(a) + Fraction(b)) for a, b in zip(*NUMBERS[:2], strict=True)]
    assert [found["sums"] for _, found, _ in ranks] == [exact, exact, []]


def test_maxima_are_those_of_all_ranks(ranks: list) -> None:
    assert [found["maxima"] for _, found, _ in ranks] == [[2.0**53, 0.0, math.inf]] * 3


@pytest.mark.parametrize("bad", range(3))
def test_the_maximum_of_what_is_not_a_number_on_one_rank_is_not_a_number(ranks: list, bad: int) -> None:
    for _, found, _ in ranks:
        value, other = found["nan"][bad]
        assert math.isnan(value) and other == 2.0


def test_all_ranks_get_what_rank_0_finds_or_its_error(ranks: list) -> None:
    assert [found["found"] for _, _, found in ranks] == ["seen by rank 0"] * 3
    assert [found["refused"] for _, _, found in ranks] == [
        "DataError('row 3')",
        *["DataError('rank 0: row 3')"] * 2,
    ]


def test_every_rank_gets_the_values_of_all(ranks: list) -> None:
    values = [{"rank": rank} for rank in range(3)]
    assert [found["gathered"] for _, _, found in ranks] == [values] * 3


def test_failure_of_one_rank_is_raised_on_all_as_the_given_type(ranks: list) -> None:
    said = "file X was not written: OSError: no space"
    assert [found["foreign"] for _, _, found in ranks] == [
        *[f"CheckpointError('rank 2: {said}')"] * 2,
        f"CheckpointError('{said}')",
    ]
    heard = "CheckpointError('rank 1: damaged')"
    assert [found["ours"] for _, _, found in ranks] == [heard, "CheckpointError('damaged')", heard]
    assert [found["none"] for _, _, found in ranks] == ["None"] * 3


def test_without_a_job_rank_0_is_this_process() -> None:
    assert from_rank_0(lambda: 7) == 7
    with pytest.raises(CheckpointError, match="file X was not written: OSError: full"):
        _fail_together(OSError("full"))
