"""Tests that time-stretched audio keeps its pitch, and the times of its sounds within the documented bound."""

from __future__ import annotations

import numpy as np
import pytest

from streamvid.errors import DecodeError
from streamvid.video.audio.resample import stretch
from tests.video.audio.clips import Float32s, peaks


def clicks(count: int, rate: int) -> Float32s:
    """Return quiet stereo noise with a click every 0.31 s."""
    out = np.random.default_rng(0).standard_normal(count) * 1e-3
    out[round(0.2 * rate) :: round(0.31 * rate)] = 0.9
    return np.stack([out, out]).astype(np.float32)


@pytest.mark.parametrize("rate", [16000, 44100, 48000])
@pytest.mark.parametrize("speed", [0.5, 0.7, 0.97, 1.04, 1.7, 2, 3, 5.3, 20])
def test_clicks_stay_close_to_their_times(speed: float, rate: int) -> None:
    given = clicks(3 * rate, rate)
    count = round(given.shape[1] / speed)
    found = stretch(given, count, rate)
    assert found.shape == (2, count) and np.array_equal(found, stretch(given, count, rate))
    wanted = np.array(peaks(given[0])) / given.shape[1] * count
    for place in peaks(found[0]):
        assert np.abs(wanted - place).min() <= rate / (30 if speed > 0.95 else 12), (place / rate, wanted / rate)


@pytest.mark.parametrize("speed", [0.5, 0.8, 1.5, 3, 6])
def test_the_pitch_is_kept(speed: float) -> None:
    rate = 32000
    tone = np.sin(2 * np.pi * 440 * np.arange(8 * rate) / rate).astype(np.float32)[None]
    found = stretch(tone, round(8 * rate / speed), rate)[0]
    spectrum = np.abs(np.fft.rfft(found * np.hanning(len(found))))
    assert np.fft.rfftfreq(len(found), 1 / rate)[int(spectrum.argmax())] == pytest.approx(440, abs=2)
    middle = found[len(found) // 4 : -len(found) // 4]
    assert float(np.sqrt(np.square(middle).mean())) == pytest.approx(np.sqrt(0.5), rel=0.1)


@pytest.mark.parametrize("speed", [0.4, 33])
def test_other_speeds_are_refused(speed: float) -> None:
    with pytest.raises(DecodeError, match="must be from 0.5 to 32"):
        stretch(np.zeros((1, 9000), np.float32), round(9000 / speed), 16000)
