"""Golden values: losses, norms, weights and states of small runs, batches and converted files, to the bit.

values.json holds them by what bits depend on besides our code (machine.py). On a machine that it does not
know, losses and norms are compared within a bound, and the test says that bits were not.

    RENEW_GOLDEN=1 .venv/bin/python -m pytest tests/golden

writes what this machine finds and prints what has changed; CONTRIBUTING.md says when.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from distributed_runner import run_distributed
from golden.runs import ALONE, DATA, TOGETHER, convert, measure_alone, measure_together, write_sources
from golden.store import EVERYWHERE, Values, differences, read, renewed, write

pytestmark = pytest.mark.timeout(600)  # the first test measures for all: minutes on a busy machine
RUNS = ALONE | TOGETHER | DATA
BYTES = [
    "raw training batches", "raw validation batches", "idxmap training batches", "idxmap validation batches",
    "documents.bin and .idx", "hf2mcore", "mcore2hf", "export at tp=2",
]  # fmt: skip


class Bound(NamedTuple):
    """How far machines may be apart after five steps."""

    loss: float
    """On losses near 5.6."""
    norm: float
    """Relative."""


# Seen between torch's three vector widths, MKL's portable products and oneDNN's for AVX2: fp32 1.4e-6 and
# 4.5e-6; bf16 and fp16, where a weight may be rounded to the next one, 1.0e-3 and 2.8e-3.
BOUNDS = {"fp32": Bound(1e-5, 5e-5), "bf16": Bound(5e-3, 1.5e-2), "fp16": Bound(5e-3, 1.5e-2)}


class Golden(NamedTuple):
    """What this machine finds, and what was recorded."""

    key: str
    found: Values
    stored: Values


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Golden:
    """Everything measured once; recorded first when RENEW_GOLDEN is set."""
    key, found = _measure(tmp_path_factory.mktemp("golden"))
    stored = read()
    if os.environ.get("RENEW_GOLDEN"):
        values = renewed(stored, found)
        write(values)
        with pytestconfig.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
            print("\n".join(["", *differences(stored, values)]))
        stored = values
    return Golden(key, found, stored)


def _measure(folder: Path) -> tuple[str, Values]:
    write_sources(folder)
    (alone,) = run_distributed(measure_alone, 1, timeout_s=240)
    ranks = run_distributed(measure_together, 2, folder, timeout_s=240)
    runs = {name: _of_ranks([run]) for name, run in alone["runs"].items()}
    runs |= {name: _of_ranks([rank["runs"][name] for rank in ranks]) for name in ranks[0]["runs"]}
    # Batches differ from rank to rank; the exported folder is one.
    everywhere = {name: [rank["bytes"][name] for rank in ranks] for name in ranks[0]["bytes"]}
    everywhere |= {name: [digest] for name, digest in convert(folder).items()}
    return alone["key"], {
        EVERYWHERE: {name: {"sha256": everywhere[name]} for name in BYTES},
        alone["key"]: runs,
    }


def _of_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Losses and norms, which are those of all ranks; weights and states rank by rank."""
    shared = [{name: rank[name] for name in ("losses", "norms", "skipped")} for rank in ranks]
    assert shared == shared[:1] * len(ranks)
    return shared[0] | {name: [rank[name] for rank in ranks] for name in ("weights", "states")}


@pytest.mark.parametrize("name", RUNS)
def test_losses_norms_weights_and_states_are_as_recorded(golden: Golden, name: str) -> None:
    found, stored = golden.found[golden.key][name], golden.stored
    known = [key for key, runs in stored.items() if name in runs]
    assert known, f"{name} was never recorded: RENEW_GOLDEN=1"
    bound = BOUNDS[RUNS[name].get("precision", "fp32")]
    for key in known:
        recorded = stored[key][name]
        assert found["skipped"] == recorded["skipped"], key
        for field, limits in (("losses", {"abs": bound.loss, "rel": 0}), ("norms", {"rel": bound.norm})):
            assert _floats(found[field]) == pytest.approx(_floats(recorded[field]), **limits), key
    if golden.key not in known:
        pytest.skip(
            f"bits of {name} were not compared, since values.json has none for '{golden.key}'; losses and "
            f"norms are within {bound.loss:g} and {bound.norm:g} (relative) of {len(known)} other machines'"
        )
    changed = differences({golden.key: {name: stored[golden.key][name]}}, {golden.key: {name: found}})
    if changed:
        pytest.fail("\n".join(["bits are not the recorded ones:", *changed]), pytrace=False)


def _floats(numbers: list[str]) -> list[float]:
    return [float.fromhex(number) for number in numbers]


@pytest.mark.parametrize("name", BYTES)
def test_bytes_without_arithmetic_are_the_recorded_ones_on_every_machine(golden: Golden, name: str) -> None:
    assert golden.found[EVERYWHERE][name] == golden.stored[EVERYWHERE][name]


def test_every_recorded_value_belongs_to_a_test(golden: Golden) -> None:
    assert list(golden.stored[EVERYWHERE]) == BYTES
    assert {name for key, runs in golden.stored.items() if key != EVERYWHERE for name in runs} == {*RUNS}


def test_machine_that_is_not_known_is_compared_within_the_bound_and_says_so(golden: Golden) -> None:
    unknown = golden._replace(key="new", found={"new": golden.found[golden.key]})
    with pytest.raises(pytest.skip.Exception, match="bits of fp32 were not compared.*'new'.*within 1e-05"):
        test_losses_norms_weights_and_states_are_as_recorded(unknown, "fp32")
    far = unknown.found["new"]["fp32"] | {"losses": [(5.7).hex()] * 6}
    with pytest.raises(AssertionError, match="5.7"):
        test_losses_norms_weights_and_states_are_as_recorded(
            unknown._replace(found={"new": {"fp32": far}}), "fp32"
        )


def test_renewing_drops_what_other_machines_found_before_the_change_and_runs_that_are_gone() -> None:
    stored = {
        EVERYWHERE: {"bytes": {"sha256": ["1"]}},
        "here": {"same": {"losses": ["0x1p+0"]}, "other": {"losses": ["0x1p+0"]}, "gone": {"losses": []}},
        "there": {"same": {"losses": ["0x1p+1"]}, "other": {"losses": ["0x1p+1"]}, "gone": {"losses": []}},
        "far": {"other": {"losses": ["0x1p+2"]}},
    }
    found = {
        EVERYWHERE: {"bytes": {"sha256": ["2"]}},
        "here": {"same": {"losses": ["0x1p+0"]}, "other": {"losses": ["0x1.8p+0"]}},
    }
    values = renewed(stored, found)
    assert values == found | {"there": {"same": {"losses": ["0x1p+1"]}}}
    assert differences(stored, values | {"new": {"same": {"losses": ["0x1p+0"]}}}) == [
        "everywhere: bytes: sha256 ['1'] -> ['2']",
        "here: other: losses [1.0] -> [1.5]",
        "here: gone: losses [] -> None",
        "there: other: losses [2.0] -> None",
        "there: gone: losses [] -> None",
        "far: other: losses [4.0] -> None",
        "new: recorded for the first time",
    ]
