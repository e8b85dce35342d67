"""Report of a run of the sharder, or of a dry run: counts, buckets and every rejection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from streamvid.buckets import Bucket
from streamvid.dataset.draws import stored_clips
from streamvid.dataset.reader import Dataset
from streamvid.sharder.plan import ShardPlan
from streamvid.sharder.rejections import RejectedKind, by_kind
from streamvid.sharder.source.records import Rejection

BUILT, ALREADY_SEALED, DRY_RUN = "built", "already sealed", "dry run"


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket in a report. `num_bytes` counts clips, `mean_crop` is the mean share of a frame's area cut off.

    source_bytes: of the files that its clips come from, each counted once. mean_psnr_y, min_psnr_y: of native clips, in
    decibels, else None. In a dry run of native clips num_bytes and num_shards are 0, as nobody knows them yet.
    """

    bucket_id: str
    num_frames: int
    height: int
    width: int
    num_samples: int
    num_shards: int
    num_bytes: int
    duration_seconds: float
    mean_crop: float
    source_bytes: int
    mean_psnr_y: float | None
    min_psnr_y: float | None


@dataclass(frozen=True)
class ShardReport:
    """`state` is "built", "already sealed" or "dry run".

    num_records counts input rows, num_windows what they were cut into: as many, unless sources were longer than
    max_clip_seconds. stored_clips: (clips that several buckets store, samples that these are), of assign="all".
    num_windows = num_samples + num_rejected, each clip counted once (SHARD-3). clips: "copy" or "native".
    encode_seconds: of CPU, earlier unfinished runs among it; None where nothing was encoded. probe_bytes_read: of
    objects, to find out what they are; None where no source is in a bucket.
    """

    state: str
    num_records: int
    num_samples: int
    num_shards: int
    num_bytes: int
    buckets: tuple[BucketRow, ...]
    rejections: tuple[Rejection, ...]
    clips: str = "copy"
    encode_seconds: float | None = None
    probe_bytes_read: int | None = None
    stored_clips: tuple[int, int] = (0, 0)

    @property
    def num_rejected(self) -> int:
        return len(self.rejections)

    @property
    def rejected_by_kind(self) -> tuple[RejectedKind, ...]:
        """Rejections by kind, with examples and remedies."""
        return by_kind((r.kind, r.row, r.source, r.reason) for r in self.rejections)

    @property
    def num_windows(self) -> int:
        clips, samples = self.stored_clips
        return self.num_samples - samples + clips + self.num_rejected

    @property
    def source_bytes(self) -> int:
        return sum(row.source_bytes for row in self.buckets)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, including all rejections."""
        counted = {
            "num_rejected": self.num_rejected,
            "num_windows": self.num_windows,
            "rejected_by_kind": [kind.to_json() for kind in self.rejected_by_kind],
        }
        return {**asdict(self), **counted, "source_bytes": self.source_bytes}


def report_plan(plan: ShardPlan, state: str) -> ShardReport:
    """Return the report of a plan, built or not."""
    clips: dict[Bucket, list[_Clip]] = {}
    shards: dict[Bucket, int] = {}
    seconds: dict[str, float] = {}
    stored = str(plan.build["options"]["clips"])
    is_unknown = state == DRY_RUN and stored == "native"
    for shard in plan.shards:
        shards[shard.bucket] = 0 if is_unknown else shards.get(shard.bucket, 0) + 1
        found = clips.setdefault(shard.bucket, [])
        for sample in shard.samples:
            clip, record = sample.clip, sample.record
            source = (record.source, record.num_bytes, sample.cropped_share)
            found.append(_Clip(clip.num_bytes, clip.duration_seconds, clip.psnr_y, *source))
            seconds[clip.path] = clip.encode_seconds
    rows = tuple(_row(bucket, shards[bucket], found) for bucket, found in clips.items())
    counts = {(shard.bucket.id, shard.number): len(shard.samples) for shard in plan.shards}
    report = replace(
        _report(state, rows, plan.rejections, plan.num_records, stored), stored_clips=stored_clips(plan.draws, counts)
    )
    return replace(report, encode_seconds=sum(seconds.values())) if stored == "native" and not is_unknown else report


def report_dataset(dataset: Dataset) -> ShardReport:
    """Return the report of a sealed dataset: that of the run that built it, except for state and encode_seconds."""
    clips: dict[str, list[_Clip]] = {}
    shards: dict[str, int] = {}
    for shard in dataset.shards:
        shards[shard.bucket_id] = shards.get(shard.bucket_id, 0) + 1
        rows = dataset.samples(shard, list(_COLUMNS)).to_pylist()
        clips.setdefault(shard.bucket_id, []).extend(_Clip(*(row[name] for name in _COLUMNS)) for row in rows)
    rows = tuple(_row(dataset.manifest.bucket(name), shards[name], found) for name, found in clips.items())
    rejections = tuple(Rejection(**row) for row in dataset.rejections_table().to_pylist())
    report = _report(ALREADY_SEALED, rows, rejections, dataset.manifest.counts.records, dataset.manifest.clips)
    return replace(report, stored_clips=dataset.stored_clips)


@dataclass(frozen=True, slots=True)
class _Clip:
    """Facts of a clip that a report needs, columns of the index."""

    num_bytes: int
    duration_seconds: float
    psnr_y: float | None
    source: str
    source_bytes: int
    crop_fraction: float | None


_COLUMNS = ("clip_bytes", "duration_seconds", "psnr_y", "source", "source_bytes", "crop_fraction")


def _row(bucket: Bucket, num_shards: int, clips: Sequence[_Clip]) -> BucketRow:
    crops = [clip.crop_fraction or 0.0 for clip in clips]
    qualities = [clip.psnr_y for clip in clips if clip.psnr_y is not None]
    return BucketRow(
        bucket_id=bucket.id,
        num_frames=bucket.num_frames,
        height=bucket.height,
        width=bucket.width,
        num_samples=len(clips),
        num_shards=num_shards,
        num_bytes=sum(clip.num_bytes for clip in clips),
        duration_seconds=sum(clip.duration_seconds for clip in clips),
        mean_crop=sum(crops) / len(crops),
        source_bytes=sum({clip.source: clip.source_bytes for clip in clips}.values()),
        mean_psnr_y=sum(qualities) / len(qualities) if qualities else None,
        min_psnr_y=min(qualities, default=None),
    )


def _report(
    state: str, rows: tuple[BucketRow, ...], rejections: tuple[Rejection, ...], num_records: int, clips: str
) -> ShardReport:
    return ShardReport(
        state=state,
        num_records=num_records,
        num_samples=sum(row.num_samples for row in rows),
        num_shards=sum(row.num_shards for row in rows),
        num_bytes=sum(row.num_bytes for row in rows),
        buckets=rows,
        rejections=rejections,
        clips=clips,
    )
