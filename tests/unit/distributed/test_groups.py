"""Process groups against upstream's RankGenerator; random generators, and leaving."""

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
from patch.plan.report import rank_groups

AXES = ("tp", "cp", "dp", "pp")


def _config(layout: dict[str, int], **changes: str | int) -> RunConfig:
    return small_run(layout["tp"], layout["pp"], layout["dp"], cp=layout["cp"], **changes)


def run_layouts(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Instances of the optimizer, the ends of a pipeline, and what generators draw at TP=2 with CP or DP.

    Draws are from the default generator, and from that of weights cut over TP.
    """
    compat.apply(cuda=False)
    alone, drawn = dict.fromkeys(AXES, 1), []
    groups = initialize(_config(alone | {"cp": 2, "dp": 2}, num_distributed_optimizer_instances=2), CPU)
    assert dist.get_process_group_ranks(groups.intra_dp_cp) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(groups.inter_dist_opt) == [rank % 2, rank % 2 + 2]
    new_job()
    groups = initialize(_config(alone | {"pp": 4}), CPU)
    assert rank in (1, 2) or dist.get_process_group_ranks(groups.embd) == [0, 3]
    new_job()
    for other in ("cp", "dp"):
        initialize(_config(alone | {"tp": 2, other: 2}), CPU)
        with get_cuda_rng_tracker().fork():
            cut = torch.rand(1, dtype=torch.float64).item()
        drawn.append((torch.rand(1, dtype=torch.float64).item(), cut))
        new_job()
    return drawn


def test_generators_of_cut_weights_differ_over_tp_alone() -> None:
    for layout in zip(*run_distributed(run_layouts, 4), strict=True):
        whole, (first, second, *others) = zip(*layout, strict=True)
        assert len({*whole}) == 1
        assert first != second and others == [first, second] and not {first, second} & {*whole}


OF_ALL = {**{axis: axis for axis in AXES}, "dp_cp": "dp-cp", "mp": "tp-pp"}
BUILT = {"ETP": "expt_tp", "EDP": "expt_dp"}
OF_EXPERTS = {"ep": "ep", "expt_tp": "tp", "expt_dp": "dp", "tp_ep": "tp-ep", "pp": "pp"}
EXPERTS = [(2, 1), (4, 1), (2, 2), (12, 1)]
"""EP and ETP, some of which suit no order, some not every one."""
ORDERS = ["tp-pp-dp", "pp-tp-dp", "tp-cp-ep-pp-dp", *map("-".join, itertools.permutations(AXES))]


def run_orders() -> None:
    """Build the groups of every order, by upstream's own checks, as one of 24 ranks that never talk.

    Without experts and with some, which upstream refuses where we do.
    """
    refused = set()
    for own, order in zip(itertools.cycle(range(24)), ORDERS):
        sizes = {"tp": 2, "cp": 1 if "cp" not in order else 2, "dp": 3, "pp": 2}
        world = 24 if "cp" in order else 12
        with_cp = order if "cp" in order else f"{order}-cp"
        with_ep = order if "ep" in order else with_cp.replace("cp", "cp-ep")
        for ep, etp in [(None, None), *EXPERTS]:
            dist.init_process_group("fake", store=FakeStore(), rank=own % world, world_size=world)
            experts = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
            own_fields = {"num_experts": 24, **experts} if ep else {}
            config = _config(sizes, rank_order=order, **own_fields)
            try:
                groups = initialize(config, CPU)
            except ConfigError:
                refused.add((order, ep, etp))
                with pytest.raises((AssertionError, RuntimeError)):
                    parallel_state.initialize_model_parallel(
                        2, 2, context_parallel_size=sizes["cp"], order=with_ep, **experts
                    )
            else:
                generator, names = RankGenerator(ep=1, order=order, **sizes), OF_ALL
                if ep and etp:
                    edp = world // (2 * ep * etp)
                    generator, names = RankGenerator(etp, ep, edp, 2, 1, with_ep), OF_EXPERTS
                assert (getattr(groups, "ep", None) is not None) is bool(ep)
                for name, axes in names.items():
                    (expected,) = (ranks for ranks in generator.get_ranks(axes) if own % world in ranks)
                    assert dist.get_process_group_ranks(getattr(groups, name)) == expected, (order, name)
                planned = rank_groups(config)
                assert len(planned) >= 3 + ("cp" in order) + bool(ep)
                for name, of_axis in planned.items():
                    built = dist.get_process_group_ranks(getattr(groups, BUILT.get(name, name.lower())))
                    assert sorted(itertools.chain(*of_axis)) == [*range(world)]
                    assert built in map(list, of_axis), (order, name)
            shutdown()
    assert ("tp-cp-ep-pp-dp", 2, 1) in refused
    assert not refused & {("tp-cp-dp-pp", 2, 2), ("tp-cp-ep-pp-dp", 4, 1)}


def run_wrong_size(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=r"has 2 processes.*expects 4 \(--nnodes x --nproc-per-node\)"):
        initialize(small_run(tp=2, dp=2), CPU)
    with pytest.raises(ConfigError, match="has 2 processes, expected 1"), alone(CPU):
        pass
    assert not parallel_state.model_parallel_is_initialized()


def test_another_number_of_processes_is_refused_on_every_rank() -> None:
    run_distributed(run_wrong_size, 2)


def run_alone() -> None:
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


def test_a_program_alone_leaves_what_it_made_and_groups_of_every_order_are_upstreams() -> None:
    """It leaves that only, and leaving twice is fine."""
    run_distributed(run_one, 1)


def run_one(rank: int, world_size: int) -> None:
    run_alone()
    run_orders()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the runner leaves one
