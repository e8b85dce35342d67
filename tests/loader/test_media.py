"""Tests of batch.media: conditioning inputs have the same frames and the same crop as their clip (SAMPLE-1, BAD-1)."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError
from streamvid.plan.position import World
from streamvid.sharder.sharder import shard
from tests.clips import frames_of
from tests.conftest import merged
from tests.files import write_rows
from tests.loader.conftest import open_loader
from tests.loader.test_cached import CachedStore
from tests.media_clips import (
    CONTROL,
    HEIGHT,
    MEDIA,
    REFERENCE,
    WIDTH,
    clip_of,
    make_rows,
    matte_of,
    numbered,
    png_of,
    turned,
    uneven_clip,
)
from tests.servers import S3Env, S3Server
from tests.shard_options import shard_options
from tools import make_corpus

pytestmark = pytest.mark.timeout(180)

NUM_CLIPS, NUM_FRAMES = 6, 9
NAMES = ("control", "matte", "reference")
OPTIONS: dict[str, Any] = {"buckets": parse_buckets("96x64@9"), "workers": 1, "media": MEDIA}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    return write_rows(folder / "metadata.jsonl", make_rows(folder, NUM_CLIPS))


@pytest.fixture(scope="module")
def roots(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Datasets of copied clips, copied clips resampled to 16 fps, native clips, and native clips at 16 fps."""
    kinds: dict[str, dict[str, Any]] = {
        "copy": {},
        "resampled": {"fps": 16},
        "native": {"clips": "native"},
        "native-16": {"clips": "native", "fps": 16},
    }
    found = {}
    for name, options in kinds.items():
        found[name] = tmp_path_factory.mktemp(name) / "dataset"
        report = shard(source, found[name], shard_options(**OPTIONS, **options))
        assert report.num_samples == NUM_CLIPS
    return found


def batches(root: Any, **options: Any) -> Iterator[streamvid.Batch]:
    settings = {
        "batch_size": 2,
        "num_workers": 0,
        "num_epochs": 1,
        "media": NAMES,
        "tail": "uneven",
        "output": {"layout": "BTHWC"},
    }
    with streamvid.VideoLoader(root, **merged(settings, options)) as loader:
        yield from loader


def numbers(pictures: torch.Tensor, scale: float = 0.5, short_side: int | None = None) -> list[int | None]:
    read_number = make_corpus.read_number
    return [read_number(picture, scale, short_side) for picture in pictures.numpy()]


def clip_number(key: str) -> int:
    return int(key.removeprefix("clip").partition("-")[0])


def check_sample(batch: streamvid.Batch, slot: int) -> list[int]:
    """Check that all conditioning inputs of a sample match its clip, frame by frame.

    Return the clip's frame numbers.
    """
    k = clip_number(batch.sample_keys[slot])
    shown = numbers(batch.video[slot])
    frames = [number - 100 * k for number in shown if number is not None]
    assert len(frames) == NUM_FRAMES and 0 <= frames[0] <= frames[-1] < 24 + k, shown
    assert numbers(batch.media["control"][slot], 1.0) == [CONTROL + 100 * k + frame for frame in frames]
    edges = batch.media["matte"][slot].float().mean((1, 2, 3)) / 255 * (24 + k) - 1
    assert torch.allclose(edges, torch.tensor(frames, dtype=torch.float32), atol=0.3), (edges, frames)
    present = batch.media_present["reference"][slot].tolist()
    assert present == [item < k % 3 for item in range(2)]
    references = batch.media["reference"][slot]
    for item, there in enumerate(present):
        expected = [100 * k + REFERENCE + item] if there else [None]
        assert numbers(references[item], 0.6, 120) == expected
        assert there or references[item].max() == 0
    return frames


