"""The course as its reader meets it, in JupyterLab: chapters are drawn, widgets answer to keys.

Chapters are opened as they were committed and not run: nbval runs them. A few are opened that hold
every kind of output (`make check-site` opens the pages of all). With DTLAB_PHOTOGRAPH=1 all of them
are, and are run from top to bottom, and every screen of them is photographed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import nbformat
import psutil
import pytest

from dtlab import widgets
from dtlab.widgets.player import MIME
from tests.browser.conftest import PHOTOGRAPH
from tests.browser.lab import ROOT, Lab, running_lab
from tests.browser.page import CONTRASTS, PICTURE, SLIDER, Page

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]
CHAPTERS = sorted(path.name for path in ROOT.glob("notebooks/*.ipynb"))
PICTURE_LIMIT_S = 1.0
TRIES = 3  # of which one must be in time: the machine may do something else for a moment

SETUP = """\
import torch
from dtlab import simulate, topology, widgets
from dtlab.collectives import all_reduce
from dtlab.wires import contest
clusters = {"torus": topology.torus(3, 3), "racks": topology.racks(2, 3)}
entries = contest(clusters, [4_000, 64_000, 1_000_000], ["tree", "ring"])
ring = simulate(lambda comm: all_reduce(comm, torch.ones(4000)), network=topology.nvswitch(4))"""
ARGUMENTS = {"Stepper": "'all_reduce', 'ring', ranks=4",
             "AlphaBetaExplorer": "'all_reduce', ranks=64, algorithms=['flat', 'tree', 'ring']",
             "AlgorithmTopologyExplorer": "clusters, entries",
             "PlanExplorer": "'GPT-3', '64 A100, a card each'",  # long enough to be stopped
             "TimelineExplorer": "ring.trace"}
PLAYED = ["Stepper", "ClockExplorer", "TimelineExplorer", "TopologyExplorer"]
PLAY = ".widget-play button, button[title='play or pause']"
WIDGET = ".dtlab-explorer, .dtlab-player"


def kinds_of(name: str) -> set[str]:
    """Of a chapter's outputs: their types, and the players among them."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return {kind for output in outputs for kind in [*output.get("data", {output.output_type: 0}),
            output.get("data", {}).get(MIME, {}).get("player", "")]}


def few_chapters() -> list[str]:
    """Chapters that together hold every kind of output, each the one with most of what is left."""
    kinds, chosen = {name: kinds_of(name) for name in CHAPTERS}, []
    while left := set().union(*kinds.values()).difference(*(kinds[name] for name in chosen)):
        chosen.append(max(CHAPTERS, key=lambda name: len(kinds[name] & left)))
    return chosen


@pytest.fixture(scope="module")
def page(browser: Any, lab: Lab, shots: Path) -> Iterator[Page]:
    """A notebook with one widget of each class, opened and run; cell i + 1 shows the i-th."""
    sources = [SETUP, *(f"widgets.{name}({ARGUMENTS.get(name, '')})" for name in widgets.__all__)]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
    nbformat.write(notebook, lab.folder / "notebooks/widgets.ipynb")
    opened = Page(browser, lab, "widgets.ipynb", shots)
    try:
        opened.open()
        opened.run_all()
        assert opened.complaints() == []
        yield opened
    finally:
        opened.close()


def shown(page: Page, name: str) -> Any:
    return page.output_of(1 + widgets.__all__.index(name))


@pytest.mark.parametrize("name", PLAYED)
def test_play_moves_the_picture(page: Page, name: str) -> None:
    play = shown(page, name).locator(PLAY).first
    assert page.press(shown(page, name), play, "Enter") < 20
    page.page.keyboard.press("Enter")
    paused = play.locator(".fa-play").or_(play.filter(has_text="▶"))
    paused.wait_for()  # it has stopped: the next test moves the picture itself


def test_the_run_button_starts_processes_and_shows_them(page: Page) -> None:
    run = shown(page, "RankGrid").get_by_role("button", name="Run")
    assert page.press(shown(page, "RankGrid"), run, "Enter") < 20
    assert page.complaints() == []


def test_the_stop_button_is_heard_while_the_work_goes_on(page: Page) -> None:
    output = shown(page, "PlanExplorer")
    run = output.get_by_role("button", name="simulate the best")
    stop = output.get_by_role("button", name="Stop")
    assert stop.is_disabled()
    run.focus()
    page.page.keyboard.press("Enter")
    output.get_by_text("Stop ends it").wait_for()
    page.page.wait_for_function("document.activeElement.textContent.includes('Stop')")
    page.page.keyboard.press("Enter")
    output.get_by_text("Stopped.").wait_for()
    assert run.is_enabled()
    assert stop.is_disabled()
    page.page.wait_for_function("document.activeElement.textContent.includes('simulate')")


