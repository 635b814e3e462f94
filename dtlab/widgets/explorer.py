"""The base of all widgets: controls on top, a picture that changes in place, its words below."""

from __future__ import annotations

import asyncio
import html
from abc import ABC, abstractmethod
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from importlib.resources import files
from typing import Any

import ipywidgets
from IPython.display import display
from traitlets import Unicode

from dtlab.checks import short
from dtlab.errors import ConfigError
from dtlab.plots import Picture

WIDTH_PX = 990  # of a picture of 11 inches on the page
MOST_KEPT = 128  # pictures; about 50 kB each
_HERE = files("dtlab.widgets")
_FRAME = """\
<style onload="{script}">{style}</style>
<button class="jupyter-button widget-button dtlab-full-screen"
  title="show this widget alone, and larger; Esc ends it">full screen</button>
<div class="dtlab-gone" role="alert">This kernel knows nothing of the widget any more:
  run this cell again.</div>"""


class NamedImage(ipywidgets.Image):  # type: ignore[misc]
    """An image whose tooltip is its name to a screen reader.

    ipywidgets 8 sets the tooltip only of views whose model has a description, and fails to show an
    image that has a tooltip but none.
    """

    description = Unicode("").tag(sync=True)


class Explorer(ABC):
    """A picture under rows of controls. Pictures are kept: to come back to one costs nothing.

    An `Image` widget keeps the old picture on screen until the new one is decoded, so nothing
    flickers. Its tooltip names the picture, and the words stand below it, in a live region.
    explorer.js gives the controls their names, keeps their keys to them, and fills the screen.
    ipywidgets keeps every widget, also of a cell that is run again, until its kernel ends or
    `ipywidgets.Widget.close_all()`.
    """

    def __init__(self, *rows: Sequence[Any]):
        self.image = NamedImage(format="svg+xml")
        self.image.layout = ipywidgets.Layout(width=f"{WIDTH_PX}px", max_width="100%")
        self.words = ipywidgets.HTML(layout=ipywidgets.Layout(max_width=f"{WIDTH_PX}px"))
        self.words.add_class("dtlab-words")
        frame = ipywidgets.HTML(_FRAME.format(
            script=html.escape((_HERE / "explorer.js").read_text("utf-8")),
            style=(_HERE / "explorer.css").read_text("utf-8"),
        ), layout=ipywidgets.Layout(max_width=f"{WIDTH_PX}px"))
        frame.add_class("dtlab-frame")
        self.controls = [control for row in rows for control in row]
        wrap = ipywidgets.Layout(flex_flow="row wrap", grid_gap="2px 14px")
        lines = [ipywidgets.HBox(list(row), layout=wrap) for row in rows]
        for line in lines:
            line.add_class("dtlab-row")
        self.box = ipywidgets.VBox([frame, *lines, self.image, self.words])
        self.box.add_class("dtlab-explorer")
        self._kept: OrderedDict[Hashable, tuple[bytes, str]] = OrderedDict()

    @abstractmethod
    def static(self) -> Picture:
        """The picture that is shown, as a matplotlib figure."""

    def display(self) -> None:
        """Show the widget."""
        display(self)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widget, and for pages without its kernel a still picture."""
        still = self.static()
        data = self.box._repr_mimebundle_() | {
            "image/png": b64encode(still.png()).decode(),
            "text/plain": f"{type(self).__name__}: run this cell to use its controls",
        }
        return data, {"image/png": {"alt": still.alt}}

    def _drawn(self, key: Hashable, draw: Callable[[], Picture]) -> tuple[bytes, str]:
        """SVG and words of the picture `key`, drawn if it isn't kept."""
        if key not in self._kept:
            picture = draw()
            self._kept[key] = picture.svg(), picture.alt
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _show(self, key: Hashable, draw: Callable[[], Picture]) -> None:
        self.image.value, words = self._drawn(key, draw)
        self._say(words)

    def _say(self, text: str, *, alarm: bool = False) -> None:
        (self.words.add_class if alarm else self.words.remove_class)("dtlab-alarm")
        self.image.tooltip = text.split(": ")[0].split(". ")[0]
        self.words.value = html.escape(text)

    def _ahead(self, key: Hashable, draw: Callable[[], Picture]) -> None:
        """Draw a picture that may be wanted next, once the kernel has nothing else to do."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no kernel: a script or a test
            return
        loop.call_later(0.03, self._drawn, key, draw)


def button(text: str, tooltip: str, action: Callable[[], None]) -> Any:
    """A button that does `action`."""
    made = ipywidgets.Button(description=text, tooltip=tooltip,
                             layout=ipywidgets.Layout(width="auto"))
    made.on_click(lambda _: action())
    return made


def dropdown(name: str, options: Sequence[Any], value: Any, width: str = "220px") -> Any:
    """A labelled drop-down list. Raises `ConfigError` if `value` is none of `options`."""
    _check_offered(name, options, value)
    return ipywidgets.Dropdown(options=list(options), value=value, description=name,
                               layout=ipywidgets.Layout(width=width),
                               style={"description_width": "initial"})


def choice(name: str, options: Sequence[tuple[str, Any]], value: Any, width: str = "340px") -> Any:
    """A slider over a list of (label, value). Raises `ConfigError` if `value` is none of them."""
    _check_offered(name, options, value)
    return ipywidgets.SelectionSlider(options=list(options), value=value, description=name,
                                      layout=ipywidgets.Layout(width=width),
                                      style={"description_width": "initial"})


def _check_offered(name: str, options: Sequence[Any], value: Any) -> None:
    offered = [option[1] if isinstance(option, tuple) else option for option in options]
    if value not in offered:
        raise ConfigError(f"{name}: there is no {short(value)}; choose one of: "
                          f"{', '.join(map(str, offered))}")
