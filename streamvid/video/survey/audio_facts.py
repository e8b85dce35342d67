"""Facts about a file's audio, for filters and reports."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from streamvid.video.audio.frames import Float32s
from streamvid.video.audio.index import AudioIndex, index_audio
from streamvid.video.audio.samples import Piece, audio_packets, decode_pieces
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import Source, VideoFile, open_audio
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.packets import PacketTable, read_packets
from streamvid.video.survey.loudness import LoudnessMeter

_SILENCE = 1e-3  # -60 dBFS
_FULL_SCALE = 32767 / 32768
_BLOCKS_PER_SECOND = 10


@dataclass(frozen=True, slots=True)
class AudioFacts:
    """Measured properties of a file's default audio stream.

    - codec: FFmpeg's name for the codec.
    - sample_rate, num_channels: sample rate in Hz and number of channels of the first decoded samples.
    - start_seconds: start of the audio minus start of the video; 0.0 for a file with only audio.
    - end_seconds: end of the audio minus end of the video; 0.0 for a file with only audio.
    - duration_seconds: time from the start of the first sample to the end of the last, including gaps.
    - gap_seconds: total duration of the gaps between samples.
    - silence_share: share of 0.1 s intervals in which no sample exceeds -60 dBFS.
    - clipping_share: share of the samples that are at full scale, in runs of at least 3.
    - loudness_lufs: integrated loudness (EBU R128) of the samples that have the same format as the first sample,
      excluding gaps; None if the loudness is below the gate of -70 LUFS or the sample rate is below 8 kHz.
    """

    codec: str
    sample_rate: int
    num_channels: int
    start_seconds: float
    end_seconds: float
    duration_seconds: float
    gap_seconds: float
    silence_share: float
    clipping_share: float
    loudness_lufs: float | None


def read_audio_facts(source: Source, limits: Limits = LIMITS) -> AudioFacts | None:
    """Decode a file's audio once, and return its AudioFacts, or None if the file has no audio.

    Raises ProbeError if the file cannot be read, or if the audio does not decode or is not allowed.
    """
    with open_audio(source, limits) as video:
        if not video.has_audio:
            return None
        table = _pictures(video)
        video.reopen()
        stream = audio_stream(video)
        if stream is None:
            return None
        measure = FactsMeasure(stream.codec_context.codec.canonical_name)
        for piece in decode_pieces(stream, audio_packets(video, stream), video.container_name == "mov"):
            measure.add(piece)
        return measure.finish(table)


def index_with_facts(data: bytes, limits: Limits = LIMITS) -> tuple[AudioIndex | None, AudioFacts | None]:
    """Return (audio index, audio facts) for a clip. The audio is decoded only once.

    Both are None for a clip without audio. The index can also be None for other reasons; see `index_audio`. Raises the
    same errors as `index_audio`.
    """
    with open_audio(data, limits) as video:
        stream = audio_stream(video)
        if stream is None:
            return None, None
        measure, table = FactsMeasure(stream.codec_context.codec.canonical_name), _pictures(video)
    return index_audio(data, limits, see=measure.add), measure.finish(table)


def _pictures(video: VideoFile) -> PacketTable | None:
    return None if video.pictures is None else read_packets(video)


class FactsMeasure:
    """Meter that computes the AudioFacts for one stream from its pieces. `codec` is FFmpeg's name for the codec."""

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self._format: tuple[int, str, int] | None = None
        self._meter: LoudnessMeter | None = None
        self._start = self._end = Fraction(0)
        self._gap = Fraction(0)
        self._loud: set[int] = set()
        self._num_clipped = self._num_values = 0

    def add(self, piece: Piece) -> None:
        """Measure the next piece."""
        rate, (channels, count) = piece.sample_rate, piece.samples.shape
        start = Fraction(piece.position, rate)
        end = start + Fraction(count, rate)
        if self._format is None:
            self._format = (rate, piece.layout, channels)
            self._meter = LoudnessMeter(rate, piece.layout)
            self._start = self._end = start
        if start - self._end > Fraction(1, rate):
            self._gap += start - self._end
        self._start, self._end = min(self._start, start), max(self._end, end)
        if self._meter is not None and self._format == (rate, piece.layout, channels):
            self._meter.add(piece.samples)
        loudest = np.abs(piece.samples)
        self._num_clipped += _num_clipped(loudest)
        self._num_values += loudest.size
        places = np.flatnonzero(loudest.max(axis=0) > _SILENCE) + piece.position
        self._loud.update(np.unique(places * _BLOCKS_PER_SECOND // rate).tolist())

    def finish(self, table: PacketTable | None) -> AudioFacts | None:
        """Return the facts, or None if there were no samples. `table` is the packet table of the video, if any."""
        if self._format is None or self._meter is None:
            return None
        rate, _, channels = self._format
        first, last = self._start, self._end
        if table is not None:
            first, last = (
                time * table.time_base for time in (table.timestamps[0], table.timestamps[-1] + table.last_duration)
            )
        duration = self._end - self._start
        num_blocks = max(1, round(duration * _BLOCKS_PER_SECOND))
        return AudioFacts(
            codec=self._codec,
            sample_rate=rate,
            num_channels=channels,
            start_seconds=float(self._start - first),
            end_seconds=float(self._end - last),
            duration_seconds=float(duration),
            gap_seconds=float(self._gap),
            silence_share=max(0.0, 1 - len(self._loud) / num_blocks),
            clipping_share=self._num_clipped / self._num_values,
            loudness_lufs=self._meter.finish(),
        )


def _num_clipped(loudness: Float32s) -> int:
    """Return the number of full-scale values that occur in runs of at least 3.

    loudness: array of absolute values, with shape (channels, n).
    """
    is_full = loudness >= _FULL_SCALE
    if not is_full.any():
        return 0
    middle = is_full[:, :-2] & is_full[:, 1:-1] & is_full[:, 2:]
    in_run = np.zeros_like(is_full)
    for shift in range(3):
        in_run[:, shift : shift + middle.shape[1]] |= middle
    return int(in_run.sum())
