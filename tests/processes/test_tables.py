"""Tables of text and of HTML from the same rows: well-formed, escaped."""

from xml.etree import ElementTree

import jpipe
from html_tables import cells
from jpipe.processes.tables import Table


def test_a_partition_has_the_same_table_in_text_and_in_html():
    partition = jpipe.partition([3, 4, 8, 6, 5, 6, 3], 3)
    lines = [line.partition("<-")[0].split() for line in str(partition).splitlines()]
    html = partition._repr_html_()
    assert cells(html) == lines[:-1]
    assert "Partition of 7 layers" in html and "slowest/mean 1.200" in html
    bold = [row for row in ElementTree.fromstring(html).iter("tr") if row.get("title") == "slowest"]
    assert [row[0].text for row in bold] == ["1"]


def test_texts_are_escaped_and_marks_shown():
    table = Table("a < b", ("x", "y"), [("1", "<2>"), ("3", "4")], {1: 'the "last"'}, ["note & more"])
    html = table.html()
    assert cells(html) == [["x", "y"], ["1", "<2>"], ["3", "4"]]
    assert "a &lt; b" in html and "note &amp; more" in html and "the &quot;last&quot;" in html
    assert table.described().splitlines() == ["a < b", "x    y", "1  <2>", '3    4  <- the "last"', "note & more"]


def test_a_wide_table_fits_a_terminal():
    """What is left out is the middle of the widest texts, and what is said about that."""
    names = ", ".join(f"Layer{i}" for i in range(40))
    table = Table("title " * 30, ("stage", "what", "devices"), [("0", names, "cpu:0"), ("1", "b", "c")], {0: "slowest"})
    lines = table.described().splitlines()
    assert max(map(len, lines)) == 120
    assert lines[3].startswith("    0  Layer0, Layer1,") and lines[3].endswith(", Layer39    cpu:0  <- slowest")
    assert "..." in lines[3] and lines[4].endswith(" b        c")
    assert lines[5] == '"..." stands for text that is too wide here; a notebook shows all of it'
    assert cells(table.html())[1] == ["0", names, "cpu:0"]
    narrow = Table("t", ("a",), [("x" * 120,)], {})
    assert narrow.text() == "a".rjust(120) + "\n" + "x" * 120
    many = Table("t", ["column"] * 40, [["text that is long"] * 40], {})
    assert "text that is long" not in many.text() and many.text().splitlines()[1].startswith("tex...ng")
