"""What memory and cores this process may take: the machine's, or less in a control group (containers, Slurm)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def usable_bytes(groups: Path = _GROUPS, root: Path = _ROOT) -> int:
    """Bytes of the machine or of the tightest control group around this process; shared memory counts in both."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # no Linux, or no /proc
        return limits[0]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def usable_cores(groups: Path = _GROUPS, root: Path = _ROOT) -> int:
    """Whole cores that this process may keep busy, at least 1: those it may run on, or fewer where a quota says so."""
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # no Linux, or no /proc
        return int(cores)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            cores = min([cores, *_quotas(root, path)])
    return max(1, int(cores))


def _quotas(root: Path, path: str) -> list[float]:
    found = []
    group = Path(path.lstrip("/"))
    for place in (group, *group.parents):
        try:
            quota, period = (root / place / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota.isdecimal() and period.isdecimal() and int(period):  # else "max"
            found.append(int(quota) / int(period))
    return found


def _limits(root: Path, path: str, name: str) -> list[int]:
    # A container sees its own group as the root, under whatever path the host has for it; so all of them are asked.
    found = []
    group = Path(path.lstrip("/"))
    for place in (group, *group.parents):
        try:
            text = (root / place / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # else "max"
            found.append(int(text))
    return found
