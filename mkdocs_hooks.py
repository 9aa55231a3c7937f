"""What the site shows differently from the sources of its pages."""

from typing import Any

from mkdocs.plugins import event_priority


@event_priority(100)  # before the Markdown twins are written
def on_page_content(html: str, **_: Any) -> str:
    """Return a page without the second colon of reStructuredText before the example of a docstring."""
    return html.replace("<p>Example::</p>", "<p>Example:</p>")
