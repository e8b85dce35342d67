"""Cutting windows from a video without encoding: their packets are copied into an MP4 or QuickTime file.

A file starts at the last key frame from which its window can be decoded, and ends with the last packet that the window
needs. Its edit list hides all other frames, so that every reader that follows edit lists shows exactly the window.

The audio of the window is stored without loss in a separate track (encode/audio.py): audio packets rarely begin where
a window begins, and not every codec fits in MP4.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from streamvid.errors import ProbeError
from streamvid.video.bitstream import h264
from streamvid.video.bitstream.boxes import find_box
from streamvid.video.container import Source, VideoFile
from streamvid.video.decode.file import from_key_frame
from streamvid.video.encode.audio import AudioTrack, AudioWindow, check_track, find_window
from streamvid.video.encode.audio_profiles import MadeAudioCodec
from streamvid.video.encode.made import MadeClip
from streamvid.video.encode.timeline import Timeline, make_timeline
from streamvid.video.info import VideoInfo
from streamvid.video.packets import packets_from, read_packets
from streamvid.video.probe import first_frame, probe

if TYPE_CHECKING:
    from av.container import OutputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

#: The formats that are tried, and the lossless codec that each can hold.
_FORMATS: dict[str, MadeAudioCodec] = {"mp4": "flac", "mov": "pcm_s16le"}
_UNWRITTEN = frozenset({"vp8"})  # FFmpeg reads it from QuickTime files, but does not write it
#: Boxes that state how long the file plays: (path, offset of the value in version 0, the same in version 1).
_DURATIONS = (
    ((b"moov", b"mvhd"), 16, 24),
    ((b"moov", b"trak", b"tkhd"), 20, 28),
    ((b"moov", b"trak", b"edts", b"elst"), 8, 8),
)


class Cutter:
    """Cutter that extracts windows from an opened video. The packet table is read only once.

    source: the opened file.
    has_audio: False to omit the audio.
    Raises ProbeError if the video is not supported; see `probe`.
    """

    def __init__(self, source: Source, video: VideoFile, *, has_audio: bool = True) -> None:
        self._source = source
        self._codec: MadeAudioCodec | None = "flac" if has_audio else None
        self._video, self._has_new_headers = video, False
        self._table = read_packets(video, self._see)
        self._format = first_frame(video, self._table)[0]

    def _see(self, packet: Packet[VideoStream]) -> None:
        self._has_new_headers |= packet.has_sidedata("new_extradata")

    def cut(self, start: int, num_frames: int, *, verify: bool = False) -> MadeClip:
        """Return a file that shows frames `start` to `start + num_frames` (exclusive), unchanged, at their own times.

        Times are measured from the first frame. The pictures have the same size, orientation, pixel aspect ratio and
        colors as in the source. The audio from the first frame to the end of the last is stored without loss as 16-bit
        FLAC or, in QuickTime files, as 16-bit PCM. The same video gives the same bytes.

        Before the file is returned, it is probed, and its audio is compared with the source's audio. If `verify` is
        True, all of its frames are also decoded.

        Raises ProbeError if the packets cannot be stored so that exactly these frames are shown, and DecodeError if the
        source has fewer frames or, with `verify`, a frame does not decode.
        """
        table = self._table
        line = make_timeline(
            table.timestamps,
            table.time_base,
            table.last_duration,
            start=start,
            num_frames=num_frames,
            usual_rate=self._video.stream.average_rate,
        )

        first_time = table.timestamps[start] * table.time_base
        sound = find_window(self._source, self._video, first_time, line, self._codec)

        def cut_from(key: tuple[int, int]) -> tuple[bytes, VideoInfo]:
            data = self._copy(key[1], line, sound)
            return data, self._probe(data, line, verify)

        data, info = from_key_frame(table, line.numbers, cut_from)
        if sound is not None:
            check_track(data, sound)
        return MadeClip(
            data=data,
            extension="mp4",
            codec=info.codec,
            num_frames=len(line.numbers),
            fps=line.fps,
            duration_seconds=float(line.duration_seconds),
            width=info.width,
            height=info.height,
            has_audio=sound is not None,
        )

    def _copy(self, first: int, line: Timeline, sound: AudioWindow | None) -> bytes:
        """Return a file with the packets from position `first` to the last packet that the window needs."""
        video, table = self._video, self._table
        if self._has_new_headers:
            raise _refused("the codec headers change within the file")
        last = max(table.ordinals[number] for number in line.numbers)
        zero = table.timestamps[line.numbers[0]]
        times = [None if row[0] is None else row[0] - zero for row in table.rows[first : last + 1]]
        known = [time for time in times if time is not None]
        if len(set(known)) < len(times):
            raise _refused("some packets have no timestamp, or have the same timestamp as another packet")
        keys = {ordinal for _, ordinal in table.keys}
        packets = packets_from(video, table, first)  # it may reopen the video, which replaces the stream
        with _muxing(), closing(_Writer(video, line.time_base, sound)) as writer:
            for entry, (ordinal, packet) in zip(_schedule(known, line.last_ticks), packets, strict=False):
                writer.write(packet, *entry, is_key=ordinal in keys, core=table.x264_core if ordinal == first else 0)
            return writer.finish(line.ticks[-1] + line.last_ticks)

    def _probe(self, data: bytes, line: Timeline, verify: bool) -> VideoInfo:
        """Return the VideoInfo of the cut file `data`.

        Raises ProbeError unless the file shows the frames of the timeline `line` at the right times, in the source's
        format.
        """
        info = probe(data, self._video.limits)
        ticks_per_tick = line.time_base / info.time_base
        times = tuple(time - info.timestamps[0] for time in info.timestamps)
        if times != tuple(tick * ticks_per_tick for tick in line.ticks):
            if len(times) != len(line.ticks):
                raise _refused(f"the copy would show {len(times)} frames instead of {len(line.ticks)}")
            raise _refused("the copy would show its frames at different times than the source")
        wanted = {**asdict(self._format), "codec": self._video.codec_name}
        for name, value in wanted.items():
            if getattr(info, name) != value:
                raise _refused(f"the copy would have {name}={getattr(info, name)} instead of {value}")
        return probe(data, self._video.limits, verify=True) if verify else info


def _schedule(times: Sequence[int], last_ticks: int) -> list[tuple[int, int, int]]:
    """Return (presentation time, decode time, duration) for each packet, in decode order.

    Decode times are the sorted presentation times, shifted so that no picture is shown before it is decoded.
    """
    ordered = sorted(times)
    delay = max(decode - time for decode, time in zip(ordered, times, strict=True))
    durations = dict(zip(ordered, [after - before for before, after in pairwise(ordered)], strict=False))
    return [
        (time, decode - delay, durations.get(time, last_ticks)) for decode, time in zip(ordered, times, strict=True)
    ]


class _Writer:
    """MP4 or QuickTime file in memory, with a video track whose packets come from `video`, and an audio track."""

    def __init__(self, video: VideoFile, time_base: Fraction, sound: AudioWindow | None) -> None:
        # A track's time base is one over an integer.
        self._scale, self._time_base = time_base.numerator, Fraction(1, time_base.denominator)
        self._header, self._sink = video.decoder.extradata or b"", io.BytesIO()
        self._container, self._stream, codec = self._open(video)
        self._track = None if sound is None else AudioTrack(self._container, sound, codec)

    def _open(self, video: VideoFile) -> tuple[OutputContainer, VideoStream, MadeAudioCodec]:
        import av

        timescale = str(self._time_base.denominator)
        options = {
            # No dates or versions are written. The first frame of the window is at 0, where the edit list begins.
            "fflags": "+bitexact",
            "use_editlist": "1",
            "avoid_negative_ts": "disabled",
            "video_track_timescale": timescale,
            "movie_timescale": timescale,
        }
        for name, codec in () if video.codec_name in _UNWRITTEN else _FORMATS.items():
            container = av.open(self._sink, "w", format=name, options=options)
            try:
                stream = container.add_stream_from_template(video.stream, opaque=True)
            except ValueError:  # this format cannot hold the codec
                continue
            if ratio := video.stream.sample_aspect_ratio:  # Matroska states it only there
                stream.codec_context.sample_aspect_ratio = ratio
            stream.time_base = self._time_base
            return container, stream, codec
        raise _refused(f"FFmpeg cannot store {video.codec_name} in MP4 or QuickTime files")

    def write(
        self, packet: Packet[VideoStream], time: int, decode_time: int, duration: int, *, is_key: bool, core: int
    ) -> None:
        """Append a packet. `core` is the x264 version to pass on to decoders; 0 if they do not need it."""
        if core and not h264.x264_core(memoryview(packet), self._header):
            content = h264.x264_message(core, self._header) + bytes(packet)
            packet = cast("Packet[VideoStream]", type(packet)(len(content)))
            packet.update(content)
        packet.stream, packet.time_base, packet.is_keyframe = self._stream, self._time_base, is_key
        packet.pts, packet.dts, packet.duration = (ticks * self._scale for ticks in (time, decode_time, duration))
        if self._track is not None:
            self._track.write_until(decode_time * self._scale * self._time_base)
        self._container.mux_one(packet)

    def close(self) -> None:
        self._container.close()

    def finish(self, ticks: int) -> bytes:
        """Return the contents of the file.

        The file's edit list ends after `ticks`, so that later frames are hidden.
        """
        if self._track is not None:
            self._track.write_until(None)
        self.close()
        with self._sink.getbuffer() as data:

            def read_at(offset: int, size: int) -> bytes:
                return bytes(data[offset : offset + size])

            for path, place, long_place in _DURATIONS:
                box = find_box(read_at, 0, len(data), *path)
                if box is None or (path[-1] == b"elst" and read_at(box[1] + 4, 4) != b"\0\0\0\1"):
                    raise _refused("the copy would not have an edit list with exactly one entry")
                kind, at = (">Q", long_place) if data[box[1]] else (">I", place)
                struct.pack_into(kind, data, box[1] + at, ticks * self._scale)
        return self._sink.getvalue()


@contextmanager
def _muxing() -> Iterator[None]:
    """Convert the muxer's errors inside the `with` block to ProbeErrors."""
    import av

    try:
        yield
    except (av.FFmpegError, struct.error) as error:
        raise _refused(f"FFmpeg cannot write the copy ({getattr(error, 'strerror', None) or error})") from error


def _refused(reason: str) -> ProbeError:
    return ProbeError(f"the window cannot be stored as a copy: {reason}; use --clips native", kind="cut")
