"""Build the course as a static site in build/site, from the notebooks as they are committed.

Sphinx wants one folder with everything and an `index` in it, so the pages are first copied to
build/site-source. Nothing is executed.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import dtlab
from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parent.parent
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
COPIED = ("notebooks/*.ipynb", "notebooks/cheat_sheet.md", "notebooks/glossary.md",
          "exercises/*.ipynb", "docs/*", "docs/launch/*", "benchmarks/collectives.*",
          "CONTRIBUTING.md", "LICENSE")
PACKAGES = ("dtlab", "dtlab.collectives", "dtlab.cost", "dtlab.topology", "dtlab.simulator",
            "dtlab.ps", "dtlab.parallel", "dtlab.parallel.pipeline",
            "dtlab.models", "dtlab.reliability", "dtlab.recording", "dtlab.plots",
            "dtlab.widgets", "dtlab.grading")


def toctree(pages: list[str], caption: str = "", options: str = "") -> str:
    """Markdown for a list of pages, which Sphinx puts into the sidebar in this order."""
    caption = f":caption: {caption}\n" if caption else ""
    return "\n".join([f"\n```{{toctree}}\n:maxdepth: 1\n{caption}{options}", *pages, "```\n"])


def numbered(path: Path) -> str:
    """A chapter's line in the sidebar: its number and its title."""
    first = json.loads(path.read_text())["cells"][0]["source"]
    title = "".join(first).partition("\n")[0].removeprefix("# ")
    return f"{path.stem.partition('_')[0]} {title} <{path.relative_to(ROOT).with_suffix('')}>"


def pages() -> dict[str, str]:
    """The pages that no file of the repository is: name → Markdown."""
    chapters = [numbered(path) for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
    exercises = [path.stem for path in sorted(ROOT.glob("exercises/*.ipynb"))]
    guides = ["docs/reading_a_grade", "docs/teaching", "benchmarks/collectives", "CONTRIBUTING"]
    made = {
        "index.md": (ROOT / "README.md").read_text()
        + toctree(chapters, "Chapters", ":hidden:\n")
        + toctree(["exercises/index", "notebooks/glossary", "notebooks/cheat_sheet", "api/index"],
                  "To work with", ":hidden:\n") + toctree(guides, "Guides", ":hidden:\n"),
        "exercises/index.md": "# Exercises\n\nRead them here; answer them in a copy of the course, "
        "which `dtlab lab` opens.\n" + toctree(exercises),
        "api/index.md": "# The package\n\nA page for each package: its public names, what they do, "
        "and their source.\n" + toctree([*PACKAGES]),
    }
    return made | {f"api/{name}.md": api(name) for name in PACKAGES}


def api(package: str) -> str:
    """The page of a package. What `dtlab` itself offers stands on its page only."""
    names = import_module(package).__all__ if package != "dtlab" else []
    elsewhere = [name for name in names if name in dtlab.__all__]
    also = ", ".join(f"{{any}}`dtlab.{name}`" for name in elsewhere)
    return (f"# {package}\n\n```{{eval-rst}}\n.. automodule:: {package}\n   :members:\n"
            f"   :member-order: bysource\n   :exclude-members: {', '.join(elsewhere)}\n```\n"
            + (f"\nAlso in this package: {also}.\n" if also else ""))


def stage() -> None:
    """Copy the pages. What has not changed keeps its date, so that Sphinx does not read it again."""
    wanted = {path.relative_to(ROOT): path.read_bytes()
              for pattern in COPIED for path in ROOT.glob(pattern) if path.is_file()}
    wanted |= {Path(name): text.encode() for name, text in pages().items()}
    for name, content in wanted.items():
        copy = SOURCE / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.read_bytes() != content:
            copy.write_bytes(content)
    for path in [p for p in SOURCE.rglob("*") if p.is_file()]:
        if path.relative_to(SOURCE) not in wanted:
            path.unlink()


if __name__ == "__main__":
    if "--fresh" in sys.argv:
        shutil.rmtree(ROOT / "build" / "site", ignore_errors=True)
    stage()
    sys.exit(sphinx(["-q", "-W", "--keep-going", "-j", "auto", "-c", str(ROOT / "site"),
                     "-d", str(ROOT / "build" / "site-doctrees"), str(SOURCE), str(SITE)]))
