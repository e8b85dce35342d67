"""Location of samples in a dataset, by key or by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamvid.dataset.filter.filter import filter_of_view
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """Location of a sample: its shard, the shard's row in the shard table, and the sample's index in the shard."""

    shard: ShardInfo
    row: int
    index: int


def place_of(dataset: Dataset, bucket_id: str, number: int, index: int) -> SamplePlace:
    """Return the location of sample `index` in shard `number` of a bucket. Raises ConfigError for a missing sample."""
    table = dataset.shards
    names = table.bucket_id.names
    code = names.index(bucket_id) if bucket_id in names else -1
    rows = np.flatnonzero((table.bucket_id.codes == code) & (table.number == number))
    if not len(rows):
        raise ConfigError(
            f"{dataset.url} has no shard {number} in bucket {bucket_id!r}; choose a shard from the overview"
        )
    row = int(rows[0])
    shard = table[row]
    if not 0 <= index < shard.num_samples:
        raise ConfigError(
            f"sample {index} of {shard.path}: the shard has {shard.num_samples} samples; use 0 to "
            f"{shard.num_samples - 1}"
        )
    return SamplePlace(shard, row, index)


def find_keys(dataset: Dataset, keys: Sequence[str]) -> list[SamplePlace]:
    """Return the locations of the samples with these `keys`, in the same order.

    The function reads the key column, one shard at a time, until all keys are found. Raises ConfigError if a key does
    not exist, or is not in the view that was opened.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted, found = pa.array(list(dict.fromkeys(keys)), pa.string()), dict[str, SamplePlace]()
    chosen, outside = filter_of_view(dataset), set[str]()
    for row, shard in enumerate(dataset.shards):
        column = dataset.samples(shard, ["key"]).column("key")
        indices = pc.indices_nonzero(pc.is_in(column, value_set=wanted)).to_pylist()
        found |= {column[index].as_py(): SamplePlace(shard, row, index) for index in indices}
        if indices and chosen is not None:
            members = set(chosen.matching(dataset.samples(shard, chosen.columns)).tolist())
            outside |= {column[index].as_py() for index in indices if index not in members}
        if len(found) == len(wanted):
            break
    missing = [key for key in keys if key not in found]
    if missing:
        raise ConfigError(
            f"key {missing[0]!r} is not in {dataset.url}; `streamvid preview` lists the keys of each bucket"
        )
    if outside:
        key = next(key for key in keys if key in outside)
        raise ConfigError(
            f"key {key!r} is not in the view ({dataset.where}) of {dataset.url}; open the dataset without the view"
        )
    return [found[key] for key in keys]
