"""Buckets and their names. All clips in a bucket share one shape (T, H, W)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property

from streamvid.buckets.geometry import (
    DEFAULT_MULTIPLE,
    MAX_MULTIPLE,
    MAX_SIDE,
    aspect_table,
    check_multiple,
    ratio_fraction,
    resolution_pixels,
)
from streamvid.config import from_fields, require_integer
from streamvid.errors import ConfigError

MAX_NUM_FRAMES = 65536
"""Maximum frame count of a bucket."""

TICKS_PER_SECOND = 25
"""Ticks per second for samples that have audio but no pictures. Ticks take the place of frames."""

_TICK_MILLISECONDS = 1000 // TICKS_PER_SECOND

_SIZE_AT_FRAMES = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})@([1-9][0-9]{0,5})")
_EXPLICIT_ID = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})-([1-9][0-9]{0,5})f")
_TRIPLE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
_SECONDS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)s")
_AUDIO_ID = re.compile(r"audio-([1-9][0-9]{0,7})ms")
_NAMED_ID = re.compile(r"([0-9]+px?)-([1-9][0-9]{0,5})f-([0-9.]+)x([0-9.]+)")


@dataclass(frozen=True)
class Bucket:
    """Bucket of clips with the same shape.

    `resolution` and `aspect_ratio` (`"w:h"`) are either both set, or both None for an explicit size. Two kinds of
    buckets contain samples without pictures: TEXT_BUCKET, which has shape (0, 0, 0), and audio buckets, which have
    shape (T, 0, 0), where T is the duration in ticks.
    """

    num_frames: int
    height: int
    width: int
    resolution: str | None = None
    aspect_ratio: str | None = None

    def __post_init__(self) -> None:
        if self.is_text and self.resolution is None and self.aspect_ratio is None:
            return
        require_integer("bucket num_frames", self.num_frames, 1, MAX_NUM_FRAMES)
        if self.is_audio and self.resolution is None and self.aspect_ratio is None:
            return
        require_integer("bucket height", self.height, 1, MAX_SIDE)
        require_integer("bucket width", self.width, 1, MAX_SIDE)
        if (self.resolution is None) != (self.aspect_ratio is None):
            raise ConfigError(
                f"bucket resolution={self.resolution!r} with aspect_ratio={self.aspect_ratio!r}: set both, "
                "such as '256px' and '16:9', or neither for an explicit size"
            )
        if self.resolution is not None and self.aspect_ratio is not None:
            for name, value in (("resolution", self.resolution), ("aspect_ratio", self.aspect_ratio)):
                if not isinstance(value, str):
                    raise ConfigError(f"bucket {name}={value!r}: must be a string, such as '256px' or '16:9'")
            resolution_pixels(self.resolution)
            ratio_fraction(self.aspect_ratio)

    @cached_property
    def id(self) -> str:
        """Stable name that is safe in paths and keys: `256px-16f-16x9`, or `832x480-81f` (W x H) for an explicit size.

        Audio buckets have names such as `audio-2000ms`.
        """
        if self.is_text:
            return "text"
        if self.is_audio:
            return f"audio-{self.num_frames * _TICK_MILLISECONDS}ms"
        if self.resolution is None or self.aspect_ratio is None:
            return f"{self.width}x{self.height}-{self.num_frames}f"
        return f"{self.resolution}-{self.num_frames}f-{self.aspect_ratio.replace(':', 'x')}"

    @property
    def size_at_frames(self) -> str:
        """Size and frame count in the form WxH@F, which the command line accepts."""
        return self.id if self.is_audio else f"{self.width}x{self.height}@{self.num_frames}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (T, H, W) of each clip."""
        return (self.num_frames, self.height, self.width)

    @property
    def is_image(self) -> bool:
        """True if the bucket has one frame and therefore contains still images."""
        return self.num_frames == 1 and not self.is_audio

    @property
    def is_audio(self) -> bool:
        """True if the bucket's samples have audio but no pictures.

        In an audio bucket, `num_frames` is the duration in ticks of 1/25 s.
        """
        return self.num_frames > 0 and self.height == 0 == self.width

    @property
    def has_pictures(self) -> bool:
        """True unless the bucket's samples contain only text or only audio."""
        return not (self.is_text or self.is_audio)

    @cached_property
    def is_text(self) -> bool:
        """True if the bucket's samples contain text and columns, but neither pictures nor audio."""
        return self.shape == (0, 0, 0)

    @property
    def num_pixels(self) -> int:
        """Number of pixels per clip: T * H * W."""
        return self.num_frames * self.height * self.width

    @property
    def tokens(self) -> int:
        """Number of transformer tokens per sample: ceil(T/4) * ceil(H/16) * ceil(W/16).

        The number is exact for Wan and HunyuanVideo, which have a 4x8x8 VAE and 2x2 patches. For other models, it is a
        measure of relative cost. A text sample counts as 1 token, and an audio sample as 1 token per tick.
        """
        if self.is_audio:
            return self.num_frames
        return max(1, -(-self.num_frames // 4) * -(-self.height // 16) * -(-self.width // 16))

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON values for a manifest; `from_json` reads them."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, value: object) -> Bucket:
        """Build a bucket from the result of `to_json`.

        Unknown fields are ignored. Raises ConfigError for invalid fields.
        """
        return from_fields(cls, value, "bucket")


TEXT_BUCKET = Bucket(0, 0, 0)
"""Bucket for samples that contain text and columns, but neither pictures nor audio; its id is `text`."""


def parse_bucket(text: str, multiple: int = DEFAULT_MULTIPLE) -> Bucket:
    """Return the bucket for a name such as `832x480@81`, or an id such as `832x480-81f` or `256px-16f-16x9`.

    `2s` and `audio-2000ms` name the same audio bucket.
    multiple: every side must be a multiple of this number of pixels. It also affects the sizes of named resolutions.
    Raises ConfigError if the name is invalid.
    """
    text = text.strip()
    require_integer("multiple", multiple, 1, MAX_MULTIPLE)
    if (audio := _audio_bucket(text)) is not None:
        return audio
    match = _SIZE_AT_FRAMES.fullmatch(text) or _EXPLICIT_ID.fullmatch(text)
    if match is not None:
        width, height, num_frames = (int(group) for group in match.groups())
        check_multiple(f"bucket {text!r}: width", width, multiple)
        check_multiple(f"bucket {text!r}: height", height, multiple)
        return Bucket(num_frames, height, width)
    match = _NAMED_ID.fullmatch(text)
    if match is None:
        _refuse_triple(text, multiple)
        raise ConfigError(
            f"{text!r} is not a valid bucket name; write '832x480@81' (WxH@F), '832x480-81f', "
            "'256px-16f-16x9' or, for audio files, a duration such as '2s'"
        )
    resolution, num_frames, aspect_ratio = match[1], int(match[2]), f"{match[3]}:{match[4]}"
    table = aspect_table(resolution, multiple)
    if aspect_ratio not in table:
        raise ConfigError(
            f"bucket {text!r}: with multiple={multiple}, {resolution} has no ratio {aspect_ratio}; "
            f"available: {', '.join(table)}"
        )
    return Bucket(num_frames, *table[aspect_ratio], resolution, aspect_ratio)


def _audio_bucket(text: str) -> Bucket | None:
    """Return the bucket for a duration such as `2s` or `audio-2000ms`, or None for other text."""
    if match := _SECONDS.fullmatch(text):
        ticks = Fraction(match[1]) * TICKS_PER_SECOND
    elif match := _AUDIO_ID.fullmatch(text):
        ticks = Fraction(int(match[1]), _TICK_MILLISECONDS)
    else:
        return None
    if ticks.denominator > 1 or not 1 <= ticks <= MAX_NUM_FRAMES:
        raise ConfigError(
            f"bucket {text!r}: the duration of an audio bucket, such as '2s' or '0.4s', must be a multiple of "
            f"{_TICK_MILLISECONDS} ms, from {_TICK_MILLISECONDS} ms to {MAX_NUM_FRAMES // TICKS_PER_SECOND} s"
        )
    return Bucket(int(ticks), 0, 0)


def parse_buckets(text: str, multiple: int = DEFAULT_MULTIPLE) -> tuple[Bucket, ...]:
    """Parse a comma-separated list of buckets. Return the buckets in the order listed.

    Raises ConfigError for an empty list, an invalid name or a duplicate bucket.
    """
    buckets: list[Bucket] = []
    for name in (part for part in text.split(",") if part.strip()):
        bucket = parse_bucket(name, multiple)
        if bucket in buckets:
            raise ConfigError(f"buckets={text!r} contains {bucket.id} more than once; list each bucket only once")
        buckets.append(bucket)
    if not buckets:
        raise ConfigError(f"buckets={text!r} is empty; write a list such as '832x480@81,480x832@81'")
    return tuple(buckets)


def match_buckets(pattern: str, buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Return the buckets whose id or WxH@F equals `pattern` or matches it as a glob, in the order of `buckets`.

    Raises ConfigError with the nearest names if no bucket matches.
    """
    buckets = tuple(buckets)
    exact = tuple(bucket for bucket in buckets if pattern in (bucket.id, bucket.size_at_frames))
    matched = exact or tuple(bucket for bucket in buckets if is_named_by(bucket, pattern))
    if not matched:
        _refuse_triple(pattern, 1)
        raise ConfigError(f"no bucket matches {pattern!r}; {_nearest_names(pattern, buckets)}")
    return matched


def is_named_by(bucket: Bucket, pattern: str) -> bool:
    """Return True if `pattern` is the bucket's id, its WxH@F, or a glob that matches one of them."""
    return any(name == pattern or fnmatchcase(name, pattern) for name in (bucket.id, bucket.size_at_frames))


def _nearest_names(pattern: str, buckets: Sequence[Bucket]) -> str:
    names = sorted({bucket.id for bucket in buckets})
    if not names:
        return "the list of buckets is empty"
    forms = {form: bucket.id for bucket in buckets for form in (bucket.size_at_frames, bucket.id)}
    near = dict.fromkeys(forms[form] for form in get_close_matches(pattern, forms, n=5, cutoff=0.3))
    shown = list(near)[:3] or names[:3]
    return f"nearest names (of {len(names)} in total): {', '.join(shown)}"


def _refuse_triple(text: str, multiple: int) -> None:
    """Raise a ConfigError for text with three numbers, which may mean WxHxF (LTX) or FxHxW (finetrainers)."""
    match = _TRIPLE.fullmatch(text)
    if match is None:
        return
    first, second, third = (int(group) for group in match.groups())
    readings = {(first, second, third): "width x height x frames", (third, second, first): "frames x height x width"}
    # A side is unlikely if it is not a multiple of `multiple`, or if it does not exceed the frame count.
    likely = [key for key in readings if key[0] % multiple == 0 and key[1] % multiple == 0 and min(key[:2]) > key[2]]
    shown = [f"'{key[0]}x{key[1]}@{key[2]}' if it is {readings[key]}" for key in likely or readings]
    raise ConfigError(
        f"bucket {text!r}: it is unclear which number is the frame count; write the bucket as {' or '.join(shown)}"
    )
