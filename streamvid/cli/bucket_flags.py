"""The flags of `streamvid shard` that say which buckets there are and how clips are assigned to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])
_POLICY = {
    "ratio_policy": "ratio",
    "frames_policy": "frames",
    "max_upscale": "max_upscale",
    "max_crop": "max_crop",
    "min_area": "min_area",
}


def bucket_flags(command: _Command) -> _Command:
    """Adds the flags; `bucket_options` makes ShardOptions of what was given."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def bucket_options(given: dict[str, Any]) -> None:
    """Puts the flags' values under the names of ShardOptions, with the default buckets where nothing names others."""
    from streamvid.buckets.bucket import parse_buckets

    policy = {field: given.pop(name) for name, field in _POLICY.items()}
    given["policy"] = {field: value for field, value in policy.items() if value is not None}
    preset, config = given.pop("preset"), given["bucket_config"]
    if preset is not None and config is not None:
        raise click.UsageError(f"--preset {preset} and --bucket-config {config} both say which buckets there are")
    given["bucket_config"] = config if preset is None else preset
    if given["buckets"] is not None:
        given["buckets"] = parse_buckets(given["buckets"], multiple=given["multiple"])
    is_sized = any(given[name] is not None for name in ("buckets", "bucket_config", "max_pixels", "height", "width"))
    if not is_sized and given["clips"] != "text":
        given["resolution"] = given["resolution"] or ("256px",)
        given["num_frames"] = given["num_frames"] or (1, 17, 33)


def words(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Comma-separated ones."""
    found = tuple(word.strip() for word in (value or "").split(",") if word.strip())
    if value is not None and not found:
        example = "1,17,33" if param.name == "num_frames" else "256px,480p"
        raise click.BadParameter(f"{value!r} is empty; write it as {example}, or leave it out", ctx, param)
    return found


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words(ctx, param, value))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of frame counts; write it as 1,17,33", ctx, param) from None


_OPTIONS = (
    click.option("--preset", metavar="NAME", help="Buckets of a model; `streamvid presets` lists them."),
    click.option("--bucket-config", type=click.Path(), help="Buckets as YAML, or Open-Sora's bucket_config."),
    click.option("--buckets", metavar="LIST", help="Explicit buckets as WxH@F, e.g. '832x480@81,480x832@81'."),
    click.option("--resolution", metavar="LIST", callback=words, help="Named resolutions.  [default: 256px]"),
    click.option(
        "--num-frames", metavar="LIST", callback=_numbers, help="Frame counts; 1 takes images.  [default: 1,17,33]"
    ),
    click.option("--multiple", default=16, show_default=True, help="What widths and heights are multiples of."),
    click.option("--min-ar", type=float, metavar="R", help="Ratios (width / height) from this one on."),
    click.option("--max-ar", type=float, metavar="R", help="Ratios up to this one."),
    click.option("--num-ar-buckets", type=int, metavar="N", help="So many ratios between them instead of the listed."),
    click.option("--max-pixels", type=int, metavar="N", help="Each clip's own size, scaled down to so many pixels."),
    click.option("--height", type=int, metavar="PX", help="One size for all, with --width."),
    click.option("--width", type=int, metavar="PX", help="See --height."),
    click.option(
        "--max-frames", type=int, metavar="N", help="With either: shorter clips take fewer frames, by --frame-rule."
    ),
    click.option("--frame-rule", metavar="RULE", help="What frame counts keep, as 4k+1."),
    click.option(
        "--assign",
        type=click.Choice(["draw", "all"]),
        help="Clips of keep probabilities: store in one bucket, drawn once, or in all, drawn each epoch.  "
        "[default: draw]",
    ),
    click.option(
        "--ratio-policy",
        type=click.Choice(["nominal", "log"]),
        help="The size with the nearest name, as Open-Sora's, or that crops least.  [default: nominal]",
    ),
    click.option(
        "--frames-policy",
        type=click.Choice(["resolution-first", "longest"]),
        help="The largest resolution that a clip has, or the most frames.  [default: resolution-first]",
    ),
    click.option("--max-upscale", type=float, metavar="X", help="No size that sides are scaled up to by more."),
    click.option("--max-crop", type=float, metavar="SHARE", help="No size that cuts away more of the picture."),
    click.option(
        "--min-area", type=float, metavar="SHARE", help="Share of a resolution's area that clips have.  [default: 0.8]"
    ),
)
