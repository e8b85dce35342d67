"""Forecast for a sealed dataset.

The counts come from its shard table. The shapes, loads, memory and time come from its index.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.buckets.batch_size import key_of
from streamvid.buckets.bucket import Bucket
from streamvid.dataset.arrow import numbers_of
from streamvid.dataset.passes import DEFAULT_WORKERS, in_parallel
from streamvid.dataset.reader import Dataset
from streamvid.forecast.batches import ReadSample, sample_reads, set_up_run
from streamvid.forecast.counts import RunCounts, count_run, failure_of
from streamvid.forecast.host import Estimates, HostCosts, RankWork, epoch_time, host_memory
from streamvid.forecast.loads import Int64Array, RankLoads, rank_loads
from streamvid.forecast.run import BucketShape, DatasetFacts, PlannedRun, RunDetails, RunForecast
from streamvid.loader.mix import MixPart
from streamvid.loader.setup import Setup
from streamvid.loader.view.model_rule import common_rule, rule_of
from streamvid.plan import Cursor
from streamvid.plan.cost import cost_classes, default_costs
from streamvid.sharder.source.summary import InputSummary, SourceSummary

MAX_SCANNED_SHARDS = 4096
"""Maximum number of shards whose index is read. They are spread evenly over all shards."""

_Columns: TypeAlias = dict[str, npt.NDArray[Any]]

_SCANNED = ("clip_bytes", "window_num_frames", "clip_width", "clip_height", "crop_fraction", "upscale")
_CLOSED_GOP = 8  # frames decoded before the first wanted one if no packet table was read: half a native key interval
_OPENING_REQUESTS = 10  # per rank: manifest, shard table, footers


def forecast_dataset(dataset: Dataset, run: PlannedRun) -> RunForecast:
    """Return the forecast for a run on a sealed dataset. Raises the same errors as VideoLoader."""
    setup = set_up_run(dataset, run)
    selection = setup.selection
    counts = count_run(
        lambda options: replace(selection, options=options).epoch_plan(Cursor()), run.options, run.num_epochs
    )
    failure = failure_of(selection.epoch_plan(Cursor()), run.num_epochs)
    is_detailed = run.details and failure is None
    scans = scan_buckets(setup) if is_detailed else {}
    chosen = setup.mix.parts[0].subset.filter
    where = run.where if dataset.where is None or chosen is None else chosen.text
    num_shards = {name: len(shards) for name, shards in setup.mix.parts[0].subset.counts.items()}
    return RunForecast(
        source=dataset.url,
        about=DatasetFacts(dataset.manifest.fingerprints.plan, run.split, where, run.preset, num_shards),
        input=InputSummary((_summary(dataset),)),
        counts=counts,
        cost_classes=cost_classes(selection.costs) if run.options.sync == "cost" else None,
        costs_are_measured=run.costs is not None,
        shapes={name: scan.shape for name, scan in sorted(scans.items())},
        details=_details(setup, run, counts, scans) if is_detailed else None,
        failure=failure,
    )


def _summary(dataset: Dataset) -> SourceSummary:
    columns = {"kept": dataset.user_columns} if dataset.user_columns else {}
    return SourceSummary(dataset.url, "dataset", dataset.manifest.counts.records, columns=columns)


# -------------------------------------------------------------------------------------------------- index values


@dataclass(frozen=True)
class BucketScan:
    """Index values for a bucket's samples that pass the filter.

    pixels: mean number of pixels per stored frame.
    first: index of each shard's first sample in `clip_bytes`, as int64 with shape (shards,).
    clip_bytes: sizes of the stored clips in bytes, as int64 with shape (samples,).
    `first` and `clip_bytes` are None if only some shards were read.
    """

    bucket: Bucket
    shape: BucketShape
    pixels: float
    first: Int64Array | None
    clip_bytes: Int64Array | None

    def sizes(self, shards: Int64Array, places: Int64Array) -> Int64Array:
        """Return the samples' clip sizes in bytes, as int64.

        If only some shards were read, every size is the mean size.
        """
        if self.first is None or self.clip_bytes is None:
            return np.full(len(shards), round(self.shape.bytes_mean), np.int64)
        found: Int64Array = self.clip_bytes[self.first[shards] + places]
        return found


def scan_buckets(setup: Setup, max_shards: int = MAX_SCANNED_SHARDS) -> dict[str, BucketScan]:
    """Read one row group of the samples index per shard, and return one scan per bucket id.

    If there are more shards than `max_shards`, read only about `max_shards` of them, spread evenly, and at least one
    per bucket.
    """
    (part,) = setup.mix.parts
    total = sum(len(counts) for counts in part.subset.counts.values())
    stride = max(1, -(-total // max_shards))
    items = [
        (name, number) for name in part.subset.counts for number in range(0, len(part.subset.counts[name]), stride)
    ]
    tables: dict[str, list[_Columns]] = {}

    def job(item: tuple[str, int], stop: threading.Event) -> tuple[str, _Columns]:
        return item[0], _scan_shard(part, *item)

    # Reading a local index is CPU-bound, so threads would not speed it up.
    is_local, never = part.dataset.store.is_local, threading.Event()
    found = (job(item, never) for item in items) if is_local else in_parallel(job, items, DEFAULT_WORKERS)
    for name, values in found:
        tables.setdefault(name, []).append(values)
    return {name: _scanned(part, setup.mix.buckets[name], found, stride == 1) for name, found in tables.items()}


def _scan_shard(part: MixPart, bucket_id: str, number: int) -> _Columns:
    where = part.subset.filter
    wanted = {*_SCANNED, *(() if where is None else where.columns)}
    table = part.dataset.samples(part.subset.shard_info(bucket_id, number), sorted(wanted))
    if where is not None:
        table = table.take(where.matching(table))
    return {name: _numbers(table.column(name).combine_chunks()) for name in _SCANNED}


def _numbers(column: Any) -> npt.NDArray[Any]:
    """Return the numbers in a column, with NaN for missing values."""
    import pyarrow.compute as pc

    return numbers_of(pc.fill_null(column, float("nan")) if column.null_count else column)


def _scanned(part: MixPart, bucket: Bucket, found: Sequence[_Columns], is_whole: bool) -> BucketScan:
    values = {name: np.concatenate([table[name] for table in found]) for name in found[0]}
    num_bytes, counts = values["clip_bytes"].astype(np.int64), part.subset.counts[bucket.id]
    crop, upscale = (values[name][np.isfinite(values[name])] for name in ("crop_fraction", "upscale"))
    frames = float(values["window_num_frames"].mean())
    shape = BucketShape(
        num_samples=len(num_bytes),
        crop_mean=float(crop.mean()) if crop.size else None,
        crop_max=float(crop.max()) if crop.size else None,
        upscale_mean=float(upscale.mean()) if upscale.size else None,
        frames_unused_share=1 - bucket.num_frames / frames if frames else 0.0,
        frames_mean=frames,
        bytes_mean=float(num_bytes.mean()),
    )
    return BucketScan(
        bucket=bucket,
        shape=shape,
        pixels=float((values["clip_width"].astype(np.float64) * values["clip_height"]).mean()),
        first=np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) if is_whole else None,
        clip_bytes=num_bytes if is_whole else None,
    )


# ---------------------------------------------------------------------------------------------------------- details


def _details(setup: Setup, run: PlannedRun, counts: RunCounts, scans: Mapping[str, BucketScan]) -> RunDetails:
    selection = setup.selection
    loads = rank_loads(
        selection.epoch_plan(Cursor()),
        selection.batch_sizes,
        default_costs(setup.buckets, rule_of(run.preset) or common_rule(setup.mix.manifests)).tokens,
        selection.costs if run.costs is None else run.costs.costs(selection.batch_sizes),
        lambda name, shards, places: scans[name].sizes(shards, places),
    )
    memory = host_memory(
        setup.buckets, selection.batch_sizes, setup.mix.max_clip_bytes, run.host, run.prefetch_bytes, run.num_ranks
    )
    summary = loads.summary(all(scan.first is not None for scan in scans.values()))
    return RunDetails(summary, memory, _estimates(setup, run, counts, scans, loads))


def _estimates(
    setup: Setup, run: PlannedRun, counts: RunCounts, scans: Mapping[str, BucketScan], loads: RankLoads
) -> Estimates:
    reads = sample_reads(setup)
    decoding = {name: decode_ms(scan, reads, run.host) for name, scan in sorted(scans.items())}
    delivered = {bucket.bucket_id: bucket.num_delivered / run.num_epochs for bucket in counts.buckets}
    summary = loads.summary()
    num_requests = max(summary.samples_by_rank) * reads.requests_per_sample
    work = RankWork(
        decode_cpu_seconds=sum(decoding[name] * delivered[name] for name in scans) / 1000 / run.num_ranks,
        num_requests=num_requests + 2 * _shards_per_rank(setup) + _OPENING_REQUESTS,
        num_bytes=max(summary.member_bytes_by_rank or [0]) * reads.read_share,
        gpu_seconds=None if run.costs is None else loads.step_costs / 1e9,
    )
    return Estimates(
        work=work,
        epoch=epoch_time(work, run.host, run.num_ranks),
        decode_ms_per_sample=decoding,
        requests_per_sample=reads.requests_per_sample,
        read_share=reads.read_share,
        num_samples_looked_at=reads.num_samples,
        host_costs=run.host,
    )


def decode_ms(scan: BucketScan, reads: ReadSample, costs: HostCosts) -> float:
    """Return the CPU time per sample in a bucket, in milliseconds.

    The time is taken from the cost table, or estimated from the bucket's pixels.
    """
    bucket, named = scan.bucket, costs.decode_ms or {}
    key = key_of(bucket, named, "cost table decode_ms")
    if key is not None:
        return named[key]
    frames = reads.decoded.get(bucket.id, min(scan.shape.frames_mean, bucket.num_frames + _CLOSED_GOP))
    decoding = frames * scan.pixels * costs.decode_ns_per_pixel
    return (decoding + bucket.num_pixels * costs.make_ns_per_pixel) / 1e6 + costs.sample_ms


def _shards_per_rank(setup: Setup) -> float:
    """Return the mean number of shards that a rank reads per epoch if samples are assigned to ranks at random."""
    others = 1 - 1 / setup.selection.world.num_ranks
    return sum(
        float((1 - others ** counts.astype(np.float64)).sum()) for counts in setup.mix.parts[0].subset.counts.values()
    )
