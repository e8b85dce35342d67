"""Windows of a clip's audio, decoded through the container and from packets, and comparison of their clicks."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from streamvid.video.audio.file import decode_audio_file
from streamvid.video.audio.grid import AudioFormat, first_sample_at
from streamvid.video.audio.index import AudioIndex, index_audio
from streamvid.video.audio.stored import decode_audio_packets
from streamvid.video.container import open_video
from streamvid.video.limits import LIMITS
from streamvid.video.packets import read_packets
from tests.video.audio.clips import Float32s, Truth, peaks

RATES = (16000, 24000, 32000, 44100, 48000)
_EDGE = 0.01  # a click this close to a window's edge may or may not be found


def whole_track(path: Path, audio: AudioFormat, first: int, count: int) -> Float32s:
    """Decode a window through the container."""
    out = np.full((audio.num_channels, count), np.nan, np.float32)
    decode_audio_file(path, first, out, audio)
    return out


def from_packets(data: bytes, index: AudioIndex, audio: AudioFormat, first: int, count: int) -> Float32s:
    """Decode a window from nothing but the byte range that the index names."""
    out = np.full((audio.num_channels, count), np.nan, np.float32)
    window = index.window(first, count, audio.sample_rate)
    part = memoryview(data[window.first_byte : window.first_byte + window.num_bytes])
    decode_audio_packets(index.info, window.packets, part, first, out, audio)
    return out


def frame_times(path: Path) -> list[Fraction]:
    """Return the presentation times of a video's frames."""
    with open_video(path, LIMITS) as video:
        table = read_packets(video)
        return [time * table.time_base for time in table.timestamps]


@dataclass
class Score:
    """Number of windows and of compared clicks, and descriptions of the wrong windows."""

    num_windows: int = 0
    num_clicks: int = 0
    wrong: tuple[str, ...] = ()


def compare(path: Path, truth: Truth, score: Score, num_windows: int, tolerance: float, seed: int) -> None:
    """Decode random windows that start at random frames, and compare their clicks with the ffmpeg program's.

    tolerance: allowed deviation in seconds; 0 for one sample.
    """
    rng, data, times = np.random.default_rng(seed), path.read_bytes(), frame_times(path)
    index = index_audio(data)
    assert [float(time) for time in times] == [pytest_approx(time) for time in truth.frame_times]
    for _ in range(num_windows):
        frame, rate = int(rng.integers(len(times))), int(rng.choice([truth.rate, *RATES]))
        audio, count = AudioFormat(rate, 1), int(rng.integers(rate // 4, rate * 2))
        first = first_sample_at(times[frame], rate)
        outs = [whole_track(path, audio, first, count)]
        outs += [from_packets(data, index, audio, first, count)] if index is not None else []
        expected = _inner([time - truth.frame_times[frame] for time in truth.click_times], count / rate)
        allowed = max(tolerance, 1.001 / min(rate, truth.rate))
        for out in outs:
            offset = float(Fraction(first, rate) - times[frame])
            found = _inner([place / rate + offset for place in peaks(out[0])], count / rate)
            score.num_windows += 1
            score.num_clicks += len(found)
            if len(found) != len(expected) or any(
                abs(one - other) > allowed for one, other in zip(found, expected, strict=True)
            ):
                score.wrong += (f"{path.name} frame {frame} {rate} Hz: {found} instead of {expected}",)


def pytest_approx(value: float) -> float:
    """Return the value for comparisons with a tolerance of 0.1 ms."""
    import pytest

    return pytest.approx(value, abs=1e-4)  # type: ignore[no-any-return]


def _inner(times: list[float], duration: float) -> list[float]:
    return [time for time in times if _EDGE < time < duration - _EDGE]
