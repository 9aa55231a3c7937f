"""The tests of a framework are in its source distribution, not in its wheel."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version as installed_version
from pathlib import Path

__all__ = ["unpacked"]

_CACHE = Path(tempfile.gettempdir()) / "helix-store-upstream"


def unpacked(package: str, version: str | None = None) -> Path:
    """The folder of a source distribution, by default of the version that is installed.

    It is downloaded once per machine. Raises `subprocess.CalledProcessError` when it cannot be.
    """
    version = version or installed_version(package)
    target = _CACHE / f"{package}-{version}"
    if not target.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            _download(f"{package}=={version}", Path(folder))
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as sdist:
                sdist.extractall(Path(folder) / "unpacked", filter="data")
            (root,) = (Path(folder) / "unpacked").iterdir()
            try:
                root.rename(target)
            except OSError:
                # Another run was faster, and its folder is the same.
                if not target.exists():
                    raise
    return target


def _download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # Building is not needed, and would need the build tools of the framework.
    command += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    subprocess.run([*command, requirement], check=True)
