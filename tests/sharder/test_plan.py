"""Tests of the arithmetic of shard plans."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.tabular.rows import Rows
from streamvid.errors import Rejected
from streamvid.host.journal import FileState
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import assign, record_key, safe_stem, sample_key, split_of
from streamvid.sharder.planning.plan import ShardPlan, cut_by_bytes, make_plan
from streamvid.sharder.probing import file_state
from streamvid.sharder.source.records import Record, RecordSet, Rejection
from streamvid.sharder.units.probe_unit import Probe
from tests.shard_options import shard_options

PROBE = Probe(96, 64, 20, 24.0, 20 / 24, "h264", "mp4", False)
OPTIONS = shard_options(buckets=parse_buckets("96x64@9"), shard_size_bytes=1000, val_fraction=0.2)


def record(row: int, num_bytes: int) -> Record:
    return Record(row, f"{row}.mp4", f"/x/{row}.mp4", num_bytes, "0", None, {})


def plan_with(records: RecordSet, probes: Mapping[FileState, Probe | Rejected], options: ShardOptions) -> ShardPlan:
    return make_plan(records, assign(records.records, lambda file: probes[file_state(file)], options), options, {})


def plan_of(records: Sequence[Record], seed: int = 0) -> list[tuple[str, str, list[str]]]:
    options = replace(OPTIONS, seed=seed)
    plan = plan_with(
        RecordSet(Rows.of(Record, records), (), {}, len(records)), {file_state(r): PROBE for r in records}, options
    )
    assert plan.num_samples == len(records)
    return [(shard.path, shard.split, [sample.key for sample in shard.samples]) for shard in plan.shards]


SIZES = st.lists(st.integers(1, 1500), min_size=1, max_size=60)


@given(SIZES)
def test_shards_are_whole_and_within_their_size(sizes: list[int]) -> None:
    records = [record(row, size) for row, size in enumerate(sizes)]
    size_of = {sample_key(r.source, 0, 20, "96x64-9f"): r.num_bytes for r in records}
    for _, _, keys in plan_of(records):
        assert len(keys) == 1 or sum(size_of[key] for key in keys) <= 1000


@given(SIZES, st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing(sizes: list[int], rng: Random) -> None:
    records = [record(row, size) for row, size in enumerate(sizes)]
    shuffled = rng.sample(records, len(records))
    assert plan_of(records) == plan_of(shuffled)


def test_equal_clips_make_equal_shards() -> None:
    sizes = [
        [len(keys) for _, split, keys in plan_of([record(row, 100) for row in range(count)]) if split == "train"]
        for count in range(12, 80)
    ]
    assert all(max(counts) - min(counts) <= 1 for counts in sizes)


def test_the_seed_shuffles() -> None:
    records = [record(row, 10) for row in range(50)]
    assert plan_of(records) != plan_of(records, seed=1)
    assert plan_of(records)[0][2] != sorted(plan_of(records)[0][2])


def test_one_long_clip_is_a_shard() -> None:
    assert list(cut_by_bytes(np.array([], np.int64), 10)) == []
    assert sorted(len(keys) for _, _, keys in plan_of([record(0, 10**6), record(1, 1)])) == [1, 1]


def test_numbers_run_through_splits() -> None:
    paths = [path for path, _, _ in plan_of([record(row, 400) for row in range(30)])]
    assert paths == [f"shards/96x64-9f/96x64-9f-{number:06d}.tar" for number in range(len(paths))]


def test_rows_without_a_bucket_are_rejected_in_the_order_of_the_input() -> None:
    """SHARD-3."""
    records = (record(0, 1), record(2, 1), record(3, 1))
    probes: Mapping[FileState, Probe | Rejected] = {
        file_state(records[0]): Rejected("no video"),
        file_state(records[1]): PROBE,
        file_state(records[2]): replace(PROBE, num_frames=2),
    }
    plan = plan_with(RecordSet(Rows.of(Record, records), (Rejection(1, "x", "broken"),), {}, 4), probes, OPTIONS)
    assert [rejection.row for rejection in plan.rejections] == [0, 1, 3]
    assert plan.num_samples == 1


@given(st.text(max_size=80), st.integers(0, 3))
def test_keys_are_safe_everywhere(source: str, occurrence: int) -> None:
    source = source.encode("utf-8", "replace").decode()
    for key in (sample_key(source, 0, 5, "96x64-9f", occurrence), record_key(source)):
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}-[0-9a-f]{16}", key)


def test_keys_never_change() -> None:
    """Keys identify samples in all existing datasets, so these values must never change."""
    assert safe_stem("a/clip_1.5s_a.mp4") == "clip_1_5s_a"
    assert record_key("a/clip_1.5s_a.mp4") == "clip_1_5s_a-1ca0f9a5dac9e491"
    assert sample_key("a/clip_1.5s_a.mp4", 0, 10, "96x64-9f") == "clip_1_5s_a-1b160f1a553ebb57"
    assert sample_key("a/clip_1.5s_a.mp4", 0, 10, "96x64-9f", 1) != "clip_1_5s_a-1b160f1a553ebb57"


def test_splits_have_about_the_requested_share_and_are_nested() -> None:
    keys = [record_key(str(number)) for number in range(4000)]
    small = {key for key in keys if split_of(key, 0.1) == "val"}
    large = {key for key in keys if split_of(key, 0.3) == "val"}
    assert small < large
    assert 330 < len(small) < 470
    assert all(split_of(key, 0.0) == "train" for key in keys)
