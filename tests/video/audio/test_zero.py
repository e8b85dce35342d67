"""Tests of the time at which audio files and videos begin, whatever time the container gives to their first sample."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from streamvid.errors import ProbeError
from streamvid.video.audio.file import decode_audio_file, own_zero
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.index import index_audio
from streamvid.video.container import OnlyAudioError
from streamvid.video.probe import probe
from tests.loader.speech import write_wav
from tests.sounding import chirps, shift_of, sounding
from tests.video.clips import run_ffmpeg

RATE, SECONDS = 44_100, 2
KINDS = {
    "wav": "pcm_s16le",
    "flac": "flac",
    "mka": "flac",
    "m4a": "aac",
    "mp3": "libmp3lame",
    "ogg": "libvorbis",
    "opus": "libopus",
}


@pytest.mark.parametrize("ending", KINDS)
def test_a_file_without_pictures_begins_with_its_first_sample(ending: str, tmp_path: Path) -> None:
    sound = chirps(SECONDS, RATE)
    write_wav(tmp_path / "made.wav", sound, RATE)
    path = tmp_path / f"file.{ending}"
    run_ffmpeg("-i", tmp_path / "made.wav", "-c:a", KINDS[ending], path)
    zero, found = own_zero(path), np.zeros((2, SECONDS * RATE), np.float32)
    assert decode_audio_file(path, 0, found, AudioFormat(RATE), zero=zero).is_present
    assert shift_of(found, sound) == 0
    assert zero == (Fraction(1105, RATE) if ending == "mp3" else 0)
    if KINDS[ending] in ("pcm_s16le", "flac"):
        assert np.array_equal(found, sound / np.float32(32768))
    index = index_audio(path.read_bytes())
    if index is not None:
        moved = index.from_first_sample()
        assert index.window(0, RATE, RATE).num_bytes and moved.positions[int(np.argmax(moved.counts > 0))] == 0
    with pytest.raises(OnlyAudioError, match="the file contains only audio"):
        probe(path)


def test_a_video_begins_with_its_first_frame(tmp_path: Path) -> None:
    """The audio keeps its position relative to the video, also if the container's first time is not 0."""
    sound, found = chirps(SECONDS, RATE), np.zeros((2, SECONDS * RATE), np.float32)
    late = sounding(24 * SECONDS, sound, rate=RATE, start_seconds=Fraction(1, 2))
    (tmp_path / "late.mp4").write_bytes(late)
    run_ffmpeg("-i", tmp_path / "late.mp4", "-c:v", "copy", "-c:a", "mp2", tmp_path / "late.ts")
    for name in ("late.mp4", "late.ts"):
        zero = own_zero(tmp_path / name)
        assert (zero > 1) is (name == "late.ts")
        decode_audio_file(tmp_path / name, 0, found, AudioFormat(RATE), zero=zero)
        assert abs(shift_of(found, sound) - RATE // 2) <= RATE // 1000


def test_files_without_audio_and_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("RIFF but not audio")
    with pytest.raises(ProbeError):
        own_zero(tmp_path / "text.wav")
    write_wav(tmp_path / "made.wav", chirps(1, RATE), RATE)
    run_ffmpeg("-i", tmp_path / "made.wav", "-c:a", "aac", tmp_path / "file.aac")
    with pytest.raises(ProbeError, match="format is not allowed"):
        own_zero(tmp_path / "file.aac")
