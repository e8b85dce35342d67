"""Tests of the frames that a loader delivers, judged by pixels against a decode of whole files (SAMPLE-1, SAMPLE-2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from streamvid import VideoLoader
from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, SampleError
from streamvid.sharder.sharder import shard
from streamvid.video.decode.stored import StoredDecoder
from streamvid.video.picture import PictureFormat
from streamvid.video.probe import probe
from streamvid.video.transform import Transform
from tests.conftest import merged
from tests.loader.conftest import open_loader
from tests.shard_options import shard_options
from tests.video.clips import ClipFolder, decode_with_ffmpeg, mean_square_errors, psnr

HEIGHT, WIDTH, COUNT = 64, 96, 9
#: With and without a packet index, constant and variable rates, reordered and hidden frames, rotated.
INDEXED = ("h264_open_gop.mp4", "variable_rate.mp4", "variable_rate.mkv", "vp9_hidden.webm", "turn_90.mp4")
NAMES = (*INDEXED, "variable_rate.avi", "image.png")
RATES = {"native": None, "cap": 16, "resample": 12, "above": 60, "fix_frame_rate": 24}


@dataclass(frozen=True)
class Truth:
    """Full decode of a file by PyAV: the time of each frame from the first one in seconds, the end, and the pixels."""

    times: tuple[Fraction, ...]
    end: Fraction
    frames: NDArray[np.uint8]

    @property
    def fps(self) -> Fraction:
        return (len(self.times) - 1) / self.times[-1]

    def shown(self, frames: NDArray[np.uint8]) -> list[int]:
        """Return the numbers of delivered frames (T, H, W, 3)."""
        found = []
        for frame in frames:
            errors = mean_square_errors(self.frames[:, ::3, ::3], frame[::3, ::3])
            assert psnr(errors.min()) >= 45
            found.append(int(errors.argmin()))
        return found


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = ClipFolder(tmp_path_factory.mktemp("made"))
    source = tmp_path_factory.mktemp("source")
    for name in NAMES:
        (source / name).write_bytes(make(name).read_bytes())
    return source


@pytest.fixture(scope="module")
def truth(clips: Path) -> Callable[[str], Truth]:
    @cache
    def of(name: str) -> Truth:
        path = clips / name
        with av.open(str(path)) as file:
            decoded = [(frame.pts, frame.duration or 0, frame.time_base) for frame in file.decode(video=0)]
        (first, _, base), (_, duration, _) = decoded[0], decoded[-1]
        times = tuple((pts - first) * base for pts, _, _ in decoded)
        end = times[-1] + (duration * base if duration else Fraction(times[-1]) / max(1, len(times) - 1))
        frames = decode_with_ffmpeg(path, Transform.cover(probe(path), HEIGHT, WIDTH).ffmpeg_filter, HEIGHT, WIDTH)
        assert len(frames) == len(times)
        return Truth(times, end, frames)

    return of


def make(source: Path, dest: Path, buckets: str, **options: Any) -> Path:
    shard(source, dest, shard_options(buckets=parse_buckets(buckets), workers=1, caption_column="", **options))
    return dest


@pytest.fixture(scope="module")
def dataset(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns the dataset of all clips for a name in RATES."""
    root = tmp_path_factory.mktemp("datasets")

    @cache
    def of(name: str) -> Path:
        rate = {} if RATES[name] is None else {"fps": RATES[name], "fps_rule": "resample" if name == "above" else name}
        return make(clips, root / name, f"{WIDTH}x{HEIGHT}@{COUNT},{WIDTH}x{HEIGHT}@1", **rate)

    return of


@dataclass(frozen=True)
class Delivered:
    source: str
    frames: NDArray[np.uint8]
    fps: float


def deliver(path: Path, **options: Any) -> list[Delivered]:
    sources = {row["key"]: row["source"] for row in open_dataset(path).samples_table().to_pylist()}
    found = []
    given = {"num_workers": 0, "batch_size": 1, "tail": "uneven", "output": {"accuracy": "exact", "layout": "BTHWC"}}
    with VideoLoader(path, **merged(given, options)) as loader:
        for batch in loader:
            for key, video, fps in zip(batch.sample_keys, batch.video, batch.fps, strict=True):
                found.append(Delivered(sources[key], video.numpy().copy(), float(fps)))
    return found


