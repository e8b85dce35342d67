"""Draw sets: groups of clips that are stored in several buckets. A pass takes each clip from at most one bucket.

The clips of a set have the same order in each of its buckets. In each bucket they fill `num_shards` consecutive shards,
starting at shard number `first`, and matching shards have the same number of samples. A plan can therefore choose a
bucket for each clip without reading samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamvid.errors import DatasetError

UNIT = 1_000_000
"""Scale of probabilities, which are stored as integer millionths."""

OF_BUCKET = ("bucket_id", "shard", "index", "key", "text_sha256", "psnr_y", "crop_fraction", "upscale")
OF_BUCKET_PREFIXES = ("clip_", "window_", "packets_")
"""Index columns, and prefixes of index columns, whose values may differ between copies of a clip in different
buckets."""


@dataclass(frozen=True, slots=True)
class StoredSet:
    """One draw set. buckets: (bucket id, probability in millionths, number of the first shard) tuples."""

    buckets: tuple[tuple[str, int, int], ...]
    num_shards: int

    def __post_init__(self) -> None:
        weights = [weight for _, weight, _ in self.buckets]
        ids = {bucket_id for bucket_id, _, _ in self.buckets}
        if not weights or min(weights) < 1 or sum(weights) > UNIT or len(ids) < len(weights) or self.num_shards < 1:
            raise DatasetError(
                f"draws: {self} is not a valid draw set; num_shards must be at least 1, there must be at least one "
                "bucket, bucket ids must be unique, and probabilities, in millionths, must be at least 1 and add up to "
                f"at most {UNIT}; copy the dataset again"
            )

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StoredSet:
        """Parse an entry of the manifest's `draws` field."""
        buckets = ((str(name), int(weight), int(first)) for name, weight, first in value["buckets"])
        return StoredSet(tuple(buckets), int(value["num_shards"]))

    @property
    def name(self) -> str:
        """Name of the set. It is unique within the dataset."""
        return " ".join(f"{bucket_id}:{weight}:{first}" for bucket_id, weight, first in self.buckets)


def stored_clips(sets: Sequence[StoredSet], num_samples: Mapping[tuple[str, int], int]) -> tuple[int, int]:
    """Return the number of clips that are stored in several buckets, and the number of samples that store these clips.

    num_samples: maps (bucket id, shard number) to the number of samples.
    """
    several = [one for one in sets if len(one.buckets) > 1]
    clips = [
        sum(num_samples[one.buckets[0][0], one.buckets[0][2] + number] for number in range(one.num_shards))
        for one in several
    ]
    return sum(clips), sum(count * len(one.buckets) for count, one in zip(clips, several, strict=True))


def kept_sets(sets: Sequence[StoredSet], shards: Collection[tuple[str, int]]) -> tuple[StoredSet, ...]:
    """Return draw sets without the shards that no longer exist. A set with gaps is divided into several sets.

    shards: (bucket id, number) of each shard that exists. Matching shards exist in all buckets of a set or in none.
    """
    kept: list[StoredSet] = []
    for one in sets:
        bucket_id, _, first = one.buckets[0]
        there = [number for number in range(one.num_shards) if (bucket_id, first + number) in shards]
        starts = [number for number in there if number - 1 not in there]
        for start in starts:
            stop = next(number for number in range(start, one.num_shards + 1) if number not in there)
            buckets = tuple((name, weight, begin + start) for name, weight, begin in one.buckets)
            kept.append(StoredSet(buckets, stop - start))
    return tuple(kept)
