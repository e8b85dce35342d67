"""Tests of whole tracks: a real file, fluctuating timestamps, changing formats and several streams."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from streamvid.video.audio.canvas import Canvas
from streamvid.video.audio.file import decode_audio_file
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.index import index_audio
from streamvid.video.survey.audio_facts import read_audio_facts
from tests.clips import real_clip
from tests.video.audio.clips import KINDS, RATE, Float32s, Truth, ffmpeg_truth, peaks, track
from tests.video.audio.conftest import SoundClips
from tests.video.audio.windows import from_packets, whole_track
from tests.video.clips import run_ffmpeg


def drawn(truth: Truth, first: int, count: int) -> Float32s:
    """Return the ffmpeg program's samples, with each frame at its time."""
    out = np.zeros(count, np.float32)
    for time, samples in truth.sounds:
        place = round(time * truth.rate) - first
        begin, end = max(0, place), min(count, place + len(samples))
        if begin < end:
            out[begin:end] = samples[begin - place : end - place]
    return out


def test_a_real_track_equals_the_ffmpeg_programs() -> None:
    """5.1 AAC of a real clip, with its start and end, decoded through the container and from packets."""
    path = Path(real_clip("bigbuckbunny"))
    truth, data = ffmpeg_truth(path), Path(path).read_bytes()
    first, count = -truth.rate // 2, 6 * truth.rate
    expected = drawn(truth, first, count)
    audio = AudioFormat(truth.rate, 6)
    np.testing.assert_allclose(whole_track(path, audio, first, count)[0], expected, atol=1e-6)
    index = index_audio(data)
    assert index is not None
    np.testing.assert_allclose(from_packets(data, index, audio, first, count)[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "jitter"), [("alac_mp4", 0.004), ("flac_mkv", 0.004), ("pcm_s16le_mkv", 0.003), ("flac_mp4", 0.0007)]
)
def test_fluctuating_timestamps_do_not_interrupt_the_audio(kind: str, jitter: float, sound: SoundClips) -> None:
    """Some recorders write such timestamps: each packet is up to a few milliseconds early or late."""
    path = sound.copied(kind, f"-bsf:a setts=ts='PTS+round({jitter}*sin(N*N)/TB)'")
    source = track(48000 if kind != "pcm_s16le_mkv" else 44100)
    rate = 48000 if kind != "pcm_s16le_mkv" else 44100
    out = whole_track(path, AudioFormat(rate, 1), -rate, 6 * rate)[0]
    present = np.flatnonzero(out)
    start = int(present[0]) - int(np.flatnonzero(source)[0])
    assert abs(start - rate) <= 0.0101 * rate
    # Omit the last packets, because no later packet shows whether their timestamps are jitter or a real shift.
    length = len(source) - 2 * 4608
    np.testing.assert_array_equal(out[start : start + length], source[:length])


def test_a_sample_rate_may_change_within_a_track(tmp_path: Path) -> None:
    """Two programs of a transport stream have the same tone: 44.1 kHz mono, then 48 kHz stereo."""
    picture = ("-f", "lavfi", "-i", "color=s=64x64:r=25:d=2")
    for name, rate, channels in (("a", 44100, 1), ("b", 48000, 2)):
        tone = ("-f", "lavfi", "-i", f"aevalsrc=0.25*sin(1000*2*PI*t):d=2:s={rate}")
        run_ffmpeg(*picture, *tone, "-c:v", "libx264", "-c:a", "mp2", "-ac", channels, tmp_path / f"{name}.ts")
    (tmp_path / "list.txt").write_text("file a.ts\nfile b.ts\n")
    both = tmp_path / "both.ts"
    run_ffmpeg("-f", "concat", "-i", tmp_path / "list.txt", "-c", "copy", both)
    facts = read_audio_facts(both)
    assert facts is not None
    assert facts.duration_seconds == pytest.approx(4, abs=0.1)
    assert index_audio(both.read_bytes()) is None
    begin = ffmpeg_truth(both).sounds[0][0]
    out = whole_track(both, AudioFormat(32000, 1), int((begin + 1) * 32000), 2 * 32000)[0]
    for part in (out[:24000], out[40000:]):
        spectrum = np.abs(np.fft.rfft(part * np.hanning(len(part))))
        assert np.argmax(spectrum) * 32000 / len(part) == pytest.approx(1000, abs=3)
    levels = np.sqrt((out.reshape(-1, 1600) ** 2).mean(axis=1))
    assert levels.min() > 0.1
    assert levels.max() < 0.2


