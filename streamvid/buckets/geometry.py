"""Resolution names and their aspect tables, in exact integer arithmetic.

A resolution name denotes an area: `"256px"` is 256 * 256 pixels, `"480p"` is int(480 * 480 * 16 / 9). Its aspect
table contains one size per listed ratio: the size nearest to that area whose sides are multiples of `multiple`.
The tables are the same as in Open-Sora 2 for multiples of 16 and 32 (tests/data/opensora_aspect.json).
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from math import isqrt

from streamvid.config import require_integer
from streamvid.errors import ConfigError

MAX_SIDE = 16384
"""Maximum side of a bucket, in pixels."""

DEFAULT_MULTIPLE = 16
"""Spatial multiple required by an 8x VAE with 2x2 patches, which Wan and HunyuanVideo use."""

MAX_MULTIPLE = 1024
_LISTED_RATIOS = ("2.39:1", "2:1", "16:9", "1.85:1", "9:16", "5:8", "3:2", "4:3", "1:1")
_OLD_NAMES = {"2k": "1440p", "4k": "2160p"}
_RESOLUTION = re.compile(r"([1-9][0-9]{0,4})(px|p)")
_RATIO = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,4})?):([0-9]{1,5}(?:\.[0-9]{1,4})?)")


def resolution_name(name: str) -> str:
    """Convert a resolution name from Open-Sora 1, for example 512 to 512px or 2k to 1440p.

    Return other names unchanged.
    """
    return f"{name}px" if name.isdecimal() else _OLD_NAMES.get(name, name)


def resolution_pixels(name: str) -> int:
    """Return the area of a named resolution, in pixels. Raises ConfigError for an invalid name."""
    match = _RESOLUTION.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"resolution={name!r} is not a valid resolution name; allowed: '<n>px' (n x n pixels, such as '256px') "
            "and '<n>p' (n*n*16/9 pixels, such as '480p'); for an explicit size, use a bucket such as '832x480@81'"
        )
    side = int(match[1])
    pixels = side * side if match[2] == "px" else side * side * 16 // 9
    if pixels > MAX_SIDE * MAX_SIDE:
        raise ConfigError(f"resolution={name!r} has {pixels} pixels; at most {MAX_SIDE}x{MAX_SIDE} are allowed")
    return pixels


def ratio_fraction(name: str) -> Fraction:
    """Return width / height for a ratio such as `"16:9"` or `"2.39:1"`. Raises ConfigError for an invalid ratio."""
    match = _RATIO.fullmatch(name)
    sides = (Fraction(match[1]), Fraction(match[2])) if match else (Fraction(0), Fraction(0))
    if not all(sides):
        raise ConfigError(f"aspect_ratio={name!r} is not a valid ratio; write width:height, such as '16:9' or '2.39:1'")
    return sides[0] / sides[1]


def check_multiple(where: str, side: int, multiple: int) -> None:
    """Raise ConfigError unless `side` is a multiple of `multiple`. The message starts with `where`."""
    if side % multiple:
        below = side // multiple * multiple
        nearest = f"{below} and {below + multiple}" if below else str(multiple)
        raise ConfigError(f"{where}={side} is not a multiple of {multiple}; nearest allowed: {nearest}")


@lru_cache(maxsize=256)
def _aspect_items(name: str, multiple: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    pixels = resolution_pixels(name)
    require_integer("multiple", multiple, 1, MAX_MULTIPLE)
    if pixels < multiple * multiple:
        raise ConfigError(
            f"resolution={name!r} has {pixels} pixels, fewer than multiple={multiple} squared; reduce multiple"
        )
    listed: dict[str, tuple[int, int]] = {}
    for ratio in _LISTED_RATIOS:
        size = nearest_size(pixels, ratio_fraction(ratio), multiple)
        if size not in listed.values():
            listed[ratio] = size
    for ratio in tuple(listed):
        # A reversed ratio may repeat a listed size under a second name, such as 16:9 and 2:1 with a coarse multiple.
        # Both names then take part in the choice of the nearest ratio, and BucketTable gives them one bucket.
        # If a ratio is listed in both directions, the first determines the size of the second, so that every table
        # is symmetric.
        height, width = listed[ratio]
        listed[":".join(reversed(ratio.split(":")))] = (width, height)
    return tuple(listed.items())


def aspect_table(name: str, multiple: int = DEFAULT_MULTIPLE) -> dict[str, tuple[int, int]]:
    """Return a mapping from ratio name `"w:h"` to size (height, width).

    Every side is a multiple of `multiple` (1 to 1024). If two ratios are equally close to a clip's ratio, the first
    entry wins. Raises ConfigError for invalid arguments.
    """
    return dict(_aspect_items(name, multiple))


def nearest_size(pixels: int, ratio: Fraction, multiple: int) -> tuple[int, int]:
    """Return the (height, width) for a width/height ratio and an area of about `pixels`.

    Both sides are rounded down to multiples of `multiple`, unless a neighboring size has an area nearer to `pixels`.
    """
    # floor(sqrt(pixels * ratio) / multiple) without floats.
    width = max(1, isqrt(int(pixels * ratio / (multiple * multiple)))) * multiple
    height = max(1, pixels // width // multiple) * multiple
    sizes = [(height, width), (height - multiple, width), (height + multiple, width)]
    sizes += [(height, width - multiple), (height, width + multiple)]
    return min((size for size in sizes if min(size) > 0), key=lambda size: abs(size[0] * size[1] - pixels))


def dynamic_size(height: int, width: int, max_pixels: int, multiple: int) -> tuple[int, int]:
    """Return the (height, width) to which DiffSynth-Studio resizes a picture. A side below `multiple` becomes 0.

    A picture with more than `max_pixels` pixels is first scaled down to that number of pixels. Then each side is
    rounded down to a multiple of `multiple`.
    """
    if height * width > max_pixels:
        # Floats and a power give the same sizes as DiffSynth-Studio. With 921600 pixels and a multiple of 16, sides of
        # 1120x1120 become 959.99 and thus 944, whereas exact arithmetic gives 960; sides of 1618x1618 become 960,
        # whereas sqrt() gives 944.
        scale: float = (height * width / max_pixels) ** 0.5
        height, width = int(height / scale), int(width / scale)
    return height // multiple * multiple, width // multiple * multiple
