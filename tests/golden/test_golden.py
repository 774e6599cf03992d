"""Golden values: losses, norms, weights and states of small runs, batches and converted files, to the bit.

values.json stores them by machine key (machine.py): what bits depend on besides our code. On an unknown
machine, losses and norms are compared within a bound, and the test says that bits were not compared.

    RENEW_GOLDEN=1 .venv/bin/python -m pytest tests/golden

writes this machine's values, and `git diff` shows the changes. CONTRIBUTING.md says when to do this.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from distributed_runner import run_distributed
from golden.runs import ALONE, DATA, TOGETHER, convert, measure_alone, measure_together, write_sources

pytestmark = pytest.mark.timeout(600)  # the first test measures all runs: minutes on a busy machine
FILE = Path(__file__).with_name("values.json")
EVERYWHERE = "everywhere"
Values = dict[str, dict[str, dict[str, Any]]]
"""Key of a machine, or EVERYWHERE -> name of a run or of bytes -> measured values."""
RUNS = ALONE | TOGETHER | DATA
BYTES = [
    "raw training batches", "raw validation batches", "idxmap training batches", "idxmap validation batches",
    "documents.bin and .idx", "hf2mcore", "mcore2hf", "export at tp=2",
]  # fmt: skip


class Bound(NamedTuple):
    """Largest difference between machines after five steps."""

    loss: float
    """Absolute, for losses near 5.6."""
    norm: float
    """Relative."""


# Measured between torch's three vector widths, MKL's portable products and oneDNN's for AVX2: fp32 1.4e-6 and
# 4.5e-6; bf16 and fp16, where a weight may be rounded to the next value, 1.0e-3 and 2.8e-3.
BOUNDS = {"fp32": Bound(1e-5, 5e-5), "bf16": Bound(5e-3, 1.5e-2), "fp16": Bound(5e-3, 1.5e-2)}


class Golden(NamedTuple):
    key: str
    found: Values
    stored: Values


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Measure everything once; record it first if RENEW_GOLDEN is set."""
    key, found = _measure(tmp_path_factory.mktemp("golden"))
    stored = json.loads(FILE.read_text())
    if os.environ.get("RENEW_GOLDEN"):
        stored = _renewed(stored, found)
        _write(stored)
    return Golden(key, found, stored)


def _renewed(stored: Values, found: Values) -> Values:
    """Return `stored` with this machine's values. A run whose bits changed loses the values of other
    machines, which must be measured anew there."""
    same = {
        name
        for key, named in found.items()
        for name, measured in named.items()
        if stored.get(key, {}).get(name, measured) == measured
    }
    kept = {
        key: still
        for key, named in stored.items()
        if key not in found and (still := {name: named[name] for name in named if name in same})
    }
    return {EVERYWHERE: found[EVERYWHERE], **dict(sorted((kept | found).items()))}


def _write(values: Values) -> None:
    parts = []
    for key, named in values.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in named.items())
        parts.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _measure(folder: Path) -> tuple[str, Values]:
    write_sources(folder)
    (alone,) = run_distributed(measure_alone, 1, timeout_s=240)
    ranks = run_distributed(measure_together, 2, folder, timeout_s=240)
    runs = {name: _of_ranks([run]) for name, run in alone["runs"].items()}
    runs |= {name: _of_ranks([rank["runs"][name] for rank in ranks]) for name in ranks[0]["runs"]}
    # Batches differ between ranks; there is only one exported folder.
    everywhere = {name: [rank["bytes"][name] for rank in ranks] for name in ranks[0]["bytes"]}
    everywhere |= {name: [digest] for name, digest in convert(folder).items()}
    return alone["key"], {
        EVERYWHERE: {name: {"sha256": everywhere[name]} for name in BYTES},
        alone["key"]: runs,
    }


def _of_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the ranks' results: losses and norms are equal, weights and states are listed by rank."""
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
            assert found[field] == pytest.approx(recorded[field], **limits), key
    if golden.key not in known:
        pytest.skip(
            f"bits of {name} were not compared, since values.json has none for '{golden.key}'; losses and "
            f"norms are within {bound.loss:g} and {bound.norm:g} (relative) of {len(known)} other machines'"
        )
    assert found == stored[golden.key][name], "bits are not the recorded ones"


@pytest.mark.parametrize("name", BYTES)
def test_bytes_without_arithmetic_are_the_recorded_ones_on_every_machine(golden: Golden, name: str) -> None:
    assert golden.found[EVERYWHERE][name] == golden.stored[EVERYWHERE][name]


def test_every_recorded_value_belongs_to_a_test(golden: Golden) -> None:
    assert list(golden.stored[EVERYWHERE]) == BYTES
    assert {name for key, runs in golden.stored.items() if key != EVERYWHERE for name in runs} == {*RUNS}
