"""What --dry-run prints: which machine is planned, and a step's time only where rates are known."""

import dataclasses

import pytest
from planned_runs import H100, planned_run

from patch.plan.report import describe_here
from patch.plan.timing.step_time import step_time


def test_the_plan_of_gpus_has_their_name_and_a_steps_time():
    run = planned_run(dp=16)
    text = "\n".join(describe_here(run, H100.facts))
    assert text.startswith("planned for 2 machines of 8 x NVIDIA H100 80GB HBM3 (79.10 GiB)")
    assert "llama-patch plan --machine" in text.splitlines()[0]
    seconds = step_time(run, dataclasses.replace(H100, nodes=2)).seconds
    assert f"time        {seconds:.3g} s a step" in text and "MFU" in text


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (dataclasses.replace(H100.facts, cuda_name="NVIDIA L4"), "those like it: NVIDIA L4"),
        (dataclasses.replace(H100.facts, cuda_devices=0, cuda_memory_bytes=0), "this machine's CPU"),
    ],
)
def test_without_known_rates_there_is_no_time(facts, named):
    lines = describe_here(planned_run(size="1B", dp=2), facts)
    assert named in lines[0] and lines[1].startswith("processes   2 = ")
    assert not any(line.startswith("time ") for line in lines)
