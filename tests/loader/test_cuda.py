"""Tests of the loader with CUDA: pinned batches, and copies that are correct even if their batch is freed early."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.loader.batch.batch import Batch
from streamvid.sharder.sharder import shard
from tests.loader.sounds import HEIGHT, RATE, WIDTH, Sound, folder_of
from tests.loader.test_batch import made_batch, random_frames
from tests.loader.test_device import driver, wait_for_two
from tests.shard_options import shard_options

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

# One batch at a time in the smallest ring, repeatedly: a slot that is reused too early is soon overwritten.
OPTIONS: dict[str, Any] = {"batch_size": 1, "num_workers": 2, "num_epochs": 6, "limits": {"prefetch_bytes": 0}}


def keep_busy(busy: torch.Tensor) -> torch.Tensor:
    """Queue some milliseconds of work on the current stream, so that later work starts late."""
    for _ in range(4):
        busy = busy @ busy / 64
    return busy


def expected_videos(dataset: Path) -> list[torch.Tensor]:
    with streamvid.VideoLoader(dataset, **OPTIONS) as loader:
        return [batch.video.clone() for batch in loader]


def test_batches_are_pinned(dataset: Path) -> None:
    with streamvid.VideoLoader(dataset, batch_size=2, num_workers=2) as loader:
        for batch in loader:
            assert batch.video.is_pinned()


def test_a_copy_in_flight_outlives_its_batch(dataset: Path) -> None:
    """BATCH-1: a ring slot is not reused before the copies queued from it have finished."""
    expected = expected_videos(dataset)
    with streamvid.VideoLoader(dataset, **OPTIONS) as loader:
        busy = torch.randn(4096, 4096, device="cuda")
        copies = []
        for batch in loader:
            busy = keep_busy(busy)  # delays the stream, so that copies start late
            copies.append(batch.to("cuda").video)
    for copy, right in zip(copies, expected, strict=True):
        assert torch.equal(copy.cpu(), right)


def test_a_copy_on_the_callers_own_stream_outlives_its_batch(dataset: Path) -> None:
    """BATCH-1: the loader waits for `to` on the stream that it used, even if the batch is freed outside that stream."""
    expected = expected_videos(dataset)
    side = torch.cuda.Stream()
    with streamvid.VideoLoader(dataset, **OPTIONS) as loader:
        busy = torch.randn(4096, 4096, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        copies = []
        for batch in loader:
            with torch.cuda.stream(side):
                busy = keep_busy(busy)
                copies.append(batch.to("cuda").video)
            del batch
        side.synchronize()
    for copy, right in zip(copies, expected, strict=True):
        assert torch.equal(copy.cpu(), right)


def test_a_copy_outlives_a_batch_that_dies_in_another_thread(dataset: Path) -> None:
    """BATCH-1: the caller's own copies run on the stream that was current when the batch was handed over."""
    expected = expected_videos(dataset)
    with streamvid.VideoLoader(dataset, **OPTIONS) as loader, torch.cuda.stream(torch.cuda.Stream()):
        busy = torch.randn(4096, 4096, device="cuda")
        copies, held = [], []
        for batch in loader:
            busy = keep_busy(busy)
            copies.append(batch.video.to("cuda", non_blocking=True))
            held.append(batch)
            del batch
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
        torch.cuda.current_stream().synchronize()
    for copy, right in zip(copies, expected, strict=True):
        assert torch.equal(copy.cpu(), right)


def test_a_copy_in_flight_outlives_its_loader(dataset: Path) -> None:
    """BATCH-1: memory pages are not freed while a copy reads them."""
    with streamvid.VideoLoader(dataset, batch_size=2, num_workers=0) as loader:
        batch = next(iter(loader))
        right = batch.video.clone()
        busy = keep_busy(torch.randn(4096, 4096, device="cuda"))
        copy = batch.to("cuda").video
        del batch
    assert torch.equal(copy.cpu(), right) and busy.is_cuda


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)])
def test_staged_batches_are_correct_however_late_the_caller_computes(dataset: Path, device: Any) -> None:
    """BATCH-1: the caller's stream waits for the copy, and torch reuses the memory only after the caller's work."""
    with driver(dataset, None) as plain:
        expected = [batch.clone() for batch in plain.batches()]
    largest = max(batch.video.numel() for batch in expected)
    with driver(dataset, device, frame_bytes=largest + 4096) as staged:
        busy = torch.randn(4096, 4096, device="cuda")
        sums, kept = [], []
        for number, batch in enumerate(staged.batches()):
            busy = keep_busy(busy)
            sums.append(batch.video.sum(dtype=torch.int64))  # reads late, after this loop has dropped the batch
            assert {value.device for value in batch.values() if torch.is_tensor(value)} == {torch.device("cuda", 0)}
            if number % 3 == 0:
                kept.append((number, batch))
    assert len(sums) == len(expected) > 5
    for found, right in zip(sums, expected, strict=True):
        assert int(found) == int(right.video.sum(dtype=torch.int64))
    for number, batch in kept:
        assert_same(batch, expected[number])


