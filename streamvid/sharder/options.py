"""What the user may ask of the sharder."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from streamvid.buckets import Bucket, BucketTable
from streamvid.errors import ConfigError

CLIPS = "copy"
MAX_WORKERS = 1024
MIN_SHARD_BYTES = 1000


def available_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class ShardOptions:
    """How records become shards. Either `buckets`, or `resolution` with `num_frames`, says which buckets there are.

    `caption_column=""` stands for "no captions". Sizes are bytes, times seconds, `val_fraction` is a share from 0 to
    below 1. Only what changes the result is kept in the manifest: `workers`, `overwrite` and the two limits on a
    worker do not. Raises ConfigError for a value that cannot be.
    """

    metadata: str | Path | None = None
    video_column: str | None = None
    caption_column: str | None = None
    buckets: tuple[Bucket, ...] | None = None
    resolution: tuple[str, ...] = ()
    num_frames: tuple[int, ...] = ()
    multiple: int = 16
    val_fraction: float = 0.0
    shard_size_bytes: int = 512 * 10**6
    seed: int = 0
    workers: int = field(default_factory=available_cpus)
    overwrite: bool = False
    max_clip_bytes: int = 2 * 2**30
    probe_timeout_seconds: float = 60.0
    worker_memory_bytes: int = 4 * 2**30

    def __post_init__(self) -> None:
        if self.buckets is not None and (self.resolution or self.num_frames):
            raise ConfigError("buckets stands beside resolution or num_frames: give explicit buckets or the other two")
        if self.buckets is None and not (self.resolution and self.num_frames):
            raise ConfigError(
                f"no buckets: resolution={self.resolution!r}, num_frames={self.num_frames!r}; give both, as ('256px',) "
                "and (1, 17, 33), or explicit buckets, as 832x480@81"
            )
        limits: tuple[tuple[str, float, float, float], ...] = (
            ("shard_size_bytes", self.shard_size_bytes, MIN_SHARD_BYTES, 2**50),
            ("workers", self.workers, 1, MAX_WORKERS),
            ("seed", self.seed, 0, 2**63 - 1),
            ("max_clip_bytes", self.max_clip_bytes, 1, 8 * 2**30 - 1),
            ("worker_memory_bytes", self.worker_memory_bytes, 2**28, 2**60),
        )
        for name, value, least, most in limits:
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(f"{name}={value!r}: allowed are the integers {least} to {most}")
        if not 0 <= self.val_fraction < 1:
            raise ConfigError(f"val_fraction={self.val_fraction!r}: allowed is 0 to below 1, as 0.01")
        if not 0 < self.probe_timeout_seconds <= 86400:
            raise ConfigError(f"probe_timeout_seconds={self.probe_timeout_seconds!r}: allowed is above 0 to 86400")
        _ = self.table

    @cached_property
    def table(self) -> BucketTable:
        """The buckets that clips are assigned to."""
        if self.buckets is not None:
            return BucketTable(self.buckets)
        return BucketTable.from_resolutions(self.resolution, self.num_frames, self.multiple)

    def to_json(self) -> dict[str, Any]:
        """What of the options decides the dataset's content, for the manifest."""
        return {
            "buckets": [f"{bucket.id} {bucket.size_at_frames}" for bucket in self.table.candidates],
            "clips": CLIPS,
            "max_clip_bytes": self.max_clip_bytes,
            "seed": self.seed,
            "shard_size_bytes": self.shard_size_bytes,
            "val_fraction": self.val_fraction,
        }
