"""Random choices for a delivery, and the frames and crop that they determine (SAMPLE-1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

import numpy as np

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.pick import Pick, Way, num_places
from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.loader.view.index_row import IndexRow
from streamvid.plan.hashing import hash64, hash_below, hash_text, permute, uniform
from streamvid.video.transform import Crop

Temporal: TypeAlias = Literal["random", "head", "middle", "uniform", "chunk", "full", "opensora"]
Spatial: TypeAlias = Literal["resize_crop", "center", "random_crop", "rand_size_crop"]

MAX_INTERVAL = 1 << 16

# Each kind of choice has its own number, so that adding a kind does not change the others.
_TEMPORAL_CROP = 1
CAPTION_DROPOUT = 2
_SUBSTITUTE = 3
_INTERVAL = 7
_CHUNK = 8
_PLACE_LEFT, _PLACE_TOP, _SCALE = 9, 10, 11
CAPTION_COLUMN, CAPTION, CAPTION_PART = 12, 13, 14
_SAMPLE_SEED = 15

_FULL_SCALE = 1 << 16  # a crop's scale of 1

_WAY_OF_RATE_RULE: dict[str, Way] = {"native": "step", "cap": "step", "resample": "time", "fix_frame_rate": "number"}
_DRAWN = ("random", "opensora")
_WHOLE = ("resize_crop", "center")


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """Options that select the frames and the crop to deliver from a clip."""

    temporal: Temporal = option(
        "random",
        help="Frames to deliver: random (a random window), head, middle, uniform (spread over the clip), chunk "
        "(adjacent whole windows, one per visit; the remainder is never shown), full (the whole clip), or opensora "
        "(a random window, drawn as in Open-Sora).",
    )
    max_interval: int = option(
        1,
        help="Maximum distance between consecutive delivered frames, in frames of the clip. Each delivery draws a "
        "distance from 1 to this value.",
        minimum=1,
        maximum=MAX_INTERVAL,
    )
    spatial: Spatial = option(
        "resize_crop",
        help="Crop of each frame, before it is scaled to the bucket's size: resize_crop (centered), center "
        "(centered; square buckets only), random_crop (at a random position) or rand_size_crop (with a random "
        "position and size).",
    )
    spatial_scale: tuple[float, float] | None = option(
        None,
        help="Minimum and maximum size of the crop for rand_size_crop, as fractions of the largest possible crop's "
        "sides, such as (0.5, 1.0).",
    )

    def __post_init__(self) -> None:
        check_options(self)
        most = self.max_interval
        if most > 1 and self.temporal not in _DRAWN:
            raise ConfigError(
                f"max_interval={most} cannot be combined with temporal={self.temporal!r}, which draws no interval; "
                "use temporal='random', or leave max_interval out"
            )
        if self.spatial == "rand_size_crop" and self.spatial_scale is None:
            raise ConfigError("spatial='rand_size_crop' requires spatial_scale; set it to a range such as (0.5, 1.0)")
        if self.spatial_scale is not None:
            if self.spatial != "rand_size_crop":
                raise ConfigError(
                    f"spatial_scale={self.spatial_scale!r} requires spatial='rand_size_crop', not {self.spatial!r}; "
                    "leave spatial_scale out, or change spatial"
                )
            _check_range(self.spatial_scale)

    @property
    def is_plain(self) -> bool:
        """True if the view selects a random window of consecutive frames and no random crop."""
        return self.temporal == "random" and self.max_interval == 1 and self.spatial in _WHOLE

    def check(self, clips: str, buckets: list[Bucket], where: str) -> None:
        """Raise ConfigError if a dataset's clips (Manifest.clips) or one of its buckets does not allow this view."""
        if clips == "audio" and self.spatial != "resize_crop":
            raise ConfigError(
                f"view.spatial={self.spatial!r}: {where} contains audio files, which have no pictures; leave "
                "view.spatial out"
            )
        if clips == "audio" and (self.temporal == "uniform" or self.max_interval > 1):
            one = "max_interval" if self.max_interval > 1 else "temporal"
            raise ConfigError(
                f"view.{one}={getattr(self, one)!r} changes the speed of clips, but {where} contains audio files, "
                "which are delivered only at their original speed; use view.temporal='random', 'head', "
                "'middle', 'chunk' or "
                "'full' without view.max_interval"
            )
        if clips == "native" and self.spatial != "resize_crop":
            raise ConfigError(
                f"view.spatial={self.spatial!r}: {where} contains native clips, whose frames were scaled and cropped "
                "when they were encoded; leave view.spatial out, or shard the dataset again with clips='copy'"
            )
        for bucket in buckets if self.spatial == "center" else []:
            if bucket.height != bucket.width:
                raise ConfigError(
                    f"view.spatial='center' crops to a square, but bucket {bucket.id} is "
                    f"{bucket.width}x{bucket.height}; use view.spatial='resize_crop', or buckets with an aspect "
                    "ratio of 1:1"
                )


