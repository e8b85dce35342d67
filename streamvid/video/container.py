"""Opening untrusted media files. No other module opens media files.

FFmpeg receives a reader without a name, never a path. It therefore cannot guess a format from the name, and no file can
make it open another file. Only the containers and codecs of `Limits` are allowed; cover art does not count as video.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from streamvid.errors import ProbeError
from streamvid.host.range_file import RangeFile
from streamvid.video.bitstream.entries import is_hidden
from streamvid.video.cropping import NO_MARGINS, Margins, container_margins
from streamvid.video.limits import (
    AUDIO_CONTAINERS,
    EXACT_CONTAINERS,
    IMAGE_CONTAINERS,
    SEQUENCE_BRANDS,
    STILL_BRANDS,
    Limits,
)
from streamvid.video.stream_info import set_up_decoder

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.stream import Stream
    from av.video.codeccontext import VideoCodecContext
    from av.video.stream import VideoStream


class FarFile(RangeFile):
    """Remote file that can skip byte ranges that are not needed."""

    def leave_out(self, bodies: Iterable[tuple[int, int]], heads: Iterable[tuple[int, int]]) -> None:
        """Read the byte ranges in `heads`.

        From then on, all other unread bytes within the ranges in `bodies` are returned as zeros.

        Each range is a (start, end) pair of byte offsets.
        """
        raise NotImplementedError

    def leave_out_nothing(self) -> None:
        """Stop replacing bytes with zeros: all later reads return the real bytes."""
        raise NotImplementedError


StreamT = TypeVar("StreamT", bound="Stream")
Source = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | io.RawIOBase

_READ_BYTES = 1 << 16
#: Codecs for which only the first bytes of key frames are needed if the container's index contains all other facts.
_INDEXED_CODECS = frozenset({"h264", "hevc", "av1"})
_KEY_HEAD_BYTES = 4096
_CROPPING_CONTAINERS = frozenset({"mov", "matroska"})
_FAR_PROBE_BYTES = 1 << 17
_HEAD_BYTES = 4096
_REFUSED = {b"#EXTM3U": "an HLS playlist", b"ffconcat": "an ffconcat playlist", b"<?xml": "XML"}
_SOUND_ONLY = {b"fLaC": "FLAC", b"ID3": "MP3", b"\xff\xfb": "MP3", b"\xff\xf3": "MP3", b"\xff\xf1": "AAC"}
_ADD_PICTURE = (
    "the file contains only audio{kind}, but a clip needs pictures; combine it with a picture or a video (ffmpeg -i "
    "AUDIO -i VIDEO OUT.mp4)"
)


class OnlyAudioError(ProbeError):
    """Error that `open_video` raises for a file that has audio but no pictures."""

    def __init__(self, kind: str) -> None:
        super().__init__(_ADD_PICTURE.format(kind=kind), kind="not-media")


class _Nameless:
    """Wrapper that hides the name of an open binary file, because FFmpeg would guess the format from the name."""

    def __init__(self, file: BinaryIO | io.RawIOBase) -> None:
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


class VideoFile:
    """Opened file with its video stream and the properties that are known before packets are read.

    Created by `open_video` and, for files that may lack pictures, by `open_audio`.

    - container, stream: PyAV objects.
    - pictures: the same object as `stream`; None for a file that has only audio and therefore no `stream`.
    - container_name, codec_name: FFmpeg's names.
    - is_image: True for a still image.
    - has_audio: True if the file has an audio stream.
    - num_bytes: size of the file.
    - head: first bytes of the file.
    - is_exact: True if the container's packets are reliable and seekable.
    """

    container: InputContainer
    pictures: VideoStream | None

    def __init__(self, reader: _Nameless, limits: Limits, far: FarFile | None, *, needs_pictures: bool = True) -> None:
        self.reader, self.limits, self._far, self._needs_pictures = reader, limits, far, needs_pictures
        self._is_still = False
        self.num_bytes = reader.seek(0, os.SEEK_END)
        if not self.num_bytes:
            raise ProbeError("the file is empty (0 bytes); copy or download the file again", kind="empty-file")
        if self.num_bytes > limits.max_bytes:
            raise ProbeError(
                f"the file is {self.num_bytes} bytes long; the limit is max_bytes={limits.max_bytes}",
                kind="limit",
            )
        self.reopen()
        self._margins = self._read_margins() if self.container_name in _CROPPING_CONTAINERS else {}
        if self.container_name == "gif":
            self._is_still = self._has_one_packet()
            self.reopen()
        elif self.container_name == "mov":
            self.is_image = self._is_still = _is_heif_still(self.head)

    def reopen(self) -> None:
        """Restart from the first byte with a fresh decoder."""
        self.close()
        self.reader.seek(0)
        self.head = self.reader.read(_HEAD_BYTES)
        self.reader.seek(0)
        _refuse_by_name(self.head, self._needs_pictures)
        is_far_mp4 = self._far is not None and self.head[4:8] == b"ftyp"
        containers = (*self.limits.containers, *(() if self._needs_pictures else AUDIO_CONTAINERS))
        self.container = _open_container(self.reader, self.limits, containers, is_far_mp4)
        try:
            self.container_name = _canonical(self.container.format.name)
            self.is_image = self.container_name in IMAGE_CONTAINERS or self._is_still
            self.pictures = _choose_stream(self.container, self.limits, self._needs_pictures)
            self.has_audio = bool(self.container.streams.audio)
            self.codec_name = "" if self.pictures is None else self.pictures.codec_context.codec.canonical_name
            self.is_exact = self.container_name in EXACT_CONTAINERS and not self._is_avi_in_matroska()
            _prepare(self.container, self.pictures, self.limits)
        except BaseException:
            self.close()
            raise

    @property
    def stream(self) -> VideoStream:
        assert self.pictures is not None
        return self.pictures

    @property
    def margins(self) -> Margins:
        """Cropping margins that the container declares for the stream's frames."""
        is_mov, videos = self.container_name == "mov", self.container.streams.video
        return self._margins.get(self.stream.id if is_mov else videos.index(self.stream), NO_MARGINS)

    def _read_margins(self) -> dict[int, Margins]:
        before = self.reader.tell()  # FFmpeg reads on from there

        def read_at(offset: int, size: int) -> bytes:
            self.reader.seek(offset)
            return self.reader.read(size) or b""

        try:
            return container_margins(read_at, self.num_bytes)
        finally:
            self.reader.seek(before)

    def _has_one_packet(self) -> bool:
        """Return whether a GIF contains a single picture. The caller must reopen the file afterwards."""
        with ffmpeg_errors("the file is damaged: its first packets cannot be read"):
            packets = (packet for packet in self.container.demux(self.stream) if packet.size)
            return sum(not is_hidden("gif", memoryview(packet)) for packet in islice(packets, 2)) < 2

    def _is_avi_in_matroska(self) -> bool:
        """Return whether the file is Matroska with an AVI-style codec header and therefore stores only decode times."""
        try:
            is_video = self.container_name == "matroska" and self.pictures is not None
            return is_video and self.stream.codec_context.codec_tag != "\0\0\0\0"
        except UnicodeDecodeError:  # a tag that is not even text
            return True

    @contextmanager
    def bodies_left_out(self) -> Iterator[None]:
        """Read only the first bytes of a remote file's key frames inside the `with` block.

        Other packet data reads as zeros; bytes between packets are still read from the file. If the container's index
        lacks sizes, times or key frames, or the codec needs more data from packets, the whole file is read.
        """
        far = self._far
        if far is None or self.container_name != "mov" or self.codec_name not in _INDEXED_CODECS:
            yield
            return
        heads = [
            (entry.pos, entry.pos + min(entry.size, _KEY_HEAD_BYTES))
            for entry in self.stream.index_entries
            if entry.is_keyframe
        ]
        bodies = [
            (entry.pos, entry.pos + entry.size) for stream in self.container.streams for entry in stream.index_entries
        ]
        far.leave_out(bodies, heads)
        try:
            yield
        finally:
            far.leave_out_nothing()
        self.reopen()  # FFmpeg still holds some of the zeros

    @property
    def decoder(self) -> VideoCodecContext:
        return self.stream.codec_context

    def close(self) -> None:
        if hasattr(self, "container"):
            self.container.close()


