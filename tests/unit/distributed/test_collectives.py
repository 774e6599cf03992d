"""Agreement on failure, and sums and maxima of host values: what each of three ranks gets."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed

from patch.distributed.collectives import (
    all_gather_object,
    all_or_none,
    fail_together,
    from_rank_0,
    is_on_all_ranks,
    max_over_world,
    sum_over,
)
from patch.errors import CheckpointError, DataError

CPU = torch.device("cpu")
NUMBERS = [[0.1, 2.0**53 - 1, -5.5], [0.2, -(2.0**52), -7.25], [math.nan] * 3]
"""By rank; float32 would lose all but the last column, and the sum is over the first two ranks."""
MADE = type("MadeHere", (ValueError,), {})
"""As botocore makes classes while it runs: pickle cannot take them, and other ranks would wait for ever."""
BAD_ROW, OWN_ROW = DataError("row 3"), "DataError('row 3')"
OTHERS_ROW = "DataError('rank 1: row 3')"


def raised(act: Callable[..., object], *arguments: object) -> Exception | None:
    try:
        act(*arguments)
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return error
    return None


def in_block(error: Exception | None, inner: Callable[[], None] = lambda: None) -> None:
    with all_or_none():
        inner()
        if error is not None:
            raise error


def in_nested_blocks(error: Exception | None) -> None:
    in_block(None, partial(in_block, error))


def after_a_block(error: Exception | None) -> None:
    in_block(error, partial(in_block, None))


def together(error: Exception | None) -> None:
    with fail_together("X was not written", CheckpointError):
        if error is not None:
            raise error


FAILURES: dict[str, tuple[Callable, dict[int, Exception], list[str]]] = {
    "none": (in_block, {}, ["None"] * 3),
    "one": (in_block, {1: BAD_ROW}, [OTHERS_ROW, OWN_ROW, OTHERS_ROW]),
    "inner": (in_nested_blocks, {1: BAD_ROW}, [OTHERS_ROW, OWN_ROW, OTHERS_ROW]),
    "late": (after_a_block, {1: BAD_ROW}, [OTHERS_ROW, OWN_ROW, OTHERS_ROW]),
    "two": (
        in_block, {1: CheckpointError("disk"), 2: BAD_ROW},
        ["CheckpointError('rank 1: disk')", "CheckpointError('disk')", OWN_ROW],
    ),
    "foreign": (
        in_block, {2: OSError("no space")}, ["PatchError('rank 2: no space')"] * 2 + ["OSError('no space')"]
    ),
    "made": (in_block, {0: MADE("new")}, ["MadeHere('new')", *["PatchError('rank 0: new')"] * 2]),
    "together": (
        together, {2: OSError("no space\non the device")},
        [*["CheckpointError('rank 2: X was not written: OSError: no space')"] * 2,
         "CheckpointError('X was not written: OSError: no space')"],
    ),
    "of the type": (
        together, {1: CheckpointError("bad")},
        ["CheckpointError('rank 1: bad')", "CheckpointError('bad')", "CheckpointError('rank 1: bad')"],
    ),
}  # fmt: skip
"""What ranks do, the errors of some, and what each raises."""


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    def only_on_rank_0() -> str:
        assert rank == 0, "another rank looks"
        return "seen by rank 0"

    def refuse() -> None:
        raise BAD_ROW

    found: dict[str, Any] = {}
    for name, (act, errors, _) in FAILURES.items():
        error = raised(act, errors.get(rank))
        assert error is None or is_on_all_ranks(error)
        found[name] = repr(error)
    group = dist.new_group([0, 1])
    return found | {
        "found": from_rank_0(only_on_rank_0),
        "refused": repr(raised(from_rank_0, refuse)),
        "gathered": all_gather_object({"rank": rank}),
        "sums": sum_over(group, NUMBERS[rank], CPU) if rank < 2 else [],
        "maxima": max_over_world([2.0**53 - rank, -rank, math.inf if rank == 1 else 0.0], CPU),
        "nan": [max_over_world([math.nan if rank == bad else -1.0, 2.0], CPU) for bad in range(3)],
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of three ranks saw."""
    return run_distributed(run_all, 3, timeout_s=60)


@pytest.mark.parametrize("name", FAILURES)
def test_all_ranks_raise_or_none(ranks: list, name: str) -> None:
    assert [found[name] for found in ranks] == FAILURES[name][2]


def test_all_ranks_get_what_rank_0_finds_or_its_error_and_the_values_of_all(ranks: list) -> None:
    assert [found["found"] for found in ranks] == ["seen by rank 0"] * 3
    assert [found["refused"] for found in ranks] == [OWN_ROW, *["DataError('rank 0: row 3')"] * 2]
    assert [found["gathered"] for found in ranks] == [[{"rank": rank} for rank in range(3)]] * 3


def test_sums_are_those_of_float64_over_the_group_and_maxima_those_of_all_ranks(ranks: list) -> None:
    exact = [float(Fraction(a) + Fraction(b)) for a, b in zip(*NUMBERS[:2], strict=True)]
    assert [found["sums"] for found in ranks] == [exact, exact, []]
    assert [found["maxima"] for found in ranks] == [[2.0**53, 0.0, math.inf]] * 3
    for found in ranks:
        assert all(math.isnan(value) and other == 2.0 for value, other in found["nan"])


def test_what_is_no_failure_of_the_work_passes_through_a_block() -> None:
    with pytest.raises(KeyboardInterrupt), all_or_none():
        raise KeyboardInterrupt


def test_without_a_job_each_process_is_for_itself() -> None:
    in_block(None)
    assert raised(in_block, BAD_ROW) is BAD_ROW and from_rank_0(lambda: 7) == 7
    assert repr(raised(together, OSError("full"))) == "CheckpointError('X was not written: OSError: full')"
