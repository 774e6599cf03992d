"""What is advised for a run that does not fit fits when it is pasted; what cannot fit is refused before."""

import dataclasses
import shlex

import pytest
from planned_runs import H100, planned_run
from small_runs import small_run

from patch.config.positions import POSITIONS
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.cures import advice, cures, refuse_what_cannot_fit, what_lacks
from patch.plan.fits import fit_of
from patch.plan.planned_run import plan_run
from patch.plan.timing.step_time import step_time

POSITIONAL = (
    "dsw 8B 8 64 1e-4 1e-5 8192 8192 bf16 1 1 1 false false false false none false 9 a none none 1e9 0 b"
).split()
"""On eight GPUs."""
CPU = dataclasses.replace(H100.facts, cuda_devices=0, cuda_memory_bytes=0, gpu_nodes=(), cuda_name="")


def planned(argv, devices=8):
    return plan_run(argv, "h100", devices=devices, here=H100.facts)


@pytest.mark.parametrize(
    ("argv", "devices"),
    [
        (POSITIONAL, 1),
        (POSITIONAL, 8),
        (["--model-size=8B", "--seq-length=131072", "--global-batch-size=8"], 8),
        (["--model-size=70B", "--global-batch-size=16"], 8),
    ],
)
def test_each_cure_fits_when_it_is_pasted_and_the_fastest_is_first(argv, devices):
    run = planned(argv, devices)
    assert not fit_of(run.resolved, run.machine.facts).is_whole
    found = cures(run.resolved, run.machine.facts, run.machine)
    assert 1 <= len(found) <= 3
    seconds = []
    for cure in found:
        cured = planned([*argv, *shlex.split(cure.flags)], devices)
        fit = fit_of(cured.resolved, cured.machine.facts)
        assert fit.is_whole and fit == cure.fit
        seconds.append(step_time(cured.resolved, cured.machine).seconds)
        assert str(cure).startswith(cure.flags) and f"{fit.device_needed / 2**30:.2f} GiB a rank" in str(cure)
    assert seconds == [cure.seconds for cure in found] == sorted(seconds)


def test_a_cure_by_positions_is_that_by_flags():
    run = planned(POSITIONAL)
    names = [position.name for position in POSITIONS]
    cure = next(each for each in cures(run.resolved, H100.facts) if "--tensor-model" in each.flags)
    argv, left = list(POSITIONAL), []
    for change in cure.changes:
        left += [] if change.places else [change.flags]
        for place in change.places:
            assert place in str(cure)
            number, name, word = place.split()
            assert names[int(number) - 1] == name
            argv[int(number) - 1] = word
    assert fit_of(planned([*argv, *shlex.split(" ".join(left))]).resolved, H100.facts) == cure.fit


def test_too_much_in_host_memory_is_cured_by_less():
    """1B's states of 10 bytes a parameter are 11.5 GiB; three quarters and less of them fit into 9 GiB."""
    run = planned_run(size="1B", flags="--optimizer-offload-policy static")
    small = dataclasses.replace(H100.facts, host_memory_bytes=9 * 2**30)
    assert not fit_of(run, small).is_whole and fit_of(run, small).is_on_device
    less, disk = sorted(cure.flags for cure in cures(run, small))[::-1]
    assert less == "--optimizer-offload-policy static --optimizer-offload-fraction 0.25"
    assert disk == "--offload-folder OFFLOAD_FOLDER"


def test_what_fits_needs_no_advice_and_is_not_refused():
    run = planned_run(size="1B", dp=8)
    assert cures(run, H100.facts) == []
    refuse_what_cannot_fit(run, H100.facts)


def test_what_cannot_fit_is_refused_with_its_cures():
    with pytest.raises(
        ConfigError,
        match=r"a rank needs .* GiB of a GPU's 79.10 GiB\. By the plan it would fit with one of\n",
    ) as error:
        refuse_what_cannot_fit(planned_run(), H100.facts)
    assert "\n    --recompute" in str(error.value) and str(error.value).endswith(
        "\n  (--force starts it all the same)"
    )
    with pytest.raises(ConfigError, match="more or larger devices are needed"):
        refuse_what_cannot_fit(planned_run(size="405B", tp=8), H100.facts)


def test_a_cpu_is_told_of_its_host_memory():
    run, small = planned_run(size="1B"), dataclasses.replace(CPU, host_memory_bytes=2**30)
    with pytest.raises(
        ConfigError, match="the processes of a machine need .* of its host's 1.00 GiB"
    ) as error:
        refuse_what_cannot_fit(run, small)
    assert "more host memory, more machines" in str(error.value) and "devices" not in str(error.value)
    assert "devices" not in what_lacks(run, small)
    enough = dataclasses.replace(CPU, host_memory_bytes=22 * 2**30)
    (cure, *_) = cures(run, enough)
    assert "of a machine's host memory" in str(cure) and cure.fit.host_needed <= 22 * 2**30


GPU = MachineFacts(cuda_devices=8, cpu_cores=2, cuda_memory_bytes=2**30, host_memory_bytes=2**31)
DO, GRADIENTS = "--use-distributed-optimizer", "--data-parallel-sharding gradients"
HOST = "--optimizer-offload"
LARGE = {"hidden_size": 4096, "vocab_size": 50_000}
"""Weights and gradients of more than 1 GiB."""


@pytest.mark.parametrize(
    ("changes", "machine", "on_device", "present", "absent"),
    [
        ({}, GPU, True, ["--micro-batch-size 1", "full", HOST, "processes"], [DO, "alone", "less offload"]),
        ({"dp": 2}, GPU, True, [DO, GRADIENTS, HOST], []),
        ({"dp": 2, "data_parallel_sharding": "gradients"}, GPU, True, ["parameters"], [DO, GRADIENTS]),
        ({"recompute_granularity": "full"}, GPU, True, [HOST], ["--recompute-granularity"]),
        (LARGE, GPU, True, ["the model's state alone takes"], []),
        ({"dp": 2, "optimizer_offload_policy": "static"}, GPU, False, [DO, "--offload-folder"], ["batch"]),
        ({"dp": 2}, CPU, False, [DO, "more machines (TP, PP)"], ["offload"]),
    ],
)
def test_out_of_memory_names_what_is_left_of_device_and_host(changes, machine, on_device, present, absent):
    text = advice(small_run(**changes), machine, on_device=on_device)
    assert all(words in text for words in present) and not any(words in text for words in absent), text
