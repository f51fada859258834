"""How Sphinx builds these pages: `make docs`. Nothing is fetched while it does."""

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

import pipework

project = "pipework"
author = "the pipework authors"
copyright = "the pipework authors, BSD-3-Clause"
version = release = pipework.__version__

sys.path.insert(0, str(Path(__file__).parent))
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "schedule_picture"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # a signature says SCHEDULES, not all that is in it
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_preprocess_types = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"pipework {release}"
html_copy_source = False
html_show_sphinx = False


def code_or_name(
    role: str, raw: str, text: str, line: int, inliner: Any, *_: Any
) -> tuple[list[nodes.Node], list[Any]]:
    """Text in single backticks in a docstring: code; a link if it is one of the package's public names."""
    literal = nodes.literal(raw, text, classes=["py"])
    if text not in pipework.__all__:
        return [literal], []
    link = pending_xref(
        "", literal, refdomain="py", reftype="obj", reftarget=f"pipework.{text}", refexplicit=True, refwarn=True
    )
    link["refdoc"] = inliner.document.settings.env.docname
    return [link], []


default_role = "code-or-name"


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.add_role("code-or-name", code_or_name)
