"""Markdown in messages, if the extra ``markdown`` is installed.

markdown-it-py reads the text without HTML in it, and nh3 leaves only the elements that are listed here.
Images become links, because a page loads nothing from other hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext

try:
    from markdown_it import MarkdownIt
    from nh3 import clean
except ImportError:
    _READER: Any = None
else:
    # A line break in a message is one, as in plain text.
    _READER = MarkdownIt("commonmark", {"html": False, "breaks": True})
    _READER.enable(["table", "strikethrough"]).disable(["image"])

_TAGS: Final = frozenset(
    {
        *("p", "br", "hr", "blockquote", "pre", "code", "em", "strong", "s", "a", "ul", "ol", "li"),
        *("h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"),
    }
)
_ATTRIBUTES: Final = {"a": {"href", "title"}, "ol": {"start"}}
_SCHEMES: Final = frozenset({"http", "https", "mailto"})
_HEADINGS: Final = 3
"""The level of the heading above a message, below which its own headings are."""


def is_available() -> bool:
    """Return whether the extra is installed."""
    return _READER is not None


def as_html(text: str) -> SafeString:
    """Return Markdown as HTML that holds nothing but known elements and links, and tables that scroll."""
    tokens = _READER.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1:]) + _HEADINGS)}"
    return format_html_join("", "{}", ((part,) for part in _parts(tokens)))


def _parts(tokens: Sequence[Any]) -> Iterator[SafeString]:
    """Yield what stands between the tables that are in no list or quotation, and those tables.

    Wide tables scroll, so that their words need not be broken.
    """
    begin = 0
    for number, token in enumerate(tokens):
        if token.level == 0 and token.type == "table_open":
            yield _cleaned(tokens[begin:number])
            begin = number
        elif token.level == 0 and token.type == "table_close":
            table = _cleaned(tokens[begin : number + 1])
            label = gettext("Table")
            yield format_html(
                '<div class="helix-scroll" role="group" tabindex="0" aria-label="{}">{}</div>', label, table
            )
            begin = number + 1
    yield _cleaned(tokens[begin:])


def _cleaned(tokens: Sequence[Any]) -> SafeString:
    # Cleaned as the last step, so the parser need not be trusted.
    return SafeString(
        clean(
            _READER.renderer.render(tokens, _READER.options, {}),
            tags=set(_TAGS),
            attributes={tag: set(names) for tag, names in _ATTRIBUTES.items()},
            url_schemes=set(_SCHEMES),
            link_rel="noopener noreferrer nofollow",
        )
    )


def divided(text: str, limit: int) -> tuple[str, str]:
    """Divide a long text between two paragraphs, or else two words, and never within a block of code."""
    if len(text) <= limit * 1.2:
        return text, ""
    end, space, is_code, position = 0, 0, False, 0
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith(("```", "~~~")):
            is_code = not is_code
        if not is_code:
            space = max(space, text.rfind(" ", 0, min(position + len(line), limit)) + 1)
        position += len(line)
        if position > limit and (end or space):
            break
        if not line.strip() and not is_code:
            end = position
    end = end or space
    return (text[:end], text[end:]) if end else (text, "")
