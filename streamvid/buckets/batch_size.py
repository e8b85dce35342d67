"""Batch sizes for buckets (samples per rank per step), and the host memory that a batch needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from streamvid.buckets.bucket import Bucket, is_named_by, match_buckets
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.model import ModelRule
from streamvid.config import require_integer
from streamvid.errors import ConfigError

_MAX_BATCH_SIZE = 1 << 20
_DEFAULT_KEY = "*"


def batch_sizes(
    buckets: Sequence[Bucket],
    batch_size: int | Mapping[str, int] | BucketConfig | None,
    max_tokens_per_batch: int | None = None,
    model: ModelRule | None = None,
    others: Sequence[Bucket] = (),
) -> dict[str, int]:
    """Return a mapping from each bucket id to the number of samples per rank per step.

    Pass exactly one of `batch_size` and `max_tokens_per_batch`.
    batch_size: one number for all buckets, a mapping whose keys are bucket ids, WxH@F or globs, or a configuration in
    Open-Sora format. In a mapping, a bucket's own id takes precedence, then its WxH@F, then globs; "*" applies to all
    other buckets. With a configuration, a bucket gets the batch size set for its id or, failing that, for its shape.
    max_tokens_per_batch: each bucket gets floor(max_tokens_per_batch / tokens per sample). Tokens are counted for
        `model`; without a model, `bucket.tokens` is used.
    others: additional buckets that the keys of a mapping may match, such as buckets that are empty in a split.
    Raises ConfigError for invalid arguments, for a bucket without a batch size, for a bucket to which two globs
    (other than "*") assign different sizes, and for a key without wildcards that matches no bucket.
    """
    if (batch_size is None) == (max_tokens_per_batch is None):
        raise ConfigError(
            f"batch_size={batch_size!r} and max_tokens_per_batch={max_tokens_per_batch!r}: set exactly one of them"
        )
    if max_tokens_per_batch is not None:
        return _from_tokens(buckets, max_tokens_per_batch, model)
    if isinstance(batch_size, BucketConfig):
        return _from_config(buckets, batch_size)
    if isinstance(batch_size, Mapping):
        return _from_mapping(buckets, batch_size, others)
    size = require_integer("batch_size", batch_size, 1, _MAX_BATCH_SIZE)
    return dict.fromkeys((bucket.id for bucket in buckets), size)


def host_bytes(bucket: Bucket, batch_size: int = 1, pixels: Literal["rgb24", "yuv420p"] = "rgb24") -> int:
    """Return the size in bytes of a batch of decoded uint8 frames: 3 bytes per pixel, or 1.5 for yuv420p."""
    return batch_size * bucket.num_pixels * 3 // (1 if pixels == "rgb24" else 2)


def tokens_of(bucket: Bucket, model: ModelRule | None) -> int:
    """Return the number of transformer tokens per sample for `model`, or `bucket.tokens` if `model` is None."""
    return bucket.tokens if model is None else model.tokens(bucket)


def _from_tokens(buckets: Sequence[Bucket], max_tokens: int, model: ModelRule | None) -> dict[str, int]:
    require_integer("max_tokens_per_batch", max_tokens, 1)
    for bucket in buckets:
        if bucket.is_text:
            raise ConfigError(
                f"max_tokens_per_batch={max_tokens} cannot be used with bucket {bucket.id}, whose samples have no "
                f"video tokens; set batch_size instead, for example to {{{bucket.id!r}: 256, '*': 4}}"
            )
    tokens = {bucket.id: tokens_of(bucket, model) for bucket in buckets}
    for name, of_sample in tokens.items():
        if of_sample > max_tokens:
            of_model = "" if model is None else f" for {model.name}"
            raise ConfigError(
                f"max_tokens_per_batch={max_tokens}: one sample of bucket {name} has {of_sample} tokens{of_model}; "
                f"raise max_tokens_per_batch to at least {of_sample}, or remove the bucket from the dataset"
            )
    return {name: max_tokens // of_sample for name, of_sample in tokens.items()}


def _from_config(buckets: Sequence[Bucket], config: BucketConfig) -> dict[str, int]:
    sizes = config.batch_sizes
    known = {bucket.id: bucket for bucket in config.table.buckets if bucket.id in sizes} if sizes else {}
    by_shape: dict[tuple[int, int, int], set[int]] = {}
    for name, bucket in known.items():
        by_shape.setdefault(bucket.shape, set()).add(sizes[name])
    found = {}
    for bucket in buckets:
        same = known.get(bucket.id)
        candidates = {sizes[bucket.id]} if same and same.shape == bucket.shape else by_shape.get(bucket.shape, set())
        if len(candidates) != 1:
            several = (
                f"several batch sizes ({', '.join(map(str, sorted(candidates)))})" if candidates else "no batch size"
            )
            raise ConfigError(
                f"batch_size: the configuration sets {several} for bucket {bucket.id} ({bucket.size_at_frames}); "
                "add the bucket to bucket_config with a batch size (for example, 33: [1.0, 12]), or set batch_size per "
                "bucket"
            )
        (found[bucket.id],) = candidates
    return found


def _from_mapping(buckets: Sequence[Bucket], sizes: Mapping[str, int], others: Sequence[Bucket]) -> dict[str, int]:
    for key, size in sizes.items():
        if not isinstance(key, str):
            raise ConfigError(f"batch_size has the key {key!r}; each key must be text: a bucket id, WxH@F or a glob")
        require_integer(f"batch_size[{key!r}]", size, 1, _MAX_BATCH_SIZE)
        if not _is_glob(key):
            match_buckets(key, [*buckets, *others])
    found = {}
    for bucket in buckets:
        named = key_of(bucket, sizes, "batch_size")
        if named is None:
            raise ConfigError(f'batch_size has no entry for bucket {bucket.id}; add an entry, or "*" for all others')
        found[bucket.id] = sizes[named]
    return found


def _is_glob(key: str) -> bool:
    # A glob may match no bucket, because one mapping may serve several datasets that do not all contain every size.
    # Without "*", a misspelled glob is noticed anyway: the bucket that it should match then has no batch size.
    return any(character in key for character in "*?[")


def key_of(bucket: Bucket, values: Mapping[str, float], name: str) -> str | None:
    """Return the first key in `values` that applies to a bucket, or None.

    Keys are tried in this order: the bucket's id, its WxH@F, a matching glob, "*". Raises ConfigError if globs other
    than "*" give the bucket different values; the message starts with `name`.
    """
    for exact in (bucket.id, bucket.size_at_frames):
        if exact in values:
            return exact
    globs = [key for key in values if key != _DEFAULT_KEY and is_named_by(bucket, key)]
    if not globs:
        return _DEFAULT_KEY if _DEFAULT_KEY in values else None
    for other in globs[1:]:
        if values[other] != values[globs[0]]:
            raise ConfigError(
                f"{name}: {globs[0]!r} ({values[globs[0]]}) and {other!r} ({values[other]}) both match "
                f"bucket {bucket.id}; add an entry for {bucket.id!r}"
            )
    return globs[0]