def test_more_samples_in_flight_than_the_sockets_of_workers_can_hold(roots: dict[str, Path]) -> None:
    """STOP-1: the loader requests the remaining decoding of a sample while workers still report others.

    This must not deadlock. The tasks of at most about 170 samples fit into a worker's socket.
    """
    many = [streamvid.DatasetConfig(url=str(roots["copy"]), num_repeats=60)]
    options = {"num_workers": 2, "batch_size": 1, "limits": {"prefetch_bytes": 2**27, "sample_timeout_seconds": 20}}
    count = 0
    for _ in batches(many, **options):
        time.sleep(0.002)  # so that more samples are in flight than have been decoded
        count += 1
    assert count == 60 * NUM_CLIPS


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_inputs_that_left_the_page_cache_change_nothing(roots: dict[str, Path], tmp_path: Path, share: float) -> None:
    """FETCH-1: a worker finds the first part of each tar, with some clips whose inputs it does not find."""
    root, part = roots["native"], shutil.copytree(roots["native"], tmp_path / "part")
    for tar in part.rglob("*.tar"):
        os.truncate(tar, int(tar.stat().st_size * share))
    found = [
        [(batch.sample_keys, [one.clone() for one in batch.tensors()]) for batch in batches(one, num_workers=2)]
        for one in (root, Dataset(CachedStore(root, part)))
    ]
    for (keys, tensors), (other_keys, others) in zip(*found, strict=True):
        assert keys == other_keys and all(map(torch.equal, tensors, others))


@pytest.mark.parametrize("name", ["copy", "resampled", "native", "native-16"])
def test_every_conditioning_input_shows_the_clips_frames(roots: dict[str, Path], name: str) -> None:
    """SAMPLE-1, SAMPLE-2: windows are drawn at random; DIFFSYNTH row 3 (several inputs), row 4 (lists of images)."""
    windows = set()
    for epoch in range(3):
        with open_loader(roots[name], batch_size=2, media=NAMES, output={"layout": "BTHWC"}, tail="uneven") as loader:
            loader.set_epoch(epoch)
            for batch in loader:
                assert tuple(batch.media["control"].shape) == tuple(batch.video.shape)
                assert tuple(batch.media["matte"].shape) == (*batch.video.shape[:-1], 1)
                assert tuple(batch.media["reference"].shape) == (len(batch.text), 2, 1, 64, 96, 3)
                for slot, key in enumerate(batch.sample_keys):
                    windows.add((key, *check_sample(batch, slot)))
    assert len(windows) > NUM_CLIPS  # more than one window per clip, because they are drawn


@pytest.mark.parametrize("temporal", ["head", "middle", "uniform", "chunk", "opensora"])
@pytest.mark.parametrize("name", [pytest.param("copy", marks=pytest.mark.slow), "resampled"])
def test_conditioning_inputs_follow_every_temporal_view(roots: dict[str, Path], name: str, temporal: str) -> None:
    """SAMPLE-2: even if two frames are equally close to a time, the conditioning inputs use the clip's choice."""
    found = [
        check_sample(batch, slot) for batch in batches(roots[name], view={"temporal": temporal}) for slot in range(2)
    ]
    assert len(found) == NUM_CLIPS


def test_random_intervals(roots: dict[str, Path]) -> None:
    found = [
        check_sample(batch, slot) for batch in batches(roots["copy"], view={"max_interval": 3}) for slot in range(2)
    ]
    assert {frames[1] - frames[0] for frames in found} > {1}


def deliveries(root: Any, **options: Any) -> dict[str, str]:
    """Return a digest of each sample's delivered clip and conditioning inputs, by key."""
    found = {}
    for batch in batches(root, **options):
        for slot, key in enumerate(batch.sample_keys):
            parts = [batch.video[slot], *(batch.media[name][slot] for name in NAMES)]
            parts += [batch.media_present[name][slot] for name in NAMES]
            found[key] = hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()
    return found


@pytest.mark.parametrize("name", ["copy", "native"])
def test_ranks_workers_and_batch_sizes_change_nothing(roots: dict[str, Path], name: str) -> None:
    """SAMPLE-1: the same seed, key and visit give the same conditioning inputs."""
    alone = deliveries(roots[name])
    assert len(alone) == NUM_CLIPS
    shared: dict[str, str] = {}
    for rank in range(2):
        mine = deliveries(roots[name], world=World(rank, 2), num_workers=2, batch_size=1)
        assert not shared.keys() & mine.keys()
        shared |= mine
    assert shared == alone


