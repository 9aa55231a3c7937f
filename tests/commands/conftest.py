from __future__ import annotations

import math

import pytest

from helix_store.management.output import ProgressBar


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine any command could show it. Tests of the progress set the time themselves."""
    monkeypatch.setattr(ProgressBar, "first_after", math.inf)


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables fit the terminal of whoever runs the tests only if a test says so."""
    monkeypatch.delenv("COLUMNS", raising=False)
