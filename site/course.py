"""What the course needs beyond Sphinx and myst-nb: outputs, glossary, formulas, docstrings."""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import logging
import re
from base64 import b64decode, b64encode
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from docutils import nodes
from fontTools import subset
from latex2mathml.converter import convert
from sphinx.application import Sphinx

from dtlab.widgets.player import MIME as PLAYER
from dtlab.widgets.player import script_of, style

GLOSSARY = "notebooks/glossary"
DRAWINGS = {"stepper": "stepper", "timeline": "", "schedule": "schedule", "flows": "topology"}
WIDGET = "application/vnd.jupyter.widget-view+json"
STILL = "run this cell to use its controls"  # in the text of a widget, also without its view
NEEDS_KERNEL = (
    '<p class="needs-kernel">A still picture: the controls need a kernel. <code>make lab</code> in '
    'a clone, or <code>dtlab lab</code>, opens the course with one '
    '(<a href="../index.html#start">how to start</a>).</p>')
NEEDS = ('<p class="needs-kernel">It plays here; what is grey needs a kernel, and so do numbers of '
         'ranks that are not listed (<a href="../index.html#start">how to start one</a>).</p>')
ELSEWHERE = {"](../benchmarks/)": "](../benchmarks/collectives.md)",
             "](exercises)": "](exercises/index.md)"}  # folders, of which a page is shown


# Outputs of notebooks


def read_source(app: Sphinx, page: str, source: list[str]) -> None:
    """Change a page's source before it is parsed: outputs, the glossary's anchors, some links."""
    if page == GLOSSARY:
        source[0] = re.sub(r"^\| (.+?) \| (.+?) \| (\d\db?) \|$", entry_row(app), source[0],
                           flags=re.M)
    elif app.env.doc2path(page).suffix == ".ipynb":
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            cell["source"] = linked("".join(cell["source"]))
            cell["outputs"] = [shown(output, app) for output in cell.get("outputs", ())]
            if cell["cell_type"] != "code":
                del cell["outputs"]
            if cell["metadata"].get("jupyter", {}).get("source_hidden"):
                cell["metadata"].setdefault("tags", []).append("hide-input")  # as JupyterLab does
        source[0] = json.dumps(notebook)
    else:
        source[0] = linked(source[0])


def linked(text: str) -> str:
    for folder, page in ELSEWHERE.items():
        text = text.replace(folder, page)
    return text


def shown(output: dict[str, Any], app: Sphinx) -> dict[str, Any]:
    """The output as this site shows it: pictures, widgets and players as HTML, others as is."""
    data = output.get("data", {})
    if "image/png" in data:
        alt = output["metadata"].get("image/png", {}).get("alt", "")
        made = picture("".join(data["image/png"]), alt, app)
        if PLAYER in data:
            made = player(data[PLAYER], made)
        elif WIDGET in data or STILL in "".join(data.get("text/plain", "")):
            made += NEEDS_KERNEL
    else:
        return output
    return {**output, "metadata": {}, "data": {"text/html": made}}


def player(recording: Any, still: str) -> str:
    """HTML that plays a recording; without scripts, its still picture."""
    name = recording["drawing"]
    runs = f'<script src="../_static/runs-{name}.js"></script>' if recording["runs"] else ""
    data = f'<script type="application/json">{packed(recording)}</script>'
    return (f'<div data-player="{name}">{data}</div><noscript>{still}</noscript>{NEEDS}{runs}'
            f'<script src="../_static/player-{name}.js"></script>')


def packed(value: Any) -> str:
    """JSON, compressed, as text that stands in HTML and in a script."""
    return b64encode(gzip.compress(json.dumps(value).encode(), mtime=0)).decode()


PLAY = """
(() => {
  const bytes = text => Uint8Array.from(atob(text), sign => sign.charCodeAt(0));
  const unpacked = text => new Response(
    new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream('gzip'))).json();
  %s
  for (const place of document.querySelectorAll('[data-player=%s]:not([data-begun])')) {
    place.dataset.begun = '';
    const all = window.dtlabRuns?.%s;
    unpacked(place.textContent).then(async data => play(
      pageModel(data, data.runs && all && await unpacked(all)), place, draw));
  }
})();"""


