"""Tasks of a build. Each task does a fixed share of every phase (probe, curate, encode, build) and then ends.

Each task reads the same input. It stores its findings in the destination, where the other tasks read them. If a task is
lost, its remaining share is done when it runs again, or by the final run without tasks, which also seals the dataset.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamvid.cluster.share import Share
from streamvid.sharder.options import ShardOptions

PHASES = ("probe", "curate", "encode", "build", "seal")
"""Phases of a build in order. Tasks do the work of every phase except "seal"."""
TASKS = "tasks"
"""Folder of the tasks in a staging folder."""


def task_folder(share: Share) -> str:
    """Return the path of a task's folder, relative to the staging folder; "" for a run without tasks."""
    return "" if share.is_whole else f"{TASKS}/{share.number}-of-{share.num_shares}"


def task_phases(options: ShardOptions) -> tuple[str, ...]:
    """Return the phases of a build that are divided among its tasks.

    Each phase begins when all tasks have finished the previous phase.
    """
    # Trusted metadata is confirmed in the phase "build": each task probes the files of its own shards.
    is_probed = not (options.clips.is_text or options.trust_metadata)
    is_used = {"probe": is_probed, "curate": options.curation.is_on, "encode": options.makes_clips, "build": True}
    return tuple(phase for phase in PHASES if is_used.get(phase, False))


@dataclass(frozen=True, slots=True)
class Remaining:
    """Work that other tasks have not finished: `num_units` of a phase's `total` units."""

    phase: str
    num_units: int
    total: int


class TasksUnfinished(Exception):
    """Error raised if the next phase cannot begin because other tasks have not finished the current one."""

    def __init__(self, remaining: Remaining) -> None:
        super().__init__(remaining)
        self.remaining = remaining
