"""llama-patch timeline on traces that a test writes by hand, with overlaps that it knows."""

import gzip
import json
import random
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from toolkits.timeline.__main__ import main
from toolkits.timeline.trace import Span, merged, total, within, without

MS = 1000.0
"""Of a trace's microseconds."""


def event(cat: str, name: str, begin_ms: float, length_ms: float, tid: Any = 1, **args: Any) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": 5e9 + begin_ms * MS, "dur": length_ms * MS, "pid": 9,
            "tid": tid, "args": args}  # fmt: skip


def named(name: str, begin_ms: float, length_ms: float, tid: int = 1) -> dict:
    return event("user_annotation", name, begin_ms, length_ms, tid)


CPU = [
    named("step 7", 0, 100),
    named("forward", 0, 40),
    event("cpu_op", "aten::mm", 0, 30),
    event("cpu_op", "autograd::engine", 0, 99),  # holds waits too: it is no operator
    named("backward", 40, 40),
    event("cpu_op", "aten::mm", 40, 20),
    named("bucket 0 reduce-scatter", 50, 1),
    named("gloo:recv", 50.5, 24.5),  # 50.5 to 75; computed until 60
    named("wait", 62, 8),
    event("cpu_op", "aten::add", 75, 5),
    named("update", 80, 20),
    named("update of buckets [0]", 80, 5),
    named("chunk 1 update", 82, 8, tid=2),
    named("chunk 1 to host", 85, 10),
    named("wait for chunk 1", 90, 10),
    event("cpu_op", "aten::mm", 300, 30),  # of another step
    named("step 8", 300, 30),
]
"""Computes 0-30, 40-60, 75-80, 80-90; copies 85-95; the message is exposed 60-75."""

GPU = [
    named("step 7", 0, 50),
    named("forward", 0, 10),
    named("bucket 4 reduce-scatter", 5, 2),
    event("cuda_runtime", "cudaLaunchKernel", 6, 0.01, correlation=11),
    event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 20, 15, "stream 20", correlation=11),
    event("kernel", "cutlass_gemm", 10, 15, "stream 7", correlation=3),
    event("kernel", "triton_rope", 30, 2, "stream 7", correlation=4),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 24, 4, "stream 21", correlation=5),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 40, 4, "stream 7", correlation=6),
    event("cuda_runtime", "cudaEventSynchronize", 36, 10, correlation=12),
    named("gloo:all_reduce", 45, 1),  # of the host: no message of the GPU
]
"""The message 20-35 is exposed 25-30 and 32-35; the copy 24-28 is exposed 25-28."""


def write(file: Path, events: list[dict], rank: int) -> Path:
    text = json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}],
                       "distributedInfo": {"rank": rank}}).encode()  # fmt: skip
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


def figures(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    page, report = tmp_path / "page.html", tmp_path / "report.json"
    code = main([*arguments, "--output", str(page), "--json", str(report)])
    return code, json.loads(report.read_text()) if report.exists() else {}


def test_overlaps_on_a_cpu_are_those_of_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path / "rank_0.json.gz", CPU, 0)
    code, report = figures(tmp_path, str(tmp_path), "--step", "7")
    (rank,) = report["ranks"]
    assert code == 0 and report["step"] == 7 and not rank["is_gpu"]
    expected = {
        "step_ms": 100, "compute_ms": 65, "communication_ms": 24.5, "exposed_communication_ms": 15,
        "copies_ms": 10, "exposed_copies_ms": 5, "host_waits_ms": 18, "idle_ms": 15,
    }  # fmt: skip
    assert {name: rank[name] for name in expected} == pytest.approx(expected)
    assert rank["most_exposed"] == pytest.approx({"bucket 0 reduce-scatter": 15})
    assert "most exposed: bucket 0 reduce-scatter 15.00" in capsys.readouterr().out


