"""Tests of output.pixels and output.accuracy: the ring's content, and the same RGB in `batch.video` in every case."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import streamvid
from streamvid.buckets.bucket import Bucket, parse_buckets
from streamvid.errors import ConfigError
from streamvid.sharder.sharder import shard
from tests.clips import real_clip
from tests.conftest import merged
from tests.loader.conftest import build_dataset
from tests.shard_options import shard_options
from tests.video.clips import psnr, run_ffmpeg

pytestmark = pytest.mark.timeout(120)

NUM_CLIPS = 5
BUCKETS = parse_buckets("96x64@5,64x64@1")
# Minimum quality in decibels by clip: planes that were scaled separately, and planes as stored, where only rounding
# differs. Native stills have full chroma resolution, whereas planes have a quarter of it.
QUALITY = {"copy-": 45, "native-": 55, "native-still": 43}
# With black at 0, the default of swscale is not too dark.
FULL_RANGE = ("copy-b", "copy-still", "native-b", "native-still")


def make_source(folder: Path, prefix: str = "") -> Path:
    """Create clips with three matrices and both ranges, one of them rotated, and a still.

    All but the still fit one bucket.
    """
    folder.mkdir()
    for name, size, matrix, tag, color_range in (
        ("a.mp4", "192:128", "bt709", "bt709", "tv"),
        ("b.mp4", "192:128", "bt601", "smpte170m", "pc"),
        ("c.mkv", "96:64", "bt2020", "bt2020nc", "tv"),
        ("d.mp4", "144:96", "bt601", "bt470bg", "tv"),
        ("tall.mp4", "128:192", "bt709", "bt709", "tv"),
    ):
        scale = f"scale={size}:out_color_matrix={matrix}:out_range={color_range},format=yuv420p"
        tags = f"setsar=1,setparams=colorspace={tag}:range={color_range}"
        made = ("-frames:v", 16, "-vf", f"{scale},{tags}", "-an", "-c:v", "libx264", "-crf", 12, "-g", 8)
        run_ffmpeg("-i", real_clip("bikes"), *made, folder / f"{prefix}{name}")
    tall = folder / f"{prefix}tall.mp4"
    run_ffmpeg("-display_rotation", 90, "-i", tall, "-c", "copy", folder / f"{prefix}turned.mp4")
    tall.unlink()
    run_ffmpeg("-i", real_clip("bigbuckbunny"), "-vf", "scale=64:64", "-frames:v", 1, folder / f"{prefix}still.jpg")
    return folder


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copied and native datasets of the same clips under different names."""
    found = {}
    for clips in ("copy", "native"):
        folder = tmp_path_factory.mktemp(clips)
        source = make_source(folder / "source", f"{clips}-")
        shard(source, folder / "dataset", shard_options(buckets=BUCKETS, clips=clips, workers=1))
        found[clips] = folder / "dataset"
    return found


def loader_of(root: Any, **options: Any) -> streamvid.VideoLoader:
    sizes = {"96x64@5": NUM_CLIPS, "64x64@1": 1}
    settings = {"batch_size": sizes, "num_workers": 0, "num_epochs": 1, "output": {"layout": "BTHWC"}}
    return streamvid.VideoLoader(root, **merged(settings, options))