def write_players(app: Sphinx, _: Any) -> None:
    """Write each player's script, and what it may choose without a kernel, as scripts: a page that
    is a file loads neither modules nor data."""
    folder = Path(app.outdir) / "_static"
    (folder / "player.css").write_text(style())
    for drawing, module in DRAWINGS.items():
        (folder / f"player-{drawing}.js").write_text(
            PLAY % (script_of(drawing), drawing, drawing))
        if module:
            runs = packed(import_module(f"dtlab.widgets.{module}").runs())
            (folder / f"runs-{drawing}.js").write_text(
                f"(window.dtlabRuns ??= {{}}).{drawing} = '{runs}';")


def picture(png_base64: str, alt: str, app: Sphinx) -> str:
    """Write a picture beside the pages; return its <img>, which loads when it is scrolled to."""
    png = b64decode(png_base64)
    name = f"{hashlib.sha256(png).hexdigest()[:16]}.png"
    folder = Path(app.outdir) / "_images"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(png)
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    return (f'<img src="../_images/{name}" alt="{html.escape(alt)}" loading="lazy" '
            f'width="{width}" height="{height}">')


# Words of the glossary


def entries(app: Sphinx) -> dict[str, tuple[str, str, str]]:
    """Word of the glossary, in lower case → its anchor, its meaning, its chapter."""
    found = {}
    text = (Path(app.srcdir) / f"{GLOSSARY}.md").read_text()
    for words, meaning, chapter in re.findall(r"^\| (.+?) \| (.+?) \| (\d\db?) \|$", text, re.M):
        for word in re.split(r", | \(", words.rstrip(")")):
            found.setdefault(word.lower(), (anchor(words), meaning, chapter))
    return found


def anchor(words: str) -> str:
    return "word-" + re.sub(r"\W+", "-", words.lower()).strip("-")


def entry_row(app: Sphinx) -> Any:
    """Give a row of the glossary its anchor, and a link to its chapter."""
    chapters = {p.stem.partition("_")[0]: p.name for p in Path(app.srcdir, "notebooks").glob("*_*")}

    def row(found: re.Match[str]) -> str:
        words, meaning, chapter = found.groups()
        return (f'| <span id="{anchor(words)}"></span>{words} | {meaning} | '
                f"[{chapter}]({chapters[chapter]}) |")

    return row