def open_video(source: Source, limits: Limits) -> AbstractContextManager[VideoFile]:
    """Open a video or an image. Raises ProbeError if the file cannot be opened, is not allowed or exceeds a limit.

    A binary file object must be seekable. It is read from the first byte, and is not closed.
    """
    return _opened(source, limits, needs_pictures=True)


def open_audio(source: Source, limits: Limits) -> AbstractContextManager[VideoFile]:
    """Open a file to read its audio. This works like `open_video`, but also accepts files without pictures."""
    return _opened(source, limits, needs_pictures=False)


@contextmanager
def _opened(source: Source, limits: Limits, *, needs_pictures: bool) -> Iterator[VideoFile]:
    with ExitStack() as opened:
        if isinstance(source, bytes | bytearray | memoryview):
            source = _MemoryFile(opened.enter_context(memoryview(source).cast("B")))
        elif isinstance(source, str | os.PathLike):
            try:
                source = opened.enter_context(Path(source).open("rb"))
            except OSError as error:
                reason = error.strerror or type(error).__name__
                # The original error shows the path, which may be a mistyped URL with credentials (SAFE-1).
                raise ProbeError(
                    f"the file cannot be opened: {reason}; check its path and permissions", kind="unreadable-file"
                ) from None
        far = source if isinstance(source, FarFile) else None
        video = VideoFile(_Nameless(source), limits, far, needs_pictures=needs_pictures)
        opened.callback(video.close)
        yield video


