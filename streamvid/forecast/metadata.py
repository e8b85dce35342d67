"""Forecast for metadata. Rows are assigned to buckets by the sizes in the metadata, and no media file is opened.

Rows with the same frame size form a group if they are long enough for the same bucket frame counts. Buckets are chosen
per group, so even ten million rows are processed quickly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from posixpath import normpath
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.buckets.batch_size import batch_sizes
from streamvid.buckets.bucket import Bucket
from streamvid.buckets.classes import Choices, Shape
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.document import bucket_config_to_json
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.pick import exact_seconds
from streamvid.buckets.policy import cover_scale, cropped_share
from streamvid.errors import SourceError
from streamvid.forecast.counts import count_run, failure_of
from streamvid.forecast.facts import FactsBlock, FactsFile, open_facts
from streamvid.forecast.host import host_memory
from streamvid.forecast.loads import rank_loads
from streamvid.forecast.run import (
    BucketShape,
    LeftOut,
    LeftOutRow,
    MetadataFacts,
    PlannedRun,
    RunDetails,
    RunForecast,
)
from streamvid.plan.cost import cost_classes, default_costs
from streamvid.plan.epoch import EpochPlan
from streamvid.plan.hashing import uniform_array
from streamvid.plan.options import PlanOptions
from streamvid.sharder.planning.assign import record_key, stable_hash
from streamvid.sharder.source.summary import Counted, InputSummary, SourceSummary

Int64Array: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]

MAX_SIDE = (1 << 20) - 1
_SIDE_BITS = 20
_MAX_FRAMES = (1 << 31) - 1
_MAX_EXAMPLES = 3
_NEAR = 1e-6  # distance from a whole number of frames within which float64 may round to the wrong side

UNREADABLE, NO_SIZE, NO_FRAMES, NO_DURATION = "unreadable-row", "no-size", "no-frame-count", "unknown-duration"


def forecast_metadata(
    source: Path, run: PlannedRun, config: BucketConfig, video_column: str | None = None
) -> RunForecast:
    """Return the forecast for a run on the media files in `source`, sharded into the buckets in `config`.

    Raises SourceError if the metadata cannot be read, or if no row is assigned to a bucket.
    """
    facts = open_facts(source, video_column)
    found = assign_rows(facts.blocks(), config, run.options.seed)
    buckets = {name: found.buckets[name].bucket for name in found.counts}
    if not buckets:
        raise SourceError(f"no row in {source} is assigned to a bucket: {_why(found)}")
    sizes = batch_sizes(list(buckets.values()), _sizes(run, config, buckets), run.max_tokens_per_batch, config.model)
    table = default_costs(buckets.values(), config.model)
    costs = (run.costs or table).costs(sizes)

    def plan_of(options: PlanOptions) -> EpochPlan:
        counts = {name: [count] for name, count in found.counts.items()}
        return EpochPlan(counts, sizes, options, run.num_ranks, costs=costs)

    counts, failure = count_run(plan_of, run.options, run.num_epochs), failure_of(plan_of(run.options), run.num_epochs)
    details = None
    if run.details and failure is None:
        memory = host_memory(
            list(buckets.values()), sizes, found.max_bytes, run.host, run.prefetch_bytes, run.num_ranks
        )
        details = RunDetails(rank_loads(plan_of(run.options), sizes, table.tokens, costs).summary(), memory, None)
    return RunForecast(
        source=str(source),
        about=MetadataFacts(
            columns=dict(facts.columns),
            bucket_config=bucket_config_to_json(config),
            num_rows=found.num_rows,
            num_groups=found.num_groups,
            frames_are_estimated=found.frames_are_estimated,
            left_out=tuple(sorted(found.left_out.values(), key=lambda left: -left.expected)),
        ),
        input=_summary(source, facts, found, config.frame_rate),
        counts=counts,
        cost_classes=cost_classes(costs) if run.options.sync == "cost" else None,
        costs_are_measured=run.costs is not None,
        shapes={name: bucket.shape() for name, bucket in sorted(found.buckets.items())},
        details=details,
        failure=failure,
        notes=_notes(found, config),
    )


def _summary(source: Path, facts: FactsFile, found: AssignedRows, rate: FrameRate) -> InputSummary:
    row = SourceSummary(str(source), "metadata" if source.is_file() else "parquet", found.num_rows, columns=facts.uses)
    if facts.caption_column is not None:
        row = replace(row, num_usable=found.num_rows, num_captions=found.num_captions)
    return InputSummary(
        sources=(row,),
        fps=(found.fps_min, found.fps_max) if found.fps_max else None,
        read_fps=None if rate.fps is None else float(rate.fps),
        repeated=Counted(found.num_repeated),
        num_dropped=found.num_dropped,
        num_without_bucket=sum(left.num_rows for left in found.left_out.values()),
    )


def _sizes(run: PlannedRun, config: BucketConfig, buckets: Mapping[str, Bucket]) -> int | Mapping[str, int] | None:
    """Return the batch sizes that the run sets or, if it sets none, the batch sizes in the bucket configuration."""
    if run.max_tokens_per_batch is not None or isinstance(run.batch_size, int | Mapping):
        return run.batch_size if isinstance(run.batch_size, int | Mapping) else None
    return {name: size for name, size in config.batch_sizes.items() if name in buckets} or None


def _notes(found: AssignedRows, config: BucketConfig) -> tuple[str, ...]:
    notes = ["sizes are taken from the metadata; `streamvid shard` probes the files, so its counts may differ"]
    if found.frames_are_estimated:
        notes.append("for rows without num_frames, the number of frames is estimated as duration x fps, rounded")
    if not found.has_bytes:
        notes.append("the metadata has no file sizes (num_bytes), so memory for clips read ahead is not counted")
    if config.assign == "all":
        notes.append("--assign all stores a clip in each bucket that accepts it; counts are for one epoch's draws")
    return tuple(notes)


def _why(found: AssignedRows) -> str:
    kinds = sorted(found.left_out.values(), key=lambda left: -left.num_rows)
    if not kinds:
        return "the metadata has no rows"
    reasons = [f"{left.kind}: rows: {left.num_rows}, for example: {left.examples[0].reason}" for left in kinds]
    return "; ".join([*reasons, "fix the metadata, or choose other buckets"])


# ----------------------------------------------------------------------------------------------------- assigned rows


@dataclass(slots=True)
class AssignedBucket:
    """Rows assigned to one bucket.

    expected: sum of the probabilities with which rows are assigned to this bucket.
    drawn: number of rows that are assigned to this bucket. The remaining fields cover only these rows.
    """

    bucket: Bucket
    expected: Fraction = Fraction(0)
    drawn: int = 0
    crop_sum: float = 0.0
    crop_max: float = 0.0
    upscale_sum: float = 0.0
    frames: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0

    def shape(self) -> BucketShape:
        """Return statistics on the rows assigned to this bucket. Frames are counted at the requested frame rate."""
        count = max(1, self.drawn)
        return BucketShape(
            num_samples=self.drawn,
            crop_mean=self.crop_sum / count,
            crop_max=self.crop_max,
            upscale_mean=self.upscale_sum / count,
            frames_unused_share=1 - self.bucket.num_frames * self.drawn / self.frames if self.frames else 0.0,
            frames_mean=self.frames / count,
            bytes_mean=self.num_bytes / count,
            seconds_mean=self.seconds / count,
            expected=float(self.expected),
        )


@dataclass
class AssignedRows:
    """All rows in a metadata file, assigned to `buckets` or counted in `left_out`.

    num_repeated: number of videos in which some frames are repeated to reach the requested frame rate.
    num_dropped: number of videos in which some frames are dropped to reach the requested frame rate.
    fps_min: lowest frame rate of the videos; infinity if all rates are unknown.
    fps_max: highest frame rate of the videos; 0 if all rates are unknown.
    num_groups: number of groups of rows that have the same possible buckets.
    max_bytes: size of the largest file in bytes; 0 if unknown.
    has_bytes: True if the metadata has a column of file sizes.
    frames_are_estimated: True if some frame counts were computed from duration and fps.
    """

    num_rows: int = 0
    num_captions: int = 0
    num_repeated: int = 0
    num_dropped: int = 0
    fps_min: float = math.inf
    fps_max: float = 0.0
    num_groups: int = 0
    max_bytes: int = 0
    has_bytes: bool = False
    frames_are_estimated: bool = False
    buckets: dict[str, AssignedBucket] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Mapping from bucket id to number of assigned rows, sorted by id, without empty buckets."""
        return {name: found.drawn for name, found in sorted(self.buckets.items()) if found.drawn}


