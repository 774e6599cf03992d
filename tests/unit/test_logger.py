"""Who speaks: rank 0; another rank only about errors, and in messages that are meant from every rank."""

import pytest

from patch.logger import configure_logging, get_logger


@pytest.mark.parametrize("rank,expected", [(0, ["plain", "every", "wrong"]), (3, ["every", "wrong"])])
def test_what_a_rank_says(rank: int, expected: list[str], capsys: pytest.CaptureFixture) -> None:
    configure_logging(rank=rank)
    get_logger("patch.part").info("plain")
    get_logger("patch.part", every_rank=True).info("every")
    get_logger("patch.part").error("wrong")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == expected
