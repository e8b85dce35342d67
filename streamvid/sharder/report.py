"""Report of a sharder run or dry run: counts, buckets and all rejections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.draws import stored_clips
from streamvid.dataset.reader import Dataset
from streamvid.sharder.assign import Assignment
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.plan import ShardPlan
from streamvid.sharder.probing import Probe, Probes, file_state
from streamvid.sharder.rejections import NO_BUCKET, RejectedKind, by_kind
from streamvid.sharder.source.records import Record, RecordSet, Rejection
from streamvid.sharder.source.summary import Counted, InputSummary, duplicates
from streamvid.sharder.work.tasks import Remaining

BUILT, ALREADY_SEALED, DRY_RUN, TASK_ENDED = "built", "already sealed", "dry run", "task ended"


@dataclass(frozen=True, slots=True)
class BucketRow:
    """Row of a report that describes one bucket.

    num_bytes: total size of the clips in bytes.
    mean_crop: mean fraction of the frame area that is cropped.
    source_bytes: total size in bytes of the clips' source files, each counted once.
    mean_psnr_y, min_psnr_y: mean and minimum PSNR-Y of native clips in decibels; None for other clips.
    In a dry run with native clips, num_bytes and num_shards are unknown and therefore 0.
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
    """Report of a run. `state` is "built", "already sealed", "dry run" or "task ended".

    num_records: number of input rows.
    num_windows: number of windows into which the rows were split. It differs from num_records only if sources are
        longer than max_clip_seconds or rows have several time ranges. It equals num_samples + num_rejected, where a
        clip that several buckets store counts once (SHARD-3).
    stored_clips: with assign="all", the number of clips that several buckets store, and the number of their samples.
    clips: "copy", "native" or "text".
    encode_seconds: CPU time for encoding in this run and in earlier, interrupted runs; None if nothing was encoded.
    probe_bytes_read: number of bytes read from remote files for probing; None if no remote file was probed.
    input: the sharder's interpretation of its input; without facts from probing if the dataset was already sealed.
    remaining: after a task, the unfinished work of other tasks; None if only sealing remains. The report of a task
        contains no buckets and no rejections.
    """

    state: str
    num_records: int
    buckets: tuple[BucketRow, ...]
    rejections: tuple[Rejection, ...]
    clips: str = "copy"
    encode_seconds: float | None = None
    probe_bytes_read: int | None = None
    stored_clips: tuple[int, int] = (0, 0)
    input: InputSummary | None = field(default=None, compare=False)
    remaining: Remaining | None = None

    @property
    def num_samples(self) -> int:
        return sum(row.num_samples for row in self.buckets)

    @property
    def num_shards(self) -> int:
        return sum(row.num_shards for row in self.buckets)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.buckets)

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
        """Return the report as JSON-serializable values, including all rejections."""
        sums = ("num_samples", "num_shards", "num_bytes", "num_rejected", "num_windows", "source_bytes")
        kinds = [kind.to_json() for kind in self.rejected_by_kind]
        return {**asdict(self), **{name: getattr(self, name) for name in sums}, "rejected_by_kind": kinds}

    def summary(self, max_rejections: int = 10) -> str:
        """Return a short summary as text, with at most `max_rejections` rejections."""
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


def report_task(num_records: int, options: ShardOptions, remaining: Remaining | None) -> ShardReport:
    """Return the report of a task that has done its share of the current phase."""
    return ShardReport(TASK_ENDED, num_records, (), (), options.clips.kind, remaining=remaining)


def report_plan(plan: ShardPlan, state: str) -> ShardReport:
    """Return the report of a plan. state: BUILT or DRY_RUN."""
    clips: dict[Bucket, list[_Clip]] = {}
    seconds: dict[str, float] = {}
    for shard in plan.shards:
        for sample in shard.samples:
            clip, record = sample.clip, sample.record
            facts = (clip.num_bytes, clip.duration_seconds, clip.psnr_y, record.source, record.num_bytes)
            clips.setdefault(shard.bucket, []).append(_Clip(*facts, sample.cropped_share))
            seconds[clip.path] = clip.encode_seconds
    stored = str(plan.build["options"]["clips"])
    is_unknown = state == DRY_RUN and stored == "native"
    shards = Counter(shard.bucket for shard in plan.shards)
    rows = [_row(bucket, 0 if is_unknown else shards[bucket], found) for bucket, found in clips.items()]
    counts = {(shard.bucket.id, shard.number): len(shard.samples) for shard in plan.shards}
    return ShardReport(
        state,
        plan.num_records,
        tuple(rows),
        plan.rejections,
        stored,
        encode_seconds=sum(seconds.values()) if stored == "native" and not is_unknown else None,
        stored_clips=stored_clips(plan.draws, counts),
    )


def summarize(
    records: RecordSet, options: ShardOptions, probes: Probes | None = None, assignment: Assignment | None = None
) -> InputSummary:
    """Return the sharder's interpretation of its input, with facts from probing if probes and assignment are given."""
    if probes is None or assignment is None:
        return InputSummary(records.sources)
    rate, firsts, shared = options.frame_rate, dict[str, Record](), []
    for record in records.records:
        first = firsts.setdefault(record.path, record)
        if first is not record:
            shared.append(f"rows {first.row} and {record.row}: {record.source}")
    videos = [
        (record.source, probe.fps)
        for record in firsts.values()
        if isinstance(probe := probes[file_state(record)], Probe) and not probe.is_image and probe.fps
    ]
    rates = [fps for _, fps in videos]
    return InputSummary(
        sources=records.sources,
        shared_files=Counted.of(shared),
        duplicates=duplicates(record.media(options.storage) for record in firsts.values()),
        fps=(min(rates), max(rates)) if rates else None,
        read_fps=None if rate.fps is None else float(rate.fps),
        repeated=Counted.of([f"{source} ({fps:.4g} fps)" for source, fps in videos if fps < rate.repeats_below]),
        num_dropped=sum(fps > rate.drops_above for fps in rates),
        num_without_bucket=sum(rejection.kind in NO_BUCKET for rejection in assignment.rejections),
    )


def report_dataset(dataset: Dataset) -> ShardReport:
    """Reconstruct the report of the run that built a dataset.

    The report does not contain that run's state, encode_seconds, probe_bytes_read and input.
    """
    clips: dict[str, list[_Clip]] = {}
    for shard in dataset.shards:
        rows = dataset.samples(shard, list(_COLUMNS)).to_pylist()
        clips.setdefault(shard.bucket_id, []).extend(_Clip(*(row[name] for name in _COLUMNS)) for row in rows)
    shards = Counter(shard.bucket_id for shard in dataset.shards)
    manifest = dataset.manifest
    return ShardReport(
        ALREADY_SEALED,
        manifest.counts.records,
        tuple(_row(manifest.bucket(name), shards[name], found) for name, found in clips.items()),
        tuple(Rejection(**row) for row in dataset.rejections_table().to_pylist()),
        manifest.clips,
        stored_clips=dataset.stored_clips,
    )


@dataclass(frozen=True, slots=True)
class _Clip:
    """Values of the index columns that a report needs, for one clip."""

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
