"""Sizes (height, width) for the ratios of a resolution: generated, evenly spaced, or given by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from streamvid.buckets.geometry import (
    DEFAULT_MULTIPLE,
    MAX_MULTIPLE,
    MAX_SIDE,
    aspect_table,
    check_multiple,
    nearest_size,
    ratio_fraction,
    resolution_name,
    resolution_pixels,
)
from streamvid.config import check_options, option, require_integer
from streamvid.errors import ConfigError

RatioTable: TypeAlias = dict[str, tuple[int, int]]
"""Maps each ratio `"w:h"` to (height, width). On a tie between ratios, the earlier entry wins."""

_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class Ratios:
    """Rule that converts a resolution's name to sizes.

    multiple: every side must be a multiple of this number of pixels.
    tables: nested mapping from resolution to ratio `"w:h"` to size `"WxH"`. These sizes replace the generated sizes.
        Resolution names from Open-Sora 1, such as 512 for 512px, are accepted. The `area` key in a table sets the
        resolution's area in pixels.
    min_ar, max_ar: bounds on width / height; None for no bound.
    num_ar_buckets: number of ratios, spaced by equal factors from `min_ar` (default 0.5) to `max_ar` (default 2);
        these ratios replace the standard list.
    """

    multiple: int = option(
        DEFAULT_MULTIPLE,
        help="Make every width and height a multiple of this number of pixels.",
        metavar="PX",
        minimum=1,
        maximum=MAX_MULTIPLE,
    )
    tables: Mapping[str, Mapping[str, str | int]] = field(default_factory=dict)
    min_ar: Fraction | None = option(
        None, help="Minimum aspect ratio, width / height.", metavar="R", minimum=0.01, maximum=100
    )
    max_ar: Fraction | None = option(
        None, help="Maximum aspect ratio, width / height.", metavar="R", minimum=0.01, maximum=100
    )
    num_ar_buckets: int | None = option(
        None,
        help="Use N aspect ratios between --min-ar and --max-ar instead of the standard ratios.",
        metavar="N",
        minimum=1,
        maximum=99,
    )

    def __post_init__(self) -> None:
        check_options(self)
        low, high = self.bounds
        if low > high:
            raise ConfigError(f"min_ar={float(low):g} is above max_ar={float(high):g}; lower min_ar or raise max_ar")
        if self.num_ar_buckets == 1 and low != high:
            raise ConfigError("num_ar_buckets=1 requires min_ar to equal max_ar; set both to the same value")
        tables = {resolution_name(name): table for name, table in self.tables.items()}
        if len(tables) != len(self.tables):
            raise ConfigError(
                f"ratios={', '.join(self.tables)}: two of these names refer to the same resolution; remove one of the "
                "two"
            )
        object.__setattr__(self, "tables", tables)
        for name in tables:
            self.of(name)

    @property
    def bounds(self) -> tuple[Fraction, Fraction]:
        """Minimum and maximum aspect ratio, as width / height."""
        if self.num_ar_buckets is None:
            return self.min_ar or Fraction(0), self.max_ar or Fraction(1000)
        return self.min_ar or Fraction(1, 2), self.max_ar or Fraction(2)

    def area(self, resolution: str) -> int:
        """Return the number of pixels in a named resolution."""
        area = self.tables.get(resolution, {}).get("area")
        if area is None:
            return resolution_pixels(resolution)
        return require_integer(f"ratios[{resolution!r}] area", area, 1, MAX_SIDE**2)

    def of(self, resolution: str) -> RatioTable:
        """Return the resolution's ratio table, limited to the bounds. Raises ConfigError if no ratio remains."""
        if resolution in self.tables:
            table = self._given(resolution)
        elif self.num_ar_buckets is not None:
            table = self._spaced(resolution)
        else:
            table = aspect_table(resolution, self.multiple)
        low, high = self.bounds
        within = {name: size for name, size in table.items() if low <= ratio_fraction(name) <= high}
        if not within:
            raise ConfigError(
                f"{resolution} has no ratio from min_ar={float(low):g} to max_ar={float(high):g}; available: "
                f"{', '.join(table)}; widen the bounds, or set num_ar_buckets"
            )
        return within

    def _given(self, resolution: str) -> RatioTable:
        self.area(resolution)
        resolution_pixels(resolution)
        table: RatioTable = {}
        for name, size in self.tables[resolution].items():
            if name == "area":
                continue
            where = f"ratios[{resolution!r}][{name!r}]"
            if re.fullmatch(r"[0-9.]+", name):
                raise ConfigError(
                    f"{where}: the key must have the form width:height; write the height/width ratio {name} as "
                    f"'1:{name}'"
                )
            ratio_fraction(name)
            match = _SIZE.fullmatch(size) if isinstance(size, str) else None
            if match is None:
                raise ConfigError(
                    f"{where}={size!r} is not a valid size; write it as width x height, such as '832x480'"
                )
            width, height = int(match[1]), int(match[2])
            check_multiple(f"{where}={size!r}: width", width, self.multiple)
            check_multiple(f"{where}={size!r}: height", height, self.multiple)
            table[name] = (height, width)
        if not table:
            raise ConfigError(f"ratios[{resolution!r}] is empty; add at least one ratio, such as '16:9': '832x480'")
        return table

    def _spaced(self, resolution: str) -> RatioTable:
        low, high = self.bounds
        count = self.num_ar_buckets or 1
        pixels = resolution_pixels(resolution)
        table: RatioTable = {}
        for number in range(count):
            # The ratio is rounded to the precision of its name, so that differences between machines' floats vanish.
            ratio = float(low) * (float(high) / float(low)) ** (number / max(1, count - 1))
            name = f"{ratio:.4f}".rstrip("0").rstrip(".") + ":1"
            table[name] = nearest_size(pixels, ratio_fraction(name), self.multiple)
        return table
