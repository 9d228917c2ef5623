"""Settings of Sphinx for the site, see `build.py`."""

from pathlib import Path

from energon.version import __version__

project = "energon"
copyright = "the energon developers"
release = version = __version__
extensions = ["myst_parser"]
root_doc = "index"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of Python, numpy and torch have no page here
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries = False

myst_heading_anchors = 4

html_theme = "furo"
html_title = f"energon {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {
        "color-brand-primary": "#2f6fb5",
        "color-brand-content": "#2f6fb5",
        "color-brand-visited": "#2f6fb5",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7db4f0",
        "color-brand-content": "#7db4f0",
        "color-brand-visited": "#7db4f0",
    },
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
