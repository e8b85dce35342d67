"""Tests of the device stage: batches are moved to the device, one batch ahead, and get their own memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, LoaderError
from streamvid.loader.batch.batch import Batch
from streamvid.loader.batch.device import DeviceStage, check_device
from streamvid.loader.batch.ring import make_batch, pin
from streamvid.loader.delivery.pending import PendingBatch
from streamvid.loader.delivery.pipeline import Pipeline, PipelineOptions
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import MixPart, SampleRequest, Subset
from streamvid.loader.options import Layout
from streamvid.loader.stats import StatsMeter


class Driver:
    """Pipeline, ring and stage assembled as in a loader, with a record of the batches made and handed over.

    Each batch holds two samples of one shard, in order. Its position is its number, starting at 1.
    """

    def __init__(self, dataset: Path, device: Any, frame_bytes: int, layout: Layout) -> None:
        self.layout = layout
        self.stage = DeviceStage(device)
        self.meter = StatsMeter()
        self.handed_over: list[int] = []
        self.made: list[int] = []
        opened = open_dataset(dataset)
        shards: dict[str, tuple[ShardInfo, ...]] = {}
        for shard in opened.shards:
            shards[shard.bucket_id] = (*shards.get(shard.bucket_id, ()), shard)
        counts = {name: np.array([shard.num_samples for shard in some]) for name, some in shards.items()}
        columns = {name: opened.column(name) for name in ("score", "place")}
        self.part = MixPart(0, opened, 0, Subset(shards, counts), columns=columns)
        options = PipelineOptions(num_workers=0, clip_bytes=2**20, frame_bytes=frame_bytes)
        self.pipeline = Pipeline((self.part,), options)

    def requests(self) -> Iterator[BatchRequest]:
        numbers = itertools.count(1)
        for bucket in self.part.dataset.manifest.buckets:
            for shard, count in enumerate(self.part.subset.counts[bucket.id]):
                for first in range(0, count - 1, 2):
                    places = (first, first + 1)
                    samples = tuple(SampleRequest(self.part, bucket.id, shard, place, 0, False) for place in places)
                    yield BatchRequest(bucket, samples, next(numbers))

    def batches(self) -> Iterator[Batch]:
        run = self.pipeline.stop()
        self.pipeline.start(run, self.requests())
        return self.stage.batches(
            partial(self.pipeline.next_batch, run), partial(self.pipeline.has_batch, run), self._make, self._hand_over
        )

    def _make(self, pending: PendingBatch) -> Batch:
        self.made.append(pending.request.position)
        return make_batch(pending, ("score", "place"), {"score"}, self.layout)

    def _hand_over(self, pending: PendingBatch, wait_seconds: float, batch_seconds: float) -> None:
        self.pipeline.count(pending)
        self.handed_over.append(pending.request.position)
        self.meter.add(
            pending.stats,
            len(pending.deliveries),
            wait_seconds=wait_seconds,
            batch_seconds=batch_seconds,
            queue_depth=self.pipeline.queue_depth,
        )


@contextmanager
def driver(dataset: Path, device: Any, frame_bytes: int = 2**20, layout: Layout = "BCTHW") -> Iterator[Driver]:
    made = Driver(dataset, device, frame_bytes, layout)
    try:
        made.pipeline.open()
        pin(made.pipeline.ring, made.stage.device)
        yield made
    finally:
        made.pipeline.close()


def wait_for_two(driving: Driver) -> None:
    """Wait until two batches are ready, one for the next request and one to copy ahead, and no more are coming.

    Decoders may finish later batches before earlier ones. The next two batches are certain to be ready only once all
    batches that fit are ready.
    """
    depth = 0
    while depth < 2 or depth != driving.pipeline.queue_depth:
        depth = driving.pipeline.queue_depth
        time.sleep(0.2)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_staged_batches_equal_plain_ones_and_have_their_own_memory(dataset: Path, device: Any) -> None:
    """BATCH-1: batches that the caller keeps occupy no slot in a ring with room for three."""
    with driver(dataset, None) as plain:
        expected = [batch.clone() for batch in plain.batches()]
    frame_bytes = 3 * (max(batch.video.numel() for batch in expected) + 4096)
    with driver(dataset, device, frame_bytes=frame_bytes) as staged:
        kept = list(staged.batches())
        assert staged.handed_over == plain.handed_over == list(range(1, len(expected) + 1))
    assert len(kept) > 5
    for batch, right in zip(kept, expected, strict=True):
        assert batch.keys() == right.keys() and batch.video.stride() == right.video.stride()
        for name, value in right.items():
            same = torch.equal(value.nan_to_num(), batch[name].nan_to_num()) if torch.is_tensor(value) else None
            assert same if same is not None else value == batch[name], name
        assert batch.digest() == right.digest()


def test_every_tensor_goes_to_the_device(dataset: Path) -> None:
    with driver(dataset, "meta") as staged:
        for batch in staged.batches():
            assert {value.device.type for value in batch.values() if torch.is_tensor(value)} == {"meta"}
            assert batch.video.dtype == torch.uint8 and batch.score.shape == batch.fps.shape == (2,)
            assert all(isinstance(place, str) for place in batch.place)
            assert batch.normalized(torch.bfloat16).shape == batch.video.shape


def test_one_batch_is_copied_ahead_and_not_counted(dataset: Path) -> None:
    """PLAN-5: a batch that is copied ahead has not been handed over."""
    with driver(dataset, "cpu", frame_bytes=2**21) as staged:
        batches = staged.batches()
        next(batches)
        for number in range(2, 6):
            wait_for_two(staged)
            next(batches)
            assert staged.handed_over == list(range(1, number + 1))
            assert staged.made == list(range(1, number + 2))
        assert len(list(batches)) + 5 == len(staged.handed_over) == len(staged.made)


def test_without_a_device_none_is_made_ahead(dataset: Path) -> None:
    with driver(dataset, None) as plain:
        for _ in plain.batches():
            assert plain.made == plain.handed_over


def test_a_batch_copied_ahead_does_not_outlive_its_run(dataset: Path) -> None:
    """A loop that continues after its loader was moved to another position raises.

    It gets no batch of the old position.
    """
    with driver(dataset, "cpu", frame_bytes=2**21) as staged:
        batches = staged.batches()
        next(batches)
        wait_for_two(staged)
        next(batches)
        assert staged.made == [1, 2, 3]
        staged.pipeline.stop()
        with pytest.raises(LoaderError, match="this iteration is over"):
            next(batches)
        assert staged.handed_over == [1, 2]


def test_the_stage_holds_no_batch_that_the_caller_released(dataset: Path) -> None:
    """BATCH-1: room for one batch is enough if the caller keeps no batch, or if batches are copied to a device."""
    largest = 2 * 9 * 96 * 64 * 3
    with driver(dataset, None, frame_bytes=largest + 4096) as plain:
        for batch in plain.batches():
            del batch
        assert len(plain.handed_over) > 5
    with driver(dataset, "cpu", frame_bytes=largest + 4096) as staged:
        assert len(list(staged.batches())) == len(plain.handed_over)


@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW", "BTHWC"])
def test_layouts_are_preserved(dataset: Path, layout: Layout) -> None:
    with driver(dataset, "cpu", layout=layout) as staged:
        for batch in staged.batches():
            frames, height, width = batch.bucket.shape
            sizes = {"B": 2, "C": 3, "T": frames, "H": height, "W": width}
            assert batch.layout == layout and batch.video.shape == tuple(sizes[name] for name in layout)
            assert batch.video.stride(layout.index("C")) == 1


def test_the_stage_reports_the_cost_of_steps(dataset: Path) -> None:
    with driver(dataset, "cpu") as staged:
        num_samples = sum(len(batch.sample_keys) for batch in staged.batches())
        stats = staged.meter.stats()
    assert stats.num_steps == len(staged.handed_over) and stats.num_samples == num_samples
    assert 0 < stats.batch_seconds <= stats.wait_seconds <= stats.seconds
    assert stats.work.num_bytes_fetched > 0 and stats.work.decode_seconds > 0


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("gpu", "gpu"),
        ("cuda:99", "the CUDA device does not exist on this machine"),
        ("cuda:-1", "cuda:-1"),
        (1.5, "1.5"),
        ("xpu", "xpu"),
        ("mps", "mps"),
    ],
)
def test_an_unavailable_device_is_refused(device: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"device=.*{why}.*Available: cpu.*omit device"):
        check_device(device)


def test_cuda_without_cuda_is_refused() -> None:
    if torch.cuda.is_available():
        assert check_device("cuda") == torch.device("cuda")
        return
    with pytest.raises(ConfigError, match=r"device='cuda' cannot be used: .*Available: cpu; use one of them"):
        check_device("cuda")
    assert check_device(None) is None


def test_a_profiler_sees_what_the_loader_does(dataset: Path) -> None:
    with (
        driver(dataset, "cpu") as staged,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        num_steps = len(list(staged.batches()))
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["streamvid.make_batch"] == calls["streamvid.copy"] == num_steps
    assert calls["streamvid.wait"] == num_steps + 1  # the last wait finds the end
