"""Options for work on several machines. None of them affects the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamvid.cluster.share import MAX_SHARES, Share, parse_share
from streamvid.config import check_options, option
from streamvid.errors import ConfigError

Engine = Literal["local", "ray", "slurm"]
_OWN_SBATCH_OPTIONS = ("array", "cpus-per-task", "dependency", "job-name", "parsable", "test-only", "wait", "wrap")


@dataclass(frozen=True)
class ClusterOptions:
    """Options for dividing work into tasks, and for running them on a cluster.

    task: "I/N" to do only task I's share of the work (I from 0 to N-1); None to do all of the work. Tasks may run at
        the same time, on any machines, under any scheduler.
    engine: "local" for this process and its workers; "ray" to run tasks on a Ray cluster; "slurm" to submit arrays of
        tasks (only for the `streamvid shard` and `streamvid encode` commands).
    num_tasks: number of tasks; None selects as many as the Ray cluster can run at a time, or 16 on Slurm.
    sbatch_options: additional options for sbatch, such as "--partition=cpu". sbatch also reads its SBATCH_… variables.
    """

    task: str | None = option(
        None, help="Process only share I of N (I from 0 to N-1); works with any scheduler.", metavar="I/N", group=""
    )
    engine: Engine = option(
        "local", help="Run in this process, on a Ray cluster (requires streamvid[ray]), or as Slurm jobs.", group=""
    )
    ray_address: str = option("auto", help="Address of the Ray cluster.", metavar="ADDRESS", group="")
    num_tasks: int | None = option(
        None,
        help="Number of tasks on a cluster.",
        metavar="N",
        minimum=2,
        maximum=MAX_SHARES,
        group="",
        shown_default="as many as Ray runs at a time; Slurm: 16",
    )
    sbatch_options: str | tuple[str, ...] | None = option(
        None,
        help="Additional option for sbatch, such as --sbatch-option=--partition=cpu; repeatable.",
        metavar="OPTION",
        flag="--sbatch-option",
        group="",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.share.is_whole and self.engine != "local":
            raise ConfigError(f"task={self.task!r} cannot be combined with engine={self.engine!r}; omit one of them")
        if self.num_tasks is not None and self.engine == "local":
            raise ConfigError(
                f"num_tasks={self.num_tasks!r} requires engine='ray' or engine='slurm'; set an engine, or omit "
                "num_tasks"
            )
        self._check_sbatch()

    def _check_sbatch(self) -> None:
        if self.sbatch_options is None:
            return
        words = (self.sbatch_options,) if isinstance(self.sbatch_options, str) else tuple(self.sbatch_options)
        object.__setattr__(self, "sbatch_options", words)
        if self.engine != "slurm":
            raise ConfigError(
                f"sbatch_options={words!r} requires engine='slurm'; set this engine, or omit sbatch_options"
            )
        for word in words:
            name = word.removeprefix("--").partition("=")[0]
            if not word.startswith("--") or not name or any(own.startswith(name) for own in _OWN_SBATCH_OPTIONS):
                raise ConfigError(
                    f"sbatch_options={word!r}: must be a long option such as --partition=cpu, and must not be a "
                    "reserved option or an abbreviation of one; reserved: "
                    f"{', '.join(f'--{own}' for own in _OWN_SBATCH_OPTIONS)}"
                )

    @property
    def is_local(self) -> bool:
        """True if this process does all of the work."""
        return self.engine == "local" and self.task is None

    @property
    def share(self) -> Share:
        """Share of the work that `task` selects. Raises ConfigError if `task` is invalid."""
        return parse_share(self.task, "task")
