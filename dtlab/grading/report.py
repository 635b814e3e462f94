"""The report of a check: a table for people, a dictionary for scripts."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

COLUMNS = ("", "check", "tried", "result", "expected", "bytes sent", "rounds", "points")


@dataclass
class Row:
    """One check. `nbytes` and `rounds` read "used / allowed", "" where they don't count."""

    name: str
    passed: bool
    points: float
    max_points: float
    tried: str
    actual: str
    expected: str
    nbytes: str = ""
    rounds: str = ""
    hint: str = ""
    looked_at: bool = True  # False: the check was not tried

    def cells(self) -> tuple[str, ...]:
        """The row's cells, in the order of `COLUMNS`. A sign, not a colour, says pass or fail."""
        sign = "✓" if self.passed else "✗" if self.looked_at else "–"
        points = f"{self.points:g} of {self.max_points:g}"
        return (sign, self.name, self.tried, self.actual, self.expected, self.nbytes, self.rounds,
                points)


@dataclass
class Report:
    """The outcome of one exercise's checks. `str(report)` is the table as text; in a notebook the
    report shows itself as HTML."""

    exercise: str
    title: str
    rows: list[Row] = field(default_factory=list)
    printed: str = ""  # by the learner's function, in the first case that fails
    details: str = ""  # the traceback or table of waiting ranks of that case
    seconds: float = 0.0
    _shown_in: int = field(default=-1, repr=False, compare=False)  # the cell that `show` ran in

    @property
    def points(self) -> float:
        """Points earned. A whole number is an int, as nbgrader expects."""
        return int_if_whole(sum(row.points for row in self.rows))

    @property
    def max_points(self) -> float:
        """Points that a right answer earns."""
        return int_if_whole(sum(row.max_points for row in self.rows))

    @property
    def passed(self) -> bool:
        """Did every check pass?"""
        return all(row.passed for row in self.rows)

    @property
    def hints(self) -> list[str]:
        """The hints of the rows, in order, each once."""
        return list(dict.fromkeys(row.hint for row in self.rows if row.hint))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary, for scripts and `--json`."""
        data = asdict(self)
        del data["_shown_in"]
        return data | {"points": self.points, "max_points": self.max_points, "hints": self.hints,
                       "passed": self.passed, "seconds": round(self.seconds, 3)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        """Return the report that `to_dict` described, without the control sequences that texts of
        learners may hold (`printable`)."""
        rows = [Row(**row) for row in data["rows"]]
        for row in rows:
            vars(row).update({name: printable(value) for name, value in vars(row).items()
                              if isinstance(value, str)})
        return Report(data["exercise"], data["title"], rows, printable(data["printed"]),
                      printable(data["details"]), data["seconds"])

    # ---- for people ----------------------------------------------------------------------------

    @property
    def headline(self) -> str:
        """One line: "ring-all-reduce: 8 of 10 points"."""
        return f"{self.exercise}: {self.points:g} of {self.max_points:g} points"

    def _columns(self) -> list[int]:
        """The columns that hold something."""
        cells = [row.cells() for row in self.rows]
        return [c for c in range(len(COLUMNS)) if any(row[c] for row in cells)]

    def _extras(self) -> list[tuple[str, str]]:
        """Return the sections below the table: (heading, text)."""
        extras = [("Details", self.details), ("Your function printed", self.printed)]
        return [(heading, text.rstrip()) for heading, text in extras if text.strip()]

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The table as plain text, `width` columns wide (default: the terminal's, 80 to 120)."""
        width = width or min(max(shutil.get_terminal_size((110, 24)).columns, 80), 120)
        shown = self._columns()
        cells = [[_plain(row.cells()[c]) for c in shown] for row in self.rows]
        unbroken = [shown.index(c) for c in (0, 1, 6, 7) if c in shown]
        table = text_table([COLUMNS[c] for c in shown], cells, width, unbroken)
        lines = [f"{self.headline} · {self.title}", "", table, ""]
        lines += [f"Hint: {_plain(hint)}" for hint in self.hints]
        for heading, text in self._extras():
            lines += [f"{heading}:", *(f"    {line}" for line in text.splitlines())]
        return "\n".join(line.rstrip() for line in lines).rstrip()

    def __repr__(self) -> str:
        return f"<Report {self.headline}>"

    def _repr_html_(self) -> str:
        return pages().get_template("report.html").render(
            report=self, columns=COLUMNS, shown=self._columns(), extras=self._extras())

    def show(self) -> None:
        """Show the report: as HTML in a notebook, as text elsewhere."""
        shell = _notebook()
        if shell is None:
            print(self)
            return
        from IPython.display import display

        display({"text/html": self._repr_html_(), "text/plain": self.to_text(110)}, raw=True)
        self._shown_in = shell.execution_count

    def _ipython_display_(self) -> None:
        """A report that ends a cell shows itself, unless `check` has just shown it there."""
        shell = _notebook()
        if shell is None or shell.execution_count != self._shown_in:
            self.show()