@dataclass(slots=True)
class RandomChoices:
    """Random choices for one delivery of a sample (SAMPLE-1). They depend only on the seed, the key and the visit.

    name: hash of the sample's key.
    """

    seed: int
    name: int
    visit: int

    @staticmethod
    def of(seed: int, key: str, visit: int) -> RandomChoices:
        """Return the random choices for one visit to the sample with this key."""
        return RandomChoices(seed, hash_text(key), visit)

    def below(self, limit: int, kind: int) -> int:
        """Draw an integer from 0 to `limit` - 1."""
        return hash_below(limit, self.seed, kind, self.name, self.visit)

    def share(self, kind: int, *part: int) -> float:
        """Draw a uniform number in [0, 1)."""
        return uniform(self.seed, kind, self.name, self.visit, *part)

    def window_start(self, num_frames: int, wanted: int) -> int:
        """Draw the start of a window of `wanted` consecutive frames in a clip of `num_frames` frames."""
        return self.below(num_frames - wanted + 1, _TEMPORAL_CROP)

    def interval(self, most: int) -> int:
        """Draw the distance between consecutive delivered frames, from 1 to `most` frames of the clip."""
        return 1 + self.below(most, _INTERVAL)

    def chunk(self, num_chunks: int) -> int:
        """Return the chunk for this visit. Over `num_chunks` visits, each chunk is shown once, in random order."""
        round_, place = divmod(self.visit, num_chunks)
        order = hash64(self.seed, _CHUNK, self.name, round_)
        return int(permute(np.array([place]), np.array([num_chunks]), np.array([order], np.uint64))[0])

    def crop(self, least: int, most: int) -> Crop:
        """Draw the position and scale of a crop.

        least, most: scale limits, in units of 1/65536 of the largest crop's scale.
        """
        left, top = self.below(1 << 32, _PLACE_LEFT), self.below(1 << 32, _PLACE_TOP)
        return Crop(left, top, least if least == most else least + self.below(most - least + 1, _SCALE))

    def sample_seed(self) -> int:
        """Draw the seed, from 0 to 2**63 - 1, for a delivery's noise and timestep."""
        return hash64(self.seed, _SAMPLE_SEED, self.name, self.visit) >> 1


def substitute_visit(key: str, visit: int) -> int:
    """Return the visit at which substitutes for a bad sample are delivered (BAD-1).

    The result is below -2**62, outside the range of visit numbers used by passes and by tail="pad" (plan/step.py).
    """
    return -((1 << 63) - 1 - hash_below(1 << 61, _SUBSTITUTE, hash_text(key), visit))


@dataclass(slots=True)
class View:
    """Frames and crop of a delivery.

    crop: region of each frame; None for the largest centered region with the bucket's aspect ratio.
    """

    pick: Pick
    crop: Crop | None = None


