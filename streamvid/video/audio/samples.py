"""Decoding audio packets to samples with positions. Priming and padding are cut as the container declares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, cast

from streamvid.errors import ProbeError
from streamvid.video.audio.codecs import EXACT_CODECS, OPENED_BY_FIRST_PACKET
from streamvid.video.audio.frames import Float32s, check_layout, samples_of
from streamvid.video.audio.grid import MAX_CHANNELS, MAX_RATE, MIN_RATE, round_half_up
from streamvid.video.audio.position import DecodedFrame, place_frames
from streamvid.video.audio.stream import stream_decoder
from streamvid.video.container import VideoFile, ffmpeg_errors, read_stream

if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.packet import Packet

_MAX_FRAME_VALUES = 1 << 22  # samples times channels
_MAX_PACKETS = 4_000_000  # 12 hours have 2 million of AAC
_MAX_INCOMPLETE = 16


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Decoded samples of one frame, without priming or padding.

    - position: position of the first sample, as the number of samples at `sample_rate` since time 0.
    - samples: float32 array of shape (channels, n); integers are divided by 2^(bits - 1).
    - layout: FFmpeg's name for the channel layout.
    - packet: ordinal of the packet after which the decoder returned the frame.
    - head, num_decoded: number of samples cut from the frame's start, and number of samples in the whole frame.
    """

    position: int
    samples: Float32s
    sample_rate: int
    layout: str
    packet: int
    head: int
    num_decoded: int


def audio_packets(video: VideoFile, stream: AudioStream) -> Iterator[Packet[AudioStream]]:
    """Yield the non-empty audio packets of a file that was just opened. Packets of other streams are skipped."""
    from av.stream import Discard

    if video.pictures is not None:
        video.pictures.discard = Discard.all
    stream.discard = Discard.default
    with (
        ffmpeg_errors("the file ends early or is damaged: not all of its audio can be read"),
        closing(read_stream(video.container, stream)) as packets,
    ):
        for number, packet in enumerate(packet for packet in packets if packet.size):
            if packet.is_corrupt:
                raise ProbeError(
                    f"the file ends early or is damaged: audio packet {number} is incomplete; copy or download "
                    "the file again",
                    kind="damaged",
                )
            if number >= _MAX_PACKETS:
                raise ProbeError(f"the audio has more than {_MAX_PACKETS} packets; split the file", kind="limit")
            yield packet


def decode_pieces(stream: AudioStream, packets: Iterable[Packet[AudioStream]], is_exact: bool) -> Iterator[Piece]:
    """Decode all packets of a stream, and yield the decoded pieces.

    is_exact: True if the container stores where the audio ends (MP4), so that the padding can be cut.
    Raises ProbeError if a packet does not decode. Packets at the start are exempt, because the stream may have been cut
    there.
    """
    assert stream.time_base is not None
    codec = stream.codec_context.codec.canonical_name
    frames = _decoded_frames(stream, packets, is_exact)
    for position, decoded in place_frames(frames, stream.time_base, codec):
        if decoded.head < decoded.stop:
            frame = decoded.frame
            samples = samples_of(frame)[:, decoded.head : decoded.stop]
            start, count = position + decoded.head, frame.samples
            yield Piece(start, samples, frame.sample_rate, frame.layout.name, decoded.packet, decoded.head, count)


def _decoded_frames(
    stream: AudioStream, packets: Iterable[Packet[AudioStream]], is_exact: bool
) -> Iterator[DecodedFrame]:
    decoder = stream_decoder(stream)
    codec, cuts = decoder.codec.canonical_name, decoder is not stream.codec_context
    left, has_begun, number = 0, False, -1
    for number, (packet, following) in enumerate(pairwise(chain(packets, [None]))):
        assert packet is not None
        cut, tail = declared_cut(packet) if cuts else None, 0
        if cut is not None:
            left, tail = cut
        frames = decode_packet(decoder, packet) if has_begun else _first_frames(decoder, packet, number)
        for frame in frames:
            if codec == "aac" and (own := declared_cut(frame)) is not None:
                left, tail = own  # the decoder knows the priming of FAAC, which marks its first packet
            count = frame.samples
            is_silent = packet.is_discard if has_begun else packet.is_discard or codec in OPENED_BY_FIRST_PACKET
            head = count if is_silent and cuts else min(left, count)
            left, has_begun = max(0, left - count), True
            stop = count - tail if tail <= count - head else count
            if following is None and is_exact:
                stop = min(stop, _num_declared(stream, packet, frame.sample_rate))
            yield DecodedFrame(frame, number, frame.pts, head, stop)
    for frame in decode_packet(decoder, None) if has_begun else []:
        yield DecodedFrame(frame, number + 1, frame.pts, min(left, frame.samples), frame.samples)


