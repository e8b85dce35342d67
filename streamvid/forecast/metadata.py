"""Which buckets the rows of a metadata file would go to, by the sizes that it states: nothing is opened or probed.

Rows that agree in size and in the bucket lengths that they can fill are counted together, so that ten million rows ask
as many questions as there are such groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.buckets import Bucket
from streamvid.buckets.choices import Choices
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.policy import cover_scale, cropped_share
from streamvid.forecast.facts import FactsBlock

Int64Array: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]

MAX_SIDE = (1 << 20) - 1
_SIDE_BITS = 20
_MAX_FRAMES = (1 << 31) - 1
_MAX_EXAMPLES = 3
_NEAR = 1e-6  # of a whole number of frames, where float64 may round to the other side

UNREADABLE, NO_SIZE, NO_FRAMES, NO_DURATION = "unreadable-row", "no-size", "no-frame-count", "unknown-duration"


@dataclass(slots=True)
class BucketForecast:
    """What goes to a bucket. expected: by probabilities; drawn: as whole rows. Sums are over drawn rows."""

    bucket: Bucket
    expected: Fraction = Fraction(0)
    drawn: int = 0
    crop_sum: float = 0.0
    crop_max: float = 0.0
    upscale_sum: float = 0.0
    frames: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values. frames_unused_share: of the rows' frames, at the frame rate asked for, what one pass leaves."""
        count = max(1, self.drawn)
        used = self.bucket.num_frames * self.drawn
        return {
            "expected": float(self.expected),
            "crop_mean": self.crop_sum / count,
            "crop_max": self.crop_max,
            "upscale_mean": self.upscale_sum / count,
            "frames_unused_share": 1 - used / self.frames if self.frames else 0.0,
            "source_bytes": round(self.num_bytes),
            "source_seconds": self.seconds,
        }


