"""The release: what the wheel and the source distribution contain, and the wheel in projects of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesParser
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

import helix_store
from tests.docs.projects import Project

ROOT: Final = Path(__file__).parent.parent
QUICKSTART: Final = (ROOT / "docs" / "quickstart.md").read_text()
REPOSITORY: Final = "https://git.example.com/you/helix-store"
UNRELEASED: Final = {
    "README.md": ["No release is on a package index", "example.com/you"],
    "docs/install.md": ["No release is on a package index", "example.com/you"],
    "mkdocs.yml": ["helix-store.example.com"],
    "CHANGELOG.md": ["not released yet"],
}
"""What a file says as long as no version is released."""

# Django 6.0 and 6.1 need Python 3.12.
PROJECTS: Final = [
    ("3.11", "5.2"),
    ("3.12", "5.2"),
    ("3.13", "5.2"),
    ("3.12", "6.0"),
    ("3.13", "6.0"),
    ("3.12", "6.1"),
    ("3.13", "6.1"),
    ("3.14", "6.1"),
]


def build(source: Path, folder: Path, repository: str = "") -> tuple[Path, Path]:
    """Return a wheel and a source distribution of a tree."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    environment = {**os.environ, "HELIX_REPOSITORY_URL": repository}
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True, timeout=300)
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(ROOT, tmp_path_factory.mktemp("release"))


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    (text,) = [text for name, text in content(wheel).items() if name.endswith(".dist-info/METADATA")]
    return BytesParser().parsebytes(text)


def package_files() -> Iterator[str]:
    for path in (ROOT / "helix_store").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT).as_posix()


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: tuple[Path, Path]) -> None:
    name = f"helix_store-{helix_store.__version__}.dist-info"
    names = set(content(built[0]))
    about = {each for each in names if each.startswith(f"{name}/")}
    assert about == {f"{name}/{each}" for each in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    assert names - about == set(package_files())
    shown = {PurePosixPath(each).suffix for each in names - about}
    assert shown == {".css", ".html", ".js", ".mo", ".po", ".py", ".typed"}


def test_the_source_distribution_has_what_its_tests_and_its_site_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {PurePosixPath(name).relative_to(PurePosixPath(name).parts[0]) for name in archive.getnames()}
    needed = "CHANGELOG.md CONTRIBUTING.md LICENSE README.md SECURITY.md mkdocs.yml pyproject.toml tox.ini"
    assert {PurePosixPath(name) for name in needed.split()} <= names
    tops = {name.parts[0] for name in names if len(name.parts) > 1}
    assert {"benchmarks", "docs", "example_project", "helix_store", "tests"} <= tops
    left = {"__pycache__", ".venv", "site", "dist", ".git"}
    assert [name for name in names if left & set(name.parts) or name.suffix == ".sqlite3"] == []


def test_a_wheel_made_of_the_source_distribution_is_the_same(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    wheel, _ = build(source, tmp_path / "again")
    assert content(wheel) == content(built[0])


def test_the_metadata_has_one_version_and_the_addresses_of_one_setting(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    without = metadata(built[0])
    assert without["Version"] == helix_store.__version__
    assert without.get_all("Project-URL") is None
    given = metadata(build(ROOT, tmp_path, REPOSITORY)[0])
    addresses = dict(line.split(", ") for line in given.get_all("Project-URL") or [])
    assert set(addresses) == {"Changelog", "Documentation", "Issues", "Security", "Source"}
    assert {address for address in addresses.values() if not address.startswith(REPOSITORY)} == set()
    links = re.findall(r"\]\(([^)\s]+)\)", str(given.get_payload()))
    assert f"{REPOSITORY}/raw/main/docs/images/admin-session.png" in links
    assert [link for link in links if not link.startswith("https:")] == []
    files = [link.removeprefix(f"{REPOSITORY}/blob/main/").partition("#")[0] for link in links]
    assert [each for each in files if ":" not in each and not (ROOT / each).is_file()] == []


def forgotten(root: Path) -> list[str]:
    """Return what a commit that is tagged with a version still lacks for its release."""
    command = ["git", "tag", "--points-at", "HEAD"]  # a source distribution has no tags
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    if not re.search(r"^v?\d+\.\d+", shown, re.MULTILINE):
        return []
    hook = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"][
        "custom"
    ]
    missing = (
        [] if hook["repository"] else ["pyproject.toml: set `repository`, the address of the repository"]
    )
    for name, sentences in UNRELEASED.items():
        text = (root / name).read_text()
        missing += [f"{name} says {each!r}" for each in sentences if each in text]
    return missing


def test_a_commit_that_is_tagged_with_a_version_has_its_addresses() -> None:
    assert forgotten(ROOT) == []


def test_a_version_that_is_tagged_without_its_addresses_is_found(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)  # noqa: S607

    for name in ("pyproject.toml", *UNRELEASED):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    project = (tmp_path / "pyproject.toml").read_text()
    unset = re.sub(r'^repository = ".*"$', 'repository = ""', project, flags=re.MULTILINE)
    (tmp_path / "pyproject.toml").write_text(unset)
    git("init", "--quiet")
    git(
        "-c",
        "user.name=a",
        "-c",
        "user.email=a",
        "commit",
        "--quiet",
        "--allow-empty",
        "--message",
        "Release",
    )
    assert forgotten(tmp_path) == []
    git("tag", f"v{helix_store.__version__}")
    assert forgotten(tmp_path)[0] == "pyproject.toml: set `repository`, the address of the repository"
    (tmp_path / "pyproject.toml").write_text(unset.replace('repository = ""', f'repository = "{REPOSITORY}"'))
    for name in UNRELEASED:
        (tmp_path / name).write_text("")
    assert forgotten(tmp_path) == []


def test_the_changelog_has_an_entry_of_the_version_on_one_screen() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    (entry,) = re.findall(
        rf"^## \[{re.escape(helix_store.__version__)}\].*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert len(entry.splitlines()) <= 60


@pytest.mark.parametrize(("python", "django"), PROJECTS)
def test_the_wheel_runs_the_quickstart_in_an_environment_of_its_own(
    python: str, django: str, built: tuple[Path, Path], tmp_path: Path
) -> None:
    interpreter = found_python(python)
    if interpreter is None:
        pytest.skip(f"Python {python} was not found")
    environment, project = tmp_path / "environment", tmp_path / "project"
    subprocess.run([interpreter, "-m", "venv", environment], check=True, timeout=300)
    own = environment / "bin" / "python"
    install = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, str(built[0]), f"Django~={django}.0"], check=True, timeout=600)
    project.mkdir()
    with Project(project, own) as followed:
        where = followed.run("python -c 'import helix_store; print(helix_store.__file__)'")
        assert where.startswith(str(environment))
        assert followed.run("python -m django --version").startswith(f"{django}.")
        assert followed.follow(QUICKSTART) == 11


def found_python(version: str) -> str | None:
    """Return an interpreter of this version, on PATH or under pyenv. A shim of pyenv need not run."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *versions.glob(f"{version}*/bin/python{version}")]
    for candidate in filter(None, map(str, filter(None, candidates))):
        asked = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        if asked.stdout.startswith(f"Python {version}."):
            return candidate
    return None
