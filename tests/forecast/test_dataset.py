"""Tests that `streamvid plan` predicts the keys, counts, bytes, memory and requests of real loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.errors import PlanError
from streamvid.forecast.batches import planned_batches, planned_keys, set_up_run
from streamvid.forecast.dataset import forecast_dataset, scan_buckets
from streamvid.forecast.host import HostCosts, host_memory
from streamvid.forecast.run import PlannedRun
from streamvid.plan import PlanOptions, World
from tests.conftest import Sharded
from tests.loader.conftest import open_loader

TAILS = ("carry", "drop", "pad", "shrink", "uneven")
SIZES = {"*": 2, "*-1f-*": 1}


def run_of(num_ranks: int, tail: Any = "carry", *, epochs: int = 1, **others: Any) -> PlannedRun:
    sync = others.pop("sync", "bucket")
    return PlannedRun(num_ranks, SIZES, None, PlanOptions(seed=5, tail=tail, sync=sync), epochs, "train", **others)


def delivered(root: Path, run: PlannedRun, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the batches that a real loader of that rank delivers."""
    options = {name: getattr(run.options, name) for name in ("seed", "tail", "sync")}
    options |= {"num_epochs": run.num_epochs, "where": run.where, "output": {"decode": False}}
    with open_loader(root, batch_size=SIZES, world=World(rank, run.num_ranks), **options) as loader:
        before = 0
        for batch in loader:
            fetched = loader.stats().work.num_bytes_fetched
            yield {
                "rank": rank,
                "epoch": loader.epoch,
                "bucket_id": batch.bucket.id,
                "keys": tuple(batch.sample_keys),
                "read_bytes": sum(clip.data.numel() for clip in batch.clips),
                "num_repeats": int(batch.is_repeat.sum()),
            }
            assert fetched - before == sum(clip.data.numel() for clip in batch.clips)
            before = fetched


