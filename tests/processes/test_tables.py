"""Tables of text and of HTML from the same rows: well-formed, escaped."""

import jpipe
from html_tables import cells
from jpipe.processes.tables import Table


def test_a_partition_has_the_same_table_in_text_and_in_html():
    partition = jpipe.partition([3, 4, 8, 6, 5, 6, 3], 3)
    lines = [line.split() for line in str(partition).splitlines()]
    html = partition._repr_html_()
    assert [" ".join(row).split() for row in cells(html)] == lines[:-1]
    assert "Partition of 7 layers" in html and "slowest/mean 1.200" in html
    assert [row[0] for row in cells(html) if row[-1] == "<- slowest"] == ["1"]


def test_texts_are_escaped():
    table = Table("a < b", ("x", "y", ""), [("1", "<2>", ""), ("3", "4", '"last"')], ["note & more"])
    html = table.html()
    assert cells(html) == [["x", "y", ""], ["1", "<2>", ""], ["3", "4", '"last"']]
    assert "a &lt; b" in html and "note &amp; more" in html and "&quot;last&quot;" in html
    assert table.described().splitlines() == ["a < b", "x    y", "1  <2>", '3    4  "last"', "note & more"]
