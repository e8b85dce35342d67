"""The bucket configuration that the sharder's options ask for: a file's, a preset's, or one of single options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, get_args

from streamvid.buckets import Bucket
from streamvid.buckets.bucket import TEXT_BUCKET
from streamvid.buckets.config import BucketConfig, load_bucket_config
from streamvid.buckets.frames import FrameRate, FrameRule, RateRule
from streamvid.buckets.geometry import DEFAULT_MULTIPLE
from streamvid.buckets.policy import Policy, exact
from streamvid.buckets.ratios import Ratios
from streamvid.errors import ConfigError

if TYPE_CHECKING:
    from streamvid.sharder.options import ShardOptions

_SHAPES = ("buckets", "resolution", "num_frames", "max_pixels", "height", "width", "max_frames")
_RATIOS = ("min_ar", "max_ar", "num_ar_buckets")
_TEXTS = ("source", "notes", "own_choice")


def bucket_config_of(options: ShardOptions) -> BucketConfig:
    """ConfigError where nothing, or more than one thing, says which buckets there are."""
    given = [name for name in (*_SHAPES, *_RATIOS) if getattr(options, name) not in (None, ())]
    config = options.bucket_config
    if options.is_text:
        given += [name for name in ("bucket_config", "assign", "frame_rule", "fps", "policy") if getattr(options, name)]
        if given:
            raise ConfigError(
                f"{given[0]}={getattr(options, given[0])!r} stands beside clips='text', which has no pictures"
            )
        return BucketConfig(buckets=(TEXT_BUCKET,))
    if config is not None:
        if given:
            raise ConfigError(
                f"{given[0]}={getattr(options, given[0])!r} stands beside bucket_config (a preset, or a file), which "
                "says which buckets there are; leave one of them out, or change a copy of it: `streamvid presets show "
                "NAME --yaml > my.yaml`, then --bucket-config my.yaml"
            )
        config = config if isinstance(config, BucketConfig) else load_bucket_config(config)
        if options.multiple not in (DEFAULT_MULTIPLE, config.multiple):
            raise ConfigError(
                f"multiple={options.multiple} stands beside a bucket_config whose multiple is {config.multiple}; write "
                "it there, or leave it out"
            )
    else:
        config = _from_options(options, given)
    asked: dict[str, Any] = {}
    if options.assign is not None:
        asked["assign"] = options.assign
    if options.frame_rule is not None:
        asked["frame_rule"] = FrameRule.parse(options.frame_rule)
    if options.fps_rule is not None and options.fps is None:
        raise ConfigError(f"fps_rule={options.fps_rule!r} without fps: say at which rate, as fps=16")
    if options.fps is not None:
        rate = rate_asked(options.fps, options.fps_rule)
        if not options.is_native:  # of native clips it is a matter of their encoding
            asked["frame_rate"] = rate
    if options.policy:
        asked["policy"] = Policy.from_json({**config.policy.to_json(), **options.policy})
    return replace(config, **asked) if asked else config


def _from_options(options: ShardOptions, given: list[str]) -> BucketConfig:
    if options.buckets is not None and not options.buckets:
        raise ConfigError("buckets is empty: give at least one, as '832x480@81'")
    if options.buckets and len(given) > 1:
        other = "the other two" if given[1] in ("resolution", "num_frames") else given[1]
        raise ConfigError(f"buckets stands beside {given[1]}: give explicit buckets or {other}")
    is_sized = options.buckets is not None or {"max_pixels", "height", "width"} & set(given)
    if not is_sized and not (options.resolution and options.num_frames):
        raise ConfigError(
            f"no buckets: resolution={options.resolution!r}, num_frames={options.num_frames!r}; give both, as "
            "('256px',) and (1, 17, 33), explicit buckets, as 832x480@81, or a bucket_config"
        )
    shapes: dict[str, Any] = {name: getattr(options, name) for name in _SHAPES if name in given}
    bounds = (_bound(options, "min_ar"), _bound(options, "max_ar"))
    # The rule for shorter clips is part of what the buckets are.
    rule = None if options.frame_rule is None else FrameRule.parse(options.frame_rule)
    return BucketConfig(**shapes, ratios=Ratios(options.multiple, {}, *bounds, options.num_ar_buckets), frame_rule=rule)


def rate_asked(fps: Any, rule: str | None) -> FrameRate:
    """The rate that the options of these names say."""
    rate: RateRule = "resample"
    for known in get_args(RateRule):
        if rule == known and known != "native":
            rate = known
    if rule is not None and rule != rate:
        allowed = ", ".join(known for known in get_args(RateRule) if known != "native")
        raise ConfigError(f"fps_rule={rule!r}: allowed are {allowed}; for the sources' own rate leave fps out")
    return FrameRate(rate, fps)


def _bound(options: ShardOptions, name: str) -> Fraction | None:
    value = getattr(options, name)
    return None if value is None else exact(name, value)


def check_model(config: BucketConfig, rate: FrameRate) -> None:
    """ConfigError for buckets or a rate that the configuration's model does not take.

    Where sizes follow the clips the configuration itself keeps to the model's sides and frame counts.
    """
    if config.model is not None and config.is_dynamic:
        config.model.check_rate(rate)
    elif config.model is not None:
        config.model.check_all(config.table.buckets, rate)


def buckets_json(config: BucketConfig) -> dict[str, Any]:
    """What of a configuration decides the dataset, for the manifest: a list where it is one and nothing more."""
    plain = (
        BucketConfig(
            buckets=config.buckets, resolution=config.resolution, num_frames=config.num_frames, ratios=config.ratios
        )
        if config.buckets or config.resolution
        else None
    )
    has_own_ratios = config.ratios != Ratios(config.multiple)
    if config == plain and not has_own_ratios:
        return {"buckets": [f"{bucket.id} {bucket.size_at_frames}" for bucket in config.table.candidates]}
    return {"bucket_config": {name: value for name, value in config.to_json().items() if name not in _TEXTS}}


def ordered_buckets(config: BucketConfig, found: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Buckets that got clips, in the table's order; where sizes follow the clips, the largest first."""
    if not config.is_dynamic:
        return config.table.buckets
    return tuple(sorted(set(found), key=lambda bucket: (-bucket.num_pixels, bucket.id)))
