"""What is advised for a run that does not fit fits when it is pasted; what cannot fit is refused before."""

import dataclasses
import shlex

import pytest
from planned_runs import H100, planned_run
from small_runs import small_run

from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.fits import fit_of
from patch.plan.planned_run import plan_run
from patch.plan.suggest import advice, refuse_what_cannot_fit, suggest, suggestions
from patch.plan.timing.step_time import step_time

POSITIONAL = (
    "dsw 8B 8 64 1e-4 1e-5 8192 8192 bf16 1 1 1 false false false false none false 9 a none none 1e9 0 b"
).split()
"""On eight GPUs."""
CPU = dataclasses.replace(H100.facts, cuda_devices=0, cuda_memory_bytes=0, cuda_name="")


def planned(argv, devices=8):
    return plan_run(argv, "h100", devices=devices, here=H100.facts)


@pytest.mark.long
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
    found = suggest(run.resolved, run.machine.facts, run.machine)
    assert 1 <= len(found) <= 3
    seconds = []
    for cure in found:
        cured = planned([*argv, *shlex.split(cure.flags)], devices)
        fit = fit_of(cured.resolved, cured.machine.facts)
        assert fit.is_whole and fit == cure.fit
        seconds.append(step_time(cured.resolved, cured.machine).seconds)
    assert seconds == [cure.cost for cure in found] == sorted(seconds)
    texts = suggestions(run.resolved, run.machine.facts, run.machine)
    for cure, text in zip(found, texts, strict=False):  # adapters come last
        needed = f"{cure.fit.device_needed / 2**30:.2f} GiB a rank"
        assert text.startswith(cure.flags) and needed in text


def test_too_much_in_host_memory_is_cured_by_less():
    """1B's states of 10 bytes a parameter are 11.5 GiB; three quarters and less of them fit into 9 GiB."""
    run = planned_run(size="1B", flags="--optimizer-offload-policy static")
    small = dataclasses.replace(H100.facts, host_memory_bytes=9 * 2**30)
    assert not fit_of(run, small).is_whole and fit_of(run, small).is_on_device
    less, disk = sorted(cure.flags for cure in suggest(run, small))[::-1]
    assert less == "--optimizer-offload-policy static --optimizer-offload-fraction 0.25"
    assert disk == "--offload-folder OFFLOAD_FOLDER"


SMALL_CPU, LARGE_CPU = (dataclasses.replace(CPU, host_memory_bytes=gib * 2**30) for gib in (1, 22))


@pytest.mark.parametrize(
    ("run", "machine", "said", "absent"),
    [
        ({}, H100.facts, ["a GPU that has 79.10 GiB. By the plan it would fit with one of\n    --"], []),
        ({"size": "405B", "tp": 8}, H100.facts, ["more or larger devices are needed"], []),
        ({"size": "1B"}, SMALL_CPU, ["in the host memory of 1 process, a machine has 1.00 GiB. By the plan "
         "more host memory, more machines"], ["devices"]),
        ({"size": "1B"}, LARGE_CPU, ["with one of\n    ", "of a machine's host memory"], ["GPU"]),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_its_cures(run, machine, said, absent):
    with pytest.raises(ConfigError) as error:
        refuse_what_cannot_fit(planned_run(**run), machine)
    text = str(error.value)
    assert all(words in text for words in (*said, "(--force starts it anyway)")), text
    assert not any(words in text for words in absent), text


def test_what_fits_or_lacks_a_simulated_device_alone_is_not_refused():
    fitting = planned_run(size="1B", dp=8)
    for config, machine in ((fitting, H100.facts), (small_run(simulated_device_memory=10**4), CPU)):
        refuse_what_cannot_fit(config, machine)
    assert suggest(fitting, H100.facts) == []


GPU = MachineFacts(cuda_devices=8, cpu_cores=2, cuda_memory_bytes=2**30, host_memory_bytes=2**31)
DO, GRADIENTS = "--use-distributed-optimizer", "--data-parallel-sharding gradients"
HOST = "--optimizer-offload"
LARGE = {"hidden_size": 4096, "vocab_size": 50_000}
"""Weights and gradients of more than 1 GiB."""


@pytest.mark.parametrize(
    ("changes", "machine", "on_device", "present", "absent"),
    [
        ({}, GPU, True, ["--micro-batch-size 1", "full", HOST, "processes"], [DO, "alone", "less offload"]),
        ({"dp": 2, "data_parallel_sharding": "gradients"}, GPU, True, ["parameters"], [DO, GRADIENTS]),
        (LARGE, GPU, True, ["the model's state alone takes"], []),
        ({"dp": 2, "optimizer_offload_policy": "static"}, GPU, False, [DO, "--offload-folder"], ["batch"]),
        ({"dp": 2}, CPU, False, [DO, "more machines (TP, PP)"], ["offload"]),
    ],
)
def test_out_of_memory_names_what_is_left_of_device_and_host(changes, machine, on_device, present, absent):
    text = advice(small_run(**changes), machine, on_device=on_device)
    assert all(words in text for words in present) and not any(words in text for words in absent), text