def _num_declared(stream: AudioStream, last: Packet[AudioStream], rate: int) -> int:
    """Return the number of samples before the padding in the last packet of an MP4 file."""
    ticks = last.duration or 1 << 40
    # The duration of an edit list has ticks of its own, which must not cut samples that are exact.
    is_padded = stream.codec_context.codec.canonical_name not in EXACT_CODECS
    if is_padded and stream.start_time is not None and stream.duration and last.pts is not None:
        left = stream.start_time + stream.duration - last.pts
        ticks = min(ticks, left) if left > 0 else ticks
    return round_half_up(ticks * (stream.time_base or Fraction(1)) * rate)


def _first_frames(decoder: AudioCodecContext, packet: Packet[AudioStream], number: int) -> list[AudioFrame]:
    """Decode one of a stream's first packets. Return no frames if the stream was cut within the packet."""
    try:
        return decode_packet(decoder, packet)
    except ProbeError as error:
        if number >= _MAX_INCOMPLETE or error.kind != "damaged":
            raise
        return []


def decode_packet(decoder: AudioCodecContext, packet: Packet[Any] | None) -> list[AudioFrame]:
    """Decode one packet, or flush the decoder if `packet` is None.

    Raises ProbeError if the packet does not decode or a frame exceeds a limit."""
    with ffmpeg_errors(f"the audio cannot be decoded near {f'timestamp {packet.pts}' if packet else 'its end'}"):
        frames = decoder.decode(packet)
    check_frames(frames)
    return frames


def check_frames(frames: list[AudioFrame]) -> None:
    """Raise ProbeError if a frame exceeds a limit or its channel order has no name.

    frames: all frames from one packet.
    """
    unnamed = [error for frame in frames if (error := _layout_error(frame)) is not None]
    if unnamed:
        raise unnamed[0]
    for frame in frames:
        rate, channels = frame.sample_rate, frame.layout.nb_channels
        if not (MIN_RATE <= rate <= MAX_RATE and 1 <= channels <= MAX_CHANNELS) or (
            frame.samples * channels > _MAX_FRAME_VALUES
        ):
            raise ProbeError(
                f"the audio has {channels} channels, a sample rate of {rate} Hz and {frame.samples} samples per frame; "
                f"allowed: up to {MAX_CHANNELS} channels, {MIN_RATE} to {MAX_RATE} Hz and {_MAX_FRAME_VALUES} "
                "values per frame",
                kind="limit",
            )


def packet_of(data: memoryview) -> Packet[Any]:
    """Return a packet that contains a padded copy of the data, because decoders read beyond a packet's end."""
    from av.packet import Packet

    packet: Packet[Any] = Packet(len(data))
    packet.update(cast("bytes", data))
    return packet


def _layout_error(frame: AudioFrame) -> ProbeError | None:
    """Return the error that `check_layout` raises for a frame, or None if it raises no error."""
    try:
        check_layout(frame.layout)
    except ProbeError as error:
        return error
    return None


def declared_cut(data: Packet[Any] | AudioFrame) -> tuple[int, int] | None:
    """Return how many samples to cut from the start and end of a packet or frame, or None if no cut is declared."""
    from av.packet import Packet
    from av.sidedata.sidedata import Type

    found: Any = None
    if not isinstance(data, Packet):
        found = cast("dict[Type, Any]", data.side_data).get(Type.SKIP_SAMPLES)
    elif data.has_sidedata("skip_samples"):
        found = data.get_sidedata("skip_samples")
    if found is None:
        return None
    numbers = bytes(found)
    return int.from_bytes(numbers[:4], "little"), int.from_bytes(numbers[4:8], "little")
