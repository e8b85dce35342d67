"""Resampling with libswresample, independent of where a window begins, and time stretching.

The library's first output sample coincides with its first input sample. Input that starts at a multiple of
in_rate / gcd(in_rate, out_rate) therefore keeps the phase of the global grid, and every output sample is the same sum.
"""

from __future__ import annotations

import math

import numpy as np

from streamvid.errors import DecodeError
from streamvid.video.audio.frames import AudioChain, Float32s, samples_of
from streamvid.video.audio.grid import LAYOUTS, MAX_SPEED, MIN_SPEED

#: Flat to 0.0001 dB up to 0.9 of the Nyquist frequency; aliases are 94 dB down from 1.04 of it on.
_FILTER_SIZE, _CUTOFF = 128, 0.97
_MAX_PHASES = 1024  # with more, libswresample interpolates between phases
_MAX_COEFFICIENTS = 1 << 24
_CHUNK = 1 << 14  # larger arrays get fresh memory from the system, whose first use is slow


def phase_step(in_rate: int, out_rate: int) -> int:
    """Return the interval, in input samples, at which input and output samples coincide."""
    return in_rate // math.gcd(in_rate, out_rate)


def reach(in_rate: int, out_rate: int) -> int:
    """Return how many input samples on each side of an output sample contribute to that output sample."""
    return 0 if in_rate == out_rate else _num_taps(in_rate, out_rate) // 2 + 2


def resample(samples: Float32s, in_rate: int, out_rate: int) -> Float32s:
    """Resample `samples`, an array of shape (channels, n), to `out_rate`.

    The first input and output samples coincide.

    Raises DecodeError if the two rates require a filter larger than 64 MiB.
    """
    phases = min(_MAX_PHASES, out_rate // math.gcd(in_rate, out_rate))
    if phases * _num_taps(in_rate, out_rate) > _MAX_COEFFICIENTS:
        raise DecodeError(
            f"audio with a sample rate of {in_rate} Hz cannot be resampled to {out_rate} Hz; re-encode it at a common "
            "sample rate, such as 48000 Hz"
        )
    # One channel at a time, because libswresample takes twice as long to separate and to interleave packed channels.
    channels = [_resample(channel[None], in_rate, out_rate) for channel in samples]
    out = np.empty((len(channels), sum(part.shape[1] for part in channels[0])), np.float32)
    for number, parts in enumerate(channels):
        np.concatenate(parts, axis=1, out=out[number : number + 1])
    return out


def stretch(samples: Float32s, num_samples: int, sample_rate: int) -> Float32s:
    """Stretch `samples`, an array of shape (channels, n), to `num_samples` samples without changing the pitch.

    FFmpeg's atempo filter is used. The result deviates from the ideal timing by at most 1/12 s, or by at most 1/30 s if
    the result is at most 5 % longer than the input.
    Raises DecodeError unless the resulting playback speed is from MIN_SPEED to MAX_SPEED.
    """
    speed = samples.shape[1] / num_samples
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise DecodeError(
            f"the audio would be played at {speed:.3g} times its original speed; the factor must be from "
            f"{MIN_SPEED} to {MAX_SPEED}"
        )
    # Above a factor of 2, a single filter would skip samples.
    count = max(1, math.ceil(abs(math.log2(speed))))
    chain = AudioChain([("atempo", f"{speed ** (1 / count):.12g}")] * count, LAYOUTS[len(samples)], sample_rate)
    frames = []
    for start in range(0, samples.shape[1], _CHUNK):
        frames += chain.run(samples[:, start : start + _CHUNK])
    parts = [samples_of(frame) for frame in [*frames, *chain.run(None)]]
    out, at = np.zeros((len(samples), num_samples), np.float32), 0
    for part in parts:
        room = out[:, at : at + part.shape[1]]
        room[:] = part[:, : room.shape[1]]
        at += part.shape[1]
    return out


def _resample(channel: Float32s, in_rate: int, out_rate: int) -> list[Float32s]:
    options = f"{out_rate}:filter_size={_FILTER_SIZE}:cutoff={_CUTOFF}"
    chain = AudioChain([("aresample", options)], LAYOUTS[1], in_rate)
    frames = []
    for start in range(0, channel.shape[1], _CHUNK):
        frames += chain.run(channel[:, start : start + _CHUNK])
    return [samples_of(frame) for frame in [*frames, *chain.run(None)]]


def _num_taps(in_rate: int, out_rate: int) -> int:
    return math.ceil(_FILTER_SIZE / min(1.0, out_rate * _CUTOFF / in_rate))