def test_a_resumed_run_delivers_the_same(roots: dict[str, Path]) -> None:
    """PLAN-5, SAMPLE-1: a resume with a different number of workers gives the same conditioning inputs."""

    def digests(loader: streamvid.VideoLoader, stop: int | None = None) -> list[tuple[list[str], str]]:
        found = []
        for number, batch in enumerate(loader, 1):
            control = batch.media["control"].contiguous().numpy().tobytes()
            found.append((batch.sample_keys, hashlib.sha256(control).hexdigest()))
            if number == stop:
                break
        return found

    options: dict[str, Any] = {"batch_size": 2, "num_workers": 0, "num_epochs": 2, "media": ("control",)}
    with streamvid.VideoLoader(roots["copy"], **options) as loader:
        whole = digests(loader)
    with streamvid.VideoLoader(roots["copy"], **options) as loader:
        first = digests(loader, 2)
        state = loader.state_dict()
    with streamvid.VideoLoader(roots["copy"], **options | {"num_workers": 1}) as loader:
        loader.load_state_dict(state)
        assert first + digests(loader) == whole


@pytest.mark.parametrize("name", ["copy", pytest.param("native", marks=pytest.mark.slow)])
def test_planes_give_the_same_frames(roots: dict[str, Path], name: str) -> None:
    """YUV-1: conditioning inputs agree, too, in every layout. Inputs that a sample lacks stay black."""
    exact = {
        key: batch
        for batch in batches(roots[name], output={"accuracy": "exact"}, batch_size=1)
        for key in batch.sample_keys
    }
    exact = {key: batch.clone() for key, batch in exact.items()}
    for batch in batches(roots[name], output={"pixels": "yuv420p", "layout": "BCTHW"}, batch_size=1):
        (key,) = batch.sample_keys
        for medium, axes in (
            ("control", (0, 2, 3, 4, 1)),
            ("matte", (0, 2, 3, 4, 1)),
            ("reference", (0, 1, 3, 4, 5, 2)),
        ):
            mine, theirs = batch.media[medium].permute(axes).double(), exact[key].media[medium].double()
            assert mine.shape == theirs.shape
            assert float(((mine - theirs) ** 2).mean()) < 40, medium
        assert batch.media["reference"][0, 1].max() == 0 or batch.media_present["reference"][0, 1]


def test_a_batch_with_media_behaves_like_any_batch(roots: dict[str, Path]) -> None:
    """BATCH-1: the batch is moved, cloned, pickled and normalized as a whole, and outlives its ring slot."""
    kept = []
    for batch in batches(roots["copy"], output={"layout": "BCTHW"}):
        own = batch.clone()
        for other in (own, pickle.loads(pickle.dumps(own)), batch.to("cpu")):
            for name in NAMES:
                assert torch.equal(other.media[name], batch.media[name])
                assert torch.equal(other.media_present[name], batch.media_present[name])
        low = batch.normalized(torch.float32, medium="reference")
        assert low.shape == batch.media["reference"].shape and low.is_contiguous()
        expected = batch.media["reference"].double() / 127.5 - 1
        assert torch.allclose(low.double(), expected, atol=1e-6)
        kept.append((batch.media["control"], own.media["control"]))
        assert set(batch.media) == set(NAMES) and len(batch.media) == 3
    assert all(torch.equal(ring, clone) for ring, clone in kept)
    (moved, *_) = batches(roots["copy"], device="cpu")
    assert moved.media["control"].device.type == "cpu"


def test_memory_is_counted(roots: dict[str, Path]) -> None:
    """The ring has room for conditioning inputs, so that a loader with the smallest ring keeps running."""
    options: dict[str, Any] = {"batch_size": 6, "limits": {"prefetch_bytes": 0}, "num_workers": 0, "tail": "drop"}
    with streamvid.VideoLoader(roots["copy"], **options) as plain:
        without = plain.ring_bytes
    with streamvid.VideoLoader(roots["copy"], **options, media=NAMES, num_epochs=4) as loader:
        values = 6 * (3 * (NUM_FRAMES + 2) + NUM_FRAMES) * 96 * 64  # three channels, and one for the mask
        assert loader.ring_bytes - without >= 3 * values
        assert sum(1 for _ in loader) == 4


