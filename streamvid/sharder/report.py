"""What a run of the sharder did, or would do: counts, buckets and every rejection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from streamvid.buckets import Bucket
from streamvid.dataset.reader import Dataset
from streamvid.sharder.plan import ShardPlan
from streamvid.sharder.records import Rejection

BUILT, ALREADY_SEALED, DRY_RUN = "built", "already sealed", "dry run"


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket in a report. `num_bytes` counts clips, `mean_crop` is the mean share of a frame's area cut off."""

    bucket_id: str
    num_frames: int
    height: int
    width: int
    num_samples: int
    num_shards: int
    num_bytes: int
    duration_seconds: float
    mean_crop: float


@dataclass(frozen=True)
class ShardReport:
    """`state` is "built", "already sealed" or "dry run"; num_records = num_samples + num_rejected (SHARD-3)."""

    state: str
    num_records: int
    num_samples: int
    num_shards: int
    num_bytes: int
    buckets: tuple[BucketRow, ...]
    rejections: tuple[Rejection, ...]

    @property
    def num_rejected(self) -> int:
        return len(self.rejections)

    def to_json(self) -> dict[str, Any]:
        """Plain values, all rejections among them."""
        return {**asdict(self), "num_rejected": self.num_rejected}

    def summary(self, max_rejections: int = 10) -> str:
        """A few lines for people; rejections are counted by reason beyond the first ones."""
        lines = [
            f"{self.state}: {self.num_samples} samples in {self.num_shards} shards, {self.num_bytes} bytes; "
            f"{self.num_rejected} of {self.num_records} records rejected"
        ]
        lines += [
            f"  {row.bucket_id}: {row.num_samples} samples, {row.num_shards} shards, {row.duration_seconds:.1f} s"
            for row in self.buckets
        ]
        shown = self.rejections[:max_rejections]
        lines += [f"  rejected row {row.row} {row.source}: {row.reason}" for row in shown]
        if len(shown) < self.num_rejected:
            lines.append(f"  and {self.num_rejected - len(shown)} more rejections")
        return "\n".join(lines)


def report_plan(plan: ShardPlan, state: str) -> ShardReport:
    """The report of a plan, built or not."""
    clips: dict[Bucket, list[_Clip]] = {}
    shards: dict[Bucket, int] = {}
    for shard in plan.shards:
        shards[shard.bucket] = shards.get(shard.bucket, 0) + 1
        clips.setdefault(shard.bucket, []).extend(
            (s.record.num_bytes, s.probe.duration_seconds, s.probe.width, s.probe.height) for s in shard.samples
        )
    rows = tuple(_row(bucket, shards[bucket], found) for bucket, found in clips.items())
    return _report(state, rows, plan.rejections)


def report_dataset(dataset: Dataset) -> ShardReport:
    """The report of a dataset that was sealed before, equal to the one of the run that sealed it but for `state`."""
    clips: dict[str, list[_Clip]] = {}
    shards: dict[str, int] = {}
    for shard in dataset.shards:
        shards[shard.bucket_id] = shards.get(shard.bucket_id, 0) + 1
        table = dataset.samples(shard, ["clip_bytes", "duration_seconds", "clip_width", "clip_height"])
        clips.setdefault(shard.bucket_id, []).extend(zip(*table.to_pydict().values(), strict=True))
    rows = tuple(_row(dataset.manifest.bucket(name), shards[name], found) for name, found in clips.items())
    return _report(ALREADY_SEALED, rows, tuple(Rejection(**row) for row in dataset.rejections_table().to_pylist()))


_Clip = tuple[int, float, int, int]
"""(bytes, seconds, width, height)."""


def _row(bucket: Bucket, num_shards: int, clips: Iterable[_Clip]) -> BucketRow:
    clips = list(clips)
    crops = [crop_fraction(width, height, bucket) for _, _, width, height in clips]
    return BucketRow(
        bucket_id=bucket.id,
        num_frames=bucket.num_frames,
        height=bucket.height,
        width=bucket.width,
        num_samples=len(clips),
        num_shards=num_shards,
        num_bytes=sum(clip[0] for clip in clips),
        duration_seconds=sum(clip[1] for clip in clips),
        mean_crop=sum(crops) / len(crops),
    )


def crop_fraction(width: int, height: int, bucket: Bucket) -> float:
    """Share of a width x height frame's area that is cut off to reach the bucket's ratio."""
    ours, theirs = width * bucket.height, height * bucket.width
    return 1 - min(ours, theirs) / max(ours, theirs)


def _report(state: str, rows: tuple[BucketRow, ...], rejections: tuple[Rejection, ...]) -> ShardReport:
    num_samples = sum(row.num_samples for row in rows)
    return ShardReport(
        state=state,
        num_records=num_samples + len(rejections),
        num_samples=num_samples,
        num_shards=sum(row.num_shards for row in rows),
        num_bytes=sum(row.num_bytes for row in rows),
        buckets=rows,
        rejections=rejections,
    )
