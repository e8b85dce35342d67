"""Tests of decode=False: stored clips are delivered, and decode to the same frames as with the loader's decoders."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import streamvid
from streamvid.buckets.bucket import Bucket, parse_buckets
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, SampleError, WorkerError
from streamvid.loader.batch.contents import StoredClip
from streamvid.sharder.sharder import shard
from streamvid.video.decode.file import decode_pictures
from streamvid.video.decode.stored import StoredDecoder
from streamvid.video.limits import STORED_LIMITS
from streamvid.video.picture import Accuracy, PictureFormat, Pixels
from tests.clips import encode, frames_of
from tests.conftest import merged
from tests.loader.conftest import SMALL, build_dataset, open_loader, state_after
from tests.loader.test_bad import LAYOUT, damaged, expected_substitute
from tests.loader.test_packets import flip, rows_of
from tests.processes import streamvid_threads, wait_for_threads
from tests.shard_options import shard_options

pytestmark = pytest.mark.timeout(120)

BUCKETS = parse_buckets("96x64@5,64x96@5,64x64@1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with long and short clips, with and without packet indices, and a still image."""
    folder = tmp_path_factory.mktemp("source")
    wide, tall = frames_of("bikes", 192, 128, 40), frames_of("carphone_pristine", 64, 96, 12)
    still = frames_of("bigbuckbunny", 64, 64, 1)
    files = {
        "long.mp4": encode(wide),
        "long.mkv": encode(wide[3:], container="matroska"),
        "plain.ts": encode(wide[5:30], container="mpegts"),
        "plain.avi": encode(wide[6:20], codec="mpeg4", container="avi"),
        "vp9.webm": encode(wide[:11], codec="libvpx-vp9", container="webm"),
        "tall0.mp4": encode(tall),
        "tall1.mp4": encode(tall[2:]),
        "still.jpg": encode(still, codec="mjpeg", container="image2pipe", options={"strict": "-1"}),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module", params=["copy", "native"])
def built(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param) / "dataset"
    shard(source, root, shard_options(buckets=BUCKETS, clips=request.param, shard_size_bytes=40_000, workers=1))
    return root


@pytest.fixture(params=["with packets", "without packets"])
def any_root(request: pytest.FixtureRequest, built: Path, dataset: Path) -> Path:
    """Dataset of each kind: copied, native, and from before packets were indexed."""
    return built if request.param == "with packets" else dataset


@dataclass(frozen=True)
class Given:
    """All values of a batch except for its frames, and the loader's state."""

    keys: list[str]
    text: list[str]
    bucket: str
    fps: list[str]
    is_repeat: list[bool]
    loss_weight: float
    state: str


def given(batch: streamvid.Batch, loader: streamvid.VideoLoader) -> Given:
    fps = [str(value) for value in batch.fps.tolist()]  # as strings, because NaN is not equal to itself
    repeats, state = batch.is_repeat.tolist(), json.dumps(loader.state_dict())
    return Given(batch.sample_keys, batch.text, batch.bucket.id, fps, repeats, batch.loss_weight, state)


def pictures(clip: StoredClip, bucket: Bucket, pixels: Pixels = "rgb24", accuracy: Accuracy = "exact") -> Any:
    """Return a clip's frames (T, bytes), decoded as the docstring of StoredClip describes."""
    picture = PictureFormat(bucket.height, bucket.width, pixels, accuracy)
    out, data = np.zeros((clip.num_frames, picture.num_bytes), np.uint8), memoryview(clip.data.numpy())
    if clip.packets is None:
        assert clip.stream is None and clip.stream_json == ""
        decode_pictures(data, clip.start, out, picture, limits=STORED_LIMITS)
    else:
        assert clip.stream is not None
        packets = clip.packets.numpy()
        key_time = int(packets[0, 0])
        StoredDecoder().decode(clip.stream, packets, data, key_time, out, picture, numbers=clip.numbers)
    return out


def decoded(batch: streamvid.Batch) -> bytes:
    """Return the bytes that the batch's `video` would have, with channels last."""
    return b"".join(pictures(clip, batch.bucket).tobytes() for clip in batch.clips)


def loader_of(root: Path, state: Any = None, **options: Any) -> streamvid.VideoLoader:
    return open_loader(root, state, **{"batch_size": 2, "num_epochs": 2, **options})


def undecoded(root: Path, skip: int = 0, **options: Any) -> list[tuple[Given, bytes]]:
    """Return the decoded batches of decode=False, resumed from another loader's state after `skip` batches."""
    state = state_after(skip, root, batch_size=2, num_epochs=2) if skip else None
    with loader_of(root, state, output={"decode": False}, **options) as loader:
        return [(given(batch, loader), decoded(batch)) for batch in loader]


def with_decode(root: Path, **options: Any) -> list[tuple[Given, bytes]]:
    with loader_of(root, output={"layout": "BTHWC", "accuracy": "exact"}, **options) as loader:
        return [(given(batch, loader), batch.video.numpy().tobytes()) for batch in loader]


def test_stored_clips_decode_to_the_same_frames(any_root: Path) -> None:
    """PLAN-5, SAMPLE-1, SAMPLE-2: pixels, keys, texts and states agree for any number of workers and after a resume."""
    expected = with_decode(any_root)
    assert len(expected) >= 6
    for num_workers in (0, 1, 2):
        assert undecoded(any_root, num_workers=num_workers) == expected, num_workers
    assert undecoded(any_root, 3, num_workers=1) == expected[3:]


def test_packets_are_delivered_if_the_dataset_has_them(built: Path) -> None:
    """FETCH: an indexed clip is delivered as the byte range that its frames need, and other clips as whole files."""
    rows = {row["key"]: (row, index) for row, index, _ in rows_of(open_dataset(built))}
    indexed = 0
    with loader_of(built, output={"decode": False}, num_epochs=1) as loader:
        for batch in loader:
            for key, clip in zip(batch.sample_keys, batch.clips, strict=True):
                row, index = rows[key]
                assert clip.num_frames == batch.bucket.num_frames and clip.data.dtype == torch.uint8
                if index is None:
                    assert clip.packets is None and len(clip.data) == row["clip_bytes"]
                    continue
                window = index.window(clip.start, clip.num_frames)
                assert clip.packets is not None and clip.packets.dtype == torch.int64
                assert np.array_equal(clip.packets.numpy(), window.packets) and len(clip.data) == window.num_bytes
                assert clip.stream == index.info
                indexed += 1
    assert indexed >= 5


def test_columns_come_with_clips(dataset: Path) -> None:
    options: dict[str, Any] = {"columns": ("score", "place"), "num_epochs": 1}
    with loader_of(dataset, **options) as plain, loader_of(dataset, output={"decode": False}, **options) as loader:
        for batch, other in zip(loader, plain, strict=True):
            assert batch.place == other.place
            assert torch.equal(batch.score.nan_to_num(-1), other.score.nan_to_num(-1))
            assert set(other) - set(batch) == {"video", "layout"} and set(batch) - set(other) == {"clips"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_needs_several_messages(dataset: Path, num_workers: int) -> None:
    """SAMPLE-2: clips keep their order if a batch has more of them than one message can name."""
    options: dict[str, Any] = {"batch_size": 40, "tail": "pad", "num_workers": num_workers, "num_epochs": 4}
    found = undecoded(dataset, **options)
    assert {len(batch.keys) for batch, _ in found} == {40}
    assert found == with_decode(dataset, **options)


def read_by_workers(root: Path, **options: Any) -> list[tuple[Given, bytes]]:
    """Return the decoded batches of decode=False, all read by workers."""
    with loader_of(root, output={"decode": False}, num_workers=1, limits={"prefetch_bytes": 0}, **options) as loader:
        return [(given(batch, loader), decoded(batch)) for batch in until_workers_read(loader)]


def test_a_dataset_with_a_very_long_path(dataset: Path, tmp_path: Path) -> None:
    """A message names each clip's dataset. However long the path is, messages are small enough to be read whole."""
    root = Path(shutil.copytree(dataset, tmp_path.joinpath(*["\u6570" * 80] * 10, "dataset")))
    options: dict[str, Any] = {"batch_size": 16, "tail": "pad", "num_epochs": 2}
    assert read_by_workers(root, **options) == with_decode(root, **options)


def test_clips_with_long_headers(tmp_path: Path) -> None:
    """x265 writes its settings into each clip's header, so the headers of one message exceed the size of one answer."""
    (tmp_path / "source").mkdir()
    frames = frames_of("bikes", 96, 64, 20)
    for number in range(16):
        clip = encode(frames[number % 8 :][:8], codec="libx265", options={"x265-params": "log-level=none"})
        (tmp_path / "source" / f"{number}.mp4").write_bytes(clip)
    root = tmp_path / "dataset"
    shard(tmp_path / "source", root, shard_options(buckets=parse_buckets("96x64@5"), workers=1))
    options: dict[str, Any] = {"batch_size": 16, "tail": "pad", "num_epochs": 2}
    found = read_by_workers(root, **options)
    assert found == with_decode(root, **options)


# BAD-1.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_clips_are_replaced_counted_and_quarantined(tmp_path: Path, num_workers: int) -> None:
    """BAD-1: decode=False and decode=True choose the same substitutes, for checksum mismatches and a truncated tar."""
    bad = {"96x64-5f-2": "flip", "64x96-9f-9": "zero", "96x64-5f-11": "cut"}
    root = damaged(tmp_path / "dataset", LAYOUT, bad)
    options: dict[str, Any] = {"num_workers": num_workers, "limits": {"max_bad_fraction": 1.0}}
    assert undecoded(root, **options) == with_decode(root, **options)
    options["limits"] = {"max_bad_fraction": 1.0, "quarantine": tmp_path / "bad"}
    with loader_of(root, output={"decode": False}, num_epochs=1, **options) as loader:
        keys = {key for batch in loader for key in batch.sample_keys}
        records = loader.substituted
        assert loader.stats().work.num_substituted == 3 and not keys & set(bad)
    assert {(r.key, r.substitute_key) for r in records} == {(key, expected_substitute(key, bad)) for key in bad}
    assert {r.key: "checksum" in r.reason or "its tar ends" in r.reason for r in records} == dict.fromkeys(bad, True)
    lines = (tmp_path / "bad" / "quarantine-rank00000.jsonl").read_text().splitlines()
    assert lines == [record.to_json() for record in records]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damage_in_a_range_is_detected_and_other_damage_is_not_read(
    built: Path, tmp_path: Path, num_workers: int
) -> None:
    """BAD-1, SAMPLE-2: the packet index verifies the pieces, and after a mismatch the clip's own checksum decides."""
    root = Path(shutil.copytree(built, tmp_path / "dataset"))
    row, index, path = next(found for found in rows_of(open_dataset(root)) if found[1] and found[1].num_frames >= 37)
    assert index is not None
    with loader_of(root, output={"decode": False}, num_epochs=1) as loader:
        (start,) = (
            clip.start
            for batch in loader
            for key, clip in zip(batch.sample_keys, batch.clips, strict=True)
            if key == row["key"]
        )
    window = index.window(start, 5)
    flip(root / path, row["clip_offset"] + window.first_byte + window.num_bytes // 2)
    options: dict[str, Any] = {"num_workers": num_workers, "num_epochs": 1}
    found = undecoded(root, **options)
    assert found == with_decode(root, **options)
    assert all(row["key"] not in batch.keys for batch, _ in found)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_substitute_that_is_larger_than_its_slot(tmp_path: Path, num_workers: int) -> None:
    """BAD-1: the ring has room for the planned samples, but a substitute may be larger than the replaced sample."""
    layout = {SMALL: [4]}
    damage = {"96x64-5f-0": encode(frames_of("bikes", 96, 64, 24)[:24], options={"crf": "51", "g": "24"})}
    root = build_dataset(tmp_path / "dataset", layout, damage=damage)
    rows = {row["key"]: row["clip_bytes"] for row in open_dataset(root).samples_table().to_pylist()}
    assert rows["96x64-5f-0"] < rows["96x64-5f-1"] / 2
    row, path = next((row, path) for row, _, path in rows_of(open_dataset(root)) if row["key"] == "96x64-5f-0")
    flip(root / path, row["clip_offset"] + 100)
    options: dict[str, Any] = {"num_workers": num_workers, "batch_size": 1, "shuffle": "none"}
    options["limits"] = {"prefetch_bytes": 0}
    found = undecoded(root, **options)
    assert [batch.keys for batch, _ in found[:2]] == [["96x64-5f-1"]] * 2
    assert found == with_decode(root, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_missing_shard_is_an_error(dataset: Path, tmp_path: Path, num_workers: int) -> None:
    """BAD-1: there is no substitute, because a missing file does not show that its samples are bad."""
    root = Path(shutil.copytree(dataset, tmp_path / "dataset"))
    (root / open_dataset(root).shards[0].path).unlink()
    with loader_of(root, output={"decode": False}, num_workers=num_workers) as loader:
        with pytest.raises(SampleError, match="No such file"):
            for _ in loader:
                pass
        assert loader.stats().work.num_substituted == 0


# BATCH-1.


def test_kept_batches_do_not_change(built: Path) -> None:
    """BATCH-1: held batches keep their content while others are delivered.

    Clones have their own memory and occupy no ring slot.
    """
    with loader_of(built, output={"decode": False}, num_epochs=4, num_workers=1) as loader:
        held, before = [], []
        for batch in loader:
            held.append(batch)
            before.append(decoded(batch))
            if len(held) > 3:
                assert decoded(held.pop(0)) == before.pop(0)
        del batch
        clones = [one.clone() for one in held]
        held.clear()
    assert [decoded(clone) for clone in clones] == before
    ends = [clip.data.untyped_storage().nbytes() == len(clip.data) for clone in clones for clip in clone.clips]
    assert all(ends)


def test_the_ring_slot_is_freed_with_the_last_clip(dataset: Path) -> None:
    """BATCH-1: a tensor of one clip occupies the slot of the whole batch, and nothing more."""
    with loader_of(dataset, output={"decode": False}, limits={"prefetch_bytes": 0}, num_epochs=6) as loader:
        iterator = iter(loader)
        kept = next(iterator).clips[1].data
        before = bytes(kept.numpy())
        num_batches = sum(1 for _ in iterator)
        assert num_batches > 40 and bytes(kept.numpy()) == before
        assert loader.stats().ring_batches == 1
        del kept
        assert loader.stats().ring_batches == 0


def test_a_pickled_batch_is_no_larger_than_its_clips(built: Path) -> None:
    """Only the batch is sent to another process, and not the shared ring slot once per clip."""
    with loader_of(built, output={"decode": False}, num_epochs=1, batch_size=8, tail="pad") as loader:
        for batch in loader:
            data = pickle.dumps(batch)
            num_bytes = sum(
                len(clip.data) + (0 if clip.packets is None else clip.packets.nbytes) for clip in batch.clips
            )
            assert len(data) < num_bytes + 4000 * len(batch.clips), (len(data), num_bytes)
            again = pickle.loads(data)
            assert decoded(again) == decoded(batch) and again.sample_keys == batch.sample_keys
            assert [clip.stream for clip in again.clips] == [clip.stream for clip in batch.clips]


def test_a_batch_of_clips_describes_itself(dataset: Path) -> None:
    with loader_of(dataset, output={"decode": False}) as loader:
        batch = next(iter(loader))
        assert batch.bucket.id in repr(batch) and "2 samples" in repr(batch)
        with pytest.raises(AttributeError, match="no 'video' field; its fields are clips"):
            _ = batch.video
        moved = batch.to("cpu")
        assert moved.clips[0].data.data_ptr() == batch.clips[0].data.data_ptr()
        assert {tensor.device.type for tensor in batch.to("meta").tensors()} == {"meta"}


# Arguments.


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("device", {"device": "cpu"}),
        ("output.layout", {"output": {"layout": "BTCHW"}}),
        ("output.pixels", {"output": {"pixels": "yuv420p"}}),
        ("output.pixels", {"output": {"pixels": "rgb24"}}),
        ("output.accuracy", {"output": {"accuracy": "fast"}}),
        ("groups.shared_group", {"groups": {"shared_group": object()}}),
    ],
)
def test_video_options_are_refused(dataset: Path, name: str, options: dict[str, Any]) -> None:
    """API: the error names the option and the remedy."""
    asked = merged({"output": {"decode": False}, "world": streamvid.World(0, 1)}, options)
    with pytest.raises(
        ConfigError, match=rf"output.decode=False cannot be combined with {name}, .*leave out output.decode"
    ):
        loader_of(dataset, **asked)


@pytest.mark.parametrize("value", [None, 0, "no"])
def test_decode_must_be_true_or_false(dataset: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="output.decode=.*must be True or False"):
        loader_of(dataset, output={"decode": value})


# Ranks, workers and shutdown.


def test_two_ranks_share_samples_as_with_decoding(dataset: Path) -> None:
    """PLAN-2: decode=False and decode=True distribute the samples over two ranks in the same way."""
    worlds = [{"world": streamvid.World(rank, 2), "num_epochs": 1} for rank in range(2)]
    found = [undecoded(dataset, **world) for world in worlds]
    assert found == [with_decode(dataset, **world) for world in worlds]
    keys = [{key for batch, _ in mine for key in batch.keys} for mine in found]
    assert keys[0] and keys[1] and not keys[0] & keys[1]


def stop_children(others: set[psutil.Process], is_over: threading.Event) -> None:
    """Suspend each worker as soon as it has started, until `is_over` is set."""
    is_last = False
    while not is_last:
        is_last = is_over.is_set()
        for child in psutil.Process().children():
            # Not before the process runs the worker program, because its parent waits for that.
            if child not in others and "loader.worker" in " ".join(command_of(child)):
                child.suspend()


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):  # it has ended or does not exist yet
        return process.cmdline()
    return []


def test_the_first_batches_do_not_wait_for_workers(dataset: Path) -> None:
    """The caller's own threads read while the workers start; here, the workers are suspended before they are up."""
    for _ in range(20):
        options: dict[str, Any] = {"output": {"decode": False}, "limits": {"prefetch_bytes": 0}}
        with loader_of(dataset, num_workers=2, num_epochs=1, **options) as loader:
            others, is_open = set(psutil.Process().children()), threading.Event()
            stopper = threading.Thread(target=stop_children, args=(others, is_open))
            stopper.start()
            try:
                iter(loader)  # opens everything that a loop needs
            finally:
                is_open.set()
                stopper.join()
            pids = loader.worker_pids
            try:
                time.sleep(0.3)
                if not any(map(is_up, pids)):  # otherwise, they were suspended too late
                    num_batches = len(loader)
                    assert sum(1 for _ in loader) == num_batches > 5
                    return
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
    raise AssertionError("workers are up before they can be stopped")


def is_up(pid: int) -> bool:
    """Return whether a worker is up. It maps the ring just before it reports this."""
    return "streamvid-ring" in Path(f"/proc/{pid}/maps").read_text()


def until_workers_read(loader: streamvid.VideoLoader) -> Iterator[streamvid.Batch]:
    """Start a new loop once the workers are up and idle, and the loader has had time to notice."""
    iter(loader)
    until = time.monotonic() + 30
    while not all(is_up(pid) and psutil.Process(pid).status() == "sleeping" for pid in loader.worker_pids):
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.2)
    return iter(loader)


