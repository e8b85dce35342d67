"""Shipped bucket configurations, one per model, and the cost of a configuration in tokens and host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from streamvid.buckets.batch_size import batch_sizes, host_bytes, tokens_of
from streamvid.buckets.bucket import Bucket, match_buckets
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.document import load_bucket_config
from streamvid.errors import ConfigError
from streamvid.shipped import shipped, shipped_config

_FOLDER = "buckets"


@dataclass(frozen=True, slots=True)
class BucketCost:
    """Cost of one bucket in tokens and memory.

    tokens: number of tokens per sample for the configuration's model.
    sample_bytes: size in bytes of a sample's decoded frames as uint8 RGB.
    batch_size: samples per rank per step; None if unknown.
    is_own_choice: True if streamvid chose the bucket; False if the bucket comes from the configuration's source.
    """

    bucket: Bucket
    tokens: int
    sample_bytes: int
    batch_size: int | None
    is_own_choice: bool

    @property
    def batch_bytes(self) -> int | None:
        """Size in bytes of a batch's decoded frames as uint8 RGB, or None if the batch size is unknown."""
        return None if self.batch_size is None else self.batch_size * self.sample_bytes


def preset_names() -> tuple[str, ...]:
    """Return the names of the shipped presets, sorted."""
    return tuple(sorted(path.stem for path in shipped(f"configs/{_FOLDER}").glob("*.yaml")))


def preset_text(name: str | Path) -> str:
    """Return the YAML text of a preset or a file. Raises ConfigError if the text cannot be read."""
    path = shipped_config(_FOLDER, name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {path}: {reason}; use a preset's name or the path to a YAML file") from None


def load_preset(name: str | Path) -> BucketConfig:
    """Load a preset. Raises ConfigError if a name or glob in its `own_choice` matches no bucket."""
    config = load_bucket_config(name)
    if not config.is_dynamic:
        for pattern in config.about.own_choice:
            match_buckets(pattern, config.table.buckets)
    return config


def bucket_costs(config: BucketConfig, max_tokens_per_batch: int | None = None) -> tuple[BucketCost, ...]:
    """Return the cost of every bucket, in the order of the configuration.

    Batch sizes come from max_tokens_per_batch if it is given, otherwise from the configuration. Raises ConfigError if
    one sample has more tokens than max_tokens_per_batch, or if the configuration's sizes depend on the clips.
    """
    buckets = config.table.buckets
    sizes: Mapping[str, int] = config.batch_sizes
    if max_tokens_per_batch is not None:
        sizes = batch_sizes(buckets, None, max_tokens_per_batch, config.model)
    own = {bucket.id for pattern in config.about.own_choice for bucket in match_buckets(pattern, buckets)}
    return tuple(
        BucketCost(bucket, tokens_of(bucket, config.model), host_bytes(bucket), sizes.get(bucket.id), bucket.id in own)
        for bucket in buckets
    )


def largest_tokens(config: BucketConfig) -> BucketCost:
    """Return the cost of the bucket that has the most tokens and therefore needs the most memory.

    If several buckets tie for the most tokens, the first one is used.
    """
    return max(bucket_costs(config), key=lambda cost: cost.tokens)


def rate_text(config: BucketConfig) -> str:
    """Return the frame rate as a short string, such as `16`, `up to 24` or `the clip's`."""
    rate: Fraction | None = config.frame_rate.fps
    if rate is None:
        return "the clip's"
    return f"up to {rate}" if config.frame_rate.rule == "cap" else str(rate)


def rule_text(config: BucketConfig) -> str:
    """Return the rules for frame counts and sides as a short string, such as `4k+1, sides of 16`."""
    rule = config.frame_rule or (config.model.frame_rule if config.model else None)
    sides = f"sides of {config.model.multiple if config.model else config.multiple}"
    return sides if rule is None else f"{rule}, {sides}"


def sizes_text(config: BucketConfig) -> str:
    """Return the sizes as a short string, such as `256px, 11 ratios` or `832x480 and 4 more`."""
    sizes: dict[str, list[str]] = {}
    for bucket in config.table.buckets:
        size, of_name = f"{bucket.width}x{bucket.height}", sizes.setdefault(bucket.resolution or "", [])
        if size not in of_name:
            of_name.append(size)
    texts = []
    for name, of_name in sizes.items():
        more = f"{len(of_name)} ratios" if name else f"{len(of_name) - 1} more"
        first = name or of_name[0]
        texts.append(first if len(of_name) == 1 else f"{first}, {more}" if name else f"{first} and {more}")
    return "; ".join(texts)


def frames_text(config: BucketConfig) -> str:
    """Return the frame counts as a short string: `17 33 49 65 81`, or `1 5 … 129` for more than 6 counts."""
    counts = sorted({bucket.num_frames for bucket in config.table.buckets})
    return " ".join(map(str, counts)) if len(counts) <= 6 else f"{counts[0]} {counts[1]} … {counts[-1]}"