def view_of(options: ViewOptions, rate: FrameRate, row: IndexRow, count: int, choices: RandomChoices) -> View:
    """Return the frames and the crop for a delivery of `count` frames.

    Raises ConfigError if the clip has too few frames or, with temporal="full", too many.
    """
    num_frames, there = row.clip.num_frames, row.clip.num_frames
    if rate.fps is not None:
        there = num_places(rate, num_frames, row.fps, row.duration_seconds)
    if there < count or (options.temporal == "full" and there != count):
        raise ConfigError(_wrong_length(options, rate, num_frames, there, count))
    if rate.fps is None and options.is_plain:  # nearly all deliveries are of this kind, and this takes half the work
        return View(Pick(count, choices.window_start(num_frames, count), 1, "step", None, row.fps))
    return View(_pick(options, rate, row, there, count, choices), _crop(options, choices))


def _pick(options: ViewOptions, rate: FrameRate, row: IndexRow, there: int, count: int, choices: RandomChoices) -> Pick:
    num_frames, fps = row.clip.num_frames, row.fps
    way = _WAY_OF_RATE_RULE[rate.rule] if fps > 0 else "step"
    is_step = way == "step"
    if num_frames == 1:
        return Pick(count, 0, 1, way, None if is_step else rate.fps, fps)
    if options.temporal == "uniform":
        return Pick(count, way="spread", clip_fps=_spread_fps(num_frames, count, fps))
    stride = rate.interval(fps) if is_step else 1
    if options.max_interval > 1 and count > 1:
        stride *= choices.interval(min(options.max_interval, there // count))
    start = _first_place(options.temporal, num_frames if is_step else there, there, count, stride, choices)
    if options.temporal == "opensora" and is_step:
        way = "linspace"
    return Pick(count, start, stride, way, None if is_step else rate.fps, fps)


def _first_place(temporal: Temporal, length: int, there: int, count: int, stride: int, choices: RandomChoices) -> int:
    """Return the position (0 to `length` - 1) of the first delivered frame on a grid of `length` positions."""
    room = length - ((count - 1) * stride + 1)
    match temporal:
        case "random":
            return choices.window_start(room + 1, 1)
        case "opensora":
            return choices.window_start(max(0, length - count * stride - 1) + 1, 1)
        case "middle":
            return room // 2
        case "chunk":
            return count * stride * choices.chunk(there // count)
        case "head" | "full" | "uniform":
            return 0
    assert_never(temporal)


def _spread_fps(num_frames: int, count: int, fps: float) -> float:
    """Return the frame rate of `count` frames that are evenly spaced from the first to the last frame of a clip."""
    return fps * (count - 1) / (num_frames - 1) if min(num_frames, count) > 1 else fps


def _crop(options: ViewOptions, choices: RandomChoices) -> Crop | None:
    if options.spatial in _WHOLE:
        return None
    if options.spatial_scale is None:
        return choices.crop(_FULL_SCALE, _FULL_SCALE)
    least, most = (max(1, round(value * _FULL_SCALE)) for value in options.spatial_scale)
    return choices.crop(least, most)


def _wrong_length(options: ViewOptions, rate: FrameRate, num_frames: int, there: int, count: int) -> str:
    at = "" if rate.fps is None else f" ({there} under the rule {rate.rule} with fps={rate.fps})"
    if there < count:
        return f"the clip has {num_frames} frames{at}, but its bucket needs {count}; shard the dataset again"
    return (
        f"view.temporal='full' delivers whole clips, but this clip has {num_frames} frames{at}, and its bucket "
        f"needs {count}; use view.temporal='uniform' or 'head', or shard with a bucket of the clip's length"
    )


def _check_range(scale: tuple[float, float]) -> None:
    try:
        least, most = scale
        is_right = 0 < least <= most <= 1
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ConfigError(
            f"spatial_scale={scale!r}: must be two numbers (minimum, maximum) above 0 and at most 1, such as (0.5, 1.0)"
        )