def test_overlaps_on_a_gpu_are_those_of_its_streams(tmp_path: Path) -> None:
    write(tmp_path / "rank_3.json", GPU, 3)
    code, report = figures(tmp_path, str(tmp_path / "rank_3.json"))
    (rank,) = report["ranks"]
    assert code == 0 and rank["is_gpu"] and rank["rank"] == 3
    expected = {
        "compute_ms": 17, "communication_ms": 15, "exposed_communication_ms": 8, "copies_ms": 4,
        "exposed_copies_ms": 3, "host_waits_ms": 10, "idle_ms": 25,
    }  # fmt: skip
    assert {name: rank[name] for name in expected} == pytest.approx(expected)
    # The host launched it inside the bucket's region, 14 ms before it ran.
    assert rank["most_exposed"] == pytest.approx({"bucket 4 reduce-scatter": 8})


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    evil = [*CPU, named("bucket 1 <script>alert(1)</script>", 10, 1), named("gloo:<img>", 10.5, 2)]
    write(tmp_path / "rank_0.json", evil, 0)
    write(tmp_path / "rank_1.json", CPU, 1)
    figures(tmp_path, str(tmp_path), "--step", "7")
    text = (tmp_path / "page.html").read_text()
    assert "<img>" not in text and "alert(1)</script>" not in text and "default-src 'none'" in text
    assert not any(word in text for word in ("http:", "https:", "src=", "href=", "@import", "url("))
    begin, end = text.index("<svg"), text.rindex("</svg>") + 6
    drawings = ["<svg" + part for part in text[begin:end].split("<svg")[1:]]
    assert len(drawings) == 2
    for drawing in drawings:
        tree = xml.etree.ElementTree.fromstring(drawing[: drawing.index("</svg>") + 6])
        lanes = {rect.get("class") for rect in tree.iter("rect")}
        assert {"forward", "compute", "messages", "exposed", "copies", "host-waits"} <= lanes
        exposed = [rect for rect in tree.iter("rect") if rect.get("class") == "exposed"]
        # 60 to 75 ms of 100 ms, which are 10,000 units.
        assert (float(exposed[-1].get("x")), float(exposed[-1].get("width"))) == (6000, 1500)


def test_the_last_step_of_all_traces_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path / "rank_0.json", CPU, 0)
    write(tmp_path / "rank_1.json", GPU, 1)
    assert figures(tmp_path, str(tmp_path))[1]["step"] == 7
    assert figures(tmp_path, str(tmp_path / "rank_0.json"))[1]["step"] == 8
    assert figures(tmp_path, str(tmp_path), "--step", "8")[0] == 3
    assert "expected one of [7]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "expected a trace"), (b"[]", "expected a trace"), (b"\x1f\x8b broken", "cannot be read"),
        (b'{"traceEvents": []}', "it has no step"), (b'{"traceEvents": [{"ph": "X", "dur": 1}]}', "trace"),
        (b"\x80\x04cos\nsystem\n", "expected a trace"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes, words: str
) -> None:
    (tmp_path / "rank_0.json").write_bytes(content)
    assert figures(tmp_path, str(tmp_path / "rank_0.json"))[0] == 3
    shown = capsys.readouterr().err
    assert words in shown and "rank_0.json" in shown


def test_a_folder_without_traces_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert figures(tmp_path, str(tmp_path))[0] == 3
    assert figures(tmp_path, str(tmp_path / "nowhere"))[0] == 3
    assert "log/traces" in capsys.readouterr().err


def test_spans_cover_what_single_moments_say() -> None:
    """Against a count of moments, for spans with whole numbers."""
    chance = random.Random(0)

    def some() -> list[Span]:
        begins = [chance.randrange(50) for _ in range(chance.randrange(8))]
        return [Span(begin, begin + chance.randrange(9)) for begin in begins]

    def moments(spans: list[Span]) -> set[int]:
        return {moment for span in spans for moment in range(int(span.begin), int(span.end))}

    for _ in range(300):
        these, others = some(), some()
        assert moments(without(these, others)) == moments(these) - moments(others)
        assert total(these) == len(moments(these)) and moments(merged(these)) == moments(these)
        assert moments(within(these, Span(10, 30))) == moments(these) & set(range(10, 30))
    assert merged([Span(0, 1), Span(3, 4)], gap=2) == [Span(0, 4)]


def test_the_page_lies_beside_the_traces_of_its_run(tmp_path: Path) -> None:
    traces = tmp_path / "log" / "traces"
    traces.mkdir(parents=True)
    write(traces / "rank_0.json.gz", CPU, 0)
    assert main([str(tmp_path), "--step", "7"]) == 0
    assert (tmp_path / "log" / "timeline.html").stat().st_size > 1000
