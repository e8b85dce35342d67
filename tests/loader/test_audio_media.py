"""Tests of audio as a conditioning input: each sample has the part of its audio file for its frames (SAMPLE-2)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from streamvid.buckets.bucket import parse_buckets
from streamvid.errors import ConfigError
from streamvid.sharder.report import ShardReport
from streamvid.sharder.sharder import dry_run, shard
from streamvid.video.audio.file import decode_audio_file, own_zero
from streamvid.video.audio.grid import AudioFormat, first_sample_at
from tests.files import write_rows
from tests.loader.conftest import open_loader, state_after
from tests.loader.sounds import FPS, HEIGHT, RATE, WIDTH, Sound, folder_of, numbers_of, pictures, times_of
from tests.loader.speech import samples_of, write_wav
from tests.shard_options import shard_options
from tests.video.clips import run_ffmpeg

COUNT, NUM_FRAMES = 9, 72
SECONDS = NUM_FRAMES / FPS
OUTPUT = {"audio": {"sample_rate": RATE, "num_channels": 2, "fps": FPS}}
CLIPS = [Sound(f"clip-{number}.{ending}", None) for number, ending in enumerate(("mp4", "mkv", "mov", "avi", "mkv"))]
LATE = 1
"""Number of a clip whose first frame is not at time 0."""
#: Audio file of each clip → its length relative to the clip, and ffmpeg's options.
SPEECH: dict[str, tuple[float, tuple[str, ...]]] = {
    "long.wav": (1.5, ()),
    "short.flac": (0.5, ("-c:a", "flac")),
    "speech.mka": (1.0, ("-c:a", "flac")),
    "speech.m4a": (1.0, ("-c:a", "alac")),
    "": (0.0, ()),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folder_of(tmp_path_factory.mktemp("clips"), CLIPS)
    rows: list[dict[str, Any]] = []
    for number, (clip, (name, (share, options))) in enumerate(zip(CLIPS, SPEECH.items(), strict=True)):
        if name:
            write_wav(folder / "made.wav", samples_of(number, share * SECONDS))
            run_ffmpeg("-y", "-i", folder / "made.wav", *options, folder / name)
        rows.append({"path": clip.name, "speech": name or None})
    (folder / "made.wav").unlink()
    late = folder / CLIPS[LATE].name
    late.rename(folder / "early.mkv")
    run_ffmpeg("-i", folder / "early.mkv", "-c", "copy", "-output_ts_offset", "1.5", late)
    assert times_of(late)[0] > 1
    return write_rows(folder / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def dataset_of(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("sealed")
    options = {"copy": {}, "native": {"clips": "native", "audio_codec": "flac", "max_clip_seconds": 1}}

    @cache
    def of(kind: str) -> Path:
        report = build(table, root / kind, {"audio:speech?": "speech"}, **options[kind])
        assert report.num_samples == len(CLIPS) * (3 if kind == "native" else 1) and not report.rejections
        return root / kind

    return of


def build(rows: Path, dest: Path, media: dict[str, str], *, is_dry: bool = False, **options: Any) -> ShardReport:
    given = {"buckets": parse_buckets(f"{WIDTH}x{HEIGHT}@{COUNT}"), "workers": 1, "caption_column": "", **options}
    return (dry_run if is_dry else shard)(rows, dest, shard_options(**given, media=media))


def window_of(times: Sequence[Fraction], number: int, first_frame: int, num_samples: int) -> NDArray[np.float32]:
    """Return the part of clip `number`'s audio file that matches its frames from `first_frame` onwards.

    times: times of the clip's frames.
    """
    share = list(SPEECH.values())[number][0]
    whole = np.zeros((2, round(2 * SECONDS * RATE)), np.float32)
    if share:
        samples = samples_of(number, share * SECONDS)
        whole[:, : samples.shape[1]] = samples / 32768
    first = round((times[first_frame] - times[0]) * RATE)
    return whole[:, first : first + num_samples]


@pytest.mark.parametrize(("kind", "num_workers"), [("copy", 0), ("copy", 2), ("native", 0)])
def test_each_window_has_the_audio_of_its_frames(
    table: Path, dataset_of: Callable[[str], Path], kind: str, num_workers: int
) -> None:
    """Audio is bit-exact in any container of the clip and of the audio.

    After its end, and without audio, there is silence.
    """
    times, seen = [times_of(table.parent / clip.name) for clip in CLIPS], set()
    with open_loader(
        dataset_of(kind),
        batch_size=2,
        num_epochs=6,
        num_workers=num_workers,
        columns=["source"],
        media=["speech"],
        output=OUTPUT,
        tail="pad",
    ) as loader:
        for batch in loader:
            speech, present = batch.media["speech"], batch.media_present["speech"]
            assert speech.shape == (2, 2, COUNT * RATE // FPS) and speech.dtype == torch.float32
            assert not batch.audio.any() and not batch.audio_present.any()
            for index, source in enumerate(batch["source"]):
                number, first = int(source[5]), numbers_of(batch.video[index].numpy())[0]
                wanted = window_of(times[number], number, first, speech.shape[2])
                assert np.array_equal(speech[index].numpy(), wanted), (source, first)
                assert bool(present[index]) is (number != 4)
                seen.add((number, first))
    assert {number for number, _ in seen} == {0, 1, 2, 3, 4} and len(seen) > 12


@pytest.mark.parametrize("options", [{}, {"clips": "native", "audio_codec": "flac", "max_clip_seconds": 1}])
def test_the_audio_of_a_clip_is_the_same_as_an_input(options: dict[str, Any], tmp_path: Path) -> None:
    """SAMPLE-2: a clip's own audio and the same file as an input agree, even if the audio starts late or ends early."""
    sounds = [
        Sound("a.mov", "pcm_s16le"),
        Sound("late.mkv", "flac", start=0.5),
        Sound("b.mov", "pcm_s16le", seconds=0.6),
    ]
    folder = folder_of(tmp_path / "in", sounds)
    rows = write_rows(folder / "rows.csv", [{"path": sound.name} for sound in sounds])
    build(rows, tmp_path / "ds", {"audio:own": "path"}, **options)
    heard = 0
    with open_loader(tmp_path / "ds", batch_size=1, media=["own"], output=OUTPUT, num_epochs=2) as loader:
        for batch in loader:
            assert torch.equal(batch.audio, batch.media["own"])
            heard += bool(batch.audio.any())
    assert heard > 3


