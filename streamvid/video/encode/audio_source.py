"""Reading a long part of a file's audio in blocks, so that memory use does not grow with the length of the part."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from streamvid.errors import DecodeError, ProbeError
from streamvid.host.range_file import RangeFile
from streamvid.video.audio.canvas import NO_AUDIO, AudioResult, Canvas
from streamvid.video.audio.codecs import can_start_anywhere
from streamvid.video.audio.frames import Float32s
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.samples import Piece, audio_packets, decode_pieces
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import Source, VideoFile, open_audio
from streamvid.video.limits import Limits

if TYPE_CHECKING:
    from av.audio.stream import AudioStream

_PREROLL_SECONDS = 2
#: How far timestamps may run backwards within a file. Samples that are stored later than that do not count.
_DISORDER_SECONDS = 5


def read_blocks(
    source: Source, first_sample: int, sizes: list[int], audio: AudioFormat, limits: Limits
) -> Iterator[tuple[Float32s, AudioResult]]:
    """Yield (samples, AudioResult) for each of several consecutive windows of a file's audio.

    first_sample: first sample of the first window, as for `decode_audio_file`.
    sizes: number of samples in each window. The yielded samples have the shape (channels, size).

    The samples depend only on the file and the arguments, and the position of an open file does not change. Decoding
    starts near the first window if there are no gaps between packets and the container stores exact times; otherwise,
    it starts at the beginning of the file.
    Raises DecodeError if the audio does not decode or is not allowed.
    """
    try:
        with open_audio(_beside(source), limits) as video:
            stream = audio_stream(video)
            if stream is None:
                for size in sizes:
                    yield np.zeros((audio.num_channels, size), np.float32), NO_AUDIO
                return
            yield from _read(
                _pieces(video, stream, Fraction(first_sample, audio.sample_rate)), first_sample, sizes, audio
            )
    except ProbeError as error:
        raise DecodeError(str(error)) from error


def _read(
    pieces: Iterator[Piece], first: int, sizes: list[int], audio: AudioFormat
) -> Iterator[tuple[Float32s, AudioResult]]:
    held: deque[Piece] = deque()
    for size in sizes:
        end = Fraction(first + size, audio.sample_rate) + _DISORDER_SECONDS
        while not held or Fraction(held[-1].position, held[-1].sample_rate) < end:
            if (piece := next(pieces, None)) is None:
                break
            held.append(piece)
        out = np.zeros((audio.num_channels, size), np.float32)
        canvas = Canvas(first, out, audio)
        for piece in held:
            canvas.draw(piece.position, piece.samples, piece.layout, piece.sample_rate)
        yield out, canvas.render()
        first += size
        begin = Fraction(first, audio.sample_rate) - _DISORDER_SECONDS
        while held and Fraction(held[0].position + held[0].samples.shape[1], held[0].sample_rate) < begin:
            held.popleft()


def _pieces(video: VideoFile, stream: AudioStream, seconds: Fraction) -> Iterator[Piece]:
    """Decode the stream, starting at or before `seconds`, and yield its pieces."""
    time_base, start, decoder = stream.time_base, seconds - _PREROLL_SECONDS, stream.codec_context
    is_exact = video.container_name == "mov" and time_base == Fraction(1, decoder.sample_rate or 1)
    is_exact = is_exact and can_start_anywhere(decoder.codec.canonical_name, decoder.extradata or b"")
    if is_exact and time_base is not None and start > _PREROLL_SECONDS and _is_regular(stream):
        video.container.seek(int(start / time_base), stream=stream)
    return decode_pieces(stream, audio_packets(video, stream), video.container_name == "mov")


def _is_regular(stream: AudioStream) -> bool:
    """Return True if all packets are equally spaced in time, so that a timestamp determines a position."""
    times = [entry.timestamp for entry in stream.index_entries]
    return len({after - before for before, after in pairwise(times)}) == 1


def _beside(source: Source) -> Source:
    """Return a source with its own read position, because the video may be read from the same file concurrently."""
    return source if isinstance(source, str | os.PathLike | bytes | bytearray | memoryview) else _Beside(source)


class _Beside(RangeFile):
    """Second reader for an open file, with its own position."""

    def __init__(self, file: BinaryIO | io.RawIOBase) -> None:
        before = file.tell()
        super().__init__(file.seek(0, os.SEEK_END))
        file.seek(before)
        self._file = file

    def fill(self, start: int, buffer: memoryview) -> int:
        before = self._file.tell()
        self._file.seek(start)
        data = self._file.read(len(buffer)) or b""
        self._file.seek(before)
        buffer[: len(data)] = data
        return len(data)