class _MemoryFile(RangeFile):
    """File-like object over a buffer. It copies only the bytes that are read."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(len(view))
        self._view = view

    def fill(self, start: int, buffer: memoryview) -> int:
        buffer[:] = self._view[start : start + len(buffer)]
        return len(buffer)


@contextmanager
def ffmpeg_errors(problem: str) -> Iterator[None]:
    """Convert FFmpeg's errors inside the `with` block to ProbeErrors whose messages start with `problem`."""
    import av

    try:
        yield
    except av.FFmpegError as error:
        raise ProbeError(f"{problem} ({error.strerror})", kind="damaged") from error


def read_stream(container: InputContainer, stream: StreamT) -> Generator[Packet[StreamT], None, None]:
    """Yield the remaining packets of one stream.

    Raises FFmpeg's errors, and ProbeError if the file contains a stream that its header does not declare."""
    # PyAV's generator loses a packet every time it is abandoned before its end.
    with closing(cast("Generator[Packet[StreamT], None, None]", container.demux(stream))) as packets:
        try:
            yield from packets
        except IndexError:  # PyAV does not know streams that FFmpeg found while it read packets
            raise ProbeError(
                "the file is damaged: a stream that its header does not declare begins in the middle of the file; "
                "remux it (ffmpeg -i IN -c copy OUT.mp4)",
                kind="damaged",
            ) from None


def _refuse_by_name(head: bytes, needs_pictures: bool) -> None:
    """Raise a ProbeError that names the format if the whitelist would reject the file without an explanation."""
    text = head.lstrip(b"\xef\xbb\xbf \r\n\t")
    sounds = [name for magic, name in _SOUND_ONLY.items() if head.startswith(magic)]
    is_wave = head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE"
    if needs_pictures and (sounds or is_wave):
        raise OnlyAudioError(f" ({(*sounds, 'WAV')[0]})")
    names = [name for magic, name in _REFUSED.items() if text.startswith(magic)]
    if head[8:16] == b"WEBPVP8X" and head[20] & 0b10:
        names.append("an animated WebP")
    if names:
        raise ProbeError(
            f"the file is {names[0]}, which is not allowed; use a video, such as MP4 or Matroska, or a still image",
            kind="not-media",
        )


def _is_heif_still(head: bytes) -> bool:
    """Return whether a file in the MP4 family that begins with `head` is a still HEIF or AVIF image."""
    size = int.from_bytes(head[:4], "big") if head[4:8] == b"ftyp" else 0
    brands = {head[8:12], *(head[at : at + 4] for at in range(16, min(size, len(head)), 4))}
    return head[8:12] in STILL_BRANDS and not brands & SEQUENCE_BRANDS


