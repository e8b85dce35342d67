"""Assignment of buckets and permanent keys to records, or to the windows of long records."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache

from streamvid.buckets.bucket import TEXT_BUCKET, TICKS_PER_SECOND, Bucket
from streamvid.buckets.classes import Choices
from streamvid.buckets.frames import NEAR_RATE
from streamvid.buckets.pick import num_places
from streamvid.buckets.policy import cover_scale, cropped_share
from streamvid.dataset.manifest import MediaInfo
from streamvid.dataset.tabular.rows import Rows
from streamvid.dataset.tabular.text_set import TextSet
from streamvid.errors import NoBucketError, Rejected
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.media_fit import PlannedMedium, fit_media, still_media
from streamvid.sharder.probing import Probes
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.records import Record, Rejection
from streamvid.sharder.source.summary import Duplicates
from streamvid.sharder.source.time_ranges import TimeRange
from streamvid.sharder.units.probe_unit import Probe
from streamvid.sharder.windows import TEXT_EXTENSION, Clip, Timing, Window, cut_windows

MAX_STEM_CHARS = 40
_NOTHING_EARLIER: Mapping[int, int] = {}
_NO_MEDIA: Mapping[str, MediaInfo] = {}
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """Record, or one window of a record, with its bucket and its permanent keys."""

    key: str
    record_key: str
    record: Record
    probe: Probe
    bucket: Bucket
    split: str
    window: Window
    clip: Clip
    media: tuple[PlannedMedium, ...] = ()
    draw_set: str = ""

    @property
    def extensions(self) -> tuple[str, ...]:
        """Extensions of the sample's tar members. All samples in a shard have the same extensions."""
        return (self.clip.extension, *sorted(medium.extension for medium in self.media))

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the sample's clip and conditioning inputs."""
        return self.clip.num_bytes + sum(medium.clip.num_bytes for medium in self.media)

    @property
    def members(self) -> list[tuple[str, Record | MediaFile, Clip]]:
        """Tuples (extension, file, clip): the sample's clip first, then its conditioning inputs."""
        media = ((medium.extension, medium.file, medium.clip) for medium in self.media)
        return [(self.clip.extension, self.record, self.clip), *media]

    @property
    def cropped_share(self) -> float | None:
        """Fraction of the source frame that is cropped to fit the bucket's shape; None for samples without pictures."""
        return float(cropped_share(*self._sizes)) if self.bucket.has_pictures else None

    @property
    def upscale(self) -> float | None:
        """Scaling factor from the source's size to the bucket's size; None for samples without pictures."""
        return float(cover_scale(*self._sizes)) if self.bucket.has_pictures else None

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return self.probe.height, self.probe.width, self.bucket.height, self.bucket.width


@dataclass(frozen=True, slots=True)
class Assignment:
    """Samples and rejections that result from assigning buckets to all records.

    draw_sets: for clips that are stored in several buckets, maps `PlannedSample.draw_set` to (bucket id, probability)
        pairs.
    duplicates: near-duplicates among the samples; None if the sharder did not search for near-duplicates.
    """

    samples: Rows[PlannedSample]
    rejections: tuple[Rejection, ...]
    draw_sets: Mapping[str, Sequence[tuple[str, Fraction]]] = field(default_factory=dict)
    duplicates: Duplicates | None = None


def window_name(window: Window, probe: Probe) -> str:
    """Return a message prefix that names a window, or "" if the window covers the whole source."""
    is_whole = window.num_frames == probe.num_frames
    return "" if is_whole else f"frames {window.start} to {window.start + window.num_frames - 1}: "


def assign(
    records: Rows[Record],
    probes: Probes,
    options: ShardOptions,
    earlier: Mapping[int, int] = _NOTHING_EARLIER,
    media: Mapping[str, MediaInfo] = _NO_MEDIA,
) -> Assignment:
    """Assign buckets to all probed records. Reject each record that no bucket accepts, and state the reason.

    earlier: for an append, maps the hash of a file name to the number of rows with that name in the dataset.
    media: for an append, the dataset's conditioning inputs.
    """
    stills = still_media(records, probes, options.source.media_columns, media)
    assigner = _Assigner(probes, options, stills, _Repeats(records, earlier))

    def samples() -> Iterator[PlannedSample]:
        for record in records:
            try:
                yield from assigner.samples(record)
            except Rejected as error:
                assigner.rejections.append(Rejection(record.row, record.source, str(error), error.kind))

    return Assignment(Rows.of(PlannedSample, samples()), tuple(assigner.rejections), assigner.draw_sets)


