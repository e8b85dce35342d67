"""The clips and the dataset of the command line's tests."""

from __future__ import annotations

from tests.cli.conftest import tiny

__all__ = ["tiny"]
