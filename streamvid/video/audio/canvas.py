"""Window of the timeline that decoded pieces are drawn on, and from which the delivered samples are computed.

Moments without audio stay silent. Where pieces overlap, the later one replaces the earlier.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from streamvid.errors import ConfigError, DecodeError
from streamvid.video.audio.frames import Float32s
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.mixing import mix
from streamvid.video.audio.resample import phase_step, reach, resample

_MAX_VALUES = 1 << 28  # 1 GiB of float32
_MAX_RUN = 1 << 18


@dataclass(frozen=True, slots=True)
class AudioResult:
    """Facts about a delivered window.

    - is_present: True if the clip has audio within the window.
    - num_present: number of delivered samples during which the clip has audio; the others are silence.
    """

    is_present: bool
    num_present: int


NO_AUDIO = AudioResult(False, 0)


@dataclass(frozen=True, slots=True)
class Span:
    """Range of samples at a stream's own rate that a window depends on: `first` to `stop` (exclusive)."""

    first: int
    stop: int


def needed_span(first_sample: int, num_samples: int, out_rate: int, in_rate: int) -> Span:
    """Return the samples at `in_rate` on which the window of `num_samples` from `first_sample` on depends."""
    margin = reach(in_rate, out_rate)
    last = first_sample + num_samples - 1
    return Span(first_sample * in_rate // out_rate - margin, -(-last * in_rate // out_rate) + margin + 1)


def check_out(out: Float32s, audio: AudioFormat) -> None:
    """Raise ConfigError unless `out` is a non-empty, writeable float32 array of shape (channels, samples)."""
    if out.dtype != np.float32 or out.ndim != 2 or len(out) != audio.num_channels or not out.size:
        raise ConfigError(
            f"out is {out.dtype} of shape {out.shape}; it must be float32 of shape ({audio.num_channels}, samples), "
            "and must not be empty"
        )
    if not out.flags.writeable:
        raise ConfigError("out must be writable")


@dataclass(slots=True)
class _Run:
    """Adjacent pieces of equal form, which are drawn at once: the cost per piece would exceed that of its samples."""

    form: tuple[str, int, int]  # layout, sample rate, number of channels
    position: int
    end: int
    parts: list[Float32s] = field(default_factory=list)

    def within(self, begin: int, end: int) -> Iterator[Float32s]:
        """Yield the samples from `begin` to `end` (exclusive), in parts."""
        at = self.position
        for part in self.parts:
            kept = part[:, max(0, begin - at) : max(0, end - at)]
            at += part.shape[1]
            if kept.shape[1]:
                yield kept


class Canvas:
    """Window `out` (channels, samples) of the delivered grid from `first_sample` on. It is complete after `render`."""

    def __init__(self, first_sample: int, out: Float32s, audio: AudioFormat) -> None:
        self._first, self._out, self._audio = first_sample, out, audio
        out[:] = 0
        # Sample rate → first sample and samples of the layer. That of the delivered rate is the window itself.
        self._layers: dict[int, tuple[int, Float32s]] = {audio.sample_rate: (first_sample, out)}
        self._present = np.zeros(self._count, np.bool_)
        self._run: _Run | None = None

    @property
    def _count(self) -> int:
        return int(self._out.shape[1])

    def draw(self, position: int, samples: Float32s, layout: str, rate: int) -> None:
        """Draw samples (channels of `layout`, n) that begin at `position`, in samples at `rate`."""
        form, run = (layout, rate, len(samples)), self._run
        if run is None or position != run.end or form != run.form or run.end - run.position > _MAX_RUN:
            self._draw_run()
            run = self._run = _Run(form, position, position)
        run.parts.append(samples)
        run.end += samples.shape[1]

    def _draw_run(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        layout, rate, _ = run.form
        span = needed_span(self._first, self._count, self._audio.sample_rate, rate)
        begin, end = max(run.position, span.first), min(run.end, span.stop)
        if begin >= end:
            return
        start, layer = self._layer(rate, span)
        self._erase(begin, end, rate)
        parts = [mix(part, layout, self._audio.num_channels) for part in run.within(begin, end)]
        np.concatenate(parts, axis=1, out=layer[:, begin - start : end - start])
        self._mark(begin, end, rate)

    def _layer(self, rate: int, span: Span) -> tuple[int, Float32s]:
        found = self._layers.get(rate)
        if found is None:
            step = phase_step(rate, self._audio.sample_rate)
            start = span.first // step * step
            size = (span.stop - start) * self._audio.num_channels
            if size + sum(layer.size for _, layer in self._layers.values()) > _MAX_VALUES:
                raise DecodeError(
                    f"the window of {self._count} samples needs more than {_MAX_VALUES} decoded values at {rate} Hz; "
                    "request a shorter window"
                )
            found = (start, np.zeros((self._audio.num_channels, span.stop - start), np.float32))
            self._layers[rate] = found
        return found

    def _erase(self, begin: int, end: int, rate: int) -> None:
        """Silence the layers of other rates during these samples."""
        for other, (start, layer) in self._layers.items():
            if other != rate:
                low, high = -(-begin * other // rate) - start, -(-end * other // rate) - start
                layer[:, max(0, low) : max(0, high)] = 0

    def _mark(self, begin: int, end: int, rate: int) -> None:
        out_rate = self._audio.sample_rate
        low, high = -(-begin * out_rate // rate) - self._first, -(-end * out_rate // rate) - self._first
        self._present[max(0, low) : max(0, high)] = True

    def render(self) -> AudioResult:
        """Complete the window."""
        self._draw_run()
        out_rate = self._audio.sample_rate
        for rate, (start, layer) in self._layers.items():
            if rate != out_rate:
                offset = self._first - start // phase_step(rate, out_rate) * (out_rate // math.gcd(rate, out_rate))
                self._out += resample(layer, rate, out_rate)[:, offset : offset + self._count]
        present = int(self._present.sum())
        return AudioResult(present > 0, present)
