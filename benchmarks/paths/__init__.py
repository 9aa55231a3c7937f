"""Every path that is measured, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paths import steps
from benchmarks.races import Case

__all__ = ["CASES"]

CASES: Sequence[Case] = [*steps.CASES]
