"""The README of the package: an index page has none of the repository's files, so a link to one is broken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
_LINK_TO_A_FILE = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)[^)]*\)")


class ReadmeOfThePackage(MetadataHookInterface):
    """Replaces each link to a file by its text and the path of the file, and leaves pictures out."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = _LINK_TO_A_FILE.sub(_named, _PICTURE.sub("", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def _named(link: re.Match[str]) -> str:
    text, path = link.groups()
    return f"`{path}`" if text == path else f"{text} (`{path}`)"
