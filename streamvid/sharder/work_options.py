"""Options for running the sharder: processes, limits, tasks and engines. None of them is stored in a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.host.resources import usable_cores
from streamvid.host.share import Share, parse_share

_WEEK_SECONDS = 7 * 86400


@dataclass(frozen=True)
class WorkOptions:
    """Options for running the sharder.

    Only the limits on time and memory can affect the content of the dataset: a file that exceeds a limit is rejected.

    work_dir: local folder for unfinished work (encoded clips, tars, probing results) if the dataset is in an object
        store. None selects a folder in the user's cache folder.
    task: "I/N" to do only the share of task I (0 to N-1) of N tasks, for clusters; None to do all work and seal the
        dataset. Tasks may run at the same time, on any machines.
    engine: "local" for this process and its workers; "ray" to run tasks with `workers` CPUs each on a Ray cluster,
        and to seal the dataset in this process.
    """

    workers: int = option(
        default_factory=usable_cores,
        help="Number of worker processes.",
        metavar="N",
        group="",
        minimum=1,
        maximum=1024,
        shown_default="one per CPU",
    )
    overwrite: bool = option(False, help="Replace a different sealed dataset at DEST.", group="")
    work_dir: str | Path | None = option(
        None, help="Local folder for unfinished work if DEST is in an object store.", metavar="FOLDER"
    )
    task: str | None = option(
        None, help="Process only share I of N, with I from 0 to N-1; for clusters.", metavar="I/N", group=""
    )
    engine: Literal["local", "ray"] = option(
        "local", help="Where tasks run: in this process, or on a Ray cluster (streamvid[ray]).", group=""
    )
    ray_address: str = option("auto", help="Address of the Ray cluster.", metavar="ADDRESS", group="")
    num_tasks: int | None = option(
        None,
        help="Number of tasks on a Ray cluster.",
        metavar="N",
        minimum=2,
        maximum=100_000,
        group="",
        shown_default="as many as the cluster can run at a time",
    )
    probe_timeout_seconds: float = option(
        60.0,
        help="Seconds allowed to probe a file.",
        metavar="S",
        flag="--probe-timeout",
        above=0,
        maximum=_WEEK_SECONDS,
    )
    encode_timeout_seconds: float = option(
        4 * 3600.0,
        help="Seconds allowed to encode or fully decode one clip.",
        metavar="S",
        flag="--encode-timeout",
        above=0,
        maximum=_WEEK_SECONDS,
    )
    worker_memory_bytes: int = option(
        4 * 2**30, help="Memory limit per worker.", metavar="SIZE", flag="--worker-memory", minimum=2**28, maximum=2**60
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.overwrite and (self.task is not None or self.engine != "local"):
            raise ConfigError(
                "overwrite=True: cannot be combined with task or engine='ray', because tasks remove no files; omit "
                "overwrite"
            )
        if not self.share.is_whole and self.engine != "local":
            raise ConfigError(f"task={self.task!r}: cannot be combined with engine={self.engine!r}; omit one of them")
        if self.num_tasks is not None and self.engine == "local":
            raise ConfigError(
                f"num_tasks={self.num_tasks!r}: requires engine='ray'; set engine='ray', or omit num_tasks"
            )

    @property
    def share(self) -> Share:
        """Share of the work that `task` selects. Raises ConfigError if `task` is invalid."""
        return parse_share(self.task, "task")
