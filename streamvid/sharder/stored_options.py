"""Options of a sealed dataset, reconstructed from its manifest, for adding samples with the same options."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from streamvid.buckets.bucket import Bucket, parse_bucket
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.document import bucket_config_from_json
from streamvid.buckets.geometry import DEFAULT_MULTIPLE
from streamvid.buckets.ratios import Ratios
from streamvid.errors import ConfigError
from streamvid.sharder.curation.options import BARS, SCORES
from streamvid.sharder.options import ShardOptions

_SOURCE = ("max_clip_bytes", "min_fps", "time_columns", "where")
_CLIPS = ("audio", "max_clip_seconds", "min_psnr", "max_growth")
_OWN = ("seed", "shard_size_bytes", "val_fraction", "hdr", "trust_metadata", "verify")
_FREE = ("time_columns",)
"""Stored options that may differ from the given ones, because they only describe the input."""
_DEFAULTS = {"audio": "keep", "hdr": "refuse"}
"""Default values, for messages, of options that are stored only if they differ from the default."""


def options_like(stored: Mapping[str, Any], given: Mapping[str, Any], url: str) -> ShardOptions:
    """Return the options with which a dataset was built, overridden by the given options.

    stored: output of `ShardOptions.to_json`. given: nested fields of ShardOptions, such as {"work": {"workers": 2}}.
    url: location of the dataset, for errors.
    Raises ConfigError if an option that determines the content of the dataset is given with a different value.
    """
    options = ShardOptions(**_merged(_fields_of(stored), given))
    asked = json.loads(json.dumps(options.to_json()))
    for name in sorted({*stored, *asked} - {*_FREE}):
        before, now = _comparable(_value(stored, name)), _comparable(_value(asked, name))
        if before != now:
            raise ConfigError(
                f"{name}: the dataset at {url} has {_short(before)}, but {_short(now)} was given; all samples in a "
                "dataset are built with the same options, so omit this option, or build another dataset with it"
            )
    return options


def options_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return a description of the first stored option that differs, or None.

    old, new: outputs of `ShardOptions.to_json`.
    """
    for name in [*new, *(name for name in old if name not in new)]:
        before, now = _value(old, name), _value(new, name)
        if before != now:
            if isinstance(before, dict) and isinstance(now, dict):  # report only the part of an encoding that differs
                part = next(part for part in [*now, *before] if before.get(part) != now.get(part))
                return f"{name}.{part}: {_short(before.get(part))} stored, {_short(now.get(part))} requested"
            return f"{name}: {_short(before)} stored, {_short(now)} requested"
    return None


def _value(stored: Mapping[str, Any], name: str) -> Any:
    return stored.get(name, _DEFAULTS.get(name))


def _short(value: object) -> str:
    text = f"{len(value)}: {', '.join(map(str, value))}" if isinstance(value, list) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _comparable(value: object) -> object:
    """Return a stored option without encoder versions, because newer encoders may be installed now."""
    return {name: one for name, one in value.items() if name != "versions"} if isinstance(value, dict) else value


def _fields_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the output of `ShardOptions.to_json` back to fields of ShardOptions."""
    tree: dict[str, Any] = {name: stored[name] for name in _OWN if name in stored}
    tree["source"] = {name: stored[name] for name in _SOURCE if name in stored}
    tree["source"]["time_columns"] = tuple(stored.get("time_columns", ()))
    media = (text.rpartition("=") for text in stored.get("media", ()))
    tree["source"]["media"] = {name: column for name, _, column in media}
    tree["clips"] = {"kind": stored["clips"], **{name: stored[name] for name in _CLIPS if name in stored}}
    if stored["clips"] != "text":
        tree["buckets"] = _buckets(stored)
    if "encoding" in stored:
        tree["clips"] |= _encoding(stored["encoding"], tree["buckets"])
    if "curation" in stored:
        tree["curation"] = _curation(stored["curation"])
    return tree


def _buckets(stored: Mapping[str, Any]) -> BucketConfig:
    if "bucket_config" in stored:
        return bucket_config_from_json(stored["bucket_config"])
    buckets = tuple(map(_bucket, stored["buckets"]))
    sides = (side for bucket in buckets for side in (bucket.height, bucket.width))
    return BucketConfig(buckets=buckets, ratios=Ratios(math.gcd(DEFAULT_MULTIPLE, *sides)))


def _bucket(text: str) -> Bucket:
    """Parse a bucket in the form "ID WxH@F", as `stored_buckets` returns it."""
    name, _, size = text.partition(" ")
    plain = parse_bucket(size, 1)
    if plain.id == name:
        return plain
    resolution, _, ratio = name.split("-")
    return Bucket(plain.num_frames, plain.height, plain.width, resolution, ratio.replace("x", ":"))


def _encoding(stored: Mapping[str, Any], config: BucketConfig) -> dict[str, Any]:
    """Return the ClipOptions fields that describe an encoding.

    The frame rate is omitted if the bucket configuration sets it.
    """
    fields = {name: stored[name] for name in ("codec", "crf", "gop")} | {"audio_codec": stored["audio"]}
    rate = None if stored["fps"] is None else Fraction(stored["fps"])
    return fields if rate == config.frame_rate.fps else {**fields, "fps": rate}


def _curation(stored: Mapping[str, Any]) -> dict[str, Any]:
    figures = stored["figures"]
    return {
        "scores": tuple(score for score in SCORES if score in figures),
        "black_bars": BARS in figures,
        "scene_cuts": stored["scene_cuts"],
        "dedup": stored.get("dedup"),
    }


def _merged(tree: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings. Values in `given` take precedence over values in `tree`."""
    merged = dict(tree)
    for name, value in given.items():
        is_nested = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if is_nested else value
    return merged
