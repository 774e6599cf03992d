"""With how many machines a run can go on: --min-nodes and --max-restarts."""

import pytest

from patch.checks.layout import set_spares_aside, usable_sizes
from patch.preflight.validate import validate_run

MEETING = {"NODE_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "99", "NPROC_PER_NODE": "1"}
AGAIN = "--max-restarts=1"


@pytest.fixture
def parse(command):
    """The run of these machines with micro-batches of 1."""
    command.environ.update(MEETING)
    return lambda batch, *flags: command.parse(*flags, BATCH_SIZE="1", GLOBAL_BATCH_SIZE=str(batch)).config


def test_all_machines_are_needed_unless_the_user_says_otherwise(parse, command):
    assert usable_sizes(parse(8, "--nnodes=4"), command.machine) == [4]


def test_sizes_that_do_not_divide_the_batch_or_hold_the_layout_are_left_out(parse, command):
    assert usable_sizes(parse(8, "--nnodes=4", "--min-nodes=1", AGAIN), command.machine) == [1, 2, 4]
    in_pairs = parse(8, "--nnodes=8", "--min-nodes=2", AGAIN, "--tensor-model-parallel-size=2")
    assert usable_sizes(in_pairs, command.machine) == [2, 4, 8]


def test_machines_that_do_not_divide_the_batch_are_spares_if_the_rest_is_enough(parse, command):
    elastic = parse(8, "--nnodes=7", "--min-nodes=2", AGAIN)
    config, (note,) = set_spares_aside(elastic, command.machine)
    assert config.parallel.nnodes == 4 and "4 of 7 machines train" in note
    validate_run(config, command.machine)
    for flags in [
        ("--nnodes=7",),
        ("--nnodes=7", "--min-nodes=5", AGAIN),
        ("--nnodes=4", "--min-nodes=2", AGAIN),
    ]:
        config = parse(8, *flags)
        assert set_spares_aside(config, command.machine) == (config, [])
