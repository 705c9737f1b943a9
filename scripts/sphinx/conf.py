"""Sphinx's settings for `make docs`; scripts/docs.py lays the pages out first."""

from cloister import __version__

project, author, release = "Cloister", "the Cloister maintainers", __version__
copyright = "the Cloister maintainers; Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Cloister {release}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
html_css_files = ["pages.css"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
default_role = "literal"  # our docstrings write code in single backticks
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_custom_sections = ["Reveals", "Assumes", "Cost"]
napoleon_use_rtype = False
maximum_signature_line_length = 88
nitpicky = False


def as_list(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Who learns what, as a list: pairs `who : what` go on over indented lines."""
    made: list[str] = []
    inside = False
    for i, line in enumerate(lines):
        if i + 1 < len(lines) and lines[i + 1].strip() and set(lines[i + 1].strip()) == {"-"}:
            inside = line.strip() == "Reveals"
        who, colon, learned = line.partition(" : ")
        if inside and colon and not line.startswith(" "):
            made.append(f"* **{who}**: {learned}")
        elif inside and line.startswith("    "):
            made[-1] += " " + line.strip()
        else:
            made.append(line)
    lines[:] = made


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", as_list, priority=400)  # before napoleon