def members(root: Path) -> dict[str, int]:
    """Return the size in bytes of each key's clip in the tars."""
    table = streamvid.open_dataset(root).samples_table().select(["key", "clip_bytes"]).to_pydict()
    return dict(zip(table["key"], table["clip_bytes"], strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("tail", TAILS)
def test_plan_predicts_what_loaders_deliver(sharded: Sharded, num_ranks: int, tail: str) -> None:
    """PLAN-4: counts, keys in order, member bytes and bytes read, over all ranks of the demo's corpus."""
    dataset = streamvid.open_dataset(sharded.root)
    run = run_of(num_ranks, tail, epochs=2 if tail == "carry" else 1, details=True)
    forecast = forecast_dataset(dataset, run)
    assert forecast.failure is None and forecast.details is not None
    said = list(planned_keys(dataset, run))
    sizes = members(sharded.root)
    found = [batch for rank in range(num_ranks) for batch in delivered(sharded.root, run, rank)]
    assert [{name: batch[name] for name in found[0]} for batch in said] == found
    assert [batch["member_bytes"] for batch in said] == [sum(sizes[key] for key in batch["keys"]) for batch in found]

    counted: dict[str, int] = {}
    repeats: dict[str, int] = {}
    for batch in found:
        counted[batch["bucket_id"]] = counted.get(batch["bucket_id"], 0) + len(batch["keys"])
        repeats[batch["bucket_id"]] = repeats.get(batch["bucket_id"], 0) + batch["num_repeats"]
    reports = [report for report in forecast.counts.buckets if report.num_delivered]
    assert {report.bucket_id: report.num_delivered for report in reports} == counted
    assert {report.bucket_id: report.num_repeated for report in reports} == repeats
    first = [batch for batch in found if batch["epoch"] == 0]
    by_rank = [0] * num_ranks
    for batch in first:
        by_rank[batch["rank"]] += sum(sizes[key] for key in batch["keys"])
    loads = forecast.details.loads
    assert loads.member_bytes_by_rank == tuple(by_rank) and not loads.bytes_are_estimate


def test_a_filter_and_cost_classes_are_predicted_too(sharded: Sharded) -> None:
    """PLAN-3 and PLAN-4: with --where and --sync cost, the predicted keys equal the loaders' keys, rank by rank."""
    dataset = streamvid.open_dataset(sharded.root)
    run = run_of(2, "pad", sync="cost", where="duration_seconds > 1", details=True)
    forecast = forecast_dataset(dataset, run)
    assert forecast.failure is None
    assert sum(report.num_samples for report in forecast.counts.buckets) < len(members(sharded.root))
    found = [batch for rank in range(2) for batch in delivered(sharded.root, run, rank)]
    assert [{name: batch[name] for name in found[0]} for batch in planned_keys(dataset, run)] == found


def test_predicted_memory_equals_the_loaders(sharded: Sharded) -> None:
    """RES-2: the predicted ring size equals the loader's ring size."""
    dataset = streamvid.open_dataset(sharded.root)
    for prefetch in (0, 256 * 2**20):
        run = dataclasses.replace(run_of(2), prefetch_bytes=prefetch, details=True)
        details = forecast_dataset(dataset, run).details
        assert details is not None
        for pixels, num_bytes in (("rgb24", details.memory.ring_bytes), ("yuv420p", details.memory.ring_bytes_yuv420p)):
            options = {"limits": {"prefetch_bytes": prefetch}, "output": {"pixels": pixels}}
            with open_loader(sharded.root, batch_size=SIZES, world=World(0, 2), **options) as loader:
                assert num_bytes == loader.ring_bytes
    memory = host_memory(list(loader.buckets), loader.batch_sizes, 0, HostCosts(num_workers=3, worker_bytes=10), 0, 4)
    assert memory.workers_bytes == 30
    assert memory.per_node_bytes == 4 * memory.per_rank_bytes


def test_predicted_waste_equals_the_means_of_the_index(sharded: Sharded) -> None:
    """Each bucket's crop, upscale and unused frames are the means of the index values."""
    dataset = streamvid.open_dataset(sharded.root)
    setup = set_up_run(dataset, run_of(1))
    rows = dataset.samples_table().to_pylist()
    scans = scan_buckets(setup)
    assert set(scans) == {row["bucket_id"] for row in rows}
    for name, scan in scans.items():
        mine = [row for row in rows if row["bucket_id"] == name]
        shape = scan.shape
        assert shape.num_samples == len(mine)
        for column, mean in (
            ("crop_fraction", shape.crop_mean),
            ("upscale", shape.upscale_mean),
            ("clip_bytes", shape.bytes_mean),
        ):
            assert mean == pytest.approx(sum(row[column] for row in mine) / len(mine))
        frames = sum(row["window_num_frames"] for row in mine)
        assert shape.frames_unused_share == pytest.approx(1 - len(mine) * scan.bucket.num_frames / frames)


def test_a_dataset_can_be_estimated_from_some_of_its_shards(sharded: Sharded) -> None:
    dataset = streamvid.open_dataset(sharded.root)
    setup = set_up_run(dataset, run_of(1))
    whole, some = scan_buckets(setup), scan_buckets(setup, max_shards=4)
    assert set(some) == set(whole)  # at least one shard per bucket
    assert any(scan.shape.num_samples < whole[name].shape.num_samples for name, scan in some.items())
    assert all(scan.first is None for scan in some.values())


def test_a_run_without_a_step_has_counts_and_no_details(sharded: Sharded) -> None:
    forecast = forecast_dataset(streamvid.open_dataset(sharded.root), run_of(4096, "drop", details=True))
    assert isinstance(forecast.failure, PlanError)
    assert forecast.details is None and forecast.counts.starved


def test_predicted_requests_equal_the_stores_count(sharded: Sharded) -> None:
    """STORE-2: for clips read from an object store, the number of predicted requests equals the store's count."""
    url = "memory://streamvid-forecast"
    streamvid.copy_dataset(sharded.root, url)
    dataset = streamvid.open_dataset(url)
    run = run_of(1, "uneven")
    planned = sum(batch.num_requests for batch in planned_batches(set_up_run(dataset, run)))
    options = {"tail": "uneven", "seed": 5, "output": {"decode": False}}
    with open_loader(url, batch_size=SIZES, world=World(0, 1), **options) as loader:
        num_shards = len(loader.dataset.shards)
        before = loader.stats().store
        for _ in loader:
            pass
        after = loader.stats().store
    assert before is not None and after is not None
    of_index = 2 * num_shards + 10
    assert planned <= after.num_requests - before.num_requests <= planned + of_index
