"""Report of a sharder run or dry run: counts, buckets and all rejections."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.policy import cropped_share
from streamvid.dataset.draws import stored_clips
from streamvid.dataset.reader import Dataset
from streamvid.dataset.tabular.rows import Rows
from streamvid.dataset.tabular.text_set import TextSet
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import Assignment, PlannedSample
from streamvid.sharder.planning.base import Base
from streamvid.sharder.planning.plan import ShardPlan
from streamvid.sharder.rejections import NO_BUCKET, RejectedKind, by_kind
from streamvid.sharder.source.records import Record, RecordSet, Rejection
from streamvid.sharder.source.summary import (
    MAX_LENGTH_SECONDS,
    MAX_START_SECONDS,
    AudioSummary,
    Counted,
    InputSummary,
    duplicates,
)
from streamvid.sharder.work.tasks import Remaining

BUILT, ALREADY_SEALED, DRY_RUN, TASK_ENDED = "built", "already sealed", "dry run", "task ended"
APPENDED, ALREADY_THERE = "appended", "already there"


@dataclass(frozen=True, slots=True)
class BucketRow:
    """Row for one bucket in a report.

    num_bytes: total size of the clips in bytes.
    mean_crop: mean fraction of the frame area that is cropped away.
    source_bytes: total size in bytes of the clips' source files, each counted once.
    mean_psnr_y, min_psnr_y: mean and minimum PSNR-Y of native clips in decibels; None for other clips.
    After a dry run of a build that encodes or cuts clips, num_bytes and num_shards are 0, because they are unknown.
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
    """Report of a run.

    `state` is "built", "already sealed", "dry run" or "task ended"; for an append also "appended", or "already there"
    if it added no samples.

    num_records: number of input rows; for an append, excluding rows that are already recorded in the dataset.
    num_known: number of input rows that are already recorded in the dataset.
    num_windows: number of windows into which the rows were split. It differs from num_records only if sources are
        longer than max_clip_seconds or rows have several time ranges. It equals num_samples + num_rejected, where a
        clip that several buckets store counts once (SHARD-3).
    stored_clips: (number of clips that are stored in several buckets, number of samples with these clips); (0, 0)
        unless assign="all".
    clips: "copy", "native", "text" or "audio".
    is_sized: False after a dry run that would make clips; clip sizes and the number of shards are then unknown.
    encode_seconds: CPU time for encoding in this run and in earlier, interrupted runs; None if nothing was encoded.
    probe_bytes_read: number of bytes read from remote files for probing; None if no remote file was probed.
    input: the sharder's interpretation of its input; it contains no results of probing if the dataset was already
        sealed.
    remaining: after a task, the work that other tasks have not finished; None if only sealing remains. A task's
        report contains neither buckets nor rejections.
    damaged_audio: files in the dataset whose audio cannot be decoded. Loaders with audio treat them as bad samples.
    """

    state: str
    num_records: int
    buckets: tuple[BucketRow, ...]
    rejections: tuple[Rejection, ...]
    clips: str = "copy"
    is_sized: bool = True
    encode_seconds: float | None = None
    probe_bytes_read: int | None = None
    stored_clips: tuple[int, int] = (0, 0)
    input: InputSummary | None = field(default=None, compare=False)
    remaining: Remaining | None = None
    num_known: int = 0
    damaged_audio: Counted = field(default_factory=Counted)

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
        """Rejections, grouped by kind, with examples and remedies."""
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
            f"{self.num_records} records, {self.num_rejected} rejections"
        ]
        lines += [
            f"  {row.bucket_id}: {row.num_samples} samples, {row.num_shards} shards, {row.duration_seconds:.1f} s"
            for row in self.buckets
        ]
        if self.damaged_audio.count:
            names = ", ".join(self.damaged_audio.examples)
            lines.append(f"  audio that cannot be decoded: {self.damaged_audio.count} ({names})")
        shown = self.rejections[:max_rejections]
        lines += [f"  rejected row {row.row} {row.source}: {row.reason}" for row in shown]
        if len(shown) < self.num_rejected:
            lines.append(f"  and {self.num_rejected - len(shown)} more rejections")
        return "\n".join(lines)


def report_known(base: Base) -> ShardReport:
    """Return the report for an append that found only rows that are already recorded in the dataset."""
    return ShardReport(ALREADY_THERE, 0, (), (), base.manifest.clips, num_known=base.num_known)


def report_task(num_records: int, options: ShardOptions, remaining: Remaining | None) -> ShardReport:
    """Return the report for a task that has done its share of the current phase."""
    return ShardReport(TASK_ENDED, num_records, (), (), options.clips.kind, remaining=remaining)


