"""Clips with audio: real pictures, and a track whose samples can be located in time."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from tests.clips import frames_of
from tests.video.clips import run_ffmpeg
from tools import make_corpus

Sound = NDArray[np.int16]


def chirps(seconds: float, rate: int, num_channels: int = 2, seed: int = 0) -> Sound:
    """Return audio that never resembles itself a moment later: noise of varying strength, (channels, samples)."""
    rng, size = np.random.default_rng(seed), round(seconds * rate)
    noise = np.cumsum(rng.standard_normal((num_channels, size + 64)), axis=1)
    smooth = noise[:, 64:] - noise[:, :-64]
    swell = 0.3 + 0.7 * np.abs(np.sin(np.arange(size) / rate * 2.3))
    return (smooth / np.abs(smooth).max() * swell * 20_000).astype(np.int16)


def sounding(
    num_frames: int,
    sound: Sound,
    *,
    rate: int = 48_000,
    fps: int = 24,
    codec: str = "flac",
    container: str = "mp4",
    start_seconds: Fraction = Fraction(0),
    size: tuple[int, int] = (96, 64),
) -> bytes:
    """Build a video with an audio track that begins `start_seconds` after the first frame."""
    sink = io.BytesIO()
    with av.open(sink, "w", format=container) as output:
        video: Any = output.add_stream("libx264", rate=fps, options={"g": "12", "bf": "2", "preset": "veryfast"})
        video.width, video.height, video.pix_fmt = *size, "yuv420p"
        video.codec_context.thread_count = 1
        audio: Any = output.add_stream(codec, rate=rate)
        audio.layout = "stereo" if len(sound) == 2 else "mono"
        for number, picture in enumerate(frames_of("bikes", *size, num_frames)):
            picture = picture.copy()
            make_corpus.burn_number(picture, number)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            output.mux(video.encode(frame))
        first = round(start_seconds * rate)
        for at in range(0, sound.shape[1], 1024):
            part = np.ascontiguousarray(sound[:, at : at + 1024].T.reshape(1, -1))
            samples = av.AudioFrame.from_ndarray(part, format="s16", layout=audio.layout.name)
            samples.sample_rate, samples.pts, samples.time_base = rate, first + at, Fraction(1, rate)
            output.mux(audio.encode(samples))
        output.mux(video.encode())
        output.mux(audio.encode())
    return sink.getvalue()


def heard(clip: bytes, folder: Path, rate: int, num_channels: int = 2) -> NDArray[np.float64]:
    """Return the audio of a clip as the ffmpeg program plays it, from the time of the first frame."""
    path = folder / "clip.mp4"
    path.write_bytes(clip)
    options = ("-map", "0:a:0", "-af", "aresample=async=1:first_pts=0", "-ar", rate, "-ac", num_channels)
    data = run_ffmpeg("-i", path, *options, "-c:a", "pcm_s16le", "-f", "s16le", "-")
    return np.frombuffer(data, "<i2").reshape(-1, num_channels).T / 32768


def shift_of(found: NDArray[Any], wanted: NDArray[Any]) -> int:
    """Return the number of samples by which the first channel of `found` lags that of `wanted`."""
    size = 2 * min(found.shape[1], wanted.shape[1])
    spectra = [np.fft.rfft(values[0, : size // 2].astype(np.float64), size) for values in (found, wanted)]
    lag = int(np.fft.irfft(spectra[0] * spectra[1].conj(), size).argmax())
    return lag if lag < size // 2 else lag - size