def test_a_stored_read_that_hangs_is_an_error(tmp_path: Path) -> None:
    """STOP-1: the disk of a shard has disappeared. The error names the sample, and closing does not wait."""
    before = streamvid_threads()
    root = build_dataset(tmp_path, {SMALL: [2, 2]})
    shard = root / "shards/96x64-5f/96x64-5f-000001.tar"
    shard.unlink()
    os.mkfifo(shard)  # a read waits for data that is never written
    options: dict[str, Any] = {"num_workers": 0, "batch_size": 1, "limits": {"sample_timeout_seconds": 2.0}}
    with (
        loader_of(root, output={"decode": False}, **options) as loader,
        pytest.raises(SampleError, match=r"sample 96x64-5f-[23] .*000001.tar.*reading its stored bytes has taken more"),
    ):
        for _ in loader:
            pass
    with shard.open("wb"):  # unblocks the read, so that its thread ends
        wait_for_threads(before)


def test_killed_workers_are_an_error(dataset: Path) -> None:
    """STOP-1: the workers are killed while they read; test_stop.py kills them while they start."""
    with loader_of(dataset, output={"decode": False}, num_workers=2, num_epochs=None) as loader:
        iterator = until_workers_read(loader)
        next(iterator)
        for pid in loader.worker_pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            for _ in iterator:
                pass