def test_the_remainder_of_an_epoch_has_the_same_audio(dataset_of: Callable[[str], Path]) -> None:
    """PLAN-5, SAMPLE-1: resuming with a different number of workers gives the same audio.

    States do not depend on the input.
    """
    options: dict[str, Any] = {"batch_size": 1, "num_epochs": 2, "media": ["speech"], "output": OUTPUT}

    def rest(state: Any, num_workers: int) -> list[list[Any]]:
        with open_loader(dataset_of("copy"), state, num_workers=num_workers, **options) as loader:
            return [[*batch.sample_keys, batch.media["speech"].numpy().tobytes()] for batch in loader]

    state = state_after(3, dataset_of("copy"), **options)
    assert state == state_after(3, dataset_of("copy"), batch_size=1, num_epochs=2)
    assert rest(state, 2) == rest(None, 0)[3:]


def test_batches_with_audio_inputs_behave_like_others(dataset_of: Callable[[str], Path]) -> None:
    root = dataset_of("copy")
    with pytest.raises(
        ConfigError, match=r"media=\['speech'\]: audio inputs are delivered in the format of output.audio"
    ):
        open_loader(root, media=["speech"])
    with open_loader(root, batch_size=5, media=["speech"], output=OUTPUT) as loader:
        (batch,) = loader
        with pytest.raises(ConfigError, match="medium='speech' is audio"):
            batch.normalized(torch.float32, medium="speech")
        for copied in (pickle.loads(pickle.dumps(batch)), batch.clone(), batch.to("cpu")):
            assert torch.equal(copied.media["speech"], batch.media["speech"])
        assert batch.media_present["speech"].tolist().count(False) == 1


