"""A profile's tables, from times that are known."""

import jpipe
from jpipe.profiling.changes import MicrobatchSize
from jpipe.profiling.hosts import ProcessTime
from jpipe.profiling.prediction import StageTimes
from jpipe.profiling.profile_tables import prediction_in_words, size_table, stage_table


def test_stages_with_their_layers_and_the_slowest():
    schedule = jpipe.make_schedule("interleaved", num_stages=2, num_microbatches=4, num_chunks=2)
    cut = jpipe.partition([1.0] * 6, 2, num_chunks=2)
    table = stage_table(schedule, cut, StageTimes((1e-3, 2e-3), (2e-3, 4e-3), (0.0, 3e-3)), (3, 2), ())
    assert table.rows[0][1].count(",") == 1, "two chunks"
    assert [row[2:] for row in table.rows] == [
        ("1", "2", "0", "3", "0.50", "3"),
        ("2", "4", "3", "9", "1.50", "2"),
    ]
    assert table.marks == {1: "slowest"}
    processes = [ProcessTime(p, host, stages, 1.0, 1.0) for p, (host, stages) in enumerate([("a", (0,)), ("b", (1,))])]
    times = StageTimes((1e-3, 2e-3), (2e-3, 4e-3), (0.0, 3e-3))
    assert stage_table(schedule, cut, times, (3, 2), processes).marks == {1: "slowest: process 1 on b"}
    even = stage_table(schedule, cut, StageTimes((1e-3,) * 2, (2e-3,) * 2, (0.0,) * 2), (3, 2), ())
    assert even.marks == {}


def test_the_prediction_beside_the_measured_step():
    words = "predicted from stages alone: 80 ms, measured 1.25 times that; rounds differ by 2%"
    assert prediction_in_words(0.1, 0.08, 0.025) == words
    assert "measured - times" in prediction_in_words(0.1, 0.0, 0.025)


def test_sizes_and_which_was_measured():
    table = size_table([MicrobatchSize(2, 8, 1e-3, 0.5, 0.1), MicrobatchSize(4, 4, 2e-3, 0.25, 0.2)], 4)
    assert list(table.rows) == [("2", "8", "1", "50.0%", "100"), ("4", "4", "2", "25.0%", "200")]
    assert table.marks == {0: "predicted", 1: "measured"}