def assert_same(batch: Batch, right: Batch) -> None:
    assert batch.video.stride() == right.video.stride() and batch.digest() == right.digest()
    for name, value in right.items():
        if torch.is_tensor(value):
            assert torch.equal(batch[name].cpu().nan_to_num(), value.nan_to_num()), name
        else:
            assert batch[name] == value


def test_a_staged_batch_does_not_wait_for_the_callers_work(dataset: Path) -> None:
    """The ring slot is released after the copy, even if the caller's stream is still busy with earlier work."""
    with driver(dataset, "cuda", frame_bytes=2 * 9 * 96 * 64 * 3 + 4096) as staged:
        batches = staged.batches()
        next(batches)
        busy = torch.cuda.Event()
        torch.cuda._sleep(2 * 10**9)  # about one second of device time
        busy.record()
        for _ in range(3):  # each batch needs the slot of the previous one
            next(batches)
        assert not busy.query()
        torch.cuda.synchronize()


def test_the_next_batch_is_on_its_way_before_the_caller_asks(dataset: Path) -> None:
    with driver(dataset, "cuda", frame_bytes=2**21) as staged:
        batches = staged.batches()
        next(batches)
        wait_for_two(staged)
        next(batches)
        assert staged.made == [1, 2, 3] and staged.handed_over == [1, 2]


def test_an_abandoned_loop_leaves_no_memory_on_the_device(dataset: Path) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with driver(dataset, "cuda") as staged:
        for batch in staged.batches():
            assert batch.video.is_cuda
            break
        del batch
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("span", [(-1, 1), (0, 1), (-2.1, 2.6)])
@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW", "BTHWC"])
def test_normalized_and_digest_match_the_cpu(dtype: torch.dtype, span: tuple[float, float], layout: str) -> None:
    batch = made_batch(random_frames(2, 9, 64, 96, 3), layout)
    moved = batch.to("cuda")
    assert torch.equal(moved.normalized(dtype, range=span).cpu(), batch.normalized(dtype, range=span))
    assert moved.normalized(dtype).is_contiguous() and moved.digest() == batch.digest()


def test_normalized_takes_no_more_memory_than_its_result(dataset: Path) -> None:
    batch = made_batch(random_frames(2, 17, 128, 128, 3)).to("cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    normalized = batch.normalized(torch.bfloat16)
    assert torch.cuda.max_memory_allocated() - before <= normalized.nbytes + 2**16


def test_a_batch_moved_back_to_the_cpu_can_be_read_immediately() -> None:
    """A copy to the CPU has finished when `to` returns."""
    right = made_batch(random_frames(4, 17, 256, 256, 3))
    moved = right.to("cuda")
    busy = keep_busy(torch.randn(4096, 4096, device="cuda"))
    assert torch.equal(moved.to("cpu").video, right.video) and busy.is_cuda


@pytest.fixture(scope="module")
def with_audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("audio")
    clips = folder_of(root / "clips", [Sound("one.mov", "pcm_s16le"), Sound("silent.mp4", None)])
    shard(clips, root / "dataset", shard_options(buckets=parse_buckets(f"{WIDTH}x{HEIGHT}@9"), caption_column=""))
    return root / "dataset"


AUDIO: dict[str, Any] = {
    "batch_size": 1,
    "num_epochs": 6,
    "num_workers": 2,
    "output": {"audio": {"sample_rate": RATE}, "pixels": "rgb24"},
}


def test_audio_is_pinned_and_a_copy_of_it_outlives_its_batch(with_audio: Path) -> None:
    """BATCH-1: audio shares the ring slot of its video."""
    with streamvid.VideoLoader(with_audio, **AUDIO) as loader:
        expected = [batch.audio.clone() for batch in loader]
    with streamvid.VideoLoader(with_audio, **AUDIO, limits={"prefetch_bytes": 0}) as loader:
        busy = torch.randn(4096, 4096, device="cuda")
        copies = []
        for batch in loader:
            assert batch.audio.is_pinned()
            busy = keep_busy(busy)
            copies.append(batch.to("cuda").audio)
    for copy, right in zip(copies, expected, strict=True):
        assert torch.equal(copy.cpu(), right)


def test_audio_is_moved_to_the_device_with_its_video(with_audio: Path) -> None:
    with streamvid.VideoLoader(with_audio, **AUDIO) as loader:
        expected = [batch.clone() for batch in loader]
    with streamvid.VideoLoader(with_audio, **AUDIO, device="cuda") as loader:
        kept = []
        for number, batch in enumerate(loader):
            places = [one.device.type for one in (batch.audio, batch.audio_present, batch.audio_offset_seconds)]
            assert places == ["cuda"] * 3
            kept += [batch] if number % 3 == 0 else []
    assert any(bool(one.audio_present.any()) for one in expected) and len(kept) > 2
    for found, right in zip(kept, expected[::3], strict=True):
        assert_same(found, right)
