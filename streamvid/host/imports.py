"""Suppression of the pandas import, which streamvid's own processes do not need."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder


class _NoPandas(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("importing pandas is disabled in this process", name=fullname)


def skip_pandas() -> None:
    """Make pyarrow work without pandas in this process, as if pandas were not installed.

    By default, pyarrow imports pandas when it first converts a Python value, which takes 0.3 s and 40 MB. pyarrow needs
    pandas only to convert data to and from pandas. Call this only in processes that do not run users' code.
    """
    sys.meta_path.insert(0, _NoPandas())
