"""Check build/site: every link, and every page in a browser without a network, from file://.

axe-core judges contrast, names and alternative texts; npm fetches it. Without npm this is skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
SITE, AXE = ROOT / "build" / "site", ROOT / "build" / "axe"
STEP_LIMIT_MS = 500  # from a key to the picture, for 19 of 20 steps; 50 on a machine that is free
STEPS = """drawing => {
  const press = key => drawing.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
  const took = [...Array(40).keys()].map(number => {
    const begun = performance.now();
    press(number % 2 ? 'Home' : 'End');
    drawing.getBoundingClientRect();
    return performance.now() - begun;
  });
  return took.sort((a, b) => a - b)[37];
}"""
WIDTHS = (400, 1024, 1920, 1280)  # the last is the one at which axe looks
SITE_MB, FIRST_SCREEN_MB = 40, 1
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"],
         "preload": False}
SCHEMES = {"light": RULES, "dark": {**RULES, "runOnly": ["color-contrast"]}}
OVERFLOW = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


class Page(HTMLParser):
    """The links, anchors, pictures and files of one page."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links, self.wrong = {""}, [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors |= {found.get("id") or ""}
        address = found.get("href" if tag in ("a", "link") else "src") or ""
        if urlsplit(address).scheme in ("http", "https") or address.startswith("//"):
            self.wrong += [f"fetches {address}"] if tag != "a" else []
        elif urlsplit(address).scheme == "" and address:
            self.links.append(address)
        if tag == "img" and not found.get("alt"):
            self.wrong.append(f"no alternative text: {address}")


def broken_links(pages: dict[Path, Page]) -> Iterator[str]:
    for path, page in pages.items():
        for link in {*page.links}:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (target in pages and parts.fragment
                                       and unquote(parts.fragment) not in pages[target].anchors):
                yield f"{path.relative_to(SITE)}: leads nowhere: {link}"


def solutions(pages: dict[Path, Page]) -> Iterator[str]:
    """Name the pages that hold the whole answer to an exercise."""
    squeeze = re.compile(r"\s+")
    texts = {path: squeeze.sub("", unescape(re.sub(r"<[^>]+>", "", path.read_text())))
             for path in pages}
    for notebook in ROOT.glob("solutions/*.ipynb"):
        for cell in json.loads(notebook.read_text())["cells"]:
            for answer in re.findall(r"### BEGIN (?:SOLUTION|HIDDEN TESTS)\n(.*?)### END",
                                     "".join(cell["source"]), re.S):
                yield from (f"{path.relative_to(SITE)}: holds an answer of {notebook.name}"
                            for path, text in texts.items() if squeeze.sub("", answer) in text)


def axe() -> str | None:
    """The source of axe-core, as package-lock.json pins it; None where npm brings none."""
    if not shutil.which("npm"):
        return None
    AXE.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "site" / name, AXE)
    fetched = subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=AXE)
    if fetched.returncode:
        return None
    return (AXE / "node_modules" / "axe-core" / "axe.min.js").read_text()


def look(job: tuple[list[Path], str | None]) -> list[str]:
    """Open pages in a browser of this process; say what is wrong with them."""
    from playwright.sync_api import sync_playwright

    paths, rules = job
    wrong: list[str] = []
    with sync_playwright() as driver:
        chrome = driver.chromium.launch(executable_path=shutil.which("chromium"),
                                        args=["--no-sandbox"])
        tab = chrome.new_context(offline=True, bypass_csp=True).new_page()
        requests: list[str] = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("pageerror", lambda error: wrong.append(f"{tab.url}: {error}"))
        tab.on("console", lambda message: message.type in ("error", "warning")
               and wrong.append(f"{tab.url}: {message.text}"))
        for path in paths:
            requests.clear()
            tab.set_viewport_size({"width": WIDTHS[-1], "height": 900})
            tab.emulate_media(color_scheme="light")
            tab.goto(path.as_uri() + "?q=ring" * (path.name == "search.html"))
            wrong += [f"{path.name}: {told}" for told in judge(tab, path, [*requests], rules)]
        chrome.close()
    return wrong


def judge(tab: Any, path: Path, requests: list[str], rules: str | None) -> Iterator[str]:
    """Say what is wrong with the page that is open in `tab`."""
    files = [urlsplit(url).path for url in requests if url.startswith("file:")]
    yield from (f"asks for {url}" for url in requests if not url.startswith(("file:", "data:")))
    loaded_mb = sum(Path(unquote(file)).stat().st_size for file in {*files}) / 1e6
    if loaded_mb > FIRST_SCREEN_MB:
        yield f"loads {loaded_mb:.2f} MB before anyone scrolls"
    if path.name == "search.html" and not tab.locator("#search-results li").count():
        tab.wait_for_selector("#search-results li", timeout=5000)
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        if tab.evaluate(OVERFLOW):
            yield f"is wider than a window of {width} pixels"
    for number in range(tab.locator("[data-player]").count()):
        yield from played(tab.locator("[data-player]").nth(number))
    if rules and ("_modules" not in path.parts or path.name == "comm.html"):  # those are alike
        tab.evaluate(rules)
        for scheme, asked in SCHEMES.items():
            tab.emulate_media(color_scheme=scheme)
            found = tab.evaluate("rules => axe.run(document, rules)", asked)
            yield from (f"{scheme}: {broken['id']}: {node['html'][:150]}"
                        for broken in found["violations"] for node in broken["nodes"])


def played(place: Any) -> Iterator[str]:
    """Step through a player with the keyboard and choose another run; say what does not answer."""
    drawing, words = place.locator(".dtlab-drawing"), place.locator("[role=status]")
    drawing.locator("svg").wait_for(timeout=5000)
    drawing.press("Home")
    for key in ("ArrowRight", "Home"):
        before, said = drawing.inner_html(), words.inner_text()
        drawing.press(key)
        if drawing.inner_html() == before or words.inner_text() == said:
            yield f"a player does not answer {key}: {said}"
    took_ms = drawing.evaluate(STEPS)
    if took_ms > STEP_LIMIT_MS:
        yield f"a player's step takes {took_ms:.0f} ms"
    for choice in place.locator("select:enabled").all():
        before = drawing.inner_html()
        choice.select_option(index=(choice.evaluate("each => each.selectedIndex") + 1) % 2)
        if drawing.inner_html() == before:
            yield "a player's list changes nothing"


def main() -> int:
    pages = {path: Page(path) for path in sorted(SITE.rglob("*.html"))}
    wrong = [f"{path.relative_to(SITE)}: {told}" for path, page in pages.items()
             for told in page.wrong]
    wrong += [*broken_links(pages), *solutions(pages)]
    wrong += [f"{path.stem}: no way to the page before or after it"
              for path in SITE.glob("notebooks/[01]*.html") for way in ("prev", "next")
              if f'class="{way}-page"' not in path.read_text()]
    site_mb = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file()) / 1e6
    wrong += [f"the site has {site_mb:.0f} MB"] if site_mb > SITE_MB else []
    rules, paths = axe(), [*pages]
    with ProcessPoolExecutor(2) as pool:
        wrong += [told for found in pool.map(look, [(paths[i::16], rules) for i in range(16)])
                  for told in found]
    print(*wrong, f"{len(pages)} pages, {site_mb:.1f} MB, {len(wrong)} complaints"
          + ("" if rules else "; axe-core skipped: npm is not there, or fetched nothing"), sep="\n")
    return len(wrong) > 0 or not pages


if __name__ == "__main__":
    sys.exit(main())
