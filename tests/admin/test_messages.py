"""Messages in the conversation: Markdown, images and files."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from helix_store.admin import markdown
from helix_store.models import Session
from tests.admin.conftest import Browser, Page
from tests.admin.console import MARKDOWN, PNG
from tests.admin.rows import store_of
from tests.cells import for_each


def _say(browser: Browser, *contents: Any) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    store.append_messages("s", [{"role": "assistant", "content": content} for content in contents])


def _row(browser: Browser) -> Session:
    return Session.objects.using(browser.database.alias).get(session_id="s")


def _conversation(browser: Browser, **query: Any) -> Page:
    return browser.page_of(_row(browser), section="conversation", **query)


def _image(media_type: str, content: bytes) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


def _urls(page: Page, tag: str, name: str) -> list[str]:
    return [str(a[name]) for each, a in page.elements.started if each == tag and "&file=" in str(a.get(name))]


# --- Markdown


def test_a_message_is_shown_as_markdown_and_as_raw_text(browser: Browser) -> None:
    _say(browser, MARKDOWN)
    page = _conversation(browser)
    for expected in (
        "<h4>Findings</h4>",
        "<strong>red</strong>",
        "<td>1</td>",
        "<li>small</li>",
        "<code>code",
    ):
        assert expected in page.html
    assert "# Findings" not in page.text
    assert "Show the raw text" in page.text
    raw = _conversation(browser, raw=1)
    assert "# Findings" in raw.text
    assert "**red**" in raw.text
    assert "Show the text as Markdown" in raw.text


def test_a_table_scrolls_by_itself_and_text_cannot_begin_one(browser: Browser) -> None:
    _say(browser, MARKDOWN, 'A `<table>`, <table> and [x](https://example.org "<table>")')
    page = _conversation(browser)
    opened = '<div class="helix-scroll" role="group" tabindex="0" aria-label="Table"><table>'
    assert page.html.count(opened) == 1
    assert page.html.count("</table>\n</div>") == 1
    assert page.text.count("<table>") == 2


def test_without_the_extra_a_message_is_plain_text(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "_READER", None)
    _say(browser, MARKDOWN)
    page = _conversation(browser)
    assert "# Findings" in page.text
    assert "raw text" not in page.text


@for_each(
    "text",
    [
        "<script>window.ran=1</script>",
        "<img src=x onerror=window.ran=1>",
        "[x](javascript:window.ran=1)",
        "[x](data:text/html,<script>window.ran=1</script>)",
        "![x](https://example.org/x.png)",
        "<https://example.org/\" onclick=\"x>",
        "<style>*{display:none}</style>",
        "| a |\n|:-:|\n| b |",
        '[x](https://example.org "<table><img src=x onerror=window.ran=1>")',
        '> | a |\n> |---|\n> | [x](https://example.org "</table></div><p>") |',
        "[x]: javascript:x\n\n[x]",
    ],
)  # fmt: skip
def test_no_markup_gets_through(text: str) -> None:
    html = markdown.as_html(text)
    frame = ("div", {"class": "helix-scroll", "role": "group", "tabindex": "0", "aria-label": "Table"})
    elements = [element for element in Page(200, html).elements.started if element != frame]
    assert {tag for tag, _ in elements} <= {
        *("p", "a", "br", "blockquote"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    for tag, attributes in elements:
        assert attributes.keys() <= ({"href", "rel", "title"} if tag == "a" else set())
        assert str(attributes.get("href", "https:")).startswith("https:")


def test_links_do_not_tell_other_hosts_where_they_are(browser: Browser) -> None:
    _say(browser, "See [the docs](https://example.org/docs).")
    assert 'href="https://example.org/docs" rel="noopener noreferrer nofollow"' in _conversation(browser).html


def test_line_breaks_and_invisible_characters_are_those_of_plain_text(browser: Browser) -> None:
    _say(browser, "one\ntwo \u202e three")
    page = _conversation(browser)
    assert "one<br>" in page.html
    assert "\u202e" not in page.html
    assert "\\u202e" in page.html


def test_a_long_text_is_folded_between_paragraphs(browser: Browser) -> None:
    code = "```\n" + "\n\n".join(f"line {number}" for number in range(400)) + "\n```\n"
    _say(browser, "the beginning\n\n" + code + "\n\nthe end of **it**")
    page = _conversation(browser)
    assert "The rest of the text" in page.text
    assert "<strong>it</strong>" in page.html
    assert page.html.count("<pre><code>") == 1
    for number in (0, 399):
        assert f"line {number}" in page.text


# --- Images and files


@for_each(
    ("content", "kind"),
    [
        (base64.b64decode(PNG), "image/png"),
        (b"\xff\xd8\xff\xe0" + bytes(40), "image/jpeg"),
        (b"GIF89a" + bytes(40), "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBP" + bytes(40), "image/webp"),
    ],
)
def test_an_image_is_shown_from_the_message(browser: Browser, content: bytes, kind: str) -> None:
    # What the message says about the type does not count.
    store_of(browser.database).delete_session("s")
    _say(browser, [{"type": "text", "text": "Look:"}, _image("image/svg+xml", content)])
    page = _conversation(browser)
    (url,) = _urls(page, "img", "src")
    assert "data:image" not in page.html
    response = browser.client.get(url)
    assert response.content == content
    assert response["Content-Type"] == kind
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["Content-Security-Policy"] == "default-src 'none'; sandbox"
    assert response["Content-Disposition"].startswith("inline")


@for_each(
    "content",
    [b"<svg onload=x>" + bytes(20), b"%PDF-1.4 " + bytes(20), b"<html><script>x</script>" + bytes(9)],
)
def test_any_other_file_is_a_download(browser: Browser, content: bytes) -> None:
    store_of(browser.database).delete_session("s")
    _say(browser, [_image("image/png", content)])
    page = _conversation(browser)
    assert _urls(page, "img", "src") == []
    (url,) = _urls(page, "a", "href")
    response = browser.client.get(url)
    assert response.content == content
    assert response["Content-Type"] == "application/octet-stream"
    assert response["Content-Disposition"].startswith("attachment")


def test_an_image_of_another_host_is_not_loaded(browser: Browser) -> None:
    _say(browser, [{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}])
    page = _conversation(browser)
    assert "https://example.org/x.png" in page.text
    assert [tag for tag, _ in page.elements.started if tag == "img" and _.get("class")] == []


def test_a_file_that_is_not_there_is_not_found(browser: Browser, visitor: Browser) -> None:
    _say(browser, [_image("image/png", base64.b64decode(PNG)), {"type": "image", "data": "*" * 40}])
    (url,) = _urls(_conversation(browser), "img", "src")
    address = url.partition("&file=")[0]
    for place in (1, 2, 99):
        assert browser.client.get(f"{address}&file={place}").status_code == 404
    assert browser.client.get(f"{address.replace('number=1', 'number=7')}&file=0").status_code == 404
    visitor.sign_in()
    assert visitor.client.get(url).status_code == 403
