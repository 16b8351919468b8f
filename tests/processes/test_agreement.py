"""What processes disagree on, in words; how they ask each other is in `test_processes.py`."""

from jpipe.processes.agreement import check_agreement, differences


def test_a_process_alone_agrees():
    check_agreement({"num_stages": "2"}, [0])


def test_what_differs_is_named_with_its_values():
    facts = {f"field {i}": "1" for i in range(5)}
    message = differences({0: facts, 1: facts, 2: {name: "2" for name in facts}})
    assert message.startswith("the processes disagree on field 0: 1 in process 0, 1, 2 in process 2; field 1")
    assert "(and 2 more)" in message
