"""Reports: for people as text and HTML, for scripts as dictionaries."""

from __future__ import annotations

import json

from dtlab import check
from dtlab.grading.report import Report, Row, int_if_whole, text_table


def example() -> Report:
    return Report("ring", "A ring", [
        Row("sums", True, 2, 2, "4 ranks", "the sum", "the sum"),
        Row("bytes", False, 0, 1.5, "4 ranks, 8 × float32", "[rank 0] sent 96 B", "≤ 48 B",
            "96 / 48", hint="Send <one> chunk."),
    ], printed="hello", details="line 3")


def test_points_are_sums_and_whole_numbers_are_ints():
    report = example()
    assert report.points == 2
    assert isinstance(report.points, int)
    assert report.max_points == 3.5
    assert not report.passed
    assert report.hints == ["Send <one> chunk."]
    assert isinstance(int_if_whole(3.0), int)


def test_a_report_goes_through_json_and_back():
    report = example()
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    assert report.to_dict()["rows"][1]["nbytes"] == "96 / 48"


def test_the_text_holds_what_a_learner_needs_at_every_width():
    for width in (60, 80, 110):
        text = example().to_text(width)
        assert text.startswith("ring: 2 of 3.5 points · A ring")
        assert all(len(line) <= width for line in text.splitlines())
        assert "Hint: Send <one> chunk." in text
        assert "✗" in text
        assert "✓" in text
    assert "[rank 0] sent 96 B" in example().to_text(200)  # brackets are no markup
    assert "rounds" not in text  # a column that nobody fills is not shown


def test_html_escapes_what_learners_print():
    report = example()
    report.printed = "<script>alert(1)</script>"
    html = report._repr_html_()
    assert "<script>" not in html
    assert "&lt;one&gt;" in html
    assert 'aria-label="failed"' in html  # not by colour alone


def test_the_repr_is_one_line():
    assert repr(example()) == "<Report ring: 2 of 3.5 points>"


def test_a_table_wraps_all_but_the_unbroken_columns():
    text = text_table(["a", "b"], [["x" * 30, "1 of 2"]], 24, unbroken=[1])
    assert "1 of 2" in text
    assert max(map(len, text.splitlines())) <= 24


def test_a_check_that_was_not_tried_has_a_dash_and_no_score_of_its_cases():
    def needs_a_tensor(comm, x):
        raise ValueError("not yet")

    tried, *others = check("ring-all-reduce", needs_a_tensor, show=False).rows
    assert (tried.cells()[0], tried.tried) == ("✗", "4 ranks, 8 × float32; 0 of 3 cases right")
    for row in others:
        assert (row.cells()[0], row.actual) == ("–", "not tried")
        assert "cases right" not in row.tried
    html = Report("ring", "A ring", [others[0]])._repr_html_()
    assert 'aria-label="not tried"' in html


def test_code_in_hints_is_marked_in_html_and_plain_in_a_terminal():
    report = Report("ring", "A ring", [Row("sums", False, 0, 1, "4 ranks", "`x`", "1",
                                           hint="Write `x < y`.")], printed="`mine`")
    text = report.to_text()
    assert "Hint: Write x < y." in text
    assert text.count("`") == 2  # what the learner printed stays as it is
    assert "Write <code>x &lt; y</code>." in report._repr_html_()


def test_a_table_of_80_columns_breaks_no_word() -> None:
    head = ["", "check", "tried", "result", "expected", "points"]
    rows = [["✗", "values", "4 ranks, 6 × float32, root 0; 0 of 3 cases right",
             "NotImplementedError on rank 0 (line 4 in binomial_broadcast)", "a result", "0 of 2"],
            ["–", "any root", "2 to 13 ranks, every kind of root", "not tried",
             "get “values” right first", "0 of 2"]]
    text = text_table(head, rows, 80, [0, 1, 5])
    assert max(map(len, text.splitlines())) <= 80
    assert {word for row in rows for cell in row for word in cell.split()} <= set(text.split())