def samples_of(record: Record, probes: Probes, options: ShardOptions) -> Iterator[PlannedSample]:
    """Yield the samples of a record, without conditioning inputs.

    Sample keys are computed as if no other record had the same name.

    Raises Rejected if no bucket accepts the record.
    """
    return _Assigner(probes, options).samples(record)


class _Repeats:
    """Counts the samples that share a name, window and bucket. Names that occur in only one record are not counted.

    For a name that is already in the dataset, counting starts at the number of rows with that name, so that no key is
    used twice.
    """

    def __init__(self, records: Rows[Record], earlier: Mapping[int, int]) -> None:
        self._earlier = earlier
        names = (source if origin is None else origin.name for source, origin in records.tuples("source", "origin"))
        self._repeated = TextSet.repeated(names)
        self._counts: Counter[int] = Counter()  # by hash, which takes less memory than names

    def occurrence(self, place: tuple[str, int, int, str]) -> int:
        """Count a sample. Return the number of earlier samples with the same name, window and bucket."""
        first = self._earlier.get(stable_hash(place[0]), 0) if self._earlier else 0
        if not len(self._repeated) or place[0] not in self._repeated:
            return first
        self._counts[hash(place)] += 1
        return first + self._counts[hash(place)] - 1


@dataclass
class _Assigner:
    """Assigns buckets and keys to records. rejections: rejections of individual windows rather than whole records."""

    probes: Probes
    options: ShardOptions
    stills: frozenset[str] = frozenset()
    repeats: _Repeats | None = None
    rejections: list[Rejection] = field(default_factory=list)
    draw_sets: dict[str, Sequence[tuple[str, Fraction]]] = field(default_factory=dict)

    def samples(self, record: Record) -> Iterator[PlannedSample]:
        """Yield the samples of a record. Raises Rejected if the whole record is rejected."""
        probe, options = self.probes(record), self.options
        if isinstance(probe, Rejected):
            raise probe
        if options.clips.is_native:
            probe = probe.without(record.bars)
        _check_rate(probe, options)
        _check_audio(probe, options)
        extra = fit_media(record, probe, self.probes, options.source.media_columns, self.stills)
        try:
            windows = list(_windows(record.time_range, probe, options))
        except NoBucketError as error:
            raise Rejected(_with_rate(str(error), probe, options), kind=error.kind) from None
        kept = record.origin
        own = record_key(record.source) if kept is None else kept.record_key
        name = record.source if kept is None else kept.name
        split = "val" if kept is not None and kept.is_val else split_of(own, options.val_fraction)
        for window, bucket, draw_set in _drawn(windows, own, probe, options, self.draw_sets):
            if bucket is None:
                reason = f"{window_name(window, probe)}{draw_set}"
                self.rejections.append(Rejection(record.row, record.source, reason, "probability"))
                continue
            place = (name, window.start, window.num_frames, bucket.id)
            occurrence = 0 if self.repeats is None else self.repeats.occurrence(place)
            key = sample_key(*place, occurrence, stem_of=record.source)
            clip = _stored(probe.copy_of(record), probe, window, bucket, options)
            media = []
            for medium in extra:
                media.append(replace(medium, clip=_stored_medium(medium, window, bucket, options)))
            yield PlannedSample(key, own, record, probe, bucket, split, window, clip, tuple(media), draw_set)


_NOTHING = Probe(0, 0, 0, 0.0, 0.0, "text", TEXT_EXTENSION, False)


def assign_texts(
    records: Rows[Record], options: ShardOptions, earlier: Mapping[int, int] = _NOTHING_EARLIER
) -> Assignment:
    """Return one sample per text record. Records with equal texts share a record key and therefore a split.

    earlier: as in `assign`.
    """
    repeats, window = _Repeats(records, earlier), Window(0, 0, 0)

    def sample(record: Record) -> PlannedSample:
        own = record_key(record.source)
        place = (record.source, 0, 0, TEXT_BUCKET.id)
        key = sample_key(*place, repeats.occurrence(place))
        clip = Clip("", record.num_bytes, TEXT_EXTENSION, "text", 0, 0.0, 0.0, 0, 0)
        split = split_of(own, options.val_fraction)
        return PlannedSample(key, own, record, _NOTHING, TEXT_BUCKET, split, window, clip)

    return Assignment(Rows.of(PlannedSample, map(sample, records)), ())


