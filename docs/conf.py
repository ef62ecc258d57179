"""Sphinx settings. `make docs` writes the generated pages first (`docs_pages.py`), then runs Sphinx."""

from importlib.metadata import version as installed

project = "tamis"
author = "The tamis authors"
copyright = author
release = version = installed("tamis")
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
source_suffix = {".md": "markdown"}
exclude_patterns = ["_static"]
nitpicky = True
html_theme = "furo"
html_title = "tamis"
html_static_path = ["_static"]
html_show_sphinx = False
# The theme and all it loads come with the packages: pages work without a network.
html_theme_options = {"source_view_link": "", "source_edit_link": "", "top_of_page_buttons": []}
templates_path: list[str] = []
