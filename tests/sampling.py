"""Suites of which a run takes one test in a hundred, always the same ones.

``HELIX_DEPLOYMENTS`` takes all of them: see ``python -m tests.deployments``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Final

import pytest

__all__ = ["CHOSEN", "leave_most_out"]

CHOSEN: Final = os.environ.get("HELIX_DEPLOYMENTS")
"""``all``, or the name of a deployment."""

_ONE_IN: Final = 100


def leave_most_out(
    config: pytest.Config, items: list[pytest.Item], is_sampled: Callable[[pytest.Item], bool]
) -> None:
    """Deselect most of the tests that ``is_sampled`` finds; it depends on their names which."""
    if CHOSEN:
        return
    left_out = {each for each in items if is_sampled(each) and zlib.crc32(each.nodeid.encode()) % _ONE_IN}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [each for each in items if each not in left_out]
