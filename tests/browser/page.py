"""A notebook open in the browser: run it, read its outputs, move its controls, photograph it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.browser.lab import Lab

OPEN_LIMIT_S = 60
RUN_LIMIT_S = 150  # a chapter takes under 40 s on two free cores; nobody promises that these are
SLIDER = ".noUi-handle, .dtlab-player input[type=range]:enabled"

READY = """() => {
  const panel = window.jupyterapp?.shell.currentWidget;
  return panel?.sessionContext?.session?.kernel?.status === 'idle' && panel.context.isReady;
}"""

CELLS = """() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells
  .filter(cell => cell.cell_type === 'code' && cell.getSource().trim())
  .map(cell => ({id: cell.getId(), count: cell.execution_count, outputs: cell.getOutputs()}))"""

FINISHED = f"""() => {{
  const cells = ({CELLS})();
  const failed = cells.some(cell => cell.outputs.some(output => output.output_type === 'error'));
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  return kernel.status === 'idle' && (failed || cells.every(cell => cell.count));
}}"""

DRAWN = """() => window.jupyterapp?.shell.currentWidget?.context?.isReady
  && document.querySelector('.jp-Notebook .jp-Cell')
  && [...document.querySelectorAll('.jp-Notebook img')].every(img => img.complete)"""

BROKEN = """() => [
  ...[...document.querySelectorAll('.jp-Notebook img')].filter(img => !img.naturalWidth)
    .map(img => `no picture: ${img.src.slice(0, 80)}`),
  ...[...document.querySelectorAll('.jp-Notebook mjx-merror')]
    .map(formula => `no formula: ${formula.textContent}`)]"""

PICTURE = "img.widget-image, .dtlab-drawing"  # a picture from the kernel; a player's drawing

# From the next key on, look every 10 ms whether the picture shows something else.
WATCH = """picture => {
  const page = document.createElement('canvas');
  const seen = () => {
    if (picture.tagName !== 'IMG') return picture.innerHTML;
    [page.width, page.height] = [picture.naturalWidth, picture.naturalHeight];
    page.getContext('2d').drawImage(picture, 0, 0);
    return page.toDataURL();
  };
  const watch = window.dtlabWatch = {before: seen(), src: picture.src, took_s: null};
  document.addEventListener('keydown', () => {
    const begun = performance.now();
    const look = () => {
      const ready = picture.tagName !== 'IMG'
        || picture.src !== watch.src && picture.complete && picture.naturalWidth;
      if (ready && seen() !== watch.before) watch.took_s = (performance.now() - begun) / 1000;
      else if (performance.now() - begun < 20000) setTimeout(look, 10);
      else watch.took_s = Infinity;
    };
    look();
  }, {capture: true, once: true});
}"""


# What can be read of an element's own text, with the contrast of its colour (WCAG 2).
CONTRASTS = """root => {
  const channels = color => (color.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const luminance = color => channels(color).slice(0, 3)
    .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((channels(color)[3] ?? 1) > 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  return [...root.querySelectorAll('*')]
    .filter(each => [...each.childNodes].some(n => n.nodeType === 3 && n.data.trim())
      && each.checkVisibility() && !each.closest('style, option, :disabled, [disabled]'))
    .map(each => {
      const [low, high] = [getComputedStyle(each).color, behind(each)].map(luminance)
        .sort((a, b) => a - b);
      return [each.textContent.trim().slice(0, 40), (high + 0.05) / (low + 0.05)];
    });
}"""


class Page:
    """One notebook in one page of the browser."""

    def __init__(self, browser: Any, lab: Lab, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.page = browser.new_page(viewport={"width": 1400, "height": 1000})
        self.page.set_default_timeout(OPEN_LIMIT_S * 1000)
        self.address = lab.address(name)
        self.script_errors: list[str] = []
        self.page.on("pageerror", lambda error: self.script_errors.append(f"script: {error}"))

    def open(self) -> None:
        """Load the page, and wait until the notebook is drawn as it was saved."""
        self.page.goto(self.address)
        self._wait(DRAWN, OPEN_LIMIT_S, "is not drawn")

    def _wait(self, condition: str, limit_s: float, otherwise: str) -> None:
        """Until `condition` holds; if it never does, leave a picture of what the page shows."""
        try:
            self.page.wait_for_function(condition, timeout=limit_s * 1000, polling=250)
        except Exception as error:
            seen = self.folder / f"{Path(self.name).stem}-stuck.png"
            self.page.screenshot(path=seen)
            raise RuntimeError(f"{self.name} {otherwise} after {limit_s} s; see {seen}") from error

    def run_all(self) -> None:
        """Choose Run, Run All Cells, as a reader does; wait for the end or for an error."""
        self._wait(READY, OPEN_LIMIT_S, "has no idle kernel")
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self._wait(FINISHED, RUN_LIMIT_S, "has not finished")
        self.page.wait_for_timeout(500)  # widgets and pictures still have to be drawn

    def complaints(self) -> list[str]:
        """Every error, everything on stderr, which a reader sees in red, and what is not drawn."""
        found = [*self.script_errors, *self.page.evaluate(BROKEN)]
        for cell in self.page.evaluate(CELLS):
            for output in cell["outputs"]:
                if output["output_type"] == "error":
                    found.append(f"cell {cell['id']}: {output['ename']}: {output['evalue']}")
                elif output.get("name") == "stderr":
                    found.append(f"cell {cell['id']}, stderr: {text_of(output)}")
        for words in ("Error displaying widget", "Error creating widget", "Loading widget"):
            if self.page.get_by_text(words).count():
                found.append(f"the page says {words!r}")
        return found

    def output_of(self, number: int) -> Any:
        """The output of a code cell, counted from 0."""
        return self.page.locator(".jp-CodeCell").nth(number).locator(".jp-Cell-outputArea")

    def move(self, output: Any, slider: Any) -> float:
        """Move a slider by one stop, with the keyboard: seconds until the picture is another."""
        low, now, high = slider.evaluate("""each => each.type === 'range'
            ? [each.min, each.value, each.max].map(Number)
            : ['min', 'now', 'max'].map(name => Number(each.getAttribute(`aria-value${name}`)))""")
        return self.press(output, slider, "ArrowRight" if high - now >= now - low else "ArrowLeft")

    def press(self, output: Any, control: Any, key: str) -> float:
        """Press a key on a control: seconds until the picture in this output is another."""
        control.scroll_into_view_if_needed()
        output.locator(PICTURE).first.evaluate(WATCH)
        control.focus()
        self.page.keyboard.press(key)
        self.page.wait_for_function("window.dtlabWatch.took_s !== null", timeout=30_000)
        return float(self.page.evaluate("window.dtlabWatch.took_s"))

    def choose_theme(self, name: str) -> None:
        """As in the menu Settings, Theme: "JupyterLab Dark", "JupyterLab Light"."""
        self.page.evaluate("theme => window.jupyterapp.commands.execute("
                           "'apputils:change-theme', {theme})", name)
        self.page.locator(f"body[data-jp-theme-name='{name}']").wait_for(
            state="attached")
        self.page.wait_for_timeout(500)  # until its colours are loaded

    def photograph(self) -> None:
        """The whole notebook, one screen after the other, as PNG files."""
        panel = self.page.locator(".jp-NotebookPanel .jp-WindowedPanel-outer")
        height, screen = panel.evaluate("panel => [panel.scrollHeight, panel.clientHeight]")
        for old in self.folder.glob(f"{Path(self.name).stem}-*.png"):
            old.unlink()
        for number, top in enumerate(range(0, int(height), int(screen) - 40)):
            panel.evaluate("(panel, top) => panel.scrollTop = top", top)
            self.page.wait_for_timeout(50)
            self.page.screenshot(path=self.folder / f"{Path(self.name).stem}-{number:02}.png")

    def close(self) -> None:
        self.page.close()


def text_of(output: dict[str, Any]) -> str:
    text = output["text"]
    return text if isinstance(text, str) else "".join(text)
