"""Options for running the sharder: processes, limits and clusters. None of them is stored in a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streamvid.cluster.options import ClusterOptions
from streamvid.cluster.share import Share
from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.host.resources import usable_cores

_WEEK_SECONDS = 7 * 86400


@dataclass(frozen=True)
class WorkOptions:
    """Options for running the sharder.

    Only the limits on time and memory can affect the content of the dataset: a file that exceeds a limit is rejected.

    work_dir: local folder for unfinished work (encoded clips, tars, probing results) if the dataset is in an object
        store. None selects a folder in the user's cache folder.
    cluster: division of the work into tasks, each of which has `workers` CPUs. A run without a task seals the dataset.
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
    overwrite: bool = option(
        False, help="Replace the sealed dataset at DEST if its input or options differ from this build's.", group=""
    )
    work_dir: str | Path | None = option(
        None, help="Local folder for unfinished work, if DEST is in an object store.", metavar="FOLDER"
    )
    cluster: ClusterOptions = option(default_factory=ClusterOptions, group="")
    probe_timeout_seconds: float = option(
        60.0,
        help="Time limit for probing one file, in seconds.",
        metavar="S",
        flag="--probe-timeout",
        above=0,
        maximum=_WEEK_SECONDS,
    )
    encode_timeout_seconds: float = option(
        4 * 3600.0,
        help="Time limit for encoding one clip or decoding one whole file, in seconds.",
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
        if self.overwrite and not self.cluster.is_local:
            raise ConfigError(
                "overwrite=True cannot be combined with work.cluster.task, or with a work.cluster.engine other than "
                "'local', because tasks do not remove files; omit overwrite, or omit the work.cluster option"
            )

    @property
    def share(self) -> Share:
        """Share of the work that this run does."""
        return self.cluster.share
