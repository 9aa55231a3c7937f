"""What the package says of itself: its addresses, and the README without links that lead nowhere.

All addresses come from one setting: ``repository`` of this hook in ``pyproject.toml``, or the variable
``HELIX_REPOSITORY_URL``. Without it, the package has no addresses, and the README names files instead.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[([^\]]*)\]\((?!https?:)([^)]*)\)\n+", re.MULTILINE)
_LINK_TO_A_FILE = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)([^)]*)\)")


class MetadataOfThePackage(MetadataHookInterface):
    """Sets the addresses of the project, and the README as an index page shows it."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("HELIX_REPOSITORY_URL") or self.config.get("repository", "")
        repository = repository.rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        if repository:
            text = _PICTURE.sub(rf"![\1]({repository}/raw/main/\2)\n\n", text)
            text = _LINK_TO_A_FILE.sub(rf"[\1]({repository}/blob/main/\2\3)", text)
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{repository}/blob/main/docs/index.md",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
                "Issues": f"{repository}/issues",
                "Security": f"{repository}/blob/main/SECURITY.md",
            }
        else:
            text = _LINK_TO_A_FILE.sub(_named, _PICTURE.sub("", text))
            metadata["urls"] = {}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def _named(link: re.Match[str]) -> str:
    text, path, _ = link.groups()
    return f"`{path}`" if text == path else f"{text} (`{path}`)"
