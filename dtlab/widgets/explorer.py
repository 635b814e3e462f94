"""The base of all widgets: controls on top, a picture that changes in place, its words below."""

from __future__ import annotations

import asyncio
import html
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
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


Choice = tuple[Any, ...]


class NamedImage(ipywidgets.Image):  # type: ignore[misc]
    """An image whose tooltip is its name to a screen reader.

    ipywidgets 8 sets the tooltip only of views whose model has a description, and fails to show an
    image that has a tooltip but none.
    """

    description = Unicode("").tag(sync=True)


class Explorer:
    """A picture under rows of controls. Pictures are kept: to come back to one costs nothing.

    A subclass makes the controls, and `_draw`, which takes `_choice`: by default their values.

    An `Image` widget keeps the old picture on screen until the new one is decoded, so nothing
    flickers. Its tooltip names the picture, and the words stand below it, in a live region.
    explorer.js gives the controls their names, keeps their keys to them, and fills the screen.
    ipywidgets keeps every widget, also of a cell that is run again, until its kernel ends or
    `ipywidgets.Widget.close_all()`.
    """

    _draw: Callable[..., Picture]

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
        self._kept: OrderedDict[Choice, tuple[bytes, str]] = OrderedDict()
        for control in self.controls:
            control.observe(lambda _: self._update(), "value")
        self._update()

    def static(self) -> Picture:
        """The picture that is shown, as a matplotlib figure."""
        return self._draw(*self._choice())

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

    def _choice(self) -> Choice:
        """Return what is chosen: the arguments of `_draw`."""
        return tuple(control.value for control in self.controls)

    def _near(self) -> Iterable[Choice]:
        """Return the choices that may come next, the likeliest first."""
        return ()

    def _update(self) -> None:
        """Show the picture of what is chosen."""
        now = self._choice()
        self.image.value, words = self._drawn(now)
        self._say(words)
        self._prepare(now, list(self._near()))

    def _drawn(self, chosen: Choice) -> tuple[bytes, str]:
        """SVG and words of the picture of a choice, drawn if it isn't kept."""
        if chosen not in self._kept:
            picture = self._draw(*chosen)
            self._kept[chosen] = picture.svg(), picture.alt
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(chosen)
        return self._kept[chosen]

    def _say(self, text: str, *, alarm: bool = False) -> None:
        (self.words.add_class if alarm else self.words.remove_class)("dtlab-alarm")
        self.image.tooltip = text.split(": ")[0].split(". ")[0]
        self.words.value = html.escape(text)

    def _prepare(self, now: Choice, ahead: list[Choice]) -> None:
        """Draw one picture ahead after the other, so that the kernel may answer in between; none
        any more once something else is chosen."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no kernel: a script or a test
            return
        if ahead:
            loop.call_later(0.03, self._prepare_one, now, ahead)

    def _prepare_one(self, now: Choice, ahead: list[Choice]) -> None:
        if now == self._choice():
            self._drawn(ahead[0])
            self._prepare(now, ahead[1:])


def button(text: str, tooltip: str, action: Callable[[], None]) -> Any:
    """A button that does `action`."""
    made = ipywidgets.Button(description=text, tooltip=tooltip,
                             layout=ipywidgets.Layout(width="auto"))
    made.on_click(lambda _: action())
    return made


def dropdown(name: str, options: Collection[Any], value: Any, width: str = "220px") -> Any:
    """A labelled drop-down list. Raises `ConfigError` if `value` is none of `options`."""
    return _labelled(ipywidgets.Dropdown, name, options, value, width)


def choice(name: str, options: Sequence[tuple[str, Any]], value: Any, width: str = "340px") -> Any:
    """A slider over a list of (label, value). Raises `ConfigError` if `value` is none of them."""
    return _labelled(ipywidgets.SelectionSlider, name, options, value, width)


def number_slider(name: str, numbers: Iterable[float], own: float, text: Callable[[Any], str],
                  width: str = "340px") -> Any:
    """A slider over `numbers` in their order, among them `own`, where it stands."""
    return choice(name, [(text(n), n) for n in sorted({*numbers, own})], own, width)


def values_beside(slider: Any) -> list[Any]:
    """Return the values to the left and to the right of where a slider stands."""
    return [slider.options[index][1] for index in (slider.index - 1, slider.index + 1)
            if 0 <= index < len(slider.options)]


def _labelled(kind: Callable[..., Any], name: str, options: Collection[Any], value: Any,
              width: str) -> Any:
    offered = [option[1] if isinstance(option, tuple) else option for option in options]
    if value not in offered:
        raise ConfigError(f"{name}: there is no {short(value)}; choose one of: "
                          f"{', '.join(map(str, offered))}")
    return kind(options=list(options), value=value, description=name,
                layout=ipywidgets.Layout(width=width), style={"description_width": "initial"})
