"""The words of a page that are not data: headings, names of columns and fields, choices and buttons."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Final

__all__ = ["labels_of"]

_TAGS: Final = {"h1", "h2", "h3", "h4", "th", "dt", "label", "legend", "summary", "button", "option"}
_CLASSES: Final = {
    "help",
    "helix-note",
    "helix-badge",
    "object-tools",
    "helix-tabs",
    "paginator",
}
_ENDLESS: Final = {"input", "br", "img", "link", "meta", "hr"}


class _Labels(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, bool]] = []
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in ("placeholder", "aria-label", "title"):
            if name in given and tag != "time":
                self._add(given[name] or "")
        if tag == "input" and given.get("type") in ("submit", "button"):
            self._add(given.get("value") or "")
        if tag not in _ENDLESS:
            is_label = tag in _TAGS or bool(_CLASSES & set((given.get("class") or "").split()))
            is_data = tag in ("script", "style", "time", "pre")
            self.open.append((tag, not is_data and (is_label or (bool(self.open) and self.open[-1][1]))))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][1]:
            self._add(data)

    def _add(self, text: str) -> None:
        words = " ".join(text.split()).strip(":")
        # A word with a digit is data, such as an id.
        if len(words) > 1 and words[0].isalpha() and not any(letter.isdigit() for letter in words):
            self.found.add(words)


def labels_of(html: str) -> set[str]:
    """The labels of a page, each once."""
    page = _Labels()
    page.feed(html)
    return page.found