def damage(root: Path, key: str, name: str) -> None:
    """Change one stored byte of a sample's conditioning input."""
    dataset = open_dataset(root)
    for info in dataset.shards:
        for row in dataset.samples(info).to_pylist():
            if row["key"].startswith(key):
                item = row[f"media.{name}"][0]
                path = root / info.path
                data = bytearray(path.read_bytes())
                data[item["offset"] + item["num_bytes"] // 2] ^= 1
                path.write_bytes(data)
                return
    raise AssertionError(key)


@pytest.mark.parametrize(
    "medium", ["control", *(pytest.param(name, marks=pytest.mark.slow) for name in ("matte", "reference"))]
)
def test_a_sample_with_a_bad_conditioning_input_is_replaced_as_a_whole(
    source: Path, tmp_path: Path, medium: str
) -> None:
    """BAD-1: clip, inputs, key and caption all come from the substitute. Without the bad input, the sample is good."""
    root = tmp_path / "dataset"
    shard(source, root, shard_options(**OPTIONS))
    damage(root, "clip4", medium)
    assert len(deliveries_without(root, medium)) == NUM_CLIPS
    settings: dict[str, Any] = {
        "batch_size": 2,
        "num_workers": 0,
        "media": NAMES,
        "output": {"layout": "BTHWC"},
        "tail": "uneven",
    }
    with streamvid.VideoLoader(root, **settings, limits={"max_bad_fraction": 0.5}) as loader:
        seen = []
        for batch in loader:
            for slot, key in enumerate(batch.sample_keys):
                check_sample(batch, slot)
                assert batch.text[slot] == f"clip {clip_number(key)}"
                seen.append((clip_number(key), bool(batch.is_repeat[slot])))
        (record,) = loader.substituted
    assert record.key.startswith("clip4") and medium in record.reason
    assert sorted(k for k, is_repeat in seen if not is_repeat) == [0, 1, 2, 3, 5]
    assert sum(is_repeat for _, is_repeat in seen) == 1
    assert loader.stats().work.num_substituted == 1


def deliveries_without(root: Path, medium: str) -> set[str]:
    names = tuple(name for name in NAMES if name != medium)
    return {key for batch in batches(root, media=names) for key in batch.sample_keys}


def test_a_conditioning_input_that_does_not_decode_is_bad(tmp_path: Path) -> None:
    """BAD-1: the checksum of the input matches, but the input does not decode, with and without workers."""
    rows = make_rows(tmp_path, 4)
    control = numbered(frames_of("carphone_pristine", WIDTH, HEIGHT, 26), CONTROL)
    data = bytearray(clip_of(control))
    for place in range(data.find(b"mdat") + 6000, data.find(b"moov") - 2000, 97):  # not in the first key frame
        data[place] ^= 0x55
    (tmp_path / "damaged.mp4").write_bytes(data)
    rows[2]["control_video"] = "damaged.mp4"
    options = OPTIONS | {"media": {"control": "control_video"}}
    report = shard(write_rows(tmp_path / "metadata.jsonl", rows), tmp_path / "dataset", shard_options(**options))
    if report.num_samples < 4:
        pytest.fail(f"probing rejected the damaged input, so nothing would be tested: {report.summary()}")
    for num_workers in (0, 1):
        with streamvid.VideoLoader(
            tmp_path / "dataset",
            batch_size=2,
            num_workers=num_workers,
            media=("control",),
            view={"temporal": "uniform"},
            limits={"max_bad_fraction": 0.5},
        ) as loader:
            keys = [key for batch in loader for key in batch.sample_keys]
            assert "control" in loader.substituted[0].reason
        assert sorted({clip_number(key) for key in keys}) == [0, 1, 3]


def test_the_clip_and_its_conditioning_inputs_share_one_crop(tmp_path: Path) -> None:
    """The inputs get the crop that was drawn for the clip, even if the clip is rotated.

    A smaller input is cropped with an accuracy of two of its own pixels.
    """
    frames = numbered(frames_of("bikes", WIDTH, HEIGHT, 16), 0)
    small = frames.reshape(16, HEIGHT // 2, 2, WIDTH // 2, 2, 3).mean((2, 4)).astype(np.uint8)
    for name, pictures in (("plain", frames), ("same", frames), ("small", small)):
        (tmp_path / f"{name}.mkv").write_bytes(clip_of(pictures, "matroska", options={"crf": "8"}))
    rows = [
        {"path": path, "caption": "", "same": "same.mkv", "small": "small.mkv"}
        for path in ("plain.mkv", turned(tmp_path, frames).name)
    ]
    options: dict[str, Any] = {"buckets": parse_buckets("32x32@9"), "workers": 1}
    options["media"] = {"same": "same", "small": "small"}
    shard(write_rows(tmp_path / "metadata.jsonl", rows), tmp_path / "dataset", shard_options(**options))
    parts: set[bytes] = set()
    for spatial, scale in (("random_crop", None), ("rand_size_crop", (0.4, 0.8)), ("resize_crop", None)):
        for epoch in range(4):
            with open_loader(
                tmp_path / "dataset",
                batch_size=2,
                media=("same", "small"),
                view={"spatial": spatial, "spatial_scale": scale, "temporal": "head"},
                output={"accuracy": "exact"},
            ) as loader:
                loader.set_epoch(epoch)
                (batch,) = loader
            video, same, small_one = (x.double() for x in (batch.video, batch.media["same"], batch.media["small"]))
            assert (((video - same) ** 2).mean((1, 2, 3, 4)) < 30).all(), spatial
            shifts = [((video - small_one.roll(shift, 4)) ** 2).mean((1, 2, 3, 4)) for shift in (0, 5, -5)]
            assert (shifts[0] < shifts[1]).all() and (shifts[0] < shifts[2]).all(), (spatial, shifts)
            parts |= {video[slot].numpy().tobytes() for slot in range(2)}
    assert len(parts) >= 14  # the crops differ


@pytest.mark.slow
def test_uneven_frame_rates(tmp_path: Path) -> None:
    """SAMPLE-2: a control video whose times are rounded differently shows the same frames as the clip."""
    steps = [40, 10, 70, 40, 33, 55, 21, 90, 40, 40, 5, 75, 40, 40, 120, 40, 40, 17, 63, 40]
    ticks = [sum(steps[:i]) for i in range(len(steps))]
    count = len(ticks)
    clip = numbered(frames_of("bikes", WIDTH, HEIGHT, count), 0)
    control = numbered(frames_of("carphone_pristine", WIDTH // 2, HEIGHT // 2, count), CONTROL)
    (tmp_path / "clip0.mp4").write_bytes(uneven_clip(clip, "mp4", [tick * 90 for tick in ticks], 90000))
    (tmp_path / "control.mkv").write_bytes(uneven_clip(control, "matroska", ticks))
    rows = [{"path": "clip0.mp4", "caption": "", "control": "control.mkv"}]
    for number, options in enumerate(({}, {"fps": 25}, {"fps": 12.5, "clips": "native"})):
        root = tmp_path / f"dataset{number}"
        given: dict[str, Any] = {"buckets": parse_buckets("96x64@9"), "workers": 1, **options}
        shard(write_rows(tmp_path / "metadata.jsonl", rows), root, shard_options(**given, media={"control": "control"}))
        for temporal in ("random", "uniform"):
            (batch,) = batches(root, media=("control",), batch_size=1, view={"temporal": temporal})
            shown = numbers(batch.video[0])
            assert None not in shown
            assert numbers(batch.media["control"][0], 1.0) == [
                CONTROL + number for number in shown if number is not None
            ]


@pytest.mark.slow
def test_invalid_requests_for_media_are_refused(roots: dict[str, Path], source: Path, tmp_path: Path) -> None:
    """Errors name the conditioning input and the available ones."""
    for media, message in (
        (("depth",), "'depth' is not a conditioning input of .*available: control, matte, reference"),
        ("control", "a list of names"),
        (("control", "control"), "a duplicate"),
    ):
        with pytest.raises(ConfigError, match=message):
            streamvid.VideoLoader(roots["copy"], batch_size=2, media=media)
    with pytest.raises(ConfigError, match="decode=False cannot be combined with media"):
        streamvid.VideoLoader(roots["copy"], batch_size=2, media=("control",), output={"decode": False})
    plain = tmp_path / "plain"
    shard(source, plain, shard_options(**OPTIONS | {"media": {}}))
    with pytest.raises(ConfigError, match="it has none"):
        streamvid.VideoLoader([roots["copy"], plain], batch_size=2, media=("control",))
    other = tmp_path / "other"
    shard(source, other, shard_options(**OPTIONS | {"media": {"control": "matte"}}))
    with streamvid.VideoLoader([roots["copy"], other], batch_size=2, media=("control",)) as loader:
        assert len(next(iter(loader)).media["control"]) == 2
    shard(source, tmp_path / "mask", shard_options(**OPTIONS | {"media": {"mask:control": "matte"}}))
    with pytest.raises(ConfigError, match="a video in .* and a video mask in"):
        streamvid.VideoLoader([roots["copy"], tmp_path / "mask"], batch_size=2, media=("control",))


@pytest.mark.slow
def test_datasets_of_a_mix_share_media(roots: dict[str, Path], source: Path, tmp_path: Path) -> None:
    """Lists are as long as the longest list in any dataset of the mix."""
    rows = make_rows(tmp_path, 3)[:2]
    shard(write_rows(tmp_path / "metadata.jsonl", rows), tmp_path / "few", shard_options(**OPTIONS))
    lengths = {open_dataset(root).manifest.media["reference"].max_items for root in (tmp_path / "few", roots["copy"])}
    assert lengths == {1, 2}
    for batch in batches([tmp_path / "few", roots["copy"]], batch_size=4):
        assert batch.media["reference"].shape[1] == 2
        for slot in range(len(batch.sample_keys)):
            check_sample(batch, slot)


@pytest.mark.slow
def test_images_have_conditioning_inputs(tmp_path: Path) -> None:
    """Images have image inputs and clips have video inputs, both with the number of frames of their bucket."""
    rows = make_rows(tmp_path, 2)
    for row in rows[1:]:
        for name, frames in (
            ("path", numbered(frames_of("bikes", WIDTH, HEIGHT, 1), 100)),
            ("control_video", numbered(frames_of("carphone_pristine", WIDTH // 2, HEIGHT // 2, 1), CONTROL + 100)),
            ("matte", matte_of(1)),
        ):
            row[name] = f"clip1-{name}.png"
            (tmp_path / row[name]).write_bytes(png_of(frames[0]))
    buckets = parse_buckets("96x64@9,96x64@1")
    shard(
        write_rows(tmp_path / "metadata.jsonl", rows),
        tmp_path / "dataset",
        shard_options(**OPTIONS | {"buckets": buckets}),
    )
    seen = {}
    for batch in batches(tmp_path / "dataset", batch_size=1):
        seen[batch.bucket.num_frames] = batch
        assert tuple(batch.media["control"].shape) == tuple(batch.video.shape)
        shown = numbers(batch.video[0])
        assert numbers(batch.media["control"][0], 1.0) == [CONTROL + (number or 0) for number in shown]
    assert set(seen) == {1, 9}


@pytest.mark.slow
def test_a_bucket_gives_the_same_media(
    roots: dict[str, Path], moto_server: S3Server, s3_env: S3Env, tmp_path: Path
) -> None:
    """FETCH-2: several parts of a tar are read per sample, in few requests, also through a cache."""
    s3_env(moto_server)
    url = f"s3://{moto_server.new_bucket()}/media"
    streamvid.copy_dataset(roots["copy"], url)
    expected = deliveries(roots["copy"])
    assert deliveries(url) == expected
    cache = {"storage": {"cache_dir": tmp_path / "cache", "cache_bytes": 1 << 26}}
    for num_workers in (0, 1):
        assert deliveries(url, num_workers=num_workers, **cache) == expected
