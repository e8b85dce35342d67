"""What memory this process may take: the machine's, or less where a control group limits it (containers, Slurm)."""

from __future__ import annotations

import os
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
