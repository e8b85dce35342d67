"""Tests of the audio of delivered clips: it matches the frames, compared with a full decode of each file (SAMPLE-2)."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.errors import ConfigError, SampleError
from streamvid.sharder.sharder import shard
from streamvid.video.audio.grid import first_sample_at
from streamvid.video.audio.index import index_audio
from streamvid.video.audio.resample import stretch
from tests.dataset.samples import seal
from tests.files import write_rows
from tests.loader.conftest import open_loader, state_after
from tests.loader.s3_run import uploaded
from tests.loader.sidecars import make_sidecar
from tests.loader.sounds import (
    FPS,
    HEIGHT,
    RATE,
    WIDTH,
    Sound,
    Track,
    folder_of,
    numbers_of,
    pictures,
    start_of,
    times_of,
    track,
)
from tests.servers import ProxyFactory, Rgw, S3Env
from tests.shard_options import shard_options
from tests.video.clips import run_ffmpeg

COUNT = 9
SOUNDS = (
    Sound("pcm.mov", "pcm_s16le"),
    Sound("flac.mkv", "flac"),
    Sound("late.mov", "pcm_s16le", start=0.5),
    Sound("short.mkv", "flac", seconds=0.7),
    Sound("pcm.avi", "pcm_s16le"),
    Sound("silent.mp4", None),
)
OUTPUT = {"audio": {"sample_rate": RATE}}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("clips"), SOUNDS)


@pytest.fixture(scope="module")
def tracks(clips: Path) -> Mapping[str, Track]:
    return {sound.name: track(clips / sound.name) for sound in SOUNDS}


@pytest.fixture(scope="module")
def dataset(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sealed") / "dataset"
    build(clips, root)
    return root


def build(folder: Path, root: Path, **options: Any) -> None:
    given = {"buckets": parse_buckets(f"{WIDTH}x{HEIGHT}@{COUNT}"), "workers": 1, "caption_column": ""} | options
    shard(folder, root, shard_options(**given))


def check(batch: streamvid.Batch, tracks: Mapping[str, Track]) -> list[tuple[str, int]]:
    """Compare each sample's audio with the full decode at its first frame. Return (file, first frame) per sample."""
    found = []
    for index, source in enumerate(batch["source"]):
        numbers = numbers_of(batch.video[index].numpy())
        name = Path(source).name
        expected, is_there = tracks[name].window(numbers[0], batch.audio.shape[2])
        assert np.array_equal(batch.audio[index].numpy(), expected), (name, numbers[0])
        assert bool(batch.audio_present[index]) is is_there, (name, numbers[0])
        assert abs(float(batch.audio_offset_seconds[index])) <= 0.5 / RATE
        found.append((name, numbers[0]))
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_window_has_the_audio_of_its_frames(dataset: Path, tracks: Mapping[str, Track], num_workers: int) -> None:
    """SAMPLE-2: with lossless codecs, audio is bit-exact in any container, with and without an audio index."""
    seen = []
    with open_loader(
        dataset, batch_size=2, num_epochs=8, num_workers=num_workers, columns=["source"], output=OUTPUT, tail="pad"
    ) as loader:
        for batch in loader:
            assert batch.audio.shape == (2, 2, COUNT * RATE // FPS) and batch.audio.dtype.itemsize == 4
            seen += check(batch, tracks)
    assert {name for name, _ in seen} == {sound.name for sound in SOUNDS}
    assert len(set(seen)) > 24


@pytest.mark.parametrize("temporal", ["head", "middle", "chunk", "random"])
def test_views_that_keep_the_speed_have_the_audio_of_their_frames(
    dataset: Path, tracks: Mapping[str, Track], temporal: str
) -> None:
    seen = delivered(dataset, tracks, num_epochs=2, view={"temporal": temporal})
    if temporal in ("head", "middle"):
        assert {number for _, number in seen} == {0 if temporal == "head" else 31}


def delivered(dataset: Any, tracks: Mapping[str, Track], **options: Any) -> list[tuple[str, int]]:
    """Return (file, first frame) of all samples, after comparing their audio with the full decode."""
    given = {"batch_size": 2, "columns": ["source"], "output": OUTPUT, "tail": "pad"} | options
    with open_loader(dataset, **given) as loader:
        return [sample for batch in loader for sample in check(batch, tracks)]


@pytest.fixture(scope="module")
def at_rates(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("rates")
    options = {"resample": {"fps": 16}, "fix_frame_rate": {"fps": 16}, "cap": {"fps": 13}, "above": {"fps": 30}}

    @cache
    def of(rule: str) -> Path:
        build(clips, root / rule, fps_rule="resample" if rule == "above" else rule, **options[rule])
        return root / rule

    return of


@pytest.mark.parametrize(("rule", "fps"), [("resample", 16), ("fix_frame_rate", 16), ("cap", 12), ("above", 30)])
def test_frames_at_another_rate_keep_the_speed_of_their_audio(
    at_rates: Callable[[str], Path], tracks: Mapping[str, Track], rule: str, fps: int
) -> None:
    """Dropping and repeating frames changes neither the start nor the speed of the audio."""
    root = at_rates(rule)
    with open_loader(root, batch_size=2, num_epochs=2, columns=["source"], output=OUTPUT, tail="pad") as loader:
        for batch in loader:
            assert batch.audio.shape[2] == round(COUNT / fps * RATE)
            check(batch, tracks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"view": {"temporal": "uniform"}},
            "cannot be combined with view.temporal='uniform', which changes the playback speed",
        ),
        (
            {"view": {"max_interval": 2}},
            "cannot be combined with view.max_interval=2, which changes the playback speed",
        ),
        ({"output": {**OUTPUT, "decode": False}}, "cannot be combined with output.decode=False"),
        (
            {"output": {"audio": {}}},
            "sample_rate=None: set sample_rate to a number such as 32000, or set preset to one of ltx-2",
        ),
        ({"output": {"audio": {"sample_rate": 10}}}, "audio.sample_rate=10: must be an integer from 1000 to 192000"),
        ({"output": {"audio": {"sample_rate": RATE, "num_channels": 3}}}, "num_channels=3: must be one of 1, 2, 6, 8"),
        (
            {"output": {"audio": {"sample_rate": RATE, "rule": "1.5k"}}},
            "rule='1.5k' is not a valid rule for audio sample counts",
        ),
        ({"output": {"audio": {"preset": "ltx"}}}, "preset='ltx'"),
        ({"columns": ["audio"]}, "columns: 'audio' is the name of a standard batch field"),
    ],
)
def test_invalid_options_are_refused(dataset: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_loader(dataset, **{"output": OUTPUT} | options)


def test_datasets_without_audio_are_refused(dataset: Path, tmp_path: Path) -> None:
    """Precomputed features, texts, and images without a known duration have no audio."""
    features = make_sidecar(tmp_path / "features", dataset)
    with pytest.raises(ConfigError, match="output.audio cannot be combined with features"):
        open_loader(dataset, features=features, output=OUTPUT)
    texts = write_rows(tmp_path / "texts.csv", [{"caption": f"number {number}"} for number in range(4)])
    shard(texts, tmp_path / "texts", shard_options(clips="text", workers=1, caption_column="caption"))
    with pytest.raises(ConfigError, match="contain only text, which has no audio"):
        open_loader(tmp_path / "texts", output=OUTPUT)
    with open_loader([tmp_path / "texts", dataset], output=OUTPUT) as loader:
        assert {("audio" in batch) for batch in loader if not batch.bucket.is_text} == {True}
    (tmp_path / "images").mkdir()
    Image.fromarray(pictures(5)[4]).save(tmp_path / "images" / "4.png")
    build(tmp_path / "images", tmp_path / "still", buckets=parse_buckets(f"{WIDTH}x{HEIGHT}@1"))
    with pytest.raises(ConfigError, match="delivers only images; set output.audio.fps"):
        open_loader(tmp_path / "still", output=OUTPUT)
    with open_loader(tmp_path / "still", output={"audio": {"sample_rate": RATE, "fps": "25"}}) as loader:
        assert [batch.audio.shape for batch in loader] == [(1, 2, RATE // 25)]


def test_rates_that_contradict_each_other_are_refused(at_rates: Callable[[str], Path], dataset: Path) -> None:
    message = "would need different numbers of audio samples; shard the datasets with the same --fps"
    with pytest.raises(ConfigError, match=message):
        open_loader(at_rates("resample"), output={"audio": {"sample_rate": RATE, "fps": 24}})
    with pytest.raises(ConfigError, match=message):
        open_loader([at_rates("resample"), at_rates("above")], output=OUTPUT)


def test_a_dataset_from_an_older_version_is_refused_with_a_remedy(tmp_path: Path) -> None:
    def without_sound(data: bytes) -> bytes:
        file, sink = pq.ParquetFile(io.BytesIO(data)), io.BytesIO()
        tables = [file.read_row_group(n).drop_columns(["has_audio"]) for n in range(file.num_row_groups)]
        with pq.ParquetWriter(sink, tables[0].schema, write_page_checksum=True) as writer:
            for table in tables:
                writer.write_table(table)
        return sink.getvalue()

    seal(tmp_path, change_index=without_sound)
    with pytest.raises(ConfigError, match="did not record audio; shard it again, or leave output.audio out"):
        open_loader(tmp_path, output=OUTPUT)


@pytest.mark.parametrize("codec", ["aac", "opus", "flac"])
def test_native_clips_have_the_audio_of_their_frames(tmp_path: Path, codec: str) -> None:
    """SAMPLE-2: re-encoded audio keeps the position at which ffmpeg decodes it in the source."""
    sound = Sound("tones.mp4", "aac")
    clips = folder_of(tmp_path / "clips", [sound])
    build(clips, tmp_path / "dataset", clips="native", audio_codec=codec)
    whole = heard_by_ffmpeg(clips / sound.name, RATE)
    with open_loader(tmp_path / "dataset", output=OUTPUT, num_epochs=6) as loader:
        for batch in loader:
            first = first_sample_at(Fraction(numbers_of(batch.video[0].numpy())[0], FPS), RATE)
            found, errors = batch.audio[0].numpy()[:, 50:-50], {}
            for shift in range(-5, 6):
                expected = whole[:, first + 50 + shift :][:, : found.shape[1]]
                errors[shift] = float(np.square(expected - found).sum())
            assert min(errors, key=errors.__getitem__) == 0, (first, errors)


def test_clips_of_other_rates_are_refused_with_remedies(tmp_path: Path) -> None:
    """The end of a window's audio may differ from the end of its last frame by at most half a frame."""
    sounds = (Sound("a.mov", "pcm_s16le", num_frames=30), Sound("b.mov", "pcm_s16le", num_frames=30, fps=Fraction(30)))
    build(folder_of(tmp_path / "clips", sounds), tmp_path / "dataset")
    with open_loader(tmp_path / "dataset", output=OUTPUT) as loader, pytest.raises(SampleError) as raised:
        list(loader)
    assert "resample, or deliver only clips with a single frame rate: set where='fps >" in str(raised.value)
    where = "fps > 29.97 and fps < 30.03"
    with open_loader(tmp_path / "dataset", where=where, output={"audio": {"sample_rate": RATE, "fps": 30}}) as loader:
        assert [batch.audio.shape[2] for batch in loader] == [COUNT * RATE // 30]
    with open_loader(tmp_path / "dataset", where=where, output=OUTPUT) as loader:
        assert [batch.audio.shape[2] for batch in loader] == [COUNT * RATE // 30]


def test_the_number_of_samples_follows_from_the_nominal_rate(tmp_path: Path) -> None:
    """Matroska stores times in milliseconds, so the average frame rate of a clip depends on its length."""
    for name, fps in (("film", Fraction(24)), ("ntsc", Fraction(24000, 1001))):
        sound = Sound(f"{name}.mkv", "flac", num_frames=26, fps=fps)
        build(folder_of(tmp_path / name, [sound]), tmp_path / f"{name}.dataset")
        with open_loader(tmp_path / f"{name}.dataset", output=OUTPUT) as loader:
            assert next(iter(loader)).audio.shape[2] == round(COUNT / fps * RATE)


def test_windows_of_variable_rates_are_judged_by_their_own_frames(tmp_path: Path) -> None:
    """With 36 frames at 24 fps and then 36 at 12 fps, the average rate of the clip matches none of its windows."""
    sound = Sound("varying.mov", "pcm_s16le", slow_from=36)
    clips = folder_of(tmp_path / "clips", [sound])
    build(clips, tmp_path / "dataset")
    whole = {sound.name: track(clips / sound.name)}
    at_24 = {"audio": {"sample_rate": RATE, "fps": 24}}
    options: dict[str, Any] = {"output": at_24, "batch_size": 1}
    assert delivered(tmp_path / "dataset", whole, view={"temporal": "head"}, **options) == [(sound.name, 0)]
    for view in ({"temporal": "random"}, {"temporal": "middle"}):
        options = {"output": OUTPUT, "view": view, "num_epochs": 8}
        with open_loader(tmp_path / "dataset", **options) as loader, pytest.raises(SampleError, match="more than half"):
            list(loader)
    build(clips, tmp_path / "even", fps=24, fps_rule="resample")
    assert len(delivered(tmp_path / "even", whole, num_epochs=8, batch_size=1)) == 8


@pytest.mark.parametrize("view", [{"temporal": "uniform"}, {"max_interval": 3}])
def test_audio_is_stretched_to_the_speed_of_the_frames_on_request(
    dataset: Path, tracks: Mapping[str, Track], view: dict[str, Any]
) -> None:
    """Sample counts are exact and follow from each window's own range, with and without an index, in any process."""
    output = {"audio": {"sample_rate": RATE, "stretch": True}}
    found, speeds = dict[tuple[str, int, int], Any](), set[int]()
    for num_workers in (0, 2):
        with open_loader(
            dataset, num_epochs=2, num_workers=num_workers, columns=["source"], output=output, view=view, tail="pad"
        ) as loader:
            for batch in loader:
                numbers, name = numbers_of(batch.video[0].numpy()), batch["source"][0]
                assert batch.audio.shape == (1, 2, COUNT * RATE // FPS)
                if name not in tracks or not batch.audio_present[0]:
                    continue
                seconds = (tracks[name].times[numbers[-1]] - tracks[name].times[numbers[0]]) * COUNT / (COUNT - 1)
                count = round(seconds * RATE)
                if abs(count - COUNT * RATE // FPS) < RATE // FPS // 4:  # normal speed
                    count = COUNT * RATE // FPS
                whole, _ = tracks[name].window(numbers[0], count)
                speeds.add(round(10 * count / batch.audio.shape[2]))
                if count != batch.audio.shape[2]:
                    whole = stretch(whole, batch.audio.shape[2], RATE)
                np.testing.assert_allclose(batch.audio[0].numpy(), whole, atol=1e-6)
                key = (name, numbers[0], numbers[-1])
                assert np.array_equal(found.setdefault(key, batch.audio[0].numpy()), batch.audio[0].numpy())
    assert max(speeds) > 10


def test_the_remainder_of_an_epoch_has_the_same_audio(dataset: Path) -> None:
    """PLAN-5: resuming with a different number of workers gives the same audio."""

    def rest(state: Any, num_workers: int) -> list[list[Any]]:
        options = {"batch_size": 2, "num_epochs": 3, "num_workers": num_workers, "output": OUTPUT}
        with open_loader(dataset, state, **options) as loader:
            return [[*batch.sample_keys, batch.digest(), batch.audio.numpy().tobytes()] for batch in loader]

    everything = rest(None, 0)
    state = state_after(4, dataset, batch_size=2, num_epochs=3, output=OUTPUT)
    assert rest(state, 2) == everything[4:]


def test_audio_changes_no_plan_no_state_and_no_frame(dataset: Path) -> None:
    """PLAN-1: a state saved with audio can be resumed without audio, and the other way around."""
    assert state_after(3, dataset, output=OUTPUT) == state_after(3, dataset)
    with open_loader(dataset, batch_size=2, output=OUTPUT) as loud, open_loader(dataset, batch_size=2) as quiet:
        for one, other in zip(loud, quiet, strict=True):
            assert one.sample_keys == other.sample_keys and torch.equal(one.video, other.video)
            assert "audio" not in other and set(one) - set(other) == {"audio", "audio_present", "audio_offset_seconds"}
            with pytest.raises(AttributeError, match="set output.audio to deliver it"):
                _ = other.audio


def test_a_filter_excludes_clips_without_audio(dataset: Path, tracks: Mapping[str, Track]) -> None:
    names = {name for name, _ in delivered(dataset, tracks, where="has_audio")}
    assert names == {sound.name for sound in SOUNDS if sound.codec}


def test_datasets_with_and_without_audio_are_mixed(dataset: Path, tracks: Mapping[str, Track], tmp_path: Path) -> None:
    quiet = Sound("quiet.mp4", None)
    build(folder_of(tmp_path / "clips", [quiet]), tmp_path / "dataset")
    known = {**tracks, quiet.name: track(tmp_path / "clips" / quiet.name)}
    names = {name for name, _ in delivered([dataset, tmp_path / "dataset"], known, num_epochs=2)}
    assert names == {sound.name for sound in (*SOUNDS, quiet)}


def test_pixels_media_layout_and_copies_of_a_batch(dataset: Path, tracks: Mapping[str, Track]) -> None:
    """Audio behaves like any other tensor of a batch."""
    seen = []
    output = {**OUTPUT, "pixels": "yuv420p", "layout": "BTCHW"}
    with open_loader(dataset, batch_size=3, columns=["source"], output=output, device="cpu") as loader:
        for batch in loader:
            assert loader.ring_bytes > 3 * batch.audio.nbytes
            for other in (batch.to("cpu"), batch.clone(), pickle.loads(pickle.dumps(batch)), copy.copy(batch)):
                assert torch.equal(other.audio, batch.audio) and other.digest() == batch.digest()
            assert sum(tensor is batch.audio for tensor in batch.tensors()) == 1 and "audio" in repr(batch)
            moved = batch.with_fields({"video": batch.video.transpose(1, 2), "layout": "BCTHW"})
            seen += check(moved, tracks)
            changed = batch.clone()
            changed.audio[0] += 1
            assert changed.digest() != batch.digest()
    assert len(seen) == len(SOUNDS)


def test_the_ring_grows_by_three_batches_of_audio(dataset: Path) -> None:
    """The part of the ring that holds frames keeps its size."""
    sizes = {}
    for name, output in (("with", OUTPUT), ("without", {})):
        with open_loader(dataset, batch_size=2, limits={"prefetch_bytes": 0}, output=output) as loader:
            next(iter(loader))
            sizes[name] = loader.ring_bytes
    of_sound = 3 * 2 * 2 * (COUNT * RATE // FPS) * 4
    assert 0 <= sizes["with"] - sizes["without"] - of_sound <= 3 * 4096


def test_images_are_silent(tmp_path: Path) -> None:
    """An image has as many silent audio samples as one frame lasts."""
    clips = folder_of(tmp_path / "clips", [Sound("a.mov", "pcm_s16le", num_frames=30)])
    for number in range(3):
        Image.fromarray(pictures(5)[4]).save(clips / f"{number}.png")
    build(clips, tmp_path / "dataset", buckets=parse_buckets(f"{WIDTH}x{HEIGHT}@{COUNT},{WIDTH}x{HEIGHT}@1"))
    with open_loader(tmp_path / "dataset", output=OUTPUT) as loader:
        for batch in loader:
            if batch.bucket.is_image:
                assert batch.audio.shape == (1, 2, RATE // FPS) and not batch.audio.any()
                assert not batch.audio_present.any() and batch.audio_offset_seconds.tolist() == [0.0]
            else:
                assert batch.audio_present.all()


def test_a_sample_with_damaged_audio_is_replaced(dataset: Path, tracks: Mapping[str, Track], tmp_path: Path) -> None:
    """BAD-1: the substitute has intact audio, and the recorded reason is the checksum."""
    root = Path(shutil.copytree(dataset, tmp_path / "dataset"))
    source, name = streamvid.open_dataset(root), "flac.mkv"
    for shard_info in source.shards:
        for row in source.samples(shard_info).to_pylist():
            if Path(row["source"]).name == name:
                path, first = root / shard_info.path, row["clip_offset"]
                data = bytearray(path.read_bytes())
                sound = index_audio(bytes(data[first : first + row["clip_bytes"]]))
                assert sound is not None
                for place, size in zip(sound.offsets.tolist(), sound.sizes.tolist(), strict=True):
                    data[first + place + size // 2] ^= 255
                path.write_bytes(data)
    with open_loader(root, columns=["source"], output=OUTPUT, limits={"max_bad_fraction": 1.0}) as loader:
        names = [check(batch, tracks)[0][0] for batch in loader]
        assert name not in names and len(names) == len(SOUNDS)
        assert [record.key for record in loader.substituted] and "checksum" in loader.substituted[0].reason


def test_a_store_sends_only_the_parts_that_a_window_needs(
    tracks: Mapping[str, Track], tmp_path: Path, rgw: Rgw, s3_env: S3Env, fault_proxy: ProxyFactory
) -> None:
    """FETCH-2: audio equals a read from disk and causes no additional requests.

    Only a small part of each file is read.
    """
    sounds = [Sound("long.mov", "pcm_s16le", num_frames=240), Sound("long.mkv", "flac", num_frames=240)]
    clips = folder_of(tmp_path / "clips", sounds)
    build(clips, tmp_path / "dataset")
    source, known = uploaded(tmp_path / "dataset", rgw), {one.name: track(clips / one.name) for one in sounds}
    proxy = fault_proxy(rgw)
    s3_env(rgw.behind(proxy))
    num_bytes = sum(path.stat().st_size for path in clips.iterdir())
    requests, fetched = {}, {}
    for name, output in (("with", OUTPUT), ("without", {})):
        proxy.reset_counts()
        with open_loader(source.url, columns=["source"], output=output) as loader:
            for batch in loader:
                if "audio" in batch:
                    check(batch, known)
            fetched[name] = loader.stats().work.num_bytes_fetched
        counts = proxy.counts()
        requests[name] = sum(number for path, number in counts.requests.items() if path.endswith(".tar"))
    assert requests["with"] == requests["without"] == len(sounds)
    assert fetched["without"] < fetched["with"] < num_bytes / 3, (fetched, num_bytes)


LOSSY = (
    Sound("aac.mp4", "aac"),
    Sound("opus.mkv", "libopus"),
    Sound("mp3.mkv", "libmp3lame"),
    Sound("late.mp4", "aac", start=0.4),
    Sound("slow.mkv", "flac", rate=44100),
)


@pytest.mark.parametrize("rate", [16000, RATE])
def test_lossy_and_resampled_audio_matches_ffmpeg(tmp_path: Path, rate: int) -> None:
    """SAMPLE-2: the ffmpeg program decodes whole files.

    Its output matches best at the delivered position, without a shift.
    """
    clips = folder_of(tmp_path / "clips", LOSSY)
    build(clips, tmp_path / "dataset")
    whole = {one.name: heard_by_ffmpeg(clips / one.name, rate) for one in LOSSY}
    times = {one.name: times_of(clips / one.name) for one in LOSSY}
    output = {"audio": {"sample_rate": rate}}
    with open_loader(tmp_path / "dataset", columns=["source"], output=output, num_epochs=3) as loader:
        for batch in loader:
            name = Path(batch["source"][0]).name
            first = first_sample_at(times[name][numbers_of(batch.video[0].numpy())[0]], rate)
            found = batch.audio[0].numpy()[:, 50:-50]
            errors = {}
            for shift in range(-3, 4):
                expected = whole[name][:, first + 50 + shift :][:, : found.shape[1]]
                errors[shift] = float(np.square(expected - found).sum())
            assert min(errors, key=errors.__getitem__) == 0 or not found.any(), (name, first, errors)
            if rate == RATE and name != "slow.mkv":
                assert errors[0] <= 1e-5 * np.square(found).sum(), (name, first, errors)


def heard_by_ffmpeg(path: Path, rate: int) -> NDArray[np.float32]:
    """Return the audio of a file as decoded by ffmpeg, as an array (2, samples) from time 0."""
    data = run_ffmpeg("-i", path, "-map", "0:a", "-ar", rate, "-ac", 2, "-f", "f32le", "-")
    sound = np.frombuffer(data, np.float32).reshape(-1, 2).T
    return np.concatenate([np.zeros((2, round(start_of(path) * rate)), np.float32), sound, np.zeros((2, rate))], axis=1)
