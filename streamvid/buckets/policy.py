"""Rule by which a size is chosen for a clip, and the loss from fitting the clip into it: exact numbers, no floats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal, get_args

from streamvid.config import option
from streamvid.errors import ConfigError

RatioPolicy = Literal["nominal", "log"]
FramesPolicy = Literal["resolution-first", "longest"]
OPENSORA_MIN_AREA = Fraction(4, 5)


def cover_scale(height: int, width: int, to_height: int, to_width: int) -> Fraction:
    """Return the factor that scales a picture to cover the other size; above 1 it is scaled up."""
    return max(Fraction(to_height, height), Fraction(to_width, width))


def cropped_share(height: int, width: int, to_height: int, to_width: int) -> Fraction:
    """Return the share of a picture's area outside the other size's shape, scaled to cover it: 0 to below 1."""
    ours, theirs = height * to_width, width * to_height
    return 1 - Fraction(min(ours, theirs), max(ours, theirs))


def exact(name: str, value: object) -> Fraction:
    """Return the number as it is written: 0.33 is 33/100. ConfigError names the field for anything else."""
    if isinstance(value, int | float | Fraction) and not isinstance(value, bool):
        try:
            return Fraction(str(value))
        except ValueError:
            pass  # inf and nan
    raise ConfigError(f"{name}={value!r}: expected a number, as 0.5")


@dataclass(frozen=True, slots=True)
class Policy:
    """Choice of a clip's bucket among those that it could fill. The defaults are Open-Sora 2's rule.

    ratio: "nominal": the size whose nominal height/width is nearest to the clip's, as difference (Open-Sora 2); "log":
        whose real height/width is nearest as a factor, which crops least.
    frames: "resolution-first": the largest area that the clip is large enough for, and in it the most frames;
        "longest": the most frames that the clip can fill in any area, and of those areas the largest.
    max_upscale: sizes to which the clip's sides had to be scaled by more are not for it. 1: nothing is scaled up.
    max_crop: nor are those that cut away more than this share of its picture.
    min_area: share of a resolution's area that a clip must have; None: 0.8, and 0 where a configuration gives one
        size or max_pixels.
    The size of the nearest ratio stands for its resolution: where it breaks a limit, the next smaller one is asked.
    """

    ratio: RatioPolicy = option(
        "nominal",
        help="Choose the size with the nearest nominal ratio, as Open-Sora does, or the one that crops least.",
        flag="--ratio-policy",
    )
    frames: FramesPolicy = option(
        "resolution-first",
        help="Prefer the largest resolution that a clip has, or the most frames.",
        flag="--frames-policy",
    )
    max_upscale: Fraction | None = option(None, help="Maximum upscaling factor.", metavar="X")
    max_crop: Fraction | None = option(None, help="Maximum share of the picture that is cropped.", metavar="SHARE")
    min_area: Fraction | None = option(
        None, help="Share of a resolution's area that a clip must have.", metavar="SHARE", shown_default="0.8"
    )

    def __post_init__(self) -> None:
        for name, allowed in (("ratio", get_args(RatioPolicy)), ("frames", get_args(FramesPolicy))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"policy {name}={getattr(self, name)!r}: allowed are {', '.join(allowed)}")
        limits = (("max_upscale", 0, 1000, "1.2"), ("max_crop", 0, 1, "0.25"), ("min_area", 0, 1, "0.8"))
        for name, least, most, example in limits:
            value = getattr(self, name)
            if value is None:
                continue
            number = exact(f"policy {name}", value)
            if not least <= number <= most or (name == "max_upscale" and not number):
                raise ConfigError(f"policy {name}={value!s}: allowed is {least} to {most}, as {example}")
            object.__setattr__(self, name, number)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, as plain JSON; `from_json` reads them back."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        default = Policy()
        return {
            name: str(value) if isinstance(value, Fraction) else value
            for name, value in given.items()
            if value != getattr(default, name)
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Policy:
        """Build a policy from what `to_json` returned, or from a file's numbers; ConfigError for anything else."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"policy has no field {name!r}; it has {', '.join(known)}")
        return cls(**{name: _number(name, value) for name, value in values.items()})


def _number(name: str, value: Any) -> Any:
    if not isinstance(value, str) or name in ("ratio", "frames"):
        return value
    try:
        return Fraction(value)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"policy {name}={value!r}: expected a number, as 0.5") from None
