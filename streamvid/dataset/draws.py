"""Draw sets: clips that several buckets store, and that each pass delivers from at most one of them.

The clips of a set have the same order in each of its buckets. There they fill `num_shards` shards, from number `first`
on, which have the same sizes in all buckets. A plan can therefore draw without reading a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamvid.errors import DatasetError

UNIT = 1_000_000
"""Number of parts that probabilities are counted in."""

OF_BUCKET = ("bucket_id", "shard", "index", "key", "text_sha256", "psnr_y", "crop_fraction", "upscale")
OF_BUCKET_PREFIXES = ("clip_", "window_", "packets_")
"""Index columns whose values differ between the buckets that store the same clip."""


@dataclass(frozen=True, slots=True)
class StoredSet:
    """One draw set. buckets: (bucket id, probability in parts of UNIT, number of the set's first shard there)."""

    buckets: tuple[tuple[str, int, int], ...]
    num_shards: int

    def __post_init__(self) -> None:
        weights = [weight for _, weight, _ in self.buckets]
        ids = {bucket_id for bucket_id, _, _ in self.buckets}
        if not weights or min(weights) < 1 or sum(weights) > UNIT or len(ids) < len(weights) or self.num_shards < 1:
            raise DatasetError(
                f"draws: {self} is not a draw set; it must have shards and different buckets, each with a probability "
                f"of at least 1, which add up to at most {UNIT}; copy the dataset again"
            )

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StoredSet:
        """Return a draw set of the manifest's field `draws`."""
        buckets = ((str(name), int(weight), int(first)) for name, weight, first in value["buckets"])
        return StoredSet(tuple(buckets), int(value["num_shards"]))

    @property
    def name(self) -> str:
        """Unique name of the set in its dataset."""
        return " ".join(f"{bucket_id}:{weight}:{first}" for bucket_id, weight, first in self.buckets)


def stored_clips(sets: Sequence[StoredSet], num_samples: Mapping[tuple[str, int], int]) -> tuple[int, int]:
    """Return the number of clips that several buckets store, and the number of their samples.

    num_samples: (bucket id, shard number) → samples in the shard.
    """
    several = [one for one in sets if len(one.buckets) > 1]
    clips = [
        sum(num_samples[one.buckets[0][0], one.buckets[0][2] + number] for number in range(one.num_shards))
        for one in several
    ]
    return sum(clips), sum(count * len(one.buckets) for count, one in zip(clips, several, strict=True))
