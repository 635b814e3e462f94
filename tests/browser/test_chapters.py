"""Every chapter as its reader meets it: in JupyterLab, in a browser, Run All, then the sliders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

from tests.browser.chapter import Chapter
from tests.browser.lab import ROOT, Lab, running_lab

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]
CHAPTERS = sorted(ROOT.glob("notebooks/*.ipynb"))
PHOTOGRAPH = os.environ.get("DTLAB_PHOTOGRAPH") == "1"  # every screen: a minute for the course
PICTURE_LIMIT_S = 1.0
TRIES = 3  # of which one must be in time: the machine may do something else for a moment


@pytest.fixture(scope="module", params=CHAPTERS, ids=lambda path: path.stem)
def chapter(
    request: pytest.FixtureRequest, browser: Any, lab: Lab, shots: Path
) -> Iterator[Chapter]:
    """The chapter, opened and run."""
    opened = Chapter(browser, lab, request.param.name, shots)
    try:
        opened.open()
        opened.run_all()
        if PHOTOGRAPH:
            opened.photograph()
        yield opened
    finally:
        opened.close()


def test_run_all_ends_without_an_error(chapter: Chapter) -> None:
    assert chapter.complaints() == []


@pytest.mark.alone
def test_every_slider_changes_the_picture_within_a_second_and_not_its_size(
    chapter: Chapter, shots: Path
) -> None:
    made = "widgets." in (ROOT / "notebooks" / chapter.name).read_text()
    assert bool(chapter.widgets().count()) == made
    for number, widget in enumerate(chapter.widgets().all()):
        picture = widget.locator("img.widget-image")
        size = picture.bounding_box()
        for slider in widget.locator(".noUi-handle").all():
            moves = (chapter.move(widget, slider) for _ in range(TRIES))
            in_time = any(took_s < PICTURE_LIMIT_S for took_s in moves)  # stops at the first
            at = slider.get_attribute("aria-valuetext")
            assert in_time, f"widget {number}, the slider now at {at}"
            now = picture.bounding_box()
            assert (now["width"], now["height"]) == (size["width"], size["height"])
        widget.screenshot(path=shots / f"{Path(chapter.name).stem}-widget-{number}.png")
    assert chapter.complaints() == []


def test_nothing_of_the_lab_is_left_even_after_a_failure(tmp_path: Path) -> None:
    me, family = psutil.Process(), set()
    before = set(me.children(recursive=True))

    def fail_with_a_kernel_running() -> None:
        with running_lab(tmp_path) as lab:
            headers = {"Authorization": f"token {lab.token}"}
            ask = Request(f"{lab.url}/api/kernels", b"{}", headers, method="POST")
            urlopen(ask, timeout=60).close()
            family.update(set(me.children(recursive=True)) - before)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_with_a_kernel_running()
    assert len(family) >= 2, "a server and a kernel"
    assert [process for process in family if process.is_running()] == []
