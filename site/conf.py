"""Sphinx's settings for the site; build.py calls it."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import dtlab  # noqa: E402

project, author, version = "dtlab", "the dtlab authors", dtlab.__version__
project_copyright = f"{author}. Licence: MIT"
html_title = "dtlab"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "myst_nb", "course"]
exclude_patterns = ["jupyter_execute"]

nb_execution_mode = "off"  # the site shows the outputs that are committed
nb_merge_streams = True
nb_ipywidgets_js = {}  # these would come from another host
nb_render_markdown_format = "gfm"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "misc.highlighting_failure", "mystnb.unknown_mime_type"]

autodoc_typehints = "signature"
autodoc_inherit_docstrings = False  # torch's and matplotlib's stand in their own pages
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_static_path = [str(HERE / "static")]
html_css_files, html_js_files = ["site.css"], ["site.js"]
html_math_renderer = "mathml"
html_show_sphinx = html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # it would be fetched, which a page from file:// may not do
pygments_style, pygments_dark_style = "github-light-high-contrast", "github-dark-high-contrast"
html_theme_options = {
    "light_css_variables": {"font-stack": "system-ui, sans-serif"},
    "footer_icons": [],
}