def report_plan(plan: ShardPlan, state: str) -> ShardReport:
    """Return the report for a plan. state: BUILT or DRY_RUN."""
    totals: dict[Bucket, _Totals] = {}
    encoded = _Distinct()
    asked = plan.build["options"]
    stored, is_sized = str(asked["clips"]), state != DRY_RUN or not {"encoding", "cut"} & asked.keys()
    names = ("bucket", "clip.num_bytes", "clip.duration_seconds", "clip.psnr_y", "record.source", "record.num_bytes")
    others = ("probe.height", "probe.width", "clip.path", "clip.encode_seconds")
    for row in plan.samples.tuples(*names, *others):
        bucket, num_bytes, seconds, psnr_y, source, source_bytes, height, width, path, encode_seconds = row
        crop = _crop(height, width, bucket.height, bucket.width) if bucket.has_pictures else 0.0
        num_bytes = num_bytes if is_sized else 0
        totals.setdefault(bucket, _Totals()).add(num_bytes, seconds, psnr_y, source, source_bytes, crop)
        if encode_seconds:
            encoded.add(path, encode_seconds)
    shards = Counter(shard.bucket for shard in plan.shards)
    rows = [found.row(bucket, shards[bucket] if is_sized else 0) for bucket, found in totals.items()]
    counts = {(shard.bucket.id, shard.number): len(shard.samples) for shard in plan.shards}
    return ShardReport(
        state,
        plan.num_records,
        tuple(rows),
        plan.rejections,
        stored,
        is_sized,
        encode_seconds=encoded.total if stored == "native" and is_sized else None,
        stored_clips=stored_clips(plan.draws, counts),
    )


@lru_cache(1 << 16)
def _crop(height: int, width: int, bucket_height: int, bucket_width: int) -> float:
    return float(cropped_share(height, width, bucket_height, bucket_width))


def summarize(records: RecordSet, options: ShardOptions, assignment: Assignment | None = None) -> InputSummary:
    """Return the sharder's interpretation of its input, with facts about the videos if an assignment is given."""
    if assignment is None:
        return InputSummary(records.sources)
    rate, files = options.frame_rate, _Files(records.records)
    rates = array("d")
    repeats_below, drops_above = rate.repeats_below, rate.drops_above

    def repeated() -> Iterator[str]:
        for source, fps in _video_rates(assignment.samples):
            rates.append(fps)
            if fps < repeats_below:
                yield f"{source} ({fps:.4g} fps)"

    slow = Counted.of(repeated())
    # Finding duplicates requires opening files, which trusted metadata is meant to avoid.
    copies = None if options.trust_metadata else duplicates(record.media(options.storage) for record in files.firsts())
    return InputSummary(
        sources=records.sources,
        shared_files=Counted.of(files.shared()),
        duplicates=copies,
        fps=(min(rates), max(rates)) if rates else None,
        read_fps=None if rate.fps is None else float(rate.fps),
        repeated=slow,
        num_dropped=sum(fps > drops_above for fps in rates),
        num_without_bucket=sum(rejection.kind in NO_BUCKET for rejection in assignment.rejections),
        near_duplicates=assignment.duplicates,
        audio=_audio_summary(assignment.samples) if _has_videos(options) else None,
    )


def _has_videos(options: ShardOptions) -> bool:
    return not (options.trust_metadata or options.clips.is_text or options.clips.is_audio)


def _video_rates(samples: Rows[PlannedSample]) -> Iterator[tuple[str, float]]:
    """Yield (file name, frame rate) for each video, once per file."""
    return ((source, fps) for source, fps in _videos(samples, "probe.fps") if fps)


def _audio_summary(samples: Rows[PlannedSample]) -> AudioSummary:
    names = ("probe.has_audio", "probe.audio_start_seconds", "probe.audio_seconds", "probe.duration_seconds")
    num_videos = num_with_audio = 0
    unreadable, starts, lengths = list[str](), list[str](), list[str]()
    for source, has_audio, offset, seconds, of_video, problem in _videos(samples, *names, "probe.audio_problem"):
        num_videos += 1
        num_with_audio += bool(has_audio)
        if problem:
            unreadable.append(f"{source}: {problem}")
        if has_audio and abs(offset) >= MAX_START_SECONDS:
            starts.append(f"{source} ({offset:+.3f} s)")
        if has_audio and abs(seconds - of_video) >= MAX_LENGTH_SECONDS:
            lengths.append(f"{source} ({seconds:.3f} s, pictures {of_video:.3f} s)")
    return AudioSummary(num_videos, num_with_audio, *map(Counted.of, (unreadable, starts, lengths)))


