"""The report as JSON and as a table; both are contracts of the command line."""

import json
import math

from patch.alignment import Report, Verdict
from patch.alignment.logits import LogitStats
from patch.alignment.measure import LogitComparison, Measurement
from patch.alignment.stored import ConfigDifference
from patch.alignment.trace import FirstDifference
from patch.alignment.weights import WeightComparison, WeightDifference

FAST = LogitStats(max=2e-4, mean=1e-5, cosine=0.999, kl=1e-6, top1=0.75)
REPORT = Report(
    Measurement(
        hf="hf", mcore="mcore", device="cpu", precision="fp32", attention="eager", prompt_lengths=[5, 33],
        weights=WeightComparison(21, False, [WeightDifference("a.weight", "is transposed")]),
        config_differences=[ConfigDifference("rotary_base", 1e4, 5e5)],
        logits=LogitComparison(
            FAST, FAST._replace(max=math.nan), FirstDifference(1, "q_proj", 0.5),
            {"rmsnorm": 0.1, "rope": 0.0},
        ),
    ),
    Verdict(False, "Not normal. So."),
)  # fmt: skip


def test_json_has_the_toolkits_keys() -> None:
    found = json.loads(json.dumps(REPORT.as_json()))
    assert found.pop("logits") == FAST._asdict()
    assert math.isnan(found.pop("logits_aligned")["max"])
    assert found == {
        "hf": "hf", "mcore": "mcore", "device": "cpu", "params_dtype": "fp32", "attention": "eager",
        "prompt_lengths": [5, 33], "weights_equal": False,
        "weight_differences": [{"name": "a.weight", "what": "is transposed"}],
        "config_differences": [{"field": "rotary_base", "ours": 1e4, "theirs": 5e5}],
        "first_difference": {"layer": 1, "operation": "q_proj", "max": 0.5},
        "sources": {"rmsnorm": 0.1, "rope": 0.0}, "normal": False, "verdict": "Not normal. So.",
    }  # fmt: skip


def test_table_has_a_line_for_each_source_and_form() -> None:
    title, *lines = REPORT.table()
    assert title == "max |logit difference|, fp32 on cpu, attention eager"
    assert [line.split()[:3] for line in lines] == [
        ["rmsnorm", "fast", "0.1"], ["rope", "fast", "0"],
        ["all", "fast", "0.0002"], ["all", "aligned", "nan"],
    ]  # fmt: skip
    assert lines[1].endswith("fast and aligned are the same operations")
    assert lines[2].endswith("mean 1e-05, KL 1e-06, cosine 0.999000, top-1 equal in 75.0%")
