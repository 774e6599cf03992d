"""Process groups against arithmetic and upstream's RankGenerator; random generators, and leaving."""

import itertools

import pytest
import torch
import torch.distributed as dist
from distributed_runner import new_job, run_distributed
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from small_runs import small_run
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_runs import CPU

from patch import compat
from patch.config.schema import RunConfig
from patch.distributed.groups import alone, initialize, shutdown
from patch.errors import ConfigError

AXES = ("tp", "cp", "dp", "pp")
"""From the fastest to the slowest."""
LAYOUTS = [dict.fromkeys(AXES, 1) | dict.fromkeys(pair, 2) for pair in itertools.combinations(AXES, 2)]
LAYOUTS += [dict.fromkeys(AXES, 1) | {axis: 4} for axis in ("tp", "dp", "pp")]


def _config(layout: dict[str, int], **changes: str | int) -> RunConfig:
    return small_run(layout["tp"], layout["pp"], layout["dp"], cp=layout["cp"], **changes)


def _coordinates(rank: int, layout: dict[str, int]) -> dict[str, int]:
    found = {}
    for axis in AXES:
        rank, found[axis] = divmod(rank, layout[axis])
    return found


def _along(axes: set[str], rank: int, layout: dict[str, int]) -> list[int]:
    """The ranks that differ from `rank` along these axes only."""
    own = _coordinates(rank, layout)
    return [
        other
        for other in range(4)
        if all(place == own[axis] for axis, place in _coordinates(other, layout).items() if axis not in axes)
    ]


def _drawn() -> tuple[float, float]:
    """From the default generator, and from that of weights cut over TP."""
    with get_cuda_rng_tracker().fork():
        cut = torch.rand(1, dtype=torch.float64).item()
    return torch.rand(1, dtype=torch.float64).item(), cut


def run_layouts(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Check this rank's groups of every layout; what its generators draw in each."""
    compat.apply(cuda=False)
    drawn = []
    for layout in LAYOUTS:
        instances = 2 if layout["dp"] * layout["cp"] == 4 else 1
        groups = initialize(_config(layout, num_distributed_optimizer_instances=instances), CPU)
        if instances == 2:
            assert dist.get_process_group_ranks(groups.intra_dp_cp) == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert dist.get_process_group_ranks(groups.inter_dist_opt) == [rank % 2, rank % 2 + 2]
        for name, axes in {
            **{axis: {axis} for axis in AXES},
            "dp_cp": {"dp", "cp"},
            "mp": {"tp", "pp"},
        }.items():
            group = getattr(groups, name)
            assert dist.get_process_group_ranks(group) == _along(axes, rank, layout), (layout, name)
            assert group.rank() == _along(axes, rank, layout).index(rank), (layout, name)
        stages = _along({"pp"}, rank, layout)
        if rank in (stages[0], stages[-1]):
            ends = sorted({stages[0], stages[-1]})
            assert dist.get_process_group_ranks(groups.embd) == ends, layout
        drawn.append(_drawn())
        new_job()
    return drawn


@pytest.fixture(scope="module")
def drawn() -> list[list[tuple[float, float]]]:
    """By rank and layout, from groups that are those of the arithmetic."""
    return run_distributed(run_layouts, 4)


def test_tp_is_the_fastest_axis_then_cp_dp_and_pp(drawn: list) -> None:
    assert all(len(of_rank) == len(LAYOUTS) for of_rank in drawn)


def test_only_the_generator_of_cut_weights_differs_over_tp(drawn: list) -> None:
    for index, layout in enumerate(LAYOUTS):
        whole, cut = zip(*(of_rank[index] for of_rank in drawn), strict=True)
        assert len(set(whole)) == 1, layout
        assert not set(whole) & set(cut), layout
        for rank, other in itertools.combinations(range(4), 2):
            if other in _along({"dp", "cp"}, rank, layout):
                assert cut[rank] == cut[other], layout
            if other in _along({"tp"}, rank, layout):
                assert cut[rank] != cut[other], layout


ORDERS = ["tp-pp-dp", "pp-tp-dp", "tp-cp-ep-pp-dp", *map("-".join, itertools.permutations(AXES))]


def run_orders(rank: int, world_size: int) -> None:
    """Build the groups of every order, by upstream's own checks, as one of 24 ranks that never talk."""
    compat.apply(cuda=False)
    dist.destroy_process_group()
    for own, order in zip(itertools.cycle(range(24)), ORDERS):
        sizes = {"tp": 2, "cp": 1 if "cp" not in order else 2, "dp": 3, "pp": 2}
        config = _config(sizes, rank_order=order)
        world = config.world_size
        dist.init_process_group("fake", store=FakeStore(), rank=own % world, world_size=world)
        groups = initialize(config, CPU)
        generator = RankGenerator(ep=1, order=order, **sizes)
        for name, axes in {**{axis: axis for axis in AXES}, "dp_cp": "dp-cp", "mp": "tp-pp"}.items():
            (expected,) = (ranks for ranks in generator.get_ranks(axes) if own % world in ranks)
            assert dist.get_process_group_ranks(getattr(groups, name)) == expected, (order, name)
        shutdown()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the runner leaves one


def test_groups_of_every_order_are_upstreams() -> None:
    run_distributed(run_orders, 1)


def run_wrong_size(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=r"has 2 processes.*expects 4 \(--nnodes x --nproc-per-node\)"):
        initialize(small_run(tp=2, dp=2), CPU)
    with pytest.raises(ConfigError, match="has 2 processes, expected one"), alone(CPU):
        pass
    assert not parallel_state.model_parallel_is_initialized()


def test_another_number_of_processes_is_refused_on_every_rank() -> None:
    run_distributed(run_wrong_size, 2)


def run_alone(rank: int, world_size: int) -> None:
    compat.apply(cuda=False)
    with alone(CPU) as groups:
        assert groups.tp.size() == groups.dp_cp.size() == 1
    assert dist.is_initialized(), "the job was there before"
    shutdown()
    shutdown()
    assert not dist.is_initialized()
    for _ in range(2):
        with alone(CPU) as groups:
            assert dist.get_world_size() == groups.pp.size() == 1
        assert not dist.is_initialized() and not parallel_state.model_parallel_is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the runner leaves one


def test_a_program_alone_leaves_what_it_made_and_only_that_and_leaving_twice_is_fine() -> None:
    run_distributed(run_alone, 1)