def _notebook() -> Any:
    """The IPython shell of a notebook kernel; None in a terminal or a script."""
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    return shell if shell is not None and hasattr(shell, "kernel") else None


def int_if_whole(points: float) -> float:
    """An int where possible: 10 rather than 10.0."""
    return int(points) if float(points).is_integer() else points


LONGEST_WORD = 20  # letters; columns are at least as wide as such words, if the table allows
SHORTEST_COLUMN = 6


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int,
               unbroken: Sequence[int] = ()) -> str:
    """Format a table as plain text. Columns wrap to fit into `width`; those `unbroken` wrap only if
    they would take more than half of it."""
    from rich import box  # here, as the judge does without rich, whose import takes time
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title, wide in zip(head, _widths(head, rows, width - 3 * len(head) + 3, unbroken),
                           strict=True):
        table.add_column(title, overflow="fold", width=wide)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    page = io.StringIO()
    # In a notebook rich would show the table instead of writing it to `page`.
    console = Console(file=page, width=width, color_system=None, force_jupyter=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines()).rstrip()


def _widths(head: Sequence[str], rows: Sequence[Sequence[str]], width: int,
            unbroken: Sequence[int]) -> list[int]:
    """Return each column's width: its longest word's, and a share of what remains of `width`."""
    texts = [[title, *(row[column] for row in rows)] for column, title in enumerate(head)]
    whole = [max(map(len, column)) for column in texts]
    unbroken = [number for number in unbroken if whole[number] <= width // 2]
    least = [longest if number in unbroken else
             max((len(word) for text in column for word in text.split()
                  if len(word) <= LONGEST_WORD), default=0)
             for number, (longest, column) in enumerate(zip(whole, texts, strict=True))]
    broken = [number for number in range(len(head)) if number not in unbroken]
    while sum(least) > width and any(least[number] > SHORTEST_COLUMN for number in broken):
        least[max(broken, key=least.__getitem__)] -= 1
    wanted, rest = sum(whole) - sum(least), max(0, width - sum(least))
    share = min(1.0, rest / wanted) if wanted else 0.0
    return [low + int(share * (high - low)) for low, high in zip(least, whole, strict=True)]


def printable(text: str) -> str:
    """Return `text` without escape sequences, control characters, marks of text direction, and
    characters that UTF-8 can't encode."""
    return _CONTROL.sub("", text).encode(errors="replace").decode()


_CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\].*?(\x07|\x1b\\)|.)|"
                      r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def _plain(text: str) -> str:
    """Return `text` for a terminal, where code is not marked."""
    return text.replace("`", "")


@cache
def pages() -> jinja2.Environment:
    """The templates of what is shown as HTML."""
    import jinja2  # here, as the judge shows nothing
    from markupsafe import Markup, escape

    found = jinja2.Environment(loader=jinja2.PackageLoader("dtlab.grading", "pages"),
                               autoescape=True, undefined=jinja2.StrictUndefined)
    found.globals["points"] = lambda number: f"{number:g}"
    # What stands between backticks is code.
    found.filters["code"] = lambda text: Markup(
        re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    return found
