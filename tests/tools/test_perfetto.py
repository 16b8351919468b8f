"""A trace has what viewers need of the format, and the timeline's times."""

import json

import pytest

import jpipe
from jpipe.schedules.simulate import simulate


@pytest.mark.parametrize(("name", "num_chunks", "recompute"), [("1f1b", 1, 0.0), ("interleaved", 2, 1.0)])
def test_trace_is_the_timeline(tmp_path, name, num_chunks, recompute):
    schedule = jpipe.make_schedule(name, num_stages=4, num_microbatches=8, num_chunks=num_chunks)
    timeline = simulate(schedule, recompute=recompute)
    trace = timeline.to_chrome_trace(tmp_path / "trace.json", unit_in_seconds=0.5)
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for stage in range(4):
        own = [event for event in events if event["pid"] == stage]
        named = {event["name"]: event["args"] for event in own if event["ph"] == "M" and "process" in event["name"]}
        assert named == {"process_name": {"name": f"stage {stage}"}, "process_sort_index": {"sort_index": stage}}
        tracks = {event["tid"]: event["args"]["name"] for event in own if event["name"] == "thread_name"}
        assert list(tracks.values()) == ["forward", *(["recomputation"] if recompute else []), "backward"]
        slices = [event for event in own if event["ph"] == "X"]
        assert all(tracks[event["tid"]] == event["cat"] for event in slices)
        assert sum(event["dur"] for event in slices) == pytest.approx(0.5e6 * timeline.busy[stage])
        spans = [span for span in timeline.spans if span.stage == stage]
        again = {event["name"]: event for event in slices}
        assert len(again) == len(slices) == len(spans) * (1.5 if recompute else 1)
        for span in spans:
            event = again[str(span.action)]
            assert event["ts"] == pytest.approx(0.5e6 * (span.start + span.recompute))
            assert event["ts"] + event["dur"] == pytest.approx(0.5e6 * span.end)
            assert event["args"] == {"micro-batch": span.action.microbatch, "chunk": span.action.chunk}
        counts = [(event["ts"], event["args"]["micro-batches"]) for event in own if event["ph"] == "C"]
        assert counts == [(0.5e6 * time, count) for time, count in timeline.in_flight(stage)]


@pytest.mark.parametrize("unit", [0.0, -1.0, float("inf")])
def test_a_wrong_unit_is_named(unit):
    timeline = simulate(jpipe.make_schedule("gpipe", num_stages=2, num_microbatches=2))
    with pytest.raises(ValueError, match=f"unit_in_seconds={unit} has to be more than 0 and finite"):
        timeline.to_chrome_trace(unit_in_seconds=unit)
