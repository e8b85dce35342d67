"""Canvas for a window of audio. Decoded pieces are drawn on it, and the delivered samples are computed from it.

Times without audio stay silent. Where pieces overlap, the later piece replaces the earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamvid.errors import ConfigError, DecodeError
from streamvid.video.audio.frames import Float32s
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.mixing import mix, mixing_matrix
from streamvid.video.audio.resample import phase_step, reach, resample

_MAX_VALUES = 1 << 28  # 1 GiB of float32


@dataclass(frozen=True, slots=True)
class AudioResult:
    """Amount of audio in a delivered window.

    - is_present: True if the clip has audio within the window.
    - num_present: number of delivered samples for which the clip has audio; all other samples are silent.
    """

    is_present: bool
    num_present: int


NO_AUDIO = AudioResult(False, 0)


@dataclass(frozen=True, slots=True)
class Span:
    """Range of a stream's samples that a window depends on, from `first` to `stop` (exclusive)."""

    first: int
    stop: int


def needed_span(first_sample: int, num_samples: int, out_rate: int, in_rate: int) -> Span:
    """Return the span of source samples needed to compute `num_samples` delivered samples.

    first_sample: position of the first delivered sample.
    out_rate, in_rate: sample rates of the delivered samples and of the source.
    """
    margin = reach(in_rate, out_rate)
    last = first_sample + num_samples - 1
    return Span(first_sample * in_rate // out_rate - margin, -(-last * in_rate // out_rate) + margin + 1)


def check_out(out: Float32s, audio: AudioFormat) -> None:
    """Raise ConfigError unless `out` is a non-empty, writable float32 array of shape (channels, samples)."""
    if out.dtype != np.float32 or out.ndim != 2 or len(out) != audio.num_channels or not out.size:
        raise ConfigError(
            f"out has dtype {out.dtype} and shape {out.shape}; it must be a non-empty float32 array of shape "
            f"({audio.num_channels}, samples)"
        )
    if not out.flags.writeable:
        raise ConfigError("out must be writable")


@dataclass(frozen=True, eq=False, slots=True)
class _Layer:
    """Decoded samples that share one channel layout and sample rate.

    `samples` has shape (channels, n), and its first sample is at position `start`. Pieces are drawn only within `span`.
    """

    layout: str
    rate: int
    start: int
    span: Span
    samples: Float32s

    def silence(self, begin: int, end: int, rate: int) -> None:
        """Silence the samples from `begin` to `end` (exclusive).

        rate: sample rate at which both positions are counted.
        """
        low, high = -(-begin * self.rate // rate) - self.start, -(-end * self.rate // rate) - self.start
        self.samples[:, max(0, low) : max(0, high)] = 0


class Canvas:
    """Window of delivered audio, starting at `first_sample`. `render` fills `out`, which has shape (channels, samples).

    Each combination of layout and sample rate has its own layer, on which decoded pieces are drawn unchanged. A layer
    that needs no conversion is `out` itself. Channels are mixed and rates are converted once per layer, because
    converting each piece separately would be slow.
    """

    def __init__(self, first_sample: int, out: Float32s, audio: AudioFormat) -> None:
        self._first, self._out, self._audio = first_sample, out, audio
        out[:] = 0
        self._layers: dict[tuple[str, int, int], _Layer] = {}  # by layout, rate and number of channels
        self._present = np.zeros(self._count, np.bool_)

    @property
    def _count(self) -> int:
        return int(self._out.shape[1])

    def draw(self, position: int, samples: Float32s, layout: str, rate: int) -> None:
        """Draw `samples`, an array with shape (channels of `layout`, n).

        position: position of the first sample, counted at `rate`.
        """
        layer = self._layers.get((layout, rate, len(samples))) or self._add_layer(layout, rate, len(samples))
        begin, end = max(position, layer.span.first), min(position + samples.shape[1], layer.span.stop)
        if begin >= end:
            return
        if len(self._layers) > 1:
            for other in self._layers.values():
                if other is not layer:
                    other.silence(begin, end, rate)
        layer.samples[:, begin - layer.start : end - layer.start] = samples[:, begin - position : end - position]
        self._mark(begin, end, rate)

    def _add_layer(self, layout: str, rate: int, num_channels: int) -> _Layer:
        span = needed_span(self._first, self._count, self._audio.sample_rate, rate)
        if rate == self._audio.sample_rate and mixing_matrix(layout, num_channels, self._audio.num_channels) is None:
            layer = _Layer(layout, rate, self._first, span, self._out)
        else:
            step = phase_step(rate, self._audio.sample_rate)
            start = span.first // step * step
            size = (span.stop - start) * num_channels
            if size + sum(layer.samples.size for layer in self._layers.values()) > _MAX_VALUES:
                raise DecodeError(
                    f"the window of {self._count} samples needs more than {_MAX_VALUES} decoded values at {rate} Hz; "
                    "request a shorter window"
                )
            layer = _Layer(layout, rate, start, span, np.zeros((num_channels, span.stop - start), np.float32))
        self._layers[layout, rate, num_channels] = layer
        return layer

    def _mark(self, begin: int, end: int, rate: int) -> None:
        out_rate = self._audio.sample_rate
        low, high = -(-begin * out_rate // rate) - self._first, -(-end * out_rate // rate) - self._first
        self._present[max(0, low) : max(0, high)] = True

    def render(self) -> AudioResult:
        """Add the converted layers to `out`, and return the amount of audio in the window."""
        for layer in self._layers.values():
            if layer.samples is not self._out:
                self._out += self._converted(layer)
        present = int(np.count_nonzero(self._present))
        return AudioResult(present > 0, present)

    def _converted(self, layer: _Layer) -> Float32s:
        """Return a layer's samples, mixed and resampled to the delivered channels and sample rate."""
        mixed, out_rate = mix(layer.samples, layer.layout, self._audio.num_channels), self._audio.sample_rate
        if layer.rate == out_rate:
            return mixed
        offset = self._first - layer.start // phase_step(layer.rate, out_rate) * phase_step(out_rate, layer.rate)
        return resample(mixed, layer.rate, out_rate)[:, offset : offset + self._count]
