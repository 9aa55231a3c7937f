"""The README on an index page, which has none of the repository's files."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from tests.docs.test_examples import ROOT

_LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.thorough
def test_the_readme_of_the_package_has_no_relative_link(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = BytesParser().parsebytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    shown = str(metadata.get_payload())
    assert [link for link in _LINK.findall(shown) if not link.startswith(("https:", "http:"))] == []
    relative = [link for link in _LINK.findall((ROOT / "README.md").read_text()) if ":" not in link]
    assert "docs/tutorial.md" in relative
    pages = [path.partition("#")[0] for path in relative if not path.endswith(".png")]
    assert [path for path in pages if f"`{path}`" not in shown] == []
    assert "![" not in shown
