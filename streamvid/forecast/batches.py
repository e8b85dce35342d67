"""Batches that a loader would deliver, and the reads that they require, computed from index rows and packet tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.reader import Dataset
from streamvid.forecast.run import PlannedRun
from streamvid.loader.delivery.delivery import Delivery, prepare
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import DataArguments, DatasetConfig, SampleRequest
from streamvid.loader.options import LimitOptions, ScheduleOptions
from streamvid.loader.setup import DeliveryArguments, PlanArguments, Setup, set_up
from streamvid.loader.view.clip_part import clip_part
from streamvid.plan import Cursor, World
from streamvid.storage import MAX_RANGE_BYTES, near_spans

_NUM_PLACES, _SAMPLES_PER_PLACE = 5, 64


def set_up_run(dataset: Dataset | Sequence[DatasetConfig], run: PlannedRun, rank: int = 0) -> Setup:
    """Return the VideoLoader setup for one rank of the run, without starting the loader.

    dataset: a dataset, or the datasets in a mix.

    Raises the same errors as VideoLoader.
    """
    options = run.options
    plan = PlanArguments(
        batch_size=run.batch_size,
        max_tokens_per_batch=run.max_tokens_per_batch,
        preset=run.preset,
        world=World(rank, run.num_ranks),
        seed=options.seed,
        shuffle=options.shuffle,
        tail=options.tail,
        sync=options.sync,
        accumulate=options.accumulate,
        schedule=ScheduleOptions(
            window=options.window,
            order=options.order,
            shard_locality=options.shard_locality,
            costs=run.costs if options.sync == "cost" else None,
        ),
    )
    delivery = DeliveryArguments(limits=LimitOptions(prefetch_bytes=run.prefetch_bytes), num_workers=0)
    return set_up(DataArguments(dataset, split=run.split, where=run.where), plan, delivery)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Batch that a rank will receive.

    step: index of the step in the epoch.
    keys: sample keys in batch order.
    member_bytes: total size, in bytes, of the batch's clips as stored in the tars.
    read_bytes: number of bytes that the loader reads for these clips.
    num_requests: number of requests if the store is an object store.
    num_repeats: number of repeated samples in the batch.
    num_frames_decoded: number of decoded frames per sample.
    """

    epoch: int
    step: int
    bucket_id: str
    keys: tuple[str, ...]
    member_bytes: int
    read_bytes: int
    num_requests: int
    num_repeats: int
    num_frames_decoded: tuple[int, ...]


def planned_batches(setup: Setup, num_epochs: int = 1) -> Iterator[PlannedBatch]:
    """Yield every batch that the setup's rank will receive, in delivery order, assuming that no sample is bad.

    The function reads index rows and packet tables, but no clips. Raises SampleError, StorageError or DatasetError if a
    read fails.
    """
    rows, start = IndexRows(), setup.selection.epoch_plan(Cursor())
    for request in setup.selection.requests(start, num_epochs):
        yield _batch(request, rows)


def _batch(request: BatchRequest, rows: IndexRows) -> PlannedBatch:
    plan, num_done = request.position
    found = [_delivery(rows, sample, request.bucket) for sample in request.samples]
    spans: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for delivery in found:
        if delivery.num_bytes:
            sample = delivery.sample
            spans.setdefault((sample.part.number, sample.shard_info.path), []).append(delivery.span)
    return PlannedBatch(
        epoch=plan.cursor.epoch,
        step=num_done - 1,
        bucket_id=request.bucket.id,
        keys=tuple(delivery.key for delivery in found),
        member_bytes=sum(delivery.row.clip.num_bytes for delivery in found),
        read_bytes=sum(delivery.num_bytes for delivery in found),
        num_requests=sum(_num_requests(of_shard) for of_shard in spans.values()),
        num_repeats=sum(sample.is_repeat for sample in request.samples),
        num_frames_decoded=tuple(map(_num_decoded, found)),
    )


def _delivery(rows: IndexRows, sample: SampleRequest, bucket: Bucket) -> Delivery:
    return prepare(rows, sample, bucket, lambda row, pick: clip_part(row.clip, rows.packets(sample, row), pick))


def _num_requests(spans: Sequence[tuple[int, int]]) -> int:
    longer = sum((end - start - 1) // MAX_RANGE_BYTES for start, end in spans)
    return len(near_spans(spans)) + longer


def _num_decoded(delivery: Delivery) -> int:
    part, there = delivery.part, delivery.row.clip.num_frames
    if not part.num_bytes:
        return 0
    if part.window is not None:
        return len(part.window.packets)
    return there if part.numbers is None else min(there, part.numbers[-1] + 1)


def planned_keys(dataset: Dataset, run: PlannedRun) -> Iterator[dict[str, Any]]:
    """Yield all batches as JSON-serializable mappings, rank by rank, in delivery order."""
    names = ("epoch", "step", "bucket_id", "keys", "member_bytes", "read_bytes", "num_repeats")
    for rank in range(run.num_ranks):
        for batch in planned_batches(set_up_run(dataset, run, rank), run.num_epochs):
            yield {"rank": rank, **{name: getattr(batch, name) for name in names}}


@dataclass(frozen=True, slots=True)
class ReadSample:
    """Read statistics measured on some of a rank's samples, used to estimate the reads for all samples.

    read_share: bytes read per byte of stored clips.
    requests_per_sample: object store requests per sample.
    decoded: maps each bucket id to the mean number of frames decoded per sample.
    """

    num_samples: int
    read_share: float
    requests_per_sample: float
    decoded: Mapping[str, float]


def sample_reads(setup: Setup) -> ReadSample:
    """Return read statistics for the setup's rank, measured on batches at five positions in its first epoch."""
    rows, found = IndexRows(), dict[int, PlannedBatch]()
    for place in range(_NUM_PLACES):
        plan, seen = setup.selection.epoch_plan(setup.selection.at_share(0, place / _NUM_PLACES)), 0
        for request in setup.selection.requests(plan, 1):
            step = plan.cursor.step + request.position[1]
            if step not in found:  # positions overlap in a short epoch
                found[step] = _batch(request, rows)
            seen += len(request.samples)
            if seen >= _SAMPLES_PER_PLACE:
                break
    batches = list(found.values())
    num_samples = sum(len(batch.keys) for batch in batches)
    decoded: dict[str, list[int]] = {}
    for batch in batches:
        decoded.setdefault(batch.bucket_id, []).extend(batch.num_frames_decoded)
    return ReadSample(
        num_samples=num_samples,
        read_share=sum(batch.read_bytes for batch in batches) / max(1, sum(batch.member_bytes for batch in batches)),
        requests_per_sample=sum(batch.num_requests for batch in batches) / max(1, num_samples),
        decoded={name: sum(counts) / len(counts) for name, counts in decoded.items()},
    )