def assign_audio(
    records: Rows[Record], probes: Probes, options: ShardOptions, earlier: Mapping[int, int] = _NOTHING_EARLIER
) -> Assignment:
    """Return one sample per audio file, in the longest bucket that the file fills.

    A file that no bucket accepts is rejected. A file's duration is rounded to the nearest tick.
    earlier: as in `assign`.
    """
    repeats, rejections = _Repeats(records, earlier), list[Rejection]()
    buckets = sorted(options.config.buckets, key=lambda bucket: -bucket.num_frames)

    def sample(record: Record) -> PlannedSample:
        probe = probes(record)
        if isinstance(probe, Rejected):
            raise probe
        if not probe.is_audio:
            raise Rejected(_HAS_PICTURES, kind="not-media")
        ticks = round(probe.duration_seconds * TICKS_PER_SECOND)
        bucket = next((bucket for bucket in buckets if bucket.num_frames <= ticks), None)
        if bucket is None:
            least = buckets[-1].num_frames / TICKS_PER_SECOND
            reason = f"the audio lasts {probe.duration_seconds:.3f} s, but the shortest bucket requires {least:g} s"
            raise Rejected(reason, kind="too-short")
        origin = record.origin
        own = record_key(record.source) if origin is None else origin.record_key
        name = record.source if origin is None else origin.name
        place = (name, 0, ticks, bucket.id)
        key = sample_key(*place, repeats.occurrence(place), stem_of=record.source)
        split = "val" if origin is not None and origin.is_val else split_of(own, options.val_fraction)
        clip = replace(probe.copy_of(record), num_frames=ticks, fps=float(TICKS_PER_SECOND))
        return PlannedSample(key, own, record, probe, bucket, split, Window(0, ticks, ticks), clip)

    def samples() -> Iterator[PlannedSample]:
        for record in records:
            try:
                yield sample(record)
            except Rejected as error:
                rejections.append(Rejection(record.row, record.source, str(error), error.kind))

    return Assignment(Rows.of(PlannedSample, samples()), tuple(rejections))


_HAS_PICTURES = (
    "the file has pictures, but clips.kind='audio' stores only audio files; extract its audio (ffmpeg -i IN -vn "
    "-c:a copy OUT.m4a), or shard it with --clips copy, which keeps its audio"
)


def _drawn(
    windows: Iterable[tuple[Window, Choices]],
    own: str,
    probe: Probe,
    options: ShardOptions,
    draw_sets: dict[str, Sequence[tuple[str, Fraction]]],
) -> Iterator[tuple[Window, Bucket | None, str]]:
    """Yield (window, bucket, draw set or "") for each bucket that stores a window.

    If no bucket stores the window, yield (window, None, reason) instead. A draw depends only on the seed and the
    clip, so adding input never changes the buckets of existing clips.
    """
    for window, choices in windows:
        if options.config.assign == "all" and (choices.rest or len(choices.options) > 1):
            # The loader draws a new bucket in each epoch; see plan.py, dataset/draws.py and plan/draws.py.
            members = tuple(sorted((bucket.id, probability) for bucket, probability in choices.options))
            draw_set = f"{stable_hash('draw set', *(f'{name} {share}' for name, share in members)):016x}"
            draw_sets[draw_set] = members
            yield from ((window, bucket, draw_set) for bucket in choices.buckets)
            continue
        if len(choices.options) == 1 and choices.options[0][1] == 1:
            yield window, choices.options[0][0], ""
            continue
        part = (str(window.start), str(window.num_frames)) if window_name(window, probe) else ()
        u = Fraction(stable_hash("bucket", str(options.seed), own, *part), 2**64)
        bucket = choices.draw(u)
        yield window, bucket, "" if bucket else choices.reason


def _windows(time_range: TimeRange | None, probe: Probe, options: ShardOptions) -> Iterator[tuple[Window, Choices]]:
    """Yield each window of a source, with the buckets to which it may be assigned.

    time_range: part of the source to use; None for the whole source.
    Raises NoBucketError if no bucket accepts a window, and Rejected if the time range does not fit the source.
    """
    windows = [Window(0, probe.num_frames, _num_frames(probe, options))]
    if time_range is not None and probe.is_image:
        raise Rejected(f"the row has the time range {time_range.text}, but its file is an image", kind="time-range")
    if options.makes_clips and probe.timing and not probe.is_image:
        timing, rate = Timing.from_text(probe.timing), options.frame_rate
        frames = range(probe.num_frames) if time_range is None else timing.frames_in(time_range)
        whole = timing.window(frames.start, frames.stop, rate)
        least = _least_frames(whole.num_clip_frames, probe, options)
        windows = cut_windows(timing, frames, options.clips.max_clip_seconds, rate, least)
    for window in windows:
        choices = options.config.fit(window.num_clip_frames, probe.height, probe.width, probe.is_image)
        if not choices.options:
            raise NoBucketError(choices.reason, kind=choices.kind)
        yield window, choices


