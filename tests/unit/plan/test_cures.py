"""What is advised for a run that does not fit fits; what cannot fit is refused before it starts."""

import dataclasses
import re

import pytest
from planned_runs import H100, planned_run

from patch.errors import ConfigError
from patch.plan import cures, refuse_what_cannot_fit
from patch.plan.fits import fit_of


def flags_of(cure: str) -> str:
    """The flags that a user makes of an advice."""
    parts = re.findall(r"(\S+) at (--[a-z-]+)", cure)
    booleans = {"--use-distributed-optimizer"}
    words = {"sel": "selective"}
    given = [flag if flag in booleans else f"{flag} {words.get(value, value)}" for value, flag in parts]
    return " ".join(given) + (" --sequence-parallel" if "--tensor" in cure else "")


@pytest.mark.parametrize("kind", [{"dp": 1}, {"dp": 8}, {"size": "70B", "dp": 8}, {"dp": 8, "length": 32768}])
def test_each_advice_fits(kind):
    run = planned_run(**kind, sharding="")
    assert not fit_of(run, H100.facts).is_whole
    advice = cures(run, H100.facts)
    assert 1 <= len(advice) <= 3
    for cure in advice:
        flags = flags_of(cure)
        # The same devices, of which the advice takes some for TP and PP.
        tp = int((re.findall(r"--tensor-model-parallel-size (\d)", flags) or ["1"])[0])
        pp = int((re.findall(r"--pipeline-model-parallel-size (\d)", flags) or ["1"])[0])
        rest = re.sub(r"--(tensor|pipeline)-model-parallel-size \d", "", flags)
        batch = f"--global-batch-size {8 * kind['dp']}"
        layout = {**kind, "tp": tp, "pp": pp, "dp": max(1, kind["dp"] // (tp * pp))}
        assert fit_of(planned_run(**layout, sharding="", flags=f"{rest} {batch}"), H100.facts).is_whole, cure


def test_one_gpu_is_told_of_the_host_first_and_of_recomputation_second():
    first, second = cures(planned_run(), H100.facts)
    assert "static at --optimizer-offload-policy" in first and "1 at --optimizer-offload-fraction" in first
    assert "full at --recompute-granularity" in second


def test_what_fits_needs_no_advice_and_is_not_refused():
    run = planned_run(size="1B", dp=8)
    assert cures(run, H100.facts) == []
    refuse_what_cannot_fit(run, H100.facts)


def test_what_cannot_fit_is_refused_with_its_cures():
    with pytest.raises(
        ConfigError, match=r"a rank needs .* GiB of a GPU's 79.10 GiB\. By the plan it would fit"
    ) as error:
        refuse_what_cannot_fit(planned_run(), H100.facts)
    assert "(--force starts it all the same)" in str(error.value)
    small = dataclasses.replace(H100.facts, cuda_devices=0, cuda_memory_bytes=0, host_memory_bytes=2**30)
    with pytest.raises(ConfigError, match="the processes of a machine need .* of its host's 1.00 GiB"):
        refuse_what_cannot_fit(planned_run(size="1B"), small)
    with pytest.raises(ConfigError, match="more or larger devices are needed"):
        refuse_what_cannot_fit(planned_run(size="405B", tp=8), H100.facts)
