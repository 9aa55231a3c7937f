"""What the site has beside the pages: the sections of llms.txt, and small changes of what is shown."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

_ENTRY = re.compile(r"^- \[[^\]]+\]\((\w[\w-]*\.md)\): (.+(?:\n  .+)*)", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages in llms.txt as the navigation does, with the descriptions of the overview."""
    overview = Path(config.docs_dir, "index.md").read_text(encoding="utf-8")
    descriptions = {page: " ".join(_LINK.sub(r"\1", text).split()) for page, text in _ENTRY.findall(overview)}
    sections = {
        title: [{page: descriptions.get(page, "")} for page in _pages(entries)]
        for group in config.nav or []
        for title, entries in group.items()
    }
    config.plugins["llmstxt"].config["sections"] = sections
    return config


def _pages(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        for inner in entries.values():
            yield from _pages(inner)
    else:
        for entry in entries:
            yield from _pages(entry)


@event_priority(100)  # before the Markdown twins are written
def on_page_content(html: str, **_: Any) -> str:
    """Return a page without the second colon of reStructuredText before the example of a docstring."""
    return html.replace("<p>Example::</p>", "<p>Example:</p>")
