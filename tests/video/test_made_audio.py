"""Tests that encoded and cut clips have the source's audio at the right time, as the ffmpeg program plays it."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import av
import numpy as np
import pytest

from streamvid.errors import ProbeError
from streamvid.video.container import open_video
from streamvid.video.encode.audio_profiles import AudioCodec
from streamvid.video.encode.clip import encode_clip
from streamvid.video.encode.cut import Cutter
from streamvid.video.encode.made import MadeClip
from streamvid.video.encode.profiles import Encoding
from streamvid.video.limits import LIMITS
from tests.clips import real_clip
from tests.sounding import Sound, chirps, heard, shift_of, sounding

NUM_FRAMES, FPS, RATE = 60, 24, 48_000
START, COUNT = 19, 31
WANTED = slice(START * RATE // FPS, (START + COUNT) * RATE // FPS)


def encoded(source: Any, audio: AudioCodec | None, **options: Any) -> MadeClip:
    fixed = {"start": START, "num_frames": COUNT, "height": 64, "width": 96, "encoding": Encoding(), "audio": audio}
    return encode_clip(source, **{**fixed, **options})


def cut(source: Any, start: int = START, num_frames: int = COUNT, **options: Any) -> MadeClip:
    with open_video(source, LIMITS) as video:
        return Cutter(source, video, **options).cut(start, num_frames, verify=True)


@pytest.fixture(scope="module")
def sound() -> Sound:
    return chirps(NUM_FRAMES / FPS, RATE)


@pytest.fixture(scope="module")
def source(sound: Sound) -> bytes:
    return sounding(NUM_FRAMES, sound, fps=FPS)


def tracks(clip: bytes) -> list[tuple[str, int, str, int]]:
    """Return codec, sample rate, layout and number of samples per audio track, excluding edited-out samples."""
    with av.open(io.BytesIO(clip)) as container:
        return [
            (one.codec_context.name, one.sample_rate, one.codec_context.layout.name, int(one.duration * one.time_base * one.sample_rate))
            for one in container.streams.audio
        ]  # fmt: skip


@pytest.mark.parametrize("codec", get_args(AudioCodec))
def test_a_native_clip_has_the_audio_of_its_window(
    codec: AudioCodec, source: bytes, sound: Sound, tmp_path: Path
) -> None:
    made = encoded(source, codec)
    wanted = sound[:, WANTED] / 32768
    assert made.has_audio and tracks(made.data) == [(codec, RATE, "stereo", wanted.shape[1])]
    found = heard(made.data, tmp_path, RATE)
    # The ffmpeg program decodes the last packet, which may last 60 ms, to its end.
    assert shift_of(found, wanted) == 0 and abs(found.shape[1] - wanted.shape[1]) <= 2880
    if codec == "flac":
        assert np.array_equal(found[:, : wanted.shape[1]], wanted)
    else:
        error = found[:, : wanted.shape[1]] - wanted
        assert np.square(error).sum() < 0.05 * np.square(wanted).sum()
    assert encoded(source, codec).data == made.data  # SHARD-1


def test_a_cut_clip_has_every_sample_of_its_window(source: bytes, sound: Sound, tmp_path: Path) -> None:
    made, wanted = cut(source), sound[:, WANTED] / 32768
    assert made.has_audio and tracks(made.data) == [("flac", RATE, "stereo", wanted.shape[1])]
    assert np.array_equal(heard(made.data, tmp_path, RATE), wanted)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_window_late_in_a_file_has_every_sample(container: str, tmp_path: Path) -> None:
    """Decoding starts near the window if possible."""
    sound = chirps(8, RATE)
    made = cut(sounding(8 * FPS, sound, fps=FPS, container=container), 7 * FPS, FPS // 2)
    found, first = heard(made.data, tmp_path, RATE), 7 * RATE
    assert np.array_equal(found[:, : RATE // 2 - 48], sound[:, first : first + RATE // 2 - 48] / 32768)


@pytest.mark.parametrize("start_seconds", [Fraction(13, 10), Fraction(-1, 5)])
def test_audio_that_begins_late_or_early_keeps_its_time(start_seconds: Fraction, sound: Sound, tmp_path: Path) -> None:
    """Parts without audio are silent; audio before the source's first frame is in no clip."""
    source = sounding(NUM_FRAMES, sound, fps=FPS, start_seconds=start_seconds)
    wanted = np.zeros((2, NUM_FRAMES * RATE // FPS))
    offset = round(start_seconds * RATE)
    there = sound[:, max(0, -offset) :][:, : wanted.shape[1] - max(0, offset)]
    wanted[:, max(0, offset) : max(0, offset) + there.shape[1]] = there / 32768
    for made in (encoded(source, "flac"), cut(source)):
        assert np.array_equal(heard(made.data, tmp_path, RATE), wanted[:, WANTED])


def test_a_window_without_audio_has_no_track(sound: Sound) -> None:
    source = sounding(NUM_FRAMES, sound[:, : RATE // 4], fps=FPS)
    for made in (encoded(source, "opus"), cut(source), encoded(source, None, start=0), cut(source, 0, has_audio=False)):
        assert not made.has_audio and tracks(made.data) == []
    assert encoded(source, "opus", start=0).has_audio and cut(source, 2).has_audio


@pytest.mark.parametrize(
    ("codec", "container", "rate", "layout"),
    [("aac", "mp4", 44_100, "stereo"), ("libmp3lame", "mp4", 44_100, "mono"), ("mp2", "mpegts", 48_000, "stereo")],
)
def test_lossy_sources_are_cut_without_a_shift(
    codec: str, container: str, rate: int, layout: str, tmp_path: Path
) -> None:
    """The ffmpeg program plays both the source and the clips, so codec priming affects both equally."""
    channels = 1 if layout == "mono" else 2
    sound = chirps(NUM_FRAMES / FPS, rate, channels)
    source = sounding(NUM_FRAMES, sound, rate=rate, fps=FPS, codec=codec, container=container)
    wanted = sound[:, round(START * rate / FPS) : round((START + COUNT) * rate / FPS)] / 32768
    for made in (encoded(source, "flac"), cut(source)):
        assert tracks(made.data)[0][1:3] == (rate, layout)
        found = heard(made.data, tmp_path, rate, channels)
        assert abs(shift_of(found, wanted)) <= 1 and found.shape[1] == wanted.shape[1]


def test_surround_audio_is_kept_in_cuts_and_mixed_to_stereo_in_lossy_clips() -> None:
    path = real_clip("bigbuckbunny")
    assert tracks(cut(path, 10, 50).data)[0][:2] == ("flac", 48_000)
    assert tracks(encoded(path, "opus", start=10, num_frames=50).data)[0][:3] == ("opus", 48_000, "stereo")


def test_prores_gets_a_quicktime_file_with_pcm(sound: Sound, tmp_path: Path) -> None:
    from tests.video.clips import run_ffmpeg

    (tmp_path / "in.mp4").write_bytes(sounding(NUM_FRAMES, sound, fps=FPS))
    run_ffmpeg("-i", tmp_path / "in.mp4", "-c:v", "prores_ks", "-c:a", "pcm_s16le", tmp_path / "prores.mov")
    made = cut(tmp_path / "prores.mov")
    assert tracks(made.data)[0][:3] == ("pcm_s16le", RATE, "stereo")
    assert np.array_equal(heard(made.data, tmp_path, RATE), sound[:, WANTED] / 32768)


def test_pictures_do_not_depend_on_the_audio(source: bytes) -> None:
    def pictures(clip: bytes) -> list[tuple[int, bytes]]:
        with av.open(io.BytesIO(clip)) as container:
            return [(frame.pts, frame.to_ndarray().tobytes()) for frame in container.decode(video=0)]

    assert pictures(encoded(source, "opus").data) == pictures(encoded(source, None).data)
    assert pictures(cut(source).data) == pictures(cut(source, has_audio=False).data)


def test_damaged_audio_is_an_error_and_not_silence(sound: Sound) -> None:
    source = bytearray(sounding(NUM_FRAMES, sound, fps=FPS, codec="aac", container="mp4"))
    with av.open(io.BytesIO(bytes(source))) as container:
        packets = [(one.pos, one.size) for one in container.demux(audio=0) if one.size]
    for place, size in packets[20:60]:
        source[place : place + size] = b"\xff" * size
    for make in (lambda: encoded(bytes(source), "opus"), lambda: cut(bytes(source))):
        with pytest.raises(ProbeError, match="the audio is damaged") as caught:
            make()
        assert caught.value.kind == "audio"
    assert encoded(bytes(source), None).num_frames == COUNT
