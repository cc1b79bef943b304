"""Sphinx settings: Markdown pages, API pages from docstrings, every unresolved reference an error."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import augend

project = "augend"
author = "The augend authors"
copyright = "2026, the augend authors"  # noqa: A001  sphinx names it so
release = augend.__version__
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"augend {release}"
exclude_patterns = ["_build"]
nitpicky = True
add_module_names = False
nitpick_ignore_regex = [
    # The inventories of other projects are not fetched: a build must not need the network.
    ("py:.*", r"(torch|nn|numpy|np|npt|collections|datasets|decimal|fractions|msgspec|os|pathlib|types|typing)\..*"),
    # Types that public signatures mention and nobody needs to name. Public ones are found by their canonical names.
    ("py:.*", r"augend\.(\w+\.)*_\w+(\.\w+)*"),
    ("py:.*", r"augend\._accumulator\.M|DeviceMesh"),
]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_custom_sections = [("Numerics", "notes_style"), ("Collective", "notes_style"), ("Source", "notes_style")]


def keep_colons(*event: Any) -> None:
    """Keep the first sentence of a property whole: napoleon takes what stands before its first colon for a type."""
    what, lines = event[1], event[-1]
    if what in {"attribute", "property"} and lines and ":" in lines[0]:
        lines.insert(0, "\\")  # an escaped line end: renders as nothing


def leave_bytes_alone(_: Sphinx, doctree: nodes.document) -> None:
    """Take the type ``bytes`` for no reference: classes here have fields of that name."""
    for reference in list(doctree.findall(addnodes.pending_xref)):
        if reference["reftarget"] == "bytes":
            reference.replace_self(reference.children)


def setup(app: Sphinx) -> None:
    """Run before napoleon, and before references are resolved."""
    app.connect("doctree-read", leave_bytes_alone)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
