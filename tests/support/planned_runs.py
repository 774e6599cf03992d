"""Planned runs of any layout on any GPUs."""

from patch.config import RunConfig
from patch.plan.timing.machine import PRESETS, Machine
from patch.preflight.parse import parse_args

H100 = PRESETS["h100"]
ENVIRON = {"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def planned_run(
    order="tp-cp-dp-pp",
    *,
    tp=1,
    cp=1,
    dp=1,
    pp=1,
    size="8B",
    length=4096,
    flags="",
    machine: Machine = H100,
    sharding="--use-distributed-optimizer",
) -> RunConfig:
    """Return a run of LLaMA 8B with eight micro-batches of one sample per replica, on the fewest nodes.

    Args:
        order: order of the layout's axes.
        tp, cp, dp, pp: sizes of the axes.
        size: MODEL_SIZE.
        length: tokens of a sample.
        flags: further flags, in one string.
        sharding: flags of data-parallel sharding.
    """
    world, per_node = tp * cp * dp * pp, machine.devices_per_node
    batch = "" if "--global-batch-size" in flags else f"--global-batch-size {8 * dp}"
    argv = (
        f"--model-size {size} --seq-length {length} --micro-batch-size 1 {batch} --train-iters 10 --lr 1 "
        f"--train-data-path a --output-path b --rank-order {order} --tensor-model-parallel-size {tp} "
        f"--context-parallel-size {cp} --pipeline-model-parallel-size {pp} {sharding} "
        f"--nnodes {-(-world // per_node)} --nproc-per-node {min(per_node, world)} {flags}"
    )
    return parse_args(argv.split(), ENVIRON, machine.facts).config