def test_damaged_audio_inputs_are_replaced(table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """BAD-1: the whole sample is replaced, and the reason names the input."""
    data = bytearray((table.parent / "speech.m4a").read_bytes())
    data[-50_000:-2000] = bytes(48_000)
    (table.parent / "damaged.m4a").write_bytes(data)
    rows: list[dict[str, Any]] = [
        {"path": "clip-0.mp4", "speech": "damaged.m4a"},
        {"path": "clip-2.mov", "speech": "long.wav"},
    ]
    report = build(write_rows(table.parent / "damaged.jsonl", rows), tmp_path / "ds", {"audio:speech": "speech"})
    assert report.num_samples == 2
    options: dict[str, Any] = {"view": {"temporal": "middle"}, "columns": ["source"], "tail": "uneven"}
    with open_loader(tmp_path / "ds", batch_size=1, media=["speech"], output=OUTPUT, **options) as loader:
        assert [batch["source"][0] for batch in loader] == ["clip-2.mov"] * 2
    assert "its speech: DecodeError" in caplog.text


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        (None, "audio:speech", "conditioning input 'speech' is missing: column 'speech' is empty in this row"),
        ("clip-2.mov", "audio:speech", "clip-2.mov has no audio"),
        (["long.wav"], "audio:speech", "an audio input must have one file per row"),
        ("long.wav", "speech", "long.wav contains only audio; declare the input as audio:speech"),
        ("nothing.wav", "audio:speech", "cannot be read"),
    ],
)
def test_rows_with_invalid_audio_inputs_are_rejected(
    table: Path, tmp_path: Path, value: Any, kind: str, reason: str
) -> None:
    """SHARD-3: the rejection gives the reason."""
    rows = [{"path": "clip-0.mp4", "speech": value}]
    report = build(write_rows(table.parent / "wrong.jsonl", rows), tmp_path / "ds", {kind: "speech"}, is_dry=True)
    assert [one.kind for one in report.rejections] == ["medium"] and reason in report.rejections[0].reason


def test_images_have_all_of_their_audio(table: Path, tmp_path: Path) -> None:
    """The number of samples follows from output.audio.fps. Native and copied clips agree."""
    Image.fromarray(pictures(3)[2]).save(table.parent / "face.png")
    rows = [{"path": "face.png", "speech": "long.wav"}]
    rows_file, found = write_rows(table.parent / "face.jsonl", rows), []
    for clips in ({}, {"clips": "native", "audio_codec": "flac"}):
        root = tmp_path / f"ds-{len(clips)}"
        build(rows_file, root, {"audio:speech": "speech"}, buckets=parse_buckets(f"{WIDTH}x{HEIGHT}@1"), **clips)
        output = {"audio": {"sample_rate": RATE, "fps": "1/2"}}
        with open_loader(root, batch_size=1, media=["speech"], output=output) as loader:
            (batch,) = loader
            found.append(batch.media["speech"][0].numpy())
    assert np.array_equal(found[0], samples_of(0, 1.5 * SECONDS)[:, : 2 * RATE] / np.float32(32768))
    assert np.array_equal(found[0], found[1])


@pytest.mark.slow
@settings(max_examples=30)
@given(
    rate=st.sampled_from([8000, 16_000, 22_050, 44_100, 48_000]),
    channels=st.sampled_from([1, 2]),
    first=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_each_window_is_a_part_of_the_whole_track(
    rate: int, channels: int, first: int, seed: int, table: Path, dataset_of: Callable[[str], Path]
) -> None:
    """For any rate, window and resume position, the samples equal those of the whole file resampled at once."""
    times, audio = [times_of(table.parent / clip.name) for clip in CLIPS], AudioFormat(rate, channels)
    output = {"audio": {"sample_rate": rate, "num_channels": channels, "fps": FPS}}
    options: dict[str, Any] = {"media": ["speech"], "columns": ["source"], "output": output, "seed": seed}
    state = state_after(first, dataset_of("copy"), batch_size=1, num_epochs=2, **options) if first else None
    with open_loader(dataset_of("copy"), state, batch_size=1, num_epochs=2, **options) as loader:
        for batch in loader:
            number = int(batch["source"][0][5])
            frame, found = numbers_of(batch.video[0].numpy())[0], batch.media["speech"][0].numpy()
            whole = np.zeros((channels, 2 * round(SECONDS) * rate), np.float32)
            if name := list(SPEECH)[number]:
                decode_audio_file(table.parent / name, 0, whole, audio, zero=own_zero(table.parent / name))
            begin = first_sample_at(times[number][frame] - times[number][0], rate)
            assert np.array_equal(found, whole[:, begin : begin + found.shape[1]]), (number, frame)