def nearest(times: tuple[Fraction, ...], wanted: Fraction) -> int:
    distances = [abs(time - wanted) for time in times]
    return distances.index(min(distances))


def places(rule: str, truth: Truth) -> list[int]:
    """Return the frames of a clip that a rule selects, computed in the simplest way."""
    total, fps = len(truth.times), truth.fps
    if rule == "native":
        return list(range(total))
    target = Fraction(RATES[rule] or 0)
    if rule == "cap":
        interval = -(-fps // target) if fps >= target else 1
        return list(range(0, total // interval * interval, interval))
    if rule == "fix_frame_rate":
        count = int(truth.end * target)
        return [min(round(i / float(target) * float(fps)), total - 1) for i in range(count)]
    count = int(truth.end * target + Fraction(1, 2))
    return [nearest(truth.times, i / target) for i in range(count)]


@pytest.mark.parametrize("rule", RATES)
def test_a_prefix_has_the_frames_of_the_rule(
    rule: str, dataset: Callable[[str], Path], truth: Callable[[str], Truth]
) -> None:
    """SAMPLE-2, OPEN-SORA 11, DIFFSYNTH 12 and 13: the first frames of each rule are delivered, with their rate."""
    delivered = deliver(dataset(rule), view={"temporal": "head"})
    assert sorted(item.source for item in delivered) == sorted(NAMES)
    for item in delivered:
        its = truth(item.source)
        if item.source == "image.png":
            assert its.shown(item.frames) == [0]
            assert np.isnan(item.fps)
            continue
        expected = places(rule, its)[:COUNT]
        assert its.shown(item.frames) == expected, item.source
        fps = float(its.fps / (expected[1] - expected[0])) if rule in ("native", "cap") else RATES[rule]
        assert item.fps == pytest.approx(fps, rel=1e-6)


@pytest.mark.parametrize("rule", ["native", "cap", "resample", "above"])
def test_random_windows_are_consecutive_frames_of_the_rule(
    rule: str, dataset: Callable[[str], Path], truth: Callable[[str], Truth]
) -> None:
    """SAMPLE-2: a window has consecutive positions at the clip's rate, and its start differs between visits."""
    starts: dict[str, set[int]] = {}
    for epoch in range(3):
        for item in deliver(dataset(rule), seed=epoch):
            if item.source == "image.png":
                continue
            its = truth(item.source)
            shown, all_places = its.shown(item.frames), places(rule, its)
            if rule == "cap":  # it starts at any frame, not only at frames that a prefix would have
                step = all_places[1] - all_places[0]
                assert shown == list(range(shown[0], shown[0] + COUNT * step, step))
            else:
                runs = [all_places[i : i + COUNT] for i in range(len(all_places) - COUNT + 1)]
                assert shown in runs, item.source
            starts.setdefault(item.source, set()).add(shown[0])
    assert sum(len(found) > 1 for found in starts.values()) >= 4


@pytest.mark.parametrize("rule", ["native", "resample"])
def test_windows_from_the_middle_and_side_by_side(
    rule: str, dataset: Callable[[str], Path], truth: Callable[[str], Truth]
) -> None:
    """With "chunk", each chunk of a clip is delivered once over as many epochs as the clip has chunks."""
    for item in deliver(dataset(rule), view={"temporal": "middle"}):
        if item.source == "image.png":
            continue
        all_places, its = places(rule, truth(item.source)), truth(item.source)
        first = (len(all_places) - COUNT) // 2
        assert its.shown(item.frames) == all_places[first : first + COUNT]
    chunks: dict[str, list[list[int]]] = {}
    num_epochs = 6
    for item in deliver(dataset(rule), view={"temporal": "chunk"}, num_epochs=num_epochs):
        chunks.setdefault(item.source, []).append(truth(item.source).shown(item.frames))
    for source in INDEXED:
        all_places = places(rule, truth(source))
        count = len(all_places) // COUNT
        expected = [all_places[i * COUNT : (i + 1) * COUNT] for i in range(count)]
        for first in range(0, num_epochs - count + 1, count):
            assert sorted(chunks[source][first : first + count]) == expected, source


@pytest.mark.parametrize("rule", ["native", "resample"])
def test_a_uniform_view_covers_the_whole_clip(
    rule: str, dataset: Callable[[str], Path], truth: Callable[[str], Truth]
) -> None:
    """With "uniform", frames are nearest to evenly spaced times from first to last, and the rate gives the spacing."""
    for item in deliver(dataset(rule), view={"temporal": "uniform"}):
        its = truth(item.source)
        if item.source == "image.png":
            continue
        wanted = [its.times[-1] * i / (COUNT - 1) for i in range(COUNT)]
        assert its.shown(item.frames) == [nearest(its.times, time) for time in wanted], item.source
        assert item.fps == pytest.approx(float((COUNT - 1) / its.times[-1]), rel=1e-6)


def test_open_soras_window_and_random_intervals(dataset: Callable[[str], Path], truth: Callable[[str], Truth]) -> None:
    """OPEN-SORA 12: each delivery has one interval, and intervals vary.

    Open-Sora's own window is a truncated linspace.
    """
    intervals = set()
    for seed in range(4):
        for item in deliver(dataset("native"), view={"max_interval": 4}, seed=seed):
            shown = truth(item.source).shown(item.frames)
            if len(shown) > 1:
                steps = {later - earlier for earlier, later in pairwise(shown)}
                assert len(steps) == 1
                assert item.fps == pytest.approx(float(truth(item.source).fps / min(steps)), rel=1e-6)
                intervals |= steps
    assert intervals == {1, 2, 3, 4}
    for item in deliver(dataset("cap"), view={"temporal": "opensora"}):
        shown, its = truth(item.source).shown(item.frames), truth(item.source)
        if len(shown) > 1:
            interval = -(-its.fps // 16)
            end = shown[0] + COUNT * interval
            assert shown == np.linspace(shown[0], end - 1, COUNT, dtype=int).tolist()
            assert end <= len(its.times)


def test_whole_clips_have_the_buckets_length_or_are_an_error(
    clips: Path, tmp_path: Path, truth: Callable[[str], Truth]
) -> None:
    """A clip exactly as long as its bucket is delivered whole by every view. With "full", a longer clip is an error."""
    source = tmp_path / "source"
    source.mkdir()
    (source / INDEXED[0]).write_bytes((clips / INDEXED[0]).read_bytes())
    whole = make(source, tmp_path / "whole", f"{WIDTH}x{HEIGHT}@40")
    for temporal in ("full", "random", "head", "middle", "chunk", "uniform"):
        (item,) = deliver(whole, view={"temporal": temporal})
        assert truth(item.source).shown(item.frames) == list(range(40))
    part = make(source, tmp_path / "part", f"{WIDTH}x{HEIGHT}@39")
    with pytest.raises(SampleError, match="temporal='full'.*40 frames.*bucket needs 39"):
        deliver(part, view={"temporal": "full"})


@pytest.mark.parametrize("rule", ["resample", "above", "cap", "fix_frame_rate"])
def test_the_rule_decides_the_bucket(rule: str, clips: Path, tmp_path: Path, truth: Callable[[str], Truth]) -> None:
    """OPEN-SORA 11: a clip fits a bucket with as many frames as it has at its rate, but not with one more."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "variable_rate.mp4").write_bytes((clips / "variable_rate.mp4").read_bytes())
    its = truth("variable_rate.mp4")
    count = len(places(rule, its))
    fps_rule = "resample" if rule == "above" else rule
    buckets = f"{WIDTH}x{HEIGHT}@{count},{WIDTH}x{HEIGHT}@{count + 1}"
    path = make(source, tmp_path / "ds", buckets, fps=RATES[rule], fps_rule=fps_rule)
    (item,) = deliver(path, view={"temporal": "full"})
    assert len(item.frames) == count
    assert its.shown(item.frames) == places(rule, its)


def test_stored_clips_have_the_same_frames(clips: Path, tmp_path: Path, truth: Callable[[str], Truth]) -> None:
    """With decode=False, frame numbers equal the decoded ones.

    A repeated frame has one packet, at its first position.
    """
    source = tmp_path / "source"
    source.mkdir()
    for name in INDEXED:
        (source / name).write_bytes((clips / name).read_bytes())
    path = make(source, tmp_path / "ds", f"{WIDTH}x{HEIGHT}@{COUNT}", fps=60)
    for temporal in ("random", "uniform"):
        decoded = deliver(path, view={"temporal": temporal})
        picture = PictureFormat(HEIGHT, WIDTH)
        with open_loader(path, tail="uneven", view={"temporal": temporal}, output={"decode": False}) as loader:
            batches = list(loader)
        for item, batch in zip(decoded, batches, strict=True):
            clip = batch.clips[0]
            assert list(clip.numbers) == truth(item.source).shown(item.frames)
            assert clip.num_frames == len(clip.numbers) == COUNT
            assert clip.stream is not None
            packets = clip.packets.numpy()
            assert np.count_nonzero(packets[:, 3] >= 0) == len(set(clip.numbers))
            out = np.zeros((COUNT, picture.num_bytes), np.uint8)
            StoredDecoder().decode(
                clip.stream, packets, memoryview(clip.data.numpy()), int(packets[0, 0]), out, picture
            )
            assert np.array_equal(out.reshape(item.frames.shape), item.frames)


def test_a_substitute_has_frames_at_its_own_times(clips: Path, tmp_path: Path, truth: Callable[[str], Truth]) -> None:
    """BAD-1: a substitute is decoded through its container or delivered whole, and its own times select its frames."""
    source = tmp_path / "source"
    source.mkdir()
    for name in INDEXED[:2]:
        (source / name).write_bytes((clips / name).read_bytes())
    path = make(source, tmp_path / "ds", f"{WIDTH}x{HEIGHT}@{COUNT}", fps=60)
    (tar,) = path.rglob("*.tar")
    bad = (clips / INDEXED[0]).read_bytes()
    tar.write_bytes(tar.read_bytes().replace(bad, bytes(len(bad))))
    its = truth(INDEXED[1])
    expected = [nearest(its.times, its.times[-1] * i / (COUNT - 1)) for i in range(COUNT)]
    given = {
        "batch_size": 1,
        "num_workers": 0,
        "tail": "uneven",
        "view": {"temporal": "uniform"},
        "output": {"layout": "BTHWC"},
    }
    with VideoLoader(path, **given) as loader:  # type: ignore[arg-type]
        for batch in loader:
            assert its.shown(batch.video[0].numpy()) == expected
        assert loader.stats().work.num_substituted == 1
    with VideoLoader(path, **{**given, "output": {"decode": False}}) as loader:  # type: ignore[arg-type]
        found = [batch.clips[0] for batch in loader]
    assert [list(clip.numbers) for clip in found] == [expected] * 2
    assert sorted(clip.packets is None for clip in found) == [False, True]


def test_frames_by_time_require_a_packet_index_or_decoding(
    dataset: Callable[[str], Path],
) -> None:
    loader = open_loader(dataset("resample"), tail="uneven", output={"decode": False})
    with loader, pytest.raises(SampleError, match="no packet index, .*decode=True"):
        list(loader)


def test_workers_decode_what_the_caller_would(dataset: Callable[[str], Path]) -> None:
    """SAMPLE-1: choices do not depend on the process that makes them, with an index or through the container."""
    for options in ({"view": {"temporal": "uniform"}}, {"view": {"temporal": "random"}, "seed": 5}):
        here, there = deliver(dataset("above"), **options), deliver(dataset("above"), num_workers=2, **options)
        for mine, theirs in zip(here, there, strict=True):
            assert (mine.source, mine.fps) == (theirs.source, theirs.fps) or np.isnan(mine.fps)
            assert np.array_equal(mine.frames, theirs.frames)


def test_a_rule_requires_a_rate_and_native_clips_allow_one_rule() -> None:
    """Errors name the option, its value and what is allowed."""
    buckets = parse_buckets("96x64@9")
    for options, message in (
        ({"fps_rule": "cap"}, "fps_rule='cap' requires a frame rate; also set clips.fps"),
        ({"fps": 16, "fps_rule": "sometimes"}, "fps_rule='sometimes': must be 'resample', 'cap' or 'fix_frame_rate'"),
        ({"fps": 0}, "fps=0"),
        ({"fps": 16, "fps_rule": "cap", "clips": "native"}, "clips.kind='native'"),
    ):
        with pytest.raises(ConfigError, match=message):
            shard_options(buckets=buckets, **options)  # type: ignore[arg-type]