def link_words(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Link the first use of each word of the glossary, from the chapter on that explains it."""
    folder, _, name = page.partition("/")
    if folder not in ("notebooks", "exercises") or not name[:2].isdigit():
        return
    words = {word: entry for word, entry in entries(app).items()
             if entry[2] <= name.partition("_")[0]}
    glossary = app.builder.get_relative_uri(page, GLOSSARY)
    pattern = re.compile(r"(?<![\w-])(" + "|".join(
        re.escape(word) for word in sorted(words, key=len, reverse=True)) + r")(?![\w-])", re.I)
    used: set[str] = set()
    for text in list(tree.findall(nodes.Text)):
        if is_prose(text):
            parts = linked_parts(str(text), pattern, words, used, glossary)
            if len(parts) > 1:
                text.parent.replace(text, parts)


def is_prose(text: nodes.Text) -> bool:
    """Is this a paragraph's or a list's own text, not a heading, a link, code or an output?"""
    above, at = [], text.parent
    while at is not None:
        above.append(at)
        at = at.parent
    return any(isinstance(a, nodes.paragraph) for a in above) and not any(
        isinstance(a, (nodes.title, nodes.reference, nodes.literal, nodes.table, nodes.container,
                       nodes.literal_block, nodes.raw, nodes.math)) for a in above)


def linked_parts(text: str, pattern: re.Pattern[str], words: dict[str, tuple[str, str, str]],
                 used: set[str], glossary: str) -> list[nodes.Node]:
    """The text, cut where a word is linked; `used` grows by what is."""
    parts: list[nodes.Node] = []
    end = 0
    for found in pattern.finditer(text):
        where, meaning, _ = words[found[0].lower()]
        if where not in used:
            used.add(where)
            link = nodes.reference("", found[0], refuri=f"{glossary}#{where}", internal=True,
                                   reftitle=meaning.replace("*", ""), classes=["word"])
            parts += [nodes.Text(text[end : found.start()]), link]
            end = found.end()
    return [*parts, nodes.Text(text[end:])]


# Formulas and docstrings


def formula(display: str) -> Any:
    """A visitor that writes a formula as MathML, which browsers draw without scripts."""

    def visit(writer: Any, node: nodes.Element) -> None:
        mathml = re.sub(r"<mi>(lg|sin)</mi>(?=<m[if])", r'\g<0><mspace width="0.17em"/>',
                        convert(node.astext(), display=display))
        writer.body.append(f'<div class="formula">{mathml}</div>\n'
                           if display == "block" else mathml)
        raise nodes.SkipNode

    return visit


def write_font(app: Sphinx, _: Any) -> None:
    """Write the font of formulas: what a formula may hold of STIX Two Math, which ziamath carries.

    Without a font that has a table for mathematics, a root does not grow with what is under it.
    """
    letters = [*range(0x20, 0x7F), *range(0x391, 0x3CA), 0x210E, *range(0x1D434, 0x1D468),
               *range(0x1D6FC, 0x1D716), *map(ord, "µ·×¯˜–′…ε←→∈∏∑−√∞≈≠≤≥⊙⋅⌈⌉⌊⌋")]
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    options = subset.Options(flavor="woff", layout_features=["ssty", "dtls", "flac"])
    font = subset.load_font(str(files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf"), options)
    only = subset.Subsetter(options)
    only.populate(unicodes=letters)
    only.subset(font)
    subset.save_font(font, str(Path(app.outdir) / "_static" / "math.woff"), options)


ARGUMENT = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): +(?=\S)|- ")


def docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring, which is plain text for people, into Sphinx's markup, in place."""
    lines[:] = "\n\n".join(map(block, re.split(r"\n\n(?! )", "\n".join(lines).strip()))).split("\n")


def block(text: str) -> str:
    """One paragraph: an example, a list of arguments, something set line by line, or prose."""
    flush = [line for line in text.split("\n") if not line.startswith(" ")]
    if text.startswith(">>>"):
        return text
    if flush and all(ARGUMENT.match(line) for line in flush):
        text = re.sub(r"\n +", "\n  ", text)
        return "\n".join(map(item, re.split(r"\n(?! )", text)))
    if "\n " in text or text.startswith(" "):
        return "::\n\n" + re.sub("^", "    ", text, flags=re.M)
    return markup(text)


def item(text: str) -> str:
    """An entry of a list; its argument, if it has one, in bold."""
    found = ARGUMENT.match(text)
    assert found
    rest = markup(text[found.end() :])
    return f"- **{found[1]}**: {rest}" if found[1] else f"- {rest}"


def markup(text: str) -> str:
    """Code stays code; everything else is meant as it stands."""
    return "".join(f"`{part}`" if part.startswith("`") else re.sub(r"([*|\\_`])", r"\\\1", part)
                   for part in re.split(r"(`[^`]+`)", text))


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out what a base class of another library puts into ours."""
    return None if getattr(obj, "__module__", "dtlab").startswith("dtlab") else True


def finish(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Mend what furo and viewcode leave wrong in a page."""
    context["furo_navigation_tree"] = context["furo_navigation_tree"].replace(
        'role="heading"', 'role="heading" aria-level="2"')
    if "body" in context:  # the label of a folded cell isn't what stands there
        context["body"] = context["body"].replace(' aria-label="Toggle hidden content"', "")
    if page.startswith("_modules/"):  # a module's names may stand on two pages; viewcode knows one
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read_source)
    app.connect("doctree-resolved", link_words)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-skip-member", skip)
    app.connect("html-page-context", finish, priority=900)
    app.connect("build-finished", write_font)
    app.connect("build-finished", write_players)
    app.add_css_file("player.css")
    app.add_html_math_renderer("mathml", (formula("inline"), None), (formula("block"), None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
