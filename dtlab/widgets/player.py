"""A player: moments that Python computes once; the page draws them and steps through them itself.

So a step needs no kernel. The drawing is ECMAScript and SVG (`players/`), the same in JupyterLab
and on a page without a kernel, which gets the moments as data (mime type `MIME`).
"""

from __future__ import annotations

from abc import abstractmethod
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar

import anywidget
from IPython.display import display
from traitlets import Dict, Int

from dtlab.errors import DtlabError
from dtlab.plots import Picture
from dtlab.plots.palette import rank_style

MIME = "application/vnd.dtlab.player+json"
_HERE = files("dtlab.widgets.players")
Json = dict[str, Any]


@cache
def script_of(drawing: str) -> str:
    """The ECMAScript of a player: `play(model, root, draw)`, `pageModel(data, runs)` and `draw`."""
    return "\n".join((_HERE / f"{name}.js").read_text("utf-8") for name in ("player", drawing))


def style() -> str:
    """The style sheet of all players."""
    return (_HERE / "player.css").read_text("utf-8")


class Player(anywidget.AnyWidget):
    """Controls over a drawing that steps through moments, with its words below.

    choice: the controls' values, by name. `_answer` computes what they show: controls (for each, in
    rows: name, label, options as (label, value), and whether it is a slider, a text or a check),
    scene (what all moments share), moments (for each: label, words, and what the drawing needs),
    and `at`, the moment to begin with. A choice that can't be shown leaves the drawing as it was,
    and the reason stands in its words.
    """

    drawing: ClassVar[str]  # names the file in players/
    has_runs = False  # whether `runs` of its file holds what a page may choose
    choice = Dict().tag(sync=True)
    show = Dict().tag(sync=True)
    at = Int(0).tag(sync=True)
    answers = Int(0).tag(sync=True)  # their number: two choices may show the same

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "drawing" in vars(cls):  # not in the class that traitlets makes of it for its traits
            cls._esm = script_of(cls.drawing) + (
                "\nexport default {render: ({model, el}) => play(model, el, draw)};\n")
            cls._css = style()
        super().__init_subclass__(**kwargs)

    def __init__(self, choice: Json):
        super().__init__(choice=choice)
        self.show = self._answer()
        self.at = self.show["at"]
        self.observe(self._on_choice, "choice")

    @abstractmethod
    def _answer(self) -> Json:
        """Return what `choice` shows. May correct values in `choice` that don't go together."""

    @abstractmethod
    def static(self) -> Picture:
        """The moment that is shown, as a matplotlib figure."""

    def forward(self) -> None:
        """Go one moment forward, unless at the end."""
        self.at = min(self.at + 1, len(self.show["moments"]) - 1)

    def back(self) -> None:
        """Go one moment back, unless at the start."""
        self.at = max(self.at - 1, 0)

    def choose(self, **values: Any) -> None:
        """Set controls by name, as a reader does with the mouse."""
        self.choice = self.choice | values

    @property
    def words(self) -> str:
        """The text below the drawing: the same in words, or why it can't be shown."""
        alarm = self.show.get("alarm") if self.at == self.show["at"] else None
        text: str = alarm or self.show["moments"][self.at]["words"]
        return text

    def display(self) -> None:
        """Show the widget."""
        display(self)

    def _on_choice(self, _: object) -> None:
        self.unobserve(self._on_choice, "choice")
        try:
            self.show = self._answer()
            self.at = self.show["at"]
        except DtlabError as error:
            self.show = self.show | {"alarm": str(error), "at": self.at}
        finally:
            self.answers += 1
            self.observe(self._on_choice, "choice")

    def _repr_mimebundle_(self, **_: Any) -> tuple[Json, Json]:
        """The widget; for pages without its kernel what they can play, and a still picture."""
        still, name = self.static(), type(self).__name__
        data, about = super()._repr_mimebundle_() or ({}, {})
        data |= {
            "image/png": b64encode(still.png()).decode(),
            "text/plain": f"{name}: run this cell to use its controls",
            MIME: {"player": name, "drawing": self.drawing, "runs": self.has_runs,
                   "choice": self.choice, "show": self.show},
        }
        return data, about | {"image/png": {"alt": still.alt}}


def runs_of(player: Player, choices: Iterable[Json]) -> list[Json]:
    """Return what `player` shows for each of `choices`, without those that it refuses."""
    made = []
    for values in choices:
        player.choose(**values)
        if "alarm" not in player.show:
            made.append({"choice": player.choice, "show": player.show})
    return made


def select(name: str, label: str, options: Sequence[Any]) -> Json:
    """A list to choose from. options: values, or (label, value)."""
    pairs = [option if isinstance(option, tuple) else (str(option), option) for option in options]
    return {"name": name, "label": label, "kind": "select", "options": pairs}


def slider(name: str, label: str, options: Sequence[Any]) -> Json:
    """The same as a slider."""
    return select(name, label, options) | {"kind": "slider"}


def looks(ranks: int) -> list[Json]:
    """Return the look of each rank in a drawing."""
    return [{"color": style.color, "ink": style.ink, "hatch": style.hatch}
            for style in map(rank_style, range(ranks))]