def assign_rows(blocks: Iterable[FactsBlock], config: BucketConfig, seed: int) -> AssignedRows:
    """Assign all rows to buckets. Random choices among buckets match the sharder's choices with this seed."""
    found = AssignedRows()
    groups: dict[int, _RowGroup] = {}
    lengths = np.array(_lengths(config), np.int64)
    for block in blocks:
        found.num_rows += len(block.rows) + len(block.broken)
        found.num_captions += block.num_captions
        for row, reason in block.broken.items():
            _leave_out(found, UNREADABLE, 1, LeftOutRow(row, "", reason))
        rows = _SizedRows.of(block, config.frame_rate, found)
        _count_rates(found, rows.fps[(rows.frames > 1) & np.isfinite(rows.fps)], config.frame_rate)
        codes = rows.codes(lengths)
        kinds, firsts, inverse = np.unique(codes, return_index=True, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        ends = np.cumsum(np.bincount(inverse, minlength=len(kinds))).tolist()
        for number, (code, first) in enumerate(zip(kinds.tolist(), firsts.tolist(), strict=True)):
            group = groups.get(code)
            if group is None:
                group = groups[code] = _group(config, rows.shape(first))
            members = order[ends[number - 1] if number else 0 : ends[number]]
            _count(found, group, rows, members, seed)
    found.num_groups = len(groups)
    return found


def _count_rates(found: AssignedRows, fps: Float64Array, rate: FrameRate) -> None:
    found.fps_min = min(found.fps_min, float(fps.min(initial=math.inf)))
    found.fps_max = max(found.fps_max, float(fps.max(initial=0.0)))
    found.num_repeated += int((fps < rate.repeats_below).sum())
    found.num_dropped += int((fps > rate.drops_above).sum())


def _lengths(config: BucketConfig) -> list[int]:
    """Return the buckets' frame counts in ascending order.

    The bucket of a clip depends on which of these counts the clip reaches.
    """
    if config.opensora is not None:  # including counts of probability 0, which keep clips from other buckets
        counts = {frames for by_frames in config.opensora.bucket_config.values() for frames in by_frames}
        return sorted(count + config.spare_frames for count in counts)
    return sorted(config.counts if config.is_dynamic else {bucket.num_frames for bucket in config.table.candidates})


# ---------------------------------------------------------------------------------------------------- rows as numbers


@dataclass(frozen=True)
class _SizedRows:
    """Rows in a block that have a valid size and frame count.

    places: indices of these rows in the block.
    """

    block: FactsBlock
    places: Int64Array
    frames: Int64Array  # as stored
    reached: Int64Array  # at the requested rate
    height: Int64Array
    width: Int64Array
    fps: Float64Array
    seconds: Float64Array
    num_bytes: Float64Array

    @staticmethod
    def of(block: FactsBlock, rate: FrameRate, found: AssignedRows) -> _SizedRows:
        """Return the usable rows in a block, and count the other rows as left out."""
        empty = np.full(len(block.rows), np.nan)
        values = {name: block.values.get(name, empty) for name in ("height", "width", "fps", "seconds", "num_bytes")}
        fps = np.where(values["fps"] > 0, values["fps"], np.nan)
        frames = block.values.get("num_frames", empty)
        if "fps" in block.values and "seconds" in block.values:
            guessed = np.rint(values["seconds"] * fps)
            found.frames_are_estimated |= bool((np.isnan(frames) & np.isfinite(guessed)).any())
            frames = np.where(np.isnan(frames), guessed, frames)
        tall, wide = (_is_count(values[name], MAX_SIDE) for name in ("height", "width"))
        sized, counted = tall & wide, _is_count(frames, _MAX_FRAMES)
        _unusable(found, block, ~tall, NO_SIZE, lambda at: _no_count("height", values["height"][at], MAX_SIDE))
        _unusable(found, block, tall & ~wide, NO_SIZE, lambda at: _no_count("width", values["width"][at], MAX_SIDE))
        _unusable(
            found, block, sized & ~counted, NO_FRAMES, lambda at: _no_count("num_frames", frames[at], _MAX_FRAMES)
        )
        found.has_bytes |= "num_bytes" in block.values
        stored = np.where(sized & counted, frames, 0).astype(np.int64)
        seconds = np.where(values["seconds"] > 0, values["seconds"], stored / fps)
        reached = _reached(rate, stored, fps, seconds)
        timing = f"frame rate rule {rate.rule!r} requires a duration or an fps above 0"
        _unusable(found, block, sized & counted & (reached < 0), NO_DURATION, lambda _: timing)
        places = np.flatnonzero(sized & counted & (reached >= 0))
        height, width = (values[name][places].astype(np.int64) for name in ("height", "width"))
        num_bytes = np.nan_to_num(values["num_bytes"][places])
        found.max_bytes = max(found.max_bytes, int(num_bytes.max(initial=0)))
        return _SizedRows(
            block, places, stored[places], reached[places], height, width, fps[places], seconds[places], num_bytes
        )

    def codes(self, lengths: Int64Array) -> Int64Array:
        """Return one code per row. Rows with equal codes have the same possible buckets and the same probabilities."""
        # An image is a row with one frame.
        reach = np.where(self.frames == 1, 0, np.searchsorted(lengths, self.reached, side="right") + 1)
        codes: Int64Array = (reach << (2 * _SIDE_BITS)) | (self.height << _SIDE_BITS) | self.width
        return codes

    def shape(self, place: int) -> Shape:
        """Return the values of one row that determine its bucket."""
        frames, height, width = (int(column[place]) for column in (self.reached, self.height, self.width))
        return Shape(frames, height, width, is_image=bool(self.frames[place] == 1))


def _is_count(values: Float64Array, most: int) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (values >= 1) & (values <= most) & (values == np.floor(values))
    return found


def _no_count(name: str, value: float, most: int) -> str:
    problem = "is missing or not a number" if math.isnan(value) else f"is {value:.12g}"
    return f"{name} {problem}; it must be a whole number from 1 to {most}"


def _unusable(
    found: AssignedRows, block: FactsBlock, mask: npt.NDArray[np.bool_], kind: str, reason: Callable[[int], str]
) -> None:
    """Count the rows in `mask` as left out.

    reason: function that returns the reason for a row, given the index of the row in the block.
    """
    places = np.flatnonzero(mask)
    if len(places):
        first = int(places[0])
        example = LeftOutRow(int(block.rows[first]), block.source(first), reason(first))
        _leave_out(found, kind, len(places), example)


def _reached(rate: FrameRate, frames: Int64Array, fps: Float64Array, seconds: Float64Array) -> Int64Array:
    """Return each row's number of frames at the requested rate, or -1 if unknown. Images have one frame."""
    if rate.fps is None or rate.rule == "native":
        return frames
    if rate.rule == "cap":
        rates, inverse = np.unique(np.nan_to_num(fps), return_inverse=True)
        intervals = np.array([rate.interval(value or None) for value in rates.tolist()], np.int64)
        return np.where(frames == 1, frames, frames // intervals[inverse])
    exact = seconds * float(rate.fps) + (0.5 if rate.rule == "resample" else 0.0)
    known = np.isfinite(exact)
    result = np.where(known, np.floor(np.where(known, exact, 0)), -1).astype(np.int64)
    if rate.rule == "resample":
        result = np.where(known, np.maximum(result, 1), -1)
    for place in np.flatnonzero(known & (np.abs(exact - np.rint(exact)) < _NEAR)).tolist():
        result[place] = rate.num_frames(int(frames[place]), None, exact_seconds(float(seconds[place])))
    return np.where(frames == 1, frames, result)


# ---------------------------------------------------------------------------------------------------- bucket choices


@dataclass(slots=True)
class _RowGroup:
    """Rows with the same frame size that are long enough for the same frame counts, and their possible buckets.

    waste: (cropped share, upscaling factor) for each possible bucket.
    ends: cumulative probabilities of the buckets; None if all rows go to one bucket or are left out.
    """

    choices: Choices
    waste: tuple[tuple[float, float], ...]
    ends: Float64Array | None


def _group(config: BucketConfig, clip: Shape) -> _RowGroup:
    choices = config.fit(clip.num_frames, clip.height, clip.width, clip.is_image)
    sizes = [(clip.height, clip.width, bucket.height, bucket.width) for bucket in choices.buckets]
    waste = tuple((float(cropped_share(*size)), float(cover_scale(*size))) for size in sizes)
    is_certain = not choices.options or choices.options[0][1] == 1
    ends = None if is_certain else np.cumsum([float(probability) for _, probability in choices.options])
    return _RowGroup(choices, waste, ends)


def _count(found: AssignedRows, group: _RowGroup, rows: _SizedRows, members: Int64Array, seed: int) -> None:
    choices, count = group.choices, len(members)
    if group.ends is None:
        takers = [members] if choices.options else []
    else:
        taken = np.searchsorted(group.ends, _draws(seed, rows.block, rows.places[members]), side="right")
        takers = [members[taken == number] for number in range(len(choices.options))]
    for (bucket, probability), waste, mine in zip(choices.options, group.waste, takers, strict=True):
        row = found.buckets.setdefault(bucket.id, AssignedBucket(bucket))
        row.expected += probability * count
        _add(row, waste, rows, mine)
    num_out = count - sum(len(mine) for mine in takers)
    if choices.rest:
        place = int(rows.places[int(members[0])])
        example = LeftOutRow(int(rows.block.rows[place]), rows.block.source(place), choices.reason)
        _leave_out(found, choices.kind or "probability", num_out, example, choices.rest * count)


def _draws(seed: int, block: FactsBlock, places: Int64Array) -> Float64Array:
    """Return one number in [0, 1) per row.

    The number is derived from the row's source, as in the sharder, or from the row number if rows have no source.
    """
    if block.sources is None:
        return uniform_array(seed, block.rows[places])
    keys = (record_key(normpath(block.source(place))) for place in places.tolist())
    return np.array([stable_hash("bucket", str(seed), key) for key in keys], np.float64) * 2.0**-64


def _add(bucket: AssignedBucket, waste: tuple[float, float], rows: _SizedRows, members: Int64Array) -> None:
    crop, upscale = waste
    count = len(members)
    if not count:
        return
    bucket.drawn += count
    bucket.crop_sum += crop * count
    bucket.crop_max = max(bucket.crop_max, crop)
    bucket.upscale_sum += upscale * count
    bucket.frames += float(rows.reached[members].sum())
    bucket.num_bytes += float(rows.num_bytes[members].sum())
    bucket.seconds += float(np.nan_to_num(rows.seconds[members]).sum())


def _leave_out(
    found: AssignedRows, kind: str, num_rows: int, example: LeftOutRow, expected: Fraction | None = None
) -> None:
    left = found.left_out.setdefault(kind, LeftOut(kind))
    left.num_rows += num_rows
    left.expected += num_rows if expected is None else expected
    if len(left.examples) < _MAX_EXAMPLES and example.reason not in {one.reason for one in left.examples}:
        left.examples.append(example)
