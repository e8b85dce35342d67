"""What a delivery shows of its clip: which frames, and which part of each picture (SAMPLE-1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.pick import Pick, Way, num_places
from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.loader.view import sampling
from streamvid.video.transform import Crop

Temporal: TypeAlias = Literal["random", "head", "middle", "uniform", "chunk", "full", "opensora"]
Spatial: TypeAlias = Literal["resize_crop", "center", "random_crop", "rand_size_crop"]

MAX_INTERVAL = 1 << 16

_WAYS: dict[str, Way] = {"native": "step", "cap": "step", "resample": "time", "fix_frame_rate": "number"}
_DRAWN = ("random", "opensora")
_WHOLE = ("resize_crop", "center")


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """Frames and crop that a delivery shows of its clip."""

    temporal: Temporal = option(
        "random",
        help="Which frames: a random window, the head, the middle, uniform (spread over the clip), chunk (windows side "
        "by side, one per visit), full, or opensora.",
    )
    max_interval: int = option(
        1, help="Largest distance of frames, drawn for each delivery.", minimum=1, maximum=MAX_INTERVAL
    )
    spatial: Spatial = option(
        "resize_crop",
        help="Which part of the pictures, scaled to cover the bucket: the middle (resize_crop; center for squares), a "
        "drawn place (random_crop), or a drawn place and size (rand_size_crop).",
    )
    spatial_scale: tuple[float, float] | None = option(
        None, help="Range of the sides that spatial=rand_size_crop draws, as shares of the largest crop: (0.5, 1.0)."
    )

    def __post_init__(self) -> None:
        check_options(self)
        most = self.max_interval
        if most > 1 and self.temporal not in _DRAWN:
            raise ConfigError(
                f"max_interval={most}: cannot be combined with temporal={self.temporal!r}, which draws no interval; "
                "use temporal='random', or leave max_interval out"
            )
        if (self.spatial_scale is not None) != (self.spatial == "rand_size_crop"):
            raise ConfigError(
                f"spatial_scale={self.spatial_scale!r}: cannot be combined with spatial={self.spatial!r}; "
                "spatial='rand_size_crop' needs a range such as (0.5, 1.0), the others take none"
            )
        if self.spatial_scale is not None:
            _check_range(self.spatial_scale)

    @property
    def is_plain(self) -> bool:
        """Whether it is a random window of consecutive frames, in whole pictures."""
        return self.temporal == "random" and self.max_interval == 1 and self.spatial in _WHOLE

    def check(self, clips: str, buckets: list[Bucket], where: str) -> None:
        """ConfigError where a dataset's clips, "copy" or "native", or a bucket of it leave no choice of that kind."""
        if clips == "native" and self.spatial != "resize_crop":
            raise ConfigError(
                f"spatial={self.spatial!r}: {where} holds native clips, whose pictures were scaled and cropped when "
                "they were encoded; leave spatial out, or shard with clips='copy'"
            )
        for bucket in buckets if self.spatial == "center" else []:
            if bucket.height != bucket.width:
                raise ConfigError(
                    f"spatial='center' scales the short side and cuts a square, bucket {bucket.id} is "
                    f"{bucket.width}x{bucket.height}; take spatial='resize_crop', or buckets of ratio 1:1"
                )


@dataclass(frozen=True, slots=True)
class View:
    """pick: which frames. crop: which part of each picture; None: the largest, from the middle."""

    pick: Pick
    crop: Crop | None = None


def view_of(
    options: ViewOptions, rate: FrameRate, row: Mapping[str, Any], count: int, *, seed: int, visit: int
) -> View:
    """What a delivery of `count` frames shows.

    row: an index row with "key", "fps", "window_num_frames" and, where the rate needs it, "duration_seconds". Raises
    ConfigError where the clip has too few frames, or under temporal="full" too many.
    """
    num_frames, fps, key = row["window_num_frames"], _known(row["fps"]), row["key"]
    there = num_frames
    if rate.fps is not None:
        there = num_places(rate, num_frames, fps, _known(row.get("duration_seconds")))
    if there < count or (options.temporal == "full" and there != count):
        raise ConfigError(_wrong_length(options, rate, num_frames, there, count))
    if rate.fps is None and options.is_plain:  # what nearly every delivery is: spelled out, as it is half as much work
        start = sampling.window_start(num_frames, count, seed=seed, key=key, visit=visit)
        return View(Pick(count, start, 1, "step", None, fps))
    draw = {"seed": seed, "key": key, "visit": visit}
    return View(_pick(options, rate, num_frames, there, count, fps, draw), _crop(options, draw))


def _known(value: float | None) -> float:
    """A rate or a duration, 0.0 where the index has none."""
    return float(value) if value is not None and 0 < value < math.inf else 0.0


def _pick(
    options: ViewOptions, rate: FrameRate, num_frames: int, there: int, count: int, fps: float, draw: dict[str, Any]
) -> Pick:
    way = _WAYS[rate.rule] if fps > 0 else "step"
    temporal, is_step = options.temporal, way == "step"
    stride = rate.interval(fps) if is_step else 1
    if options.max_interval > 1 and count > 1:
        stride *= sampling.interval(min(options.max_interval, there // count), **draw)
    length = num_frames if is_step else there  # of the grid
    room = length - ((count - 1) * stride + 1)
    start = 0
    if num_frames == 1:
        return Pick(count, 0, 1, way, None if way == "step" else rate.fps, fps)
    if temporal == "uniform":
        return Pick(count, way="spread", clip_fps=_spread_fps(num_frames, count, fps))
    if temporal == "random":
        start = sampling.window_start(room + 1, 1, **draw)
    elif temporal == "opensora":
        start = sampling.window_start(max(0, length - count * stride - 1) + 1, 1, **draw)
        way = "linspace" if is_step else way
    elif temporal == "middle":
        start = room // 2
    elif temporal == "chunk":
        start = count * stride * sampling.chunk(there // count, **draw)
    return Pick(count, start, stride, way, None if way in ("step", "linspace") else rate.fps, fps)


def _spread_fps(num_frames: int, count: int, fps: float) -> float:
    """Of frames at even distances: one fewer distances than frames, in the time of the clip's."""
    return fps * (count - 1) / (num_frames - 1) if min(num_frames, count) > 1 else fps


def _crop(options: ViewOptions, draw: dict[str, Any]) -> Crop | None:
    if options.spatial in _WHOLE:
        return None
    scale = sampling.FULL_SCALE
    if options.spatial_scale is not None:
        least, most = (max(1, round(value * scale)) for value in options.spatial_scale)
        scale = sampling.crop_scale(least, most, **draw)
    return Crop(*sampling.crop_place(**draw), scale)


def _wrong_length(options: ViewOptions, rate: FrameRate, num_frames: int, there: int, count: int) -> str:
    at = "" if rate.fps is None else f" ({there} by the rule {rate.rule} with fps={rate.fps})"
    if there < count:
        return f"the clip has {num_frames} frames{at}, its bucket takes {count}; shard again"
    return (
        f"temporal='full' takes whole clips, and this one has {num_frames} frames{at} where its bucket takes {count}; "
        "take temporal='uniform' or 'head', or shard with a bucket of that length"
    )


def _check_range(scale: tuple[float, float]) -> None:
    try:
        least, most = scale
        is_right = 0 < least <= most <= 1
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ConfigError(f"spatial_scale={scale!r}: allowed are two shares of the largest crop's sides, as (0.5, 1.0)")
