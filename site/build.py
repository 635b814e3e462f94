"""Build the course as a static site in build/site, from the notebooks as they are committed.

Sphinx wants one folder with everything and an `index` in it, so the pages are first copied to
build/site-source. Nothing is executed.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

from course import player
from sphinx.cmd.build import main as sphinx

import dtlab
from dtlab.widgets import Stepper
from dtlab.widgets.player import MIME

ROOT = Path(__file__).resolve().parent.parent
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
COPIED = ("notebooks/*.ipynb", "notebooks/cheat_sheet.md", "notebooks/glossary.md",
          "exercises/*.ipynb", "docs/*", "docs/launch/*", "benchmarks/collectives.*",
          "benchmarks/layer.*", "CONTRIBUTING.md", "LICENSE")
PACKAGES = ("dtlab", "dtlab.collectives", "dtlab.cost", "dtlab.topology", "dtlab.simulator",
            "dtlab.ps", "dtlab.parallel", "dtlab.parallel.pipeline",
            "dtlab.models", "dtlab.reliability", "dtlab.recording", "dtlab.plots",
            "dtlab.widgets", "dtlab.grading")


def toctree(pages: list[str], caption: str = "", options: str = "") -> str:
    """Markdown for a list of pages, which Sphinx puts into the sidebar in this order."""
    caption = f":caption: {caption}\n" if caption else ""
    return "\n".join([f"\n```{{toctree}}\n:maxdepth: 1\n{caption}{options}", *pages, "```\n"])


def numbered(folder: str) -> list[str]:
    """A line in the sidebar for each notebook of a folder: its number, and its title without it."""
    lines = []
    for path in sorted(ROOT.glob(f"{folder}/*.ipynb")):
        heading = "".join(json.loads(path.read_text())["cells"][0]["source"]).partition("\n")[0]
        title = re.sub(r"^# (Exercises \w+: )?", "", heading)
        lines.append(f"{path.stem.partition('_')[0]} {title} </{folder}/{path.stem}>")
    return lines


def pages() -> dict[str, str]:
    """The pages that no file of the repository is: name → Markdown."""
    guides = ["docs/reading_a_grade", "docs/teaching", "benchmarks/collectives",
              "benchmarks/layer", "CONTRIBUTING"]
    made = {
        "index.md": re.sub(r"^!\[.*\]\(docs/screenshot.png\)$", front(),
                           (ROOT / "README.md").read_text(), flags=re.M)
        + toctree(numbered("notebooks"), "Chapters", ":hidden:\n")
        + toctree(["exercises/index", "notebooks/glossary", "notebooks/cheat_sheet", "api/index"],
                  "To work with", ":hidden:\n") + toctree(guides, "Guides", ":hidden:\n"),
        "exercises/index.md": "# Exercises\n\nRead them here; answer them in a copy of the course, "
        "which `dtlab lab` opens.\n" + toctree(numbered("exercises")),
        "api/index.md": "# The package\n\nA page for each package: its public names, what they do, "
        "and their source.\n" + toctree([*PACKAGES]),
    }
    return made | {f"api/{name}.md": api(name) for name in PACKAGES}


def front() -> str:
    """Markdown for a ring all-reduce to be played, where the README has a screenshot."""
    data, _ = Stepper("all_reduce", "ring", ranks=4)._repr_mimebundle_()
    return "```{raw} html\n" + player(data[MIME], "").replace('="../', '="') + "\n```"


def api(package: str) -> str:
    """The page of a package. What `dtlab` itself offers stands on its page only."""
    module = import_module(package)
    elsewhere = [name for name in module.__all__ if module is not dtlab
                 and getattr(module, name) is getattr(dtlab, name, None)]
    also = ", ".join(f"{{py:obj}}`dtlab.{name}`" for name in elsewhere)
    return (f"# {package}\n\n```{{eval-rst}}\n.. automodule:: {package}\n   :members:\n"
            f"   :member-order: bysource\n   :exclude-members: {', '.join(elsewhere)}\n```\n"
            + (f"\nAlso in this package: {also}.\n" if also else ""))


def stage() -> None:
    """Put the pages into one folder."""
    files = [path for pattern in COPIED for path in ROOT.glob(pattern) if path.is_file()]
    for path in files:
        copy = SOURCE / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for name, text in pages().items():
        (SOURCE / name).parent.mkdir(exist_ok=True)
        (SOURCE / name).write_text(text)


if __name__ == "__main__":
    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    stage()
    sys.exit(sphinx(["-q", "-W", "--keep-going", "-E", "-j", "auto", "-c", str(ROOT / "site"),
                     "-d", str(ROOT / "build" / "site-doctrees"), str(SOURCE), str(SITE)]))
