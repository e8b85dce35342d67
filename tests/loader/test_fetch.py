"""Tests of reading the index and tars: the cache is bounded and does not change rows, and short tars are bad data."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamvid.buckets.pick import Pick
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import StorageError
from streamvid.loader.delivery.fetch import read_parts
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.mix import SampleRequest
from streamvid.loader.view.clip_part import clip_part
from tests.loader.conftest import SMALL, build_dataset
from tests.loader.test_bad import part_of


def test_rows_equal_the_index_for_any_cache_size(tmp_path: Path) -> None:
    """PLAN-6: shards are evicted by size, but the most recently used one is kept, however large it is."""
    source = open_dataset(build_dataset(tmp_path, {SMALL: [3, 2, 4, 1]}))
    part, bucket = part_of(source, columns={"score": "user.score", "where": "user.place"})
    everything = [row for shard in source.shards for row in source.samples(shard).to_pylist()]
    places = [(shard, place) for shard, info in enumerate(source.shards) for place in range(info.num_samples)]
    for cached_bytes in (0, 700, 1 << 20):
        rows = IndexRows(cached_bytes)
        largest = 0
        for _ in range(2):
            for (shard, place), expected in zip(places, everything, strict=True):
                row = rows.row(SampleRequest(part, bucket.id, shard, place, 0, False), bucket)
                assert row.columns == {"score": expected["user.score"], "where": expected["user.place"]}
                assert (row.key, row.fps, row.number) == (expected["key"], expected["fps"], place)
                assert row.packets is None and not row.media and row.texts["text"] == expected["text"]
                assert (row.clip.offset, row.clip.num_bytes) == (expected["clip_offset"], expected["clip_bytes"])
                assert row.clip.sha256 == expected["clip_sha256"]
                assert row.clip.num_frames == expected["window_num_frames"]
                largest = max(largest, rows.num_bytes)
        assert 0 < largest <= max(cached_bytes, 4 * 200), (cached_bytes, largest)


def test_a_short_tar_is_bad_data_and_not_a_storage_error(tmp_path: Path) -> None:
    """FETCH-1: the length shows that the bytes are bad, whereas a missing file does not."""
    source = open_dataset(build_dataset(tmp_path, {SMALL: [1]}))
    (shard,) = source.shards
    mix_part, bucket = part_of(source)
    sample = SampleRequest(mix_part, bucket.id, 0, 0, 0, False)
    clip = IndexRows().row(sample, bucket).clip
    part = clip_part(clip, None, Pick(1))
    block = memoryview(bytearray(part.block_bytes))
    good = read_parts(source, shard, [(clip.offset, part, block)])
    assert good.problem is None and good.num_bytes == len(block) == clip.num_bytes
    path = tmp_path / shard.path
    data = path.read_bytes()
    path.write_bytes(data[: clip.offset + clip.num_bytes - 1])
    short = read_parts(source, shard, [(clip.offset, part, block)])
    assert short.problem is not None and f"ends at byte {path.stat().st_size}" in short.problem
    path.unlink()
    with pytest.raises(StorageError, match="No such file"):
        read_parts(source, shard, [(clip.offset, part, block)])
