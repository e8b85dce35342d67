"""Draw sets as a manifest has them: clips that several buckets store, of which a pass takes each for one or for none.

A set's clips lie in the same order in each of its buckets, in `num_shards` shards there from number `first` on, and the
shards have the same sizes: what a plan needs to draw in all buckets alike without looking at a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamvid.dataset.shard_table import ShardTable
from streamvid.errors import DatasetError

UNIT = 1_000_000
"""Probabilities are counted in so many parts."""

OF_BUCKET = ("bucket_id", "shard", "index", "key", "text_sha256", "psnr_y", "crop_fraction", "upscale")
OF_BUCKET_PREFIXES = ("clip_", "window_", "packets_")
"""Columns of the index that are not the same of one clip in all buckets that store it."""


@dataclass(frozen=True, slots=True)
class StoredSet:
    """buckets: (bucket id, probability in parts of UNIT, number of the first of the set's shards there)."""

    buckets: tuple[tuple[str, int, int], ...]
    num_shards: int

    def __post_init__(self) -> None:
        weights = [weight for _, weight, _ in self.buckets]
        ids = {bucket_id for bucket_id, _, _ in self.buckets}
        if not weights or min(weights) < 1 or sum(weights) > UNIT or len(ids) < len(weights) or self.num_shards < 1:
            raise DatasetError(
                f"draws: {self} is no draw set: it has shards, different buckets, each with a probability from 1 to "
                f"{UNIT}, and {UNIT} together at most; copy the dataset again"
            )

    @property
    def name(self) -> str:
        """The same wherever the set is looked at, and no other set's."""
        return " ".join(f"{bucket_id}:{weight}:{first}" for bucket_id, weight, first in self.buckets)

    def to_json(self) -> dict[str, Any]:
        """Plain fields, for the manifest."""
        return {"buckets": [list(bucket) for bucket in self.buckets], "num_shards": self.num_shards}


def sets_to_json(sets: Sequence[StoredSet]) -> dict[str, Any]:
    """The manifest's field `draws`."""
    return {"unit": UNIT, "sets": [one.to_json() for one in sets]}


def sets_from_json(value: Mapping[str, Any] | None) -> tuple[StoredSet, ...]:
    """The draw sets that a manifest's field `draws` names; DatasetError for anything unfit."""
    if value is None:
        return ()
    try:
        if value["unit"] != UNIT:
            raise ValueError(f"unit is {value['unit']}, not {UNIT}")
        return tuple(
            StoredSet(tuple((str(name), int(weight), int(first)) for name, weight, first in one["buckets"]),
                      int(one["num_shards"]))
            for one in value["sets"]
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DatasetError(f"draws of the manifest are damaged ({error}); copy the dataset again") from error


def stored_clips(sets: Sequence[StoredSet], num_samples: Mapping[tuple[str, int], int]) -> tuple[int, int]:
    """(clips that several buckets store, their samples). num_samples: (bucket id, shard's number) → its samples."""
    several = [one for one in sets if len(one.buckets) > 1]
    clips = [
        sum(num_samples[one.buckets[0][0], one.buckets[0][2] + number] for number in range(one.num_shards))
        for one in several
    ]
    return sum(clips), sum(count * len(one.buckets) for count, one in zip(clips, several, strict=True))


def check_sets(sets: Sequence[StoredSet], shards: ShardTable, where: str) -> None:
    """DatasetError unless the shards of each set are there, alike in all its buckets, and in no other set."""
    numbers: dict[str, dict[int, int]] = {}
    for one in sets:
        alike: list[list[tuple[int, str]]] = []
        for bucket_id, _, first in one.buckets:
            rows = numbers.get(bucket_id)
            if rows is None:
                found = np.flatnonzero([name == bucket_id for name in shards.bucket_id.names])
                mine = np.flatnonzero(shards.bucket_id.codes == (found[0] if len(found) else -1))
                rows = numbers[bucket_id] = dict(zip(shards.number[mine].tolist(), mine.tolist(), strict=True))
            taken = [rows.pop(number, None) for number in range(first, first + one.num_shards)]
            if None in taken:
                raise DatasetError(
                    f"{where}: draw set {one.name} has a shard of bucket {bucket_id} that is not there, or is in "
                    "another set too; copy the dataset again"
                )
            alike.append([(int(shards.num_samples[row]), shards.split[row]) for row in taken if row is not None])
        if any(other != alike[0] for other in alike):
            raise DatasetError(f"{where}: draw set {one.name} has other shards in each bucket; copy the dataset again")