def test_later_samples_replace_earlier_ones_of_another_rate() -> None:
    out = np.zeros((1, 32000), np.float32)
    canvas = Canvas(0, out, AudioFormat(32000, 1))
    canvas.draw(0, np.full((1, 48000), 0.5, np.float32), "mono", 48000)
    canvas.draw(22050, np.full((1, 22050), 0.25, np.float32), "mono", 44100)
    assert canvas.render().num_present == 32000
    np.testing.assert_allclose(out[0, 200:15800], 0.5, atol=1e-3)
    np.testing.assert_allclose(out[0, 16200:31800], 0.25, atol=1e-3)


def test_the_default_stream_of_several_is_delivered(tmp_path: Path, sound: SoundClips) -> None:
    path = tmp_path / "a.mkv"
    tone = ("-f", "lavfi", "-i", "aevalsrc=0.25*sin(1000*2*PI*t):d=2:s=48000")
    noise = sound("flac_mkv")
    maps = ("-map", "0:v", "-map", "0:a", "-map", "1:a", "-c:v", "copy", "-c:a", "flac")
    for default, is_tone in ((0, False), (1, True)):
        other = 1 - default
        run_ffmpeg(
            "-i", noise, *tone, *maps, f"-disposition:a:{default}", "default", f"-disposition:a:{other}", 0, path
        )
        out = whole_track(path, AudioFormat(RATE, 1), RATE, RATE // 5)[0]
        assert (np.abs(out).max() > 0.2) == is_tone


@pytest.mark.parametrize(
    "kind",
    [
        *("aac_mp4", "alac_mp4", "libopus_mp4", "libmp3lame_mp4", "libopus_webm", "libvorbis_webm"),
        *("libopus_ogv", "libvorbis_ogv", "flac_mkv"),
    ],
)
def test_priming_and_padding_are_cut(kind: str, sound: SoundClips) -> None:
    """The delivered audio has exactly as many samples as the encoded track."""
    rate = KINDS[kind].rate
    out = np.zeros((1, 6 * rate), np.float32)
    assert decode_audio_file(sound(kind), -rate, out, AudioFormat(rate, 1)).num_present == 4 * rate
    assert not out[0, :rate].any()
    assert not out[0, 5 * rate :].any()


def _box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content) + 8) + kind + content


def test_priming_that_only_itunes_metadata_declares_is_cut(tmp_path: Path, sound: SoundClips) -> None:
    """Apple's encoders write iTunSMPB in place of an edit list."""
    data = sound.copied("aac_mp4", "-use_editlist 0").read_bytes()
    text = b" 00000000 00000400 00000000 000000000002EE00 00000000 00000000"
    item = _box(b"mean", bytes(4) + b"com.apple.iTunes") + _box(b"name", bytes(4) + b"iTunSMPB")
    item += _box(b"data", struct.pack(">II", 1, 0) + text)
    items = _box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9)) + _box(b"ilst", _box(b"----", item))
    addition = _box(b"udta", _box(b"meta", bytes(4) + items))
    place = data.rindex(b"moov") - 4  # the last box of the file
    size = struct.pack(">I", len(data) - place + len(addition))
    path = tmp_path / "a.mp4"
    path.write_bytes(data[:place] + size + data[place + 4 :] + addition)
    truth = ffmpeg_truth(path)
    out = np.zeros((1, 6 * RATE), np.float32)
    assert decode_audio_file(path, 0, out, AudioFormat(RATE, 1)).num_present == 4 * RATE
    assert np.flatnonzero(out[0])[0] == pytest.approx(truth.sounds[0][0] * RATE, abs=2)
    assert [place / RATE for place in peaks(out[0])] == pytest.approx(truth.click_times, abs=1e-3)