@dataclass(slots=True)
class LeftOut:
    """Rows that go nowhere, of one kind: how many on the mean, and some of them as (row, source, reason)."""

    kind: str
    expected: Fraction = Fraction(0)
    drawn: int = 0
    examples: list[tuple[int, str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        examples = [{"row": row, "source": source, "reason": reason} for row, source, reason in self.examples]
        return {"kind": self.kind, "rows": self.drawn, "expected": float(self.expected), "examples": examples}


@dataclass
class MetadataForecast:
    """The whole file: every row is in `buckets` or in `left_out`.

    num_groups: groups of rows that were told apart. max_bytes: of the largest file, 0 where sizes are not stated.
    has_bytes, has_seconds: whether the file states them. frames_are_estimated: from duration and fps.
    """

    num_rows: int = 0
    num_groups: int = 0
    max_bytes: int = 0
    has_bytes: bool = False
    has_seconds: bool = False
    frames_are_estimated: bool = False
    buckets: dict[str, BucketForecast] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Bucket id → rows, those without any left out; by id."""
        return {name: found.drawn for name, found in sorted(self.buckets.items()) if found.drawn}


@dataclass(slots=True)
class _Group:
    """Rows of one size and one reachable length, and where they may go: (bucket, probability, crop, upscale)."""

    choices: Choices
    rest: Fraction
    waste: tuple[tuple[float, float], ...]
    ends: Float64Array | None  # of the probabilities, added up; None: one bucket takes all, or none takes any


def forecast_metadata(
    blocks: Iterable[FactsBlock],
    config: BucketConfig,
    draws: Callable[[FactsBlock, Int64Array], Float64Array],
) -> MetadataForecast:
    """Assign all rows. draws: (block, places of rows) → float64 in [0, 1), where keep probabilities decide."""
    found = MetadataForecast()
    groups: dict[int, _Group] = {}
    lengths = np.array(_lengths(config), np.int64)
    for block in blocks:
        found.num_rows += block.num_rows + block.num_broken
        if block.num_broken:
            _leave_out(found, UNREADABLE, block.num_broken, (block.row, "", "cannot be read as a row of the file"))
        rows = _Rows.of(block, config.frame_rate, found)
        codes = rows.codes(lengths)
        kinds, firsts, inverse = np.unique(codes, return_index=True, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        ends = np.cumsum(np.bincount(inverse, minlength=len(kinds))).tolist()
        for number, (code, first) in enumerate(zip(kinds.tolist(), firsts.tolist(), strict=True)):
            group = groups.get(code)
            if group is None:
                group = groups[code] = _group(config, *rows.shape(first))
            members = order[ends[number - 1] if number else 0 : ends[number]]
            _count(found, group, rows, members, draws)
    found.num_groups = len(groups)
    return found


def _lengths(config: BucketConfig) -> list[int]:
    """Frame counts, ascending: a choice depends on a clip's frames by those of them that it reaches, and no more."""
    if config.bucket_config:  # those of probability 0 too, which keep clips from others
        return sorted({frames for by_frames in config.bucket_config.values() for frames in by_frames})
    return sorted(config.counts if config.is_dynamic else {bucket.num_frames for bucket in config.table.candidates})


# ---------------------------------------------------------------------------------------------------- rows as numbers


@dataclass(frozen=True)
class _Rows:
    """Rows of a block that state a size and a number of frames; places: theirs in the block."""

    block: FactsBlock
    places: Int64Array
    frames: Int64Array  # as stored
    reached: Int64Array  # at the rate asked for
    height: Int64Array
    width: Int64Array
    fps: Float64Array
    seconds: Float64Array
    num_bytes: Float64Array

    @staticmethod
    def of(block: FactsBlock, rate: FrameRate, found: MetadataForecast) -> _Rows:
        """The usable rows; the others are counted as left out."""
        empty = np.full(block.num_rows, np.nan)
        values = {name: block.values.get(name, empty) for name in ("height", "width", "fps", "seconds", "num_bytes")}
        fps = np.where(values["fps"] > 0, values["fps"], np.nan)
        frames = block.values.get("num_frames", empty)
        if "fps" in block.values and "seconds" in block.values:
            guessed = np.rint(values["seconds"] * fps)
            found.frames_are_estimated |= bool((np.isnan(frames) & np.isfinite(guessed)).any())
            frames = np.where(np.isnan(frames), guessed, frames)
        sized = _is_count(values["height"], MAX_SIDE) & _is_count(values["width"], MAX_SIDE)
        counted = _is_count(frames, _MAX_FRAMES)
        _unusable(found, block, ~sized, NO_SIZE, "height and width", values["height"])
        _unusable(found, block, sized & ~counted, NO_FRAMES, "num_frames", frames)
        found.has_bytes |= "num_bytes" in block.values
        found.has_seconds |= "seconds" in block.values
        stored = np.where(sized & counted, frames, 0).astype(np.int64)
        seconds = np.where(values["seconds"] > 0, values["seconds"], stored / fps)
        reached = _reached(rate, stored, fps, seconds)
        _unusable(found, block, sized & counted & (reached < 0), NO_DURATION, "duration", seconds)
        places = np.flatnonzero(sized & counted & (reached >= 0))
        height, width = (values[name][places].astype(np.int64) for name in ("height", "width"))
        num_bytes = np.nan_to_num(values["num_bytes"][places])
        found.max_bytes = max(found.max_bytes, int(num_bytes.max(initial=0)))
        return _Rows(
            block, places, stored[places], reached[places], height, width, fps[places], seconds[places], num_bytes
        )

    def codes(self, lengths: Int64Array) -> Int64Array:
        """A number for each row: rows with equal ones go to the same buckets with the same probabilities."""
        # An image is told from a video by its one frame.
        reach = np.where(self.frames == 1, 0, np.searchsorted(lengths, self.reached, side="right") + 1)
        codes: Int64Array = (reach << (2 * _SIDE_BITS)) | (self.height << _SIDE_BITS) | self.width
        return codes

    def shape(self, place: int) -> tuple[int, int, int, bool]:
        """(frames at the rate asked for, height, width, is it an image) of one row."""
        columns = (self.reached, self.height, self.width)
        frames, height, width = (int(column[place]) for column in columns)
        return frames, height, width, bool(self.frames[place] == 1)


def _is_count(values: Float64Array, most: int) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (values >= 1) & (values <= most) & (values == np.floor(values))
    return found


def _unusable(
    found: MetadataForecast, block: FactsBlock, mask: npt.NDArray[np.bool_], kind: str, name: str, values: Float64Array
) -> None:
    places = np.flatnonzero(mask)
    if len(places):
        first = int(places[0])
        value = float(values[first])
        said = "is missing or no number" if np.isnan(value) else f"is {value:g}; allowed are whole numbers from 1 on"
        _leave_out(found, kind, len(places), (block.row + first, block.source(first), f"{name} {said}"))


def _reached(rate: FrameRate, frames: Int64Array, fps: Float64Array, seconds: Float64Array) -> Int64Array:
    """`rate.num_frames` of each row; -1 where it needs what the row does not state. Images keep their frame."""
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
        duration = Fraction(float(seconds[place])).limit_denominator(10**6)
        result[place] = rate.num_frames(int(frames[place]), None, duration)
    return np.where(frames == 1, frames, result)


# ------------------------------------------------------------------------------------------------------ where they go


def _group(config: BucketConfig, num_frames: int, height: int, width: int, is_image: bool) -> _Group:
    choices = config.fit(num_frames, height, width, is_image)
    waste = tuple(
        (
            float(cropped_share(height, width, bucket.height, bucket.width)),
            float(cover_scale(height, width, bucket.height, bucket.width)),
        )
        for bucket in choices.buckets
    )
    is_certain = not choices.options or choices.options[0][1] == 1
    ends = None if is_certain else np.cumsum([float(probability) for _, probability in choices.options])
    return _Group(choices, choices.rest, waste, ends)


def _count(
    found: MetadataForecast,
    group: _Group,
    rows: _Rows,
    members: Int64Array,
    draws: Callable[[FactsBlock, Int64Array], Float64Array],
) -> None:
    choices, count = group.choices, len(members)
    if group.ends is None:
        takers = [members] if choices.options else []
    else:
        taken = np.searchsorted(group.ends, draws(rows.block, rows.places[members]), side="right")
        takers = [members[taken == number] for number in range(len(choices.options))]
    for (bucket, probability), waste, mine in zip(choices.options, group.waste, takers, strict=True):
        row = found.buckets.setdefault(bucket.id, BucketForecast(bucket))
        row.expected += probability * count
        _add(row, waste, rows, mine)
    num_out = count - sum(len(mine) for mine in takers)
    if group.rest:
        first = int(members[0])
        example = (rows.block.row + int(rows.places[first]), rows.block.source(int(rows.places[first])), choices.reason)
        _leave_out(found, choices.kind or "probability", num_out, example, group.rest * count)


def _add(row: BucketForecast, waste: tuple[float, float], rows: _Rows, members: Int64Array) -> None:
    crop, upscale = waste
    count = len(members)
    if not count:
        return
    row.drawn += count
    row.crop_sum += crop * count
    row.crop_max = max(row.crop_max, crop)
    row.upscale_sum += upscale * count
    row.frames += float(rows.reached[members].sum())
    row.num_bytes += float(rows.num_bytes[members].sum())
    row.seconds += float(np.nan_to_num(rows.seconds[members]).sum())


def _leave_out(
    found: MetadataForecast, kind: str, drawn: int, example: tuple[int, str, str], expected: Fraction | None = None
) -> None:
    left = found.left_out.setdefault(kind, LeftOut(kind))
    left.drawn += drawn
    left.expected += drawn if expected is None else expected
    if len(left.examples) < _MAX_EXAMPLES and example[2] not in {reason for _, _, reason in left.examples}:
        left.examples.append(example)