def videos(root: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Return each sample's video in the loader's layout, by key."""
    with loader_of(root, **options) as loader:
        return {
            key: video for batch in loader for key, video in zip(batch.sample_keys, batch.clone().video, strict=True)
        }


def quality_of(one: torch.Tensor, other: torch.Tensor) -> float:
    return psnr(float(((one.double() - other.double()) ** 2).mean()))


@pytest.mark.parametrize("clips", ["copy", "native"])
def test_rgb_from_planes_matches_decoded_rgb(roots: dict[str, Path], clips: str) -> None:
    """YUV-1: clips of all colors share a batch. The number of workers and the layout do not change the RGB."""
    exact = videos(roots[clips], output={"accuracy": "exact"})
    found = videos(roots[clips], output={"pixels": "yuv420p"})
    assert set(found) == set(exact) and len(found) == NUM_CLIPS + 1
    quality = {key: quality_of(found[key], exact[key]) for key in exact}
    for key, found_quality in quality.items():
        assert found_quality >= [least for name, least in QUALITY.items() if key.startswith(name)][-1], quality
    again = videos(roots[clips], output={"pixels": "yuv420p"}, num_workers=2)
    assert all(torch.equal(again[key], found[key]) for key in found)
    for layout, order in (("BCTHW", (3, 0, 1, 2)), ("BTCHW", (0, 3, 1, 2))):
        other = videos(roots[clips], output={"pixels": "yuv420p", "layout": layout})
        assert all(torch.equal(other[key], found[key].permute(*order)) for key in found)


def holds_planes(batch: streamvid.Batch) -> bool:
    """Return whether the batch's RGB has not been computed yet; in planes, each frame is one run of bytes."""
    return next(batch.tensors()).ndim == 3


def test_one_batch_holds_clips_of_many_colors(roots: dict[str, Path]) -> None:
    """YUV-1: matrices, ranges and sitings differ within a batch of the test above."""
    with loader_of(roots["copy"], output={"pixels": "yuv420p"}) as loader:
        (table,) = (
            tuple(batch.tensors())[1] for batch in loader if batch.bucket.num_frames == 5 and len(batch.text) == 5
        )
    assert len({tuple(row[:6]) for row in table.tolist()}) >= 4


def test_accuracies_differ_and_the_default_follows_the_clips(roots: dict[str, Path]) -> None:
    """ACCURACY: the default is exact for clips that are scaled anyway and fast for native clips, also in a mix."""
    for clips in ("copy", "native"):
        fast, exact = (videos(roots[clips], output={"accuracy": accuracy}) for accuracy in ("fast", "exact"))
        for key in fast:
            darker = float((exact[key].double() - fast[key].double()).mean())
            least, most = (-1, 1) if key.startswith(FULL_RANGE) else (0.3, 3)
            assert least < darker < most and quality_of(fast[key], exact[key]) > 38, (key, darker)
            assert torch.equal(fast[key], exact[key]) == key.startswith("native-still"), key
        default = videos(roots[clips])
        assert all(torch.equal(default[key], (exact if clips == "copy" else fast)[key]) for key in fast)
    both, sizes = [roots["copy"], roots["native"]], {"batch_size": {"96x64@5": 2, "64x64@1": 1}}
    fast, exact, default = (
        videos(both, **sizes, output={"accuracy": accuracy}) for accuracy in ("fast", "exact", None)
    )
    assert len(default) == 2 * NUM_CLIPS + 2
    for key, video in default.items():
        assert torch.equal(video, (exact if key.startswith("copy") else fast)[key])


def test_batches_on_a_device_equal_batches_in_the_ring(roots: dict[str, Path]) -> None:
    """BATCH-1: with device="cpu", planes are copied out of the ring, and RGB is computed from the copy."""
    plain = videos(roots["copy"], output={"pixels": "yuv420p"})
    with loader_of(roots["copy"], output={"pixels": "yuv420p"}, device="cpu", num_epochs=2) as loader:
        kept = list(loader)
    assert all(holds_planes(batch) for batch in kept)
    for batch in kept:
        assert batch.is_repeat.logical_not().all() and batch.video.device.type == "cpu"
    first = {key: video for batch in kept[:2] for key, video in zip(batch.sample_keys, batch.video, strict=True)}
    assert all(torch.equal(first[key], plain[key]) for key in plain)
    assert videos(roots["copy"], device="cpu").keys() == plain.keys()  # rgb24 is the default without CUDA


def test_all_kinds_of_copies_are_equal(roots: dict[str, Path]) -> None:
    """BATCH-1: batches are copied, cloned, pickled or mapped, before and after RGB is computed, in any layout."""
    digests = set()
    for layout in ("BCTHW", "BTCHW", "BTHWC"):
        with loader_of(
            roots["copy"], output={"pixels": "yuv420p", "layout": layout}, shuffle="none", num_workers=1
        ) as loader:
            batch = next(iter(loader))
            ways: list[Any] = [
                lambda one: one.clone(),
                lambda one: one.to("cpu"),
                lambda one: pickle.loads(pickle.dumps(one)),
                copy.copy,
                copy.deepcopy,
                lambda one: one.map_tensors(lambda tensor: tensor + 0),
                lambda one: streamvid.Batch(dict(one)),
            ]
            before = [way(batch) for way in ways[:-1]]
            assert holds_planes(batch)
            video = batch.video
            assert batch.video is video and batch["video"] is video and dict(batch)["video"] is video
            assert video.is_contiguous() and batch.layout == layout
            for one in [*before, *(way(batch) for way in ways)]:
                assert torch.equal(one.video, video) and one.layout == layout and one.sample_keys == batch.sample_keys
                assert one.digest() == batch.digest()
                assert torch.equal(one.normalized(torch.float32), batch.normalized(torch.float32))
            assert torch.equal(batch.normalized(torch.float64, (0, 255)), video.double())
            digests.add(batch.digest())
    assert len(digests) == 1


def test_planes_halve_the_ring(roots: dict[str, Path]) -> None:
    """YUV-1: a pixel takes 1.5 bytes instead of 3, in the ring and in the size that the loader reports."""
    with (
        loader_of(roots["copy"], output={"pixels": "yuv420p"}, limits={"prefetch_bytes": 0}) as half,
        loader_of(roots["copy"], output={"pixels": "rgb24"}, limits={"prefetch_bytes": 0}) as whole,
    ):
        largest = NUM_CLIPS * 5 * 64 * 96 * 3
        assert whole.ring_bytes - half.ring_bytes == 3 * largest // 2
        assert half.shapes == whole.shapes
        for batch in half:
            planes = next(batch.tensors())
            assert planes.dtype == torch.uint8 and 2 * planes.numel() == batch.video.numel()


def test_the_ring_slot_is_released_with_the_planes(roots: dict[str, Path]) -> None:
    """BATCH-1: the slot is free once the batch has been freed, or once its RGB, with its own memory, is computed."""
    with loader_of(
        roots["copy"], output={"pixels": "yuv420p"}, batch_size=2, limits={"prefetch_bytes": 0}, num_epochs=16
    ) as loader:
        iterator = iter(loader)
        held = [next(iterator)]
        video, before = held[0].video, held[0].video.clone()
        # The ring has room for three batches; all others pass through it while this one's RGB is kept.
        count = sum(1 for _ in iterator)
        assert count > 20 and torch.equal(video, before)
        assert loader.stats().ring_batches == 0
    with loader_of(roots["copy"], output={"pixels": "yuv420p"}, batch_size=2, limits={"prefetch_bytes": 0}) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        assert sum(1 for _ in iterator) >= 1
        assert loader.stats().ring_batches == 1
        del batch
        gc.collect()
        assert loader.stats().ring_batches == 0


def test_odd_sizes_are_refused_as_planes_and_accepted_as_rgb(tmp_path: Path) -> None:
    """API: a chroma sample covers 2 x 2 pixels."""
    root = build_dataset(tmp_path / "dataset", {Bucket(5, 63, 95): [2], Bucket(5, 64, 96): [1]})
    with pytest.raises(
        ConfigError, match=r"pixels='yuv420p'.* 95x63: both sides must be even.*use an even size or pixels='rgb24'"
    ):
        streamvid.VideoLoader(root, batch_size=1, output={"pixels": "yuv420p"})
    with streamvid.VideoLoader(root, batch_size=1, num_workers=0, device="cpu") as loader:
        sizes = {tuple(batch.video.shape[-2:]) for batch in loader}
    assert sizes == {(63, 95), (64, 96)}


@pytest.mark.parametrize(("name", "value"), [("pixels", "yuv444p"), ("accuracy", "best"), ("pixels", 3)])
def test_unknown_names_are_refused(dataset: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"output.{name}={value!r}: must be"):
        streamvid.VideoLoader(dataset, batch_size=1, output={name: value})
