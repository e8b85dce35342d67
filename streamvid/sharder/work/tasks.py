"""Tasks of a build. Each task does a fixed share of every phase (probe, curate, encode, build) and then ends.

Each task reads the same input. It stores its findings in the destination, where the other tasks read them. If a task is
lost, its remaining share is done when it runs again, or by the final run without tasks, which also seals the dataset.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.cluster.share import Share

TASKS = "tasks"
"""Folder of the tasks in a staging folder."""


def task_folder(share: Share) -> str:
    """Return the path of a task's folder, relative to the staging folder; "" for a run without tasks."""
    return "" if share.is_whole else f"{TASKS}/{share.number}-of-{share.num_shares}"


@dataclass(frozen=True, slots=True)
class Remaining:
    """Unfinished work of other tasks: `num_units` of the `total` units of a phase."""

    phase: str
    num_units: int
    total: int


class TasksUnfinished(Exception):
    """Raised if the next phase cannot begin, because other tasks have not finished the current phase."""

    def __init__(self, remaining: Remaining) -> None:
        super().__init__(remaining)
        self.remaining = remaining
