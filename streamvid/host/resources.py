"""Resources of this machine: memory and cores, limited by control groups (containers, Slurm), and the cache folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def usable_bytes(groups: Path = _GROUPS, root: Path = _ROOT) -> int:
    """Return the number of bytes of memory, including shared memory, that this process may use.

    The result is the minimum of the machine's memory and the memory limits of the process's control groups.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for controllers, path in _groups(groups):
        if not controllers:
            texts = _settings(root, path, "memory.max")
        elif "memory" in controllers:
            texts = _settings(root / "memory", path, "memory.limit_in_bytes")
        else:
            continue
        limits += [int(text) for text in texts if text.isdecimal()]  # else "max"
    return min(limits)


def usable_cores(groups: Path = _GROUPS, root: Path = _ROOT) -> int:
    """Return the number of cores (at least 1) that CPU affinity and control group quotas allow this process to use."""
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    for controllers, path in _groups(groups):
        if not controllers:
            for text in _settings(root, path, "cpu.max"):
                quota, _, period = text.partition(" ")
                if quota.isdecimal() and period.isdecimal() and int(period):  # else "max"
                    cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def user_cache(name: str) -> Path:
    """Return the path of streamvid's `name` folder in the user's cache folder. The folder might not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path("~/.cache").expanduser()
    return base / "streamvid" / name


def _groups(groups: Path) -> Iterator[tuple[list[str], Path]]:
    """Yield (controllers, path) for each control group of this process.

    In cgroup v2, the list of controllers is empty.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux, or no /proc
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        yield controllers.split(",") if controllers else [], Path(path.lstrip("/"))


def _settings(root: Path, group: Path, name: str) -> Iterator[str]:
    """Yield the values of a setting in a control group and in its parent groups.

    A container sees its own group as the root, although the group may have a longer path on the host. All levels of the
    path are therefore tried.
    """
    for place in (group, *group.parents):
        try:
            yield (root / place / name).read_text().strip()
        except OSError:
            continue
