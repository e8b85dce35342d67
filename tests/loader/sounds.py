"""Clips with audio whose position can be determined from any part of it, and full decodes of such clips.

Each frame shows its number in eight blocks. Lossless audio is noise, so a window that is off by one sample differs in
all of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

HEIGHT, WIDTH, FPS, RATE = 64, 96, 24, 48000
LOSSLESS = ("pcm_s16le", "flac")
Floats = NDArray[np.float32]

#: Without this option, the muxer shifts all timestamps of some containers.
_KEEP_TIMES = {"avoid_negative_ts": "disabled"}


@dataclass(frozen=True)
class Sound:
    """Description of a clip to create. Its name determines the container, and `codec` its audio codec.

    start: start of the audio, in seconds after the first frame.
    seconds: duration of the audio; None for audio that lasts until the end of the video.
    slow_from: number of the first frame from which each frame is shown for twice as long; None for a constant rate.
    """

    name: str
    codec: str | None
    start: float = 0.0
    seconds: float | None = None
    num_frames: int = 72
    fps: Fraction = Fraction(FPS)
    rate: int = RATE
    channels: int = 2
    slow_from: int | None = None

    def time_of(self, number: int) -> int:
        """Return the time at which a frame is shown, in units of 1 / fps."""
        return number + max(0, number - (number if self.slow_from is None else self.slow_from))


def pictures(count: int) -> NDArray[np.uint8]:
    """Return frames (count, H, W, 3) that show their numbers."""
    frames = np.zeros((count, HEIGHT, WIDTH, 3), np.uint8)
    for number in range(count):
        for bit in range(8):
            if number >> bit & 1:
                row, column = divmod(bit, 4)
                frames[number, row * 32 : row * 32 + 32, column * 24 : column * 24 + 24] = 255
    return frames


def number_of(frame: NDArray[np.uint8]) -> int:
    """Return the number that a frame (H, W, 3) shows."""
    found = 0
    for bit in range(8):
        row, column = divmod(bit, 4)
        block = frame[row * 32 + 8 : row * 32 + 24, column * 24 + 6 : column * 24 + 18]
        found |= int(block.mean() > 128) << bit
    return found


def noise(seed: int, channels: int, count: int) -> NDArray[np.int16]:
    """Return low-passed noise (channels, count), which codecs can preserve."""
    rng = np.random.default_rng(seed)
    white = rng.normal(size=(channels, count + 16))
    smooth = np.stack([np.convolve(one, np.ones(16) / 16, "valid")[:count] for one in white])
    return (smooth / np.abs(smooth).max() * 20000).astype(np.int16)


def sweep(channels: int, count: int, rate: int) -> NDArray[np.int16]:
    """Return rising tones (channels, count).

    Lossy encoders replace noise with a description of it but preserve tones.
    """
    seconds = np.arange(count) / rate
    tones = [np.sin(2 * np.pi * (200 + 60 * channel + 400 * seconds) * seconds) for channel in range(channels)]
    return (np.stack(tones) * 20000).astype(np.int16)


def make(folder: Path, sound: Sound, seed: int = 0) -> Path:
    """Write a clip and return its path."""
    path = folder / sound.name
    with av.open(str(path), "w", options=_KEEP_TIMES) as output:
        video: Any = output.add_stream("libx264", rate=sound.fps, options={"g": "12", "bf": "2", "crf": "12"})
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        video.codec_context.thread_count = 1
        audio: Any = None
        if sound.codec is not None:
            audio = output.add_stream(sound.codec, rate=sound.rate)
            audio.codec_context.layout = "stereo" if sound.channels == 2 else "mono"
        shown = [(sound.time_of(number) / sound.fps, number) for number in range(sound.num_frames)]
        frames = pictures(sound.num_frames)
        length = (
            sound.time_of(sound.num_frames) / sound.fps - Fraction(sound.start)
            if sound.seconds is None
            else sound.seconds
        )
        count = math.ceil(float(length) * sound.rate)
        is_exact = sound.codec in LOSSLESS
        samples = noise(seed, sound.channels, count) if is_exact else sweep(sound.channels, count, sound.rate)
        done = 0
        for seconds, number in shown:
            image = av.VideoFrame.from_ndarray(frames[number], "rgb24")
            image.pts, image.time_base = sound.time_of(number), 1 / Fraction(sound.fps)
            output.mux(video.encode(image))
            while audio is not None and done < samples.shape[1] and done / sound.rate + sound.start <= seconds + 0.1:
                part = samples[:, done : done + 1024]
                output.mux(audio.encode(_frame(part, done, sound)))
                done += part.shape[1]
        output.mux(video.encode())
        if audio is not None:
            output.mux(audio.encode())
    return path


def _frame(part: NDArray[np.int16], done: int, sound: Sound) -> av.AudioFrame:
    packed = np.ascontiguousarray(part.T.reshape(1, -1))
    frame = av.AudioFrame.from_ndarray(packed, "s16", "stereo" if sound.channels == 2 else "mono")
    frame.sample_rate = sound.rate
    frame.pts, frame.time_base = done + round(sound.start * sound.rate), Fraction(1, sound.rate)
    return frame


@dataclass(frozen=True)
class Track:
    """Full decode of a file by PyAV: the times of its frames, and its audio from sample 0 of the timeline."""

    times: tuple[Fraction, ...]
    sound: Floats
    is_there: NDArray[np.bool_]

    def window(self, number: int, count: int) -> tuple[Floats, bool]:
        """Return (samples, whether they contain any audio) for a window that starts at a frame."""
        first = math.floor(self.times[number] * RATE + Fraction(1, 2))
        found = np.zeros((len(self.sound), count), np.float32)
        part = self.sound[:, max(0, first) : first + count]
        found[:, max(0, -first) : max(0, -first) + part.shape[1]] = part
        return found, bool(self.is_there[max(0, first) : first + count].any())


def times_of(path: Path) -> tuple[Fraction, ...]:
    """Return the times in seconds at which the frames of a file are shown. Matroska rounds times to milliseconds."""
    with av.open(str(path)) as container:
        return tuple(sorted(Fraction(frame.pts) * frame.time_base for frame in container.decode(video=0)))


def start_of(path: Path) -> Fraction:
    """Return the time at which the audio of a file starts."""
    with av.open(str(path)) as container:
        return next(Fraction(frame.pts) * frame.time_base for frame in container.decode(audio=0))


def track(path: Path) -> Track:
    """Decode a whole file whose audio has the sample rate RATE."""
    canvas, there = np.zeros((2, 30 * RATE), np.float32), np.zeros(30 * RATE, np.bool_)
    with av.open(str(path)) as container:
        for frame in container.decode(audio=0) if container.streams.audio else ():
            values = _floats(frame)
            first = round(Fraction(frame.pts) * frame.time_base * RATE)
            begin = max(0, -first)
            canvas[:, first + begin : first + values.shape[1]] = values[:, begin:]
            there[first + begin : first + values.shape[1]] = True
    return Track(times_of(path), canvas, there)


def _floats(frame: av.AudioFrame) -> Floats:
    assert frame.sample_rate == RATE
    values = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(-1, frame.layout.nb_channels).T
    scale = {"s16": 2**15, "s32": 2**31, "flt": 1}[frame.format.name.removesuffix("p")]
    return (values / np.float32(scale)).astype(np.float32)


def numbers_of(video: NDArray[np.uint8]) -> list[int]:
    """Return the numbers that the frames of a sample (C, T, H, W) show."""
    return [number_of(frame) for frame in video.transpose(1, 2, 3, 0)]


def folder_of(folder: Path, sounds: Sequence[Sound]) -> Path:
    """Write these clips to a folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, sound in enumerate(sounds):
        make(folder, sound, seed)
    return folder