@pytest.mark.alone
def test_every_slider_changes_the_picture_within_a_second_and_not_its_size(
    page: Page, shots: Path
) -> None:
    for name in widgets.__all__:
        output = shown(page, name)
        picture, sliders = output.locator(PICTURE).first, output.locator(SLIDER).all()
        size = picture.bounding_box()
        for slider in sliders:
            moves = (page.move(output, slider) for _ in range(TRIES))
            in_time = any(took_s < PICTURE_LIMIT_S for took_s in moves)  # stops at the first
            at = slider.get_attribute("aria-valuetext")
            assert in_time, f"{name}, the slider now at {at}"
            now = picture.bounding_box()
            assert (now["width"], now["height"]) == (size["width"], size["height"])
        assert sliders, f"{name} has no slider"
        output.screenshot(path=shots / f"{name}.png")
    assert page.complaints() == []


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_every_widget_can_be_read_in_this_theme(page: Page, shots: Path, theme: str) -> None:
    page.choose_theme(theme)
    for name in widgets.__all__:
        output = shown(page, name)
        output.screenshot(path=shots / f"{name}-{theme.split()[-1].lower()}.png")
        seen = output.locator(WIDGET).first.evaluate(CONTRASTS)
        assert len(seen) > 3
        assert [text for text, contrast in seen if contrast < 4.5] == [], name


def test_keys_stay_inside_and_screen_readers_hear_values(page: Page) -> None:
    output = shown(page, "TopologyExplorer")
    menu = output.locator("select").first
    before = page.page.locator(".jp-CodeCell").count()
    menu.focus()
    for key in ("b", "a", "ArrowDown"):
        page.page.keyboard.press(key)
    assert page.page.locator(".jp-CodeCell").count() == before  # no cell was inserted
    assert page.page.evaluate("document.activeElement.tagName") == "SELECT"  # nor one chosen
    handle = output.locator(SLIDER).last
    assert handle.get_attribute("aria-label") == "moment"
    assert handle.get_attribute("aria-valuetext").endswith("s")  # a time, not a place in a list
    assert "cluster" not in output.locator(".dtlab-drawing").get_attribute("aria-label")
    assert "at " in output.locator(".dtlab-drawing").get_attribute("aria-label")
    assert shown(page, "ClockExplorer").locator("img.widget-image").get_attribute("alt")
    assert output.locator("[role=status]").count() == 1


def test_the_server_has_nothing_to_warn_of(page: Page, lab: Lab) -> None:
    page.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.page.wait_for_timeout(1000)
    assert (lab.folder.parent / "server.log").read_text() == ""


def test_a_widget_whose_kernel_is_gone_says_to_run_the_cell_again(page: Page) -> None:
    gone = shown(page, "ClockExplorer").get_by_text("run this cell again")
    assert not gone.is_visible()
    page.page.evaluate(
        "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    gone.wait_for()
    drawing = shown(page, "Stepper").locator(".dtlab-drawing")  # a player needs no kernel
    assert page.press(shown(page, "Stepper"), drawing, "Home") < PICTURE_LIMIT_S
    assert page.press(shown(page, "Stepper"), drawing, "ArrowRight") < PICTURE_LIMIT_S


def test_full_screen_shows_each_widget_larger_with_all_controls(page: Page, shots: Path) -> None:
    page.page.set_viewport_size({"width": 1920, "height": 1080})
    for name in widgets.__all__:
        output = shown(page, name)
        picture = output.locator(PICTURE).first
        before = picture.bounding_box()
        output.get_by_role("button", name="full screen").first.click()
        output.get_by_role("button", name="leave full screen").first.wait_for()
        page.page.wait_for_timeout(300)
        page.page.screenshot(path=shots / f"{name}-full.png")
        now = picture.bounding_box()
        assert now["width"] * now["height"] > 1.5 * before["width"] * before["height"], name
        for control in output.locator("select, input, button, .noUi-handle").all():
            box = control.bounding_box()
            assert box is None or (box["y"] >= 0 and box["y"] + box["height"] <= 1080), name
        page.page.keyboard.press("Escape")
        output.get_by_role("button", name="full screen", exact=True).first.wait_for()
    page.page.set_viewport_size({"width": 1400, "height": 1000})


@pytest.mark.parametrize("name", CHAPTERS if PHOTOGRAPH else few_chapters())
def test_a_chapter_is_drawn_without_an_error(
    name: str, browser: Any, lab: Lab, shots: Path
) -> None:
    page = Page(browser, lab, name, shots)
    try:
        page.open()
        pictures = page.page.locator(".jp-Notebook .jp-RenderedImage img").all()
        assert [each for each in pictures if not each.get_attribute("alt")] == []
        if PHOTOGRAPH:
            page.run_all()
            page.photograph()
        assert page.complaints() == []
    finally:
        page.close()


def test_nothing_of_the_lab_is_left_even_after_a_failure(tmp_path: Path) -> None:
    me, family = psutil.Process(), set()
    before = set(me.children())  # another test's server may start a kernel meanwhile

    def fail_with_a_kernel_running() -> None:
        with running_lab(tmp_path) as lab:
            headers = {"Authorization": f"token {lab.token}"}
            ask = Request(f"{lab.url}/api/kernels", b"{}", headers, method="POST")
            urlopen(ask, timeout=60).close()
            for server in set(me.children()) - before:
                family.update([server, *server.children(recursive=True)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_with_a_kernel_running()
    assert len(family) >= 2, "a server and a kernel"
    assert [process for process in family if process.is_running()] == []