def _videos(samples: Rows[PlannedSample], *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield the file name of each video, followed by the values of the fields in `names`. Each file appears once."""
    repeated = TextSet.repeated(path for (path,) in samples.tuples("record.path"))
    seen = set()
    for path, source, is_image, *values in samples.tuples("record.path", "record.source", "probe.is_image", *names):
        if path in repeated:
            if path in seen:
                continue
            seen.add(path)
        if not is_image:
            yield source, *values


class _Files:
    """Distinct files of the records."""

    def __init__(self, records: Rows[Record]) -> None:
        self._records = records
        self._repeated = TextSet.repeated(path for (path,) in records.tuples("path"))

    def firsts(self) -> Iterator[Record]:
        """Yield the first record that uses each file."""
        seen = set()
        for record in self._records:
            if record.path not in seen:
                yield record
            if record.path in self._repeated:
                seen.add(record.path)

    def shared(self) -> Iterator[str]:
        """Yield a description of each record that uses the same file as an earlier record."""
        rows: dict[str, int] = {}
        for path, row, source in self._records.tuples("path", "row", "source") if len(self._repeated) else ():
            if path in self._repeated:
                if rows.get(path, row) != row:
                    yield f"rows {rows[path]} and {row}: {source}"
                rows.setdefault(path, row)


def report_dataset(dataset: Dataset) -> ShardReport:
    """Reconstruct, from a dataset, the report of the run that built it.

    The report does not contain that run's state, encode_seconds, probe_bytes_read or input.
    """
    totals: dict[str, _Totals] = {}
    for shard in dataset.shards:
        for row in dataset.samples(shard, list(_COLUMNS)).to_pylist():
            totals.setdefault(shard.bucket_id, _Totals()).add(*(row[name] for name in _COLUMNS))
    shards = Counter(shard.bucket_id for shard in dataset.shards)
    manifest = dataset.manifest
    return ShardReport(
        ALREADY_SEALED,
        manifest.counts.records,
        tuple(found.row(manifest.bucket(name), shards[name]) for name, found in totals.items()),
        tuple(Rejection(**row) for row in dataset.rejections_table().to_pylist()),
        manifest.clips,
        stored_clips=dataset.stored_clips,
        damaged_audio=damaged_audio(dataset),
    )


def damaged_audio(dataset: Dataset) -> Counted:
    """Return the number of files whose audio, according to the index, cannot be decoded, and some examples."""
    import pyarrow.compute as pc

    names = ["source", "has_audio", "audio_start_seconds"]
    if dataset.manifest.clips == "text" or not set(names) <= set(dataset.samples_schema.names):
        return Counted()
    sources = dict[str, None]()
    for shard in dataset.shards:
        table = dataset.samples(shard, names)
        found = table.filter(pc.and_(pc.fill_null(table["has_audio"], False), pc.is_null(table["audio_start_seconds"])))
        sources.update(dict.fromkeys(found.column("source").to_pylist()))
    return Counted.of(sources)


_COLUMNS = ("clip_bytes", "duration_seconds", "psnr_y", "source", "source_bytes", "crop_fraction")


class _Distinct:
    """Sum of named numbers. If a name occurs several times, its number is added only once."""

    def __init__(self) -> None:
        self._names, self._numbers = array("q"), array("d")

    def add(self, name: str, number: float) -> None:
        self._names.append(hash(name))
        self._numbers.append(number)

    @property
    def total(self) -> float:
        _, firsts = np.unique(np.asarray(self._names), return_index=True)
        return float(np.asarray(self._numbers)[firsts].sum())


@dataclass
class _Totals:
    """Totals for the clips in one bucket, from which a BucketRow is created."""

    num_clips: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    crop: float = 0.0
    num_psnr_y: int = 0
    psnr_y: float = 0.0
    min_psnr_y: float = math.inf
    sources: _Distinct = field(default_factory=_Distinct)

    def add(
        self,
        num_bytes: int,
        seconds: float,
        psnr_y: float | None,
        source: str,
        source_bytes: int,
        crop: float | None,
    ) -> None:
        """Add a clip. The arguments are values of index columns; see _COLUMNS."""
        self.num_clips += 1
        self.num_bytes += num_bytes
        self.seconds += seconds
        self.crop += crop or 0.0
        self.sources.add(source, source_bytes)
        if psnr_y is not None:
            self.num_psnr_y += 1
            self.psnr_y += psnr_y
            self.min_psnr_y = min(self.min_psnr_y, psnr_y)

    def row(self, bucket: Bucket, num_shards: int) -> BucketRow:
        return BucketRow(
            bucket_id=bucket.id,
            num_frames=bucket.num_frames,
            height=bucket.height,
            width=bucket.width,
            num_samples=self.num_clips,
            num_shards=num_shards,
            num_bytes=self.num_bytes,
            duration_seconds=self.seconds,
            mean_crop=self.crop / self.num_clips,
            source_bytes=int(self.sources.total),
            mean_psnr_y=self.psnr_y / self.num_psnr_y if self.num_psnr_y else None,
            min_psnr_y=self.min_psnr_y if self.num_psnr_y else None,
        )