def _open_container(reader: _Nameless, limits: Limits, containers: Sequence[str], is_far: bool) -> InputContainer:
    import av

    options = {
        "format_whitelist": ",".join(containers),
        "protocol_whitelist": "",
        "max_pixels": str(limits.max_pixels),
        # One above the limit, so that the check below can fail: Matroska drops additional streams silently.
        "max_streams": str(limits.max_streams + 1),
        # PyAV always lets FFmpeg look for stream facts, which decodes an H.264 frame (14 ms at 1080p) that we decode
        # again if needed. This option affects only FFmpeg's temporary decoder.
        "skip_frame": "all",
    }
    if is_far:
        # To find the same facts, FFmpeg would read 5 MB or 5 s of packets, even if the index of an MP4 contains them.
        options["probesize"] = str(_FAR_PROBE_BYTES)
    try:
        container: InputContainer = av.open(reader, "r", options=options, buffer_size=_READ_BYTES, **_metadata_errors())
        return container
    except av.FFmpegError as error:
        if isinstance(error, MemoryError):  # FFmpeg 8.0 (PyAV 17) reports too many streams so
            raise ProbeError(
                "FFmpeg cannot allocate the memory that the file's header requests; the file may have more streams "
                f"than max_streams={limits.max_streams}",
                kind="limit",
            ) from error
        problem = f"the file is not a video, image or audio file that FFmpeg can read ({error.strerror})"
        if error.errno == errno.EINVAL:  # FFmpeg's answer to a format that it recognized, but that is not listed
            problem = "the file's format is not allowed; remux or re-encode it, for example to MP4"
        of_audio = ", ".join(AUDIO_CONTAINERS)
        allowed = ", ".join(name for name in containers if name not in AUDIO_CONTAINERS)
        allowed = f"{allowed}; for files with only audio, also {of_audio}"
        raise ProbeError(f"{problem}; allowed containers: {allowed}", kind="not-media") from error


def _metadata_errors() -> dict[str, Any]:
    """Return the arguments with which PyAV accepts metadata that is not UTF-8, or {} for PyAV 19 and later."""
    import av

    return {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}


def _canonical(format_name: str) -> str:
    names = format_name.split(",")
    return "mov" if "mov" in names else names[0]


def _choose_stream(container: InputContainer, limits: Limits, needs_pictures: bool) -> VideoStream | None:
    """Return the first video stream that is neither cover art nor a tile of a larger picture.

    If no such stream exists, return None if the file has audio and pictures are not needed; otherwise, raise
    ProbeError.
    """
    from av.stream import Disposition

    if len(container.streams) > limits.max_streams:
        raise ProbeError(
            f"the file has {len(container.streams)} streams; the limit is max_streams={limits.max_streams}",
            kind="limit",
        )
    pictures = 0
    for stream in container.streams.video:
        if stream.disposition & (Disposition.attached_pic | Disposition.dependent):
            pictures += 1
            continue
        if stream.codec_context is None:
            raise ProbeError(
                "the file's video codec is unknown to FFmpeg; re-encode the file, for example to H.264", kind="codec"
            )
        codec = stream.codec_context.codec.canonical_name
        if codec not in limits.codecs:
            raise ProbeError(
                f"the video codec {codec} is not allowed; allowed codecs: {', '.join(limits.codecs)}", kind="codec"
            )
        return stream
    if container.streams.audio:
        if needs_pictures:
            raise OnlyAudioError(" and cover art" if pictures else "")
        return None
    reason = ", only cover art or tiles of a larger picture" if pictures else ""
    raise ProbeError(f"the file has no video stream{reason}", kind="not-media")


def _prepare(container: InputContainer, stream: VideoStream | None, limits: Limits) -> None:
    from av.stream import Discard

    for other in container.streams:
        if stream is None or other.index != stream.index:
            other.discard = Discard.all
    if stream is None:
        return
    decoder = stream.codec_context
    set_up_decoder(decoder, decoder.codec.canonical_name, limits)