def _check_rate(probe: Probe, options: ShardOptions) -> None:
    least = options.source.min_fps
    if least is not None and not probe.is_image and probe.fps < least * NEAR_RATE:
        raise Rejected(
            f"the video has {probe.fps:.4g} frames per second; at least min_fps={least} is required", kind="min-fps"
        )


def _check_audio(probe: Probe, options: ShardOptions) -> None:
    if options.clips.audio == "require" and probe.has_audio is False:
        reason = f"the audio cannot be used ({probe.audio_problem})" if probe.audio_problem else "the file has no audio"
        raise Rejected(f"{reason}, but clips.audio='require' is set", kind="no-audio")


def _num_frames(probe: Probe, options: ShardOptions) -> int:
    """Return the number of clip frames that the whole source yields, without using frame times."""
    if probe.is_image or options.clips.is_native:
        return probe.num_frames
    return num_places(options.frame_rate, probe.num_frames, probe.fps, probe.duration_seconds)


def _least_frames(most: int, probe: Probe, options: ShardOptions) -> int:
    """Return the smallest frame count above 1 at which a bucket accepts the source; `most` if no smaller count fits."""
    config = options.config
    counts = config.counts if config.is_dynamic else {bucket.num_frames for bucket in config.table.candidates}
    fewer = (count + config.spare_frames for count in sorted(counts) if 1 < count < most)
    return next((count for count in fewer if config.fit(count, probe.height, probe.width).options), most)


def _with_rate(reason: str, probe: Probe, options: ShardOptions) -> str:
    rate = options.frame_rate.fps
    is_rated = rate is not None and not probe.is_image
    return f"{reason} (at fps={rate}; the source has {probe.num_frames} frames)" if is_rated else reason


def _stored(copy: Clip, probe: Probe, window: Window, bucket: Bucket, options: ShardOptions) -> Clip:
    """Return the clip that stores a window of a file.

    If the clip must first be made, the result contains only the facts that are known in advance.
    """
    is_native, seconds = options.clips.is_native, window.num_frames / probe.num_frames * probe.duration_seconds
    if not is_native and window.num_frames == probe.num_frames:
        return copy
    cut = replace(copy, path="", num_bytes=0, extension="", num_frames=window.num_frames, duration_seconds=seconds)
    if not is_native:
        return cut
    return replace(cut, codec="", num_frames=window.num_clip_frames, width=bucket.width, height=bucket.height)


def _stored_medium(medium: PlannedMedium, window: Window, bucket: Bucket, options: ShardOptions) -> Clip:
    """Return the clip that stores a conditioning input for a window of the sample's source; see `_stored`."""
    if not medium.column.is_audio:
        shown = Window(0, 1, 1) if medium.is_still else window
        return _stored(medium.clip, medium.probe, shown, bucket, options)
    return (
        replace(medium.clip, path="", num_bytes=0, extension="", codec="") if options.clips.is_native else medium.clip
    )


def sample_key(
    source: str, window_start: int, window_num_frames: int, bucket_id: str, occurrence: int = 0, *, stem_of: str = ""
) -> str:
    """Return a sample's key: a readable stem followed by a hash. Adding input never changes existing keys.

    occurrence: number of earlier rows with the same file, window and bucket.
    stem_of: name from which to derive the stem, instead of `source`.
    """
    parts = [source, str(window_start), str(window_num_frames), bucket_id]
    if occurrence:
        parts.append(str(occurrence))
    return f"{safe_stem(stem_of or source)}-{stable_hash(*parts):016x}"


def record_key(source: str) -> str:
    """Return the key that all samples from one file share."""
    return f"{safe_stem(source)}-{stable_hash(source):016x}"


@lru_cache(1)  # a record's two keys have the same stem
def safe_stem(source: str) -> str:
    """Return a file's name for use in a key. Dots are replaced, because tar readers split names at the first dot."""
    stem = posixpath.splitext(posixpath.basename(source))[0]
    return _UNSAFE.sub("_", stem)[:MAX_STEM_CHARS].strip("_-") or "clip"


def split_of(own: str, val_fraction: float) -> str:
    """Return "train" or "val". The split depends only on the record key, so adding input never moves a sample."""
    return "val" if val_fraction and stable_hash("split", own) < val_fraction * 2.0**64 else "train"


def stable_hash(*parts: str) -> int:
    """Return a 64-bit hash of the given texts. The hash is the same on every machine and in every version."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")
