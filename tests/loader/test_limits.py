"""Tests of memory and core limits: the limits of the machine, or lower ones in a container or batch job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamvid.host.resources import usable_bytes, usable_cores

CORES = len(os.sched_getaffinity(0))
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def write_groups(folder: Path, groups: str, files: dict[str, str]) -> None:
    (folder / "groups").write_text(groups)
    for name, text in files.items():
        (folder / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "fs" / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, MACHINE),
        ("0::/\n", {"memory.max": "max"}, MACHINE),
        ("0::/\n", {"memory.max": "1000"}, 1000),
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "2000"}, 2000),
        ("0::/job/step\n", {"job/step/memory.max": "500", "job/memory.max": "2000"}, 500),
        ("0::/../host\n", {"memory.max": "700"}, 700),
        ("4:memory:/docker/abc\n0::/\n", {"memory/memory.limit_in_bytes": "800"}, 800),
        ("5:cpu:/x\n4:hugetlb,memory:/x\n", {"memory/x/memory.limit_in_bytes": "900"}, 900),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),
    ],
)
def test_the_tightest_group_limit_applies(tmp_path: Path, groups: str, files: dict[str, str], expected: int) -> None:
    write_groups(tmp_path, groups, files)
    assert usable_bytes(tmp_path / "groups", tmp_path / "fs") == expected


def test_no_groups_at_all(tmp_path: Path) -> None:
    assert usable_bytes(tmp_path / "nothing", tmp_path) == MACHINE


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, CORES),
        ("0::/\n", {"cpu.max": "max 100000"}, CORES),
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),  # half a core still counts as one
        ("0::/job/step\n", {"job/step/cpu.max": "max 100000", "job/cpu.max": "150000 100000"}, 1),
        ("0::/\n", {"cpu.max": "100000000 100000"}, CORES),
        ("0::/\n", {"cpu.max": "nonsense"}, CORES),
        ("4:memory:/x\n", {"cpu.max": "100000 100000"}, CORES),
    ],
)
def test_a_quota_counts_as_cores(tmp_path: Path, groups: str, files: dict[str, str], expected: int) -> None:
    write_groups(tmp_path, groups, files)
    assert usable_cores(tmp_path / "groups", tmp_path / "fs") == expected
    assert usable_cores(tmp_path / "nothing", tmp_path) == CORES
