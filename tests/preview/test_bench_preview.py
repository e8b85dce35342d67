"""Tests of the preview's benchmark: its memory figure holds for any number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_tool


@pytest.mark.parametrize("num_rows", [2_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_preview_of_many_rows_needs_little_memory(
    num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = run_tool("bench_preview", "--rows", num_rows, "--repeats", 1)
    assert found["rows"] == num_rows
    assert {"start", "overview", "filtered", "sorted"} <= set(found["pages"])
    assert max(page["resident_mb_after"] for page in found["pages"].values()) < 400
