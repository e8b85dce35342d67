"""What a bucket configuration's fields may be: each alone, beside each other, and with the buckets that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamvid.buckets.bucket import MAX_NUM_FRAMES
from streamvid.buckets.geometry import MAX_SIDE
from streamvid.buckets.opensora import MEANINGS
from streamvid.errors import ConfigError

if TYPE_CHECKING:
    from streamvid.buckets.config import BucketConfig

ASSIGN = ("draw", "all")


def check_fields(config: BucketConfig) -> None:
    """ConfigError for a value that cannot be, or that cannot be beside another."""
    if config.assign not in ASSIGN:
        raise ConfigError(f"assign={config.assign!r}: allowed are {', '.join(ASSIGN)}")
    if config.probabilities is not None and config.probabilities not in MEANINGS:
        raise ConfigError(f"probabilities={config.probabilities!r}: allowed are {', '.join(MEANINGS)}")
    form = _form(config)
    _check_counts(config, form)
    if form not in ("bucket_config", "resolution"):
        for name in ("tables", "min_ar", "max_ar", "num_ar_buckets"):
            if getattr(config.ratios, name):
                shown = "ratios" if name == "tables" else name
                raise ConfigError(f"{shown} stands beside {form}; it is for resolution and bucket_config")
    _check_numbers(config)


def check_buckets(config: BucketConfig) -> None:
    """ConfigError for a bucket that its frame rule or its model does not take."""
    if config.is_dynamic:
        _check_dynamic(config)
        return
    for bucket in config.table.buckets:
        if config.frame_rule is not None and not bucket.is_image:
            config.frame_rule.check(bucket.num_frames, f"bucket {bucket.id}")
        if config.model is not None:
            config.model.check(bucket)
    if config.policy.frames == "longest" and not config.keeps_all:
        raise ConfigError(
            "policy frames='longest' stands beside keep probabilities below 1, which go from one resolution to the "
            "next; leave one of them out"
        )


def _form(config: BucketConfig) -> str:
    """The one way in which buckets are given."""
    given = [name for name in ("buckets", "bucket_config", "resolution") if getattr(config, name)]
    given += ["max_pixels"] if config.max_pixels is not None else []
    is_sized = config.height is not None or config.width is not None
    given += ["height and width"] if is_sized else []
    if len(given) != 1:
        raise ConfigError(
            f"{' beside '.join(given) or 'nothing'} says which buckets there are; give exactly one of buckets "
            "(832x480@81), bucket_config, resolution with num_frames, height with width, or max_pixels"
        )
    if (config.height is None) != (config.width is None):
        alone, missing = ("height", "width") if config.width is None else ("width", "height")
        raise ConfigError(
            f"{alone}={getattr(config, alone)} stands without {missing}: give both for one fixed size, or max_pixels "
            "for sizes that follow each clip's shape"
        )
    return given[0]


def _check_counts(config: BucketConfig, form: str) -> None:
    given = [name for name in ("num_frames", "max_frames") if getattr(config, name) not in (None, ())]
    if form in ("buckets", "bucket_config"):
        if given:
            value = getattr(config, given[0])
            raise ConfigError(f"{given[0]}={value!r} stands beside {form}, which has frame counts of its own")
        return
    if form == "resolution" and given != ["num_frames"]:
        raise ConfigError("resolution needs num_frames, and no max_frames; give both, as ('256px',) and (1, 17, 33)")
    if len(given) != 1:
        raise ConfigError(
            f"{form} with {' and '.join(given) or 'neither num_frames nor max_frames'}: give one of the two; "
            "max_frames=81 cuts shorter clips by frame_rule, num_frames=(17, 81) lists what there is"
        )


def _check_numbers(config: BucketConfig) -> None:
    limits = (
        ("max_pixels", config.max_pixels, MAX_SIDE * MAX_SIDE),
        ("height", config.height, MAX_SIDE),
        ("width", config.width, MAX_SIDE),
        ("max_frames", config.max_frames, MAX_NUM_FRAMES),
        *(("num_frames", count, MAX_NUM_FRAMES) for count in config.num_frames),
    )
    for name, value, most in limits:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
            raise ConfigError(f"{name}={value!r}: allowed are the integers 1 to {most}")
    for name, side in (("height", config.height), ("width", config.width)):
        if side is not None and side % config.multiple:
            low = side // config.multiple * config.multiple
            raise ConfigError(
                f"{name}={side} is not a multiple of {config.multiple}; nearest allowed: "
                f"{f'{low} and ' if low else ''}{low + config.multiple}"
            )
    if config.max_frames is not None:
        config.short_clip_rule.check(config.max_frames, "max_frames")


def _check_dynamic(config: BucketConfig) -> None:
    for count in config.counts:
        for rule in (config.frame_rule, None if config.model is None else config.model.frame_rule):
            if rule is not None and count > 1:
                rule.check(count, "num_frames")
    if config.model is not None and config.multiple % config.model.multiple:
        raise ConfigError(
            f"multiple={config.multiple} with max_pixels: {config.model.name} takes sides that are multiples of "
            f"{config.model.multiple}; set multiple to {config.model.multiple}"
        )
