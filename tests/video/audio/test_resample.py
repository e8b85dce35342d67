"""Tests of resampling quality, measured with tones, and of channel mixing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from streamvid.errors import DecodeError
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.mixing import mixing_matrix
from streamvid.video.audio.resample import resample
from tests.video.audio.windows import whole_track
from tests.video.clips import run_ffmpeg

PAIRS = [(48000, 44100), (44100, 48000), (48000, 32000), (44100, 16000), (48000, 24000), (44100, 32000), (11025, 48000)]


def response(frequency: float, in_rate: int, out_rate: int) -> npt.NDArray[np.complex128]:
    """Return the middle of a resampled complex tone of amplitude 1, without the ends."""
    phase = 2 * np.pi * frequency * np.arange(in_rate // 2) / in_rate
    tone = np.stack([np.cos(phase), np.sin(phase)]).astype(np.float32)
    out = resample(tone, in_rate, out_rate).astype(np.float64)
    return (out[0] + 1j * out[1])[out.shape[1] // 4 : out.shape[1] * 3 // 4]


@pytest.mark.parametrize(("in_rate", "out_rate"), PAIRS)
def test_tones_in_the_passband_keep_amplitude_and_phase(in_rate: int, out_rate: int) -> None:
    for share in (0.01, 0.25, 0.6, 0.9):
        frequency = share * min(in_rate, out_rate) / 2
        found = response(frequency, in_rate, out_rate)
        first = (resample(np.zeros((2, in_rate // 2), np.float32), in_rate, out_rate).shape[1]) // 4
        ideal = np.exp(2j * np.pi * frequency * (first + np.arange(len(found))) / out_rate)
        assert np.abs(found - ideal).max() < 10 ** (-75 / 20), share


@pytest.mark.parametrize(("in_rate", "out_rate"), [pair for pair in PAIRS if pair[1] < pair[0]])
def test_tones_above_the_band_are_removed(in_rate: int, out_rate: int) -> None:
    for frequency in np.linspace(out_rate / 2 * 1.05, in_rate / 2 * 0.99, 6):
        assert np.abs(response(float(frequency), in_rate, out_rate)).max() < 10 ** (-85 / 20), frequency


def test_rates_that_need_a_huge_filter_are_refused() -> None:
    with pytest.raises(DecodeError, match="re-encode"):
        resample(np.zeros((1, 100), np.float32), 767_999, 1001)


def test_mixing_follows_the_standard_without_overflow() -> None:
    assert mixing_matrix("stereo", 2, 2) is None
    np.testing.assert_allclose(mixing_matrix("mono", 1, 2), [[1], [1]])
    np.testing.assert_allclose(mixing_matrix("stereo", 2, 1), [[0.5, 0.5]])
    surround = mixing_matrix("5.1", 6, 2)
    assert surround is not None
    half = 0.5**0.5
    expected = np.array([[1, 0, half, 0, half, 0], [0, 1, half, 0, 0, half]]) / (1 + 2 * half)
    np.testing.assert_allclose(surround, expected, atol=1e-6)


@pytest.mark.parametrize(("codec", "layout", "ending"), [("flac", "7.1", "mkv"), ("aac", "7.1", "mp4")])
def test_tracks_of_eight_channels_are_delivered(codec: str, layout: str, ending: str, tmp_path: Path) -> None:
    """PyAV crashes when it counts the planes of frames with eight channels."""
    path, tones = tmp_path / f"a.{ending}", "|".join(f"0.2*sin({300 + 100 * n}*2*PI*t)" for n in range(8))
    run_ffmpeg(
        *("-f", "lavfi", "-i", "color=s=64x64:r=25:d=1", "-f", "lavfi"),
        *("-i", f"aevalsrc='{tones}':d=1:s=48000:c={layout}", "-c:v", "libx264", "-c:a", codec, path),
    )
    out = whole_track(path, AudioFormat(48000, 8), 4800, 38400)
    found = [int(np.argmax(np.abs(np.fft.rfft(channel)))) * 48000 // 38400 for channel in out]
    # AAC removes the tone of the low-frequency channel, because its frequency is too high.
    assert [pitch for n, pitch in enumerate(found) if n != 3] == [300, 400, 500, 700, 800, 900, 1000]
