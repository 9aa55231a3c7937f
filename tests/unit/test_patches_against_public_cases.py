"""Patches against the public JSON Patch cases and the real Immer, fetched from npm when npm is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helix_store.core.patches import apply_patches, json_equal
from helix_store.exceptions import PatchError

SUITE = "json-patch-test-suite@1.1.0"
SUITE_ENABLED_CASES = 91
IMMER = {
    "immer": "immer@11.2.10",
    "immer-9": "immer-9@npm:immer@9.0.21",
}
LEAST_LENGTHS = {
    "immer": 0,
    # Before version 10 Immer wrote the new length of a shorter list, where it now removes item by item.
    "immer-9": 1_000,
}
RECIPES = 3_000
SINGLE_PATCHES = 3_000


@pytest.fixture(scope="session")
def npm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages installed."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package.json").write_text('{"private": true}')
    command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", SUITE, *IMMER.values()]
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=True)
    except subprocess.SubprocessError as exc:
        pytest.skip(f"npm could not install {SUITE} and Immer: {type(exc).__name__}")
    return folder


@pytest.mark.thorough
def test_all_enabled_public_cases_hold(npm_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = npm_folder / "node_modules" / "json-patch-test-suite"
    records = [
        record
        for name in ("tests.json", "spec_tests.json")
        for record in json.loads((package / name).read_text("utf-8"))
    ]
    enabled = [record for record in records if "patch" in record and not record.get("disabled")]

    failed = [record for record in enabled if not holds(record)]

    with capsys.disabled():
        sys.stdout.write(f"\n{SUITE}: {len(enabled) - len(failed)} of {len(enabled)} enabled cases hold\n")
    assert failed == []
    assert len(enabled) == SUITE_ENABLED_CASES


def holds(record: dict[str, Any]) -> bool:
    try:
        result = apply_patches(record["doc"], record["patch"])
    except PatchError:
        return "error" in record
    return "error" not in record and json_equal(result, record.get("expected", record["doc"]))


def immer_cases(folder: Path, package: str, seed: int) -> Iterator[dict[str, Any]]:
    # A module finds the packages that lie beside it.
    script = shutil.copy(Path(__file__).with_name("immer_cases.mjs"), folder)
    command = ["node", script, package, str(seed), str(RECIPES), str(SINGLE_PATCHES)]
    printed = subprocess.run(
        command, cwd=folder, capture_output=True, encoding="utf-8", timeout=180, check=True
    )
    return map(json.loads, printed.stdout.splitlines())


@pytest.mark.thorough
@pytest.mark.parametrize("package", IMMER)
def test_immer_patches_have_the_same_result_as_in_immer(
    npm_folder: Path, package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    applied = truncated = accepted = refused = 0
    differences: list[dict[str, Any]] = []
    for case in immer_cases(npm_folder, package, seed=len(package)):
        if case["kind"] == "recipe":
            there_and_back = [
                (case["document"], case["patches"], case["result"]),
                (case["result"], case["inverse"], case["document"]),
            ]
            for document, patches, expected in there_and_back:
                applied += 1
                truncated += any(patch["op"] == "replace" and "length" in patch["path"] for patch in patches)
                if not has_result(document, patches, expected):
                    differences.append(case)
            continue
        # JavaScript coerces odd segments to some index: refusing them is right, another result is not.
        try:
            result = apply_patches(case["document"], case["patches"])
        except PatchError:
            refused += 1
            continue
        accepted += 1
        if not json_equal(result, case["result"]):
            differences.append(case)

    with capsys.disabled():
        sys.stdout.write(
            f"\n{IMMER[package]}: {applied} patches of random recipes ({truncated} with a length), "
            f"{accepted} single patches accepted and {refused} refused: {len(differences)} differences\n"
        )
    assert differences == []
    assert applied == 2 * RECIPES
    assert truncated >= LEAST_LENGTHS[package]
    assert accepted > 500
    assert accepted + refused == SINGLE_PATCHES


def has_result(document: Any, patches: list[Any], expected: Any) -> bool:
    try:
        return json_equal(apply_patches(document, patches), expected)
    except PatchError:
        return False
