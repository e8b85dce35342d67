"""Process that decodes windows with streamvid on request, one line at a time, as tools/peers/decode.py does for peers.

    python -m tools.decode_ours         (from the root of the checkout)

Requests and answers are those of tools/peers/decode.py. Files are in memory, and their packet indexes are made in
advance. cpu_seconds covers the whole process, including `window()` of the index, the checksums of the byte range, and
reading one byte in each cache line of the output.

- ours_fast, ours_exact, ours_yuv: StoredDecoder, with output to reused memory, like a loader's ring.
- plain: opens the file, seeks, decodes from the key frame, and converts each requested frame to RGB with a reused
  reformatter that has one thread (`to_ndarray("rgb24")` creates threads for each frame). The clip must have the
  requested size.
- seek: the same for clips of any size. Requested frames are scaled to cover the size (area) and center-cropped.
- decode_only: the lower limit. The packets of the same window, made in advance, pass through a reused decoder, which
  skips unreferenced frames and is drained early. Frames are discarded.
- {"method": "encode"}: encodes `path` as a native clip (crf 18, height, width) at `save`, and answers
  {"num_frames", "num_bytes", "psnr_y"}.
- {"method": "facts"}: answers {"num_frames", "height", "codec"}, or {"error"} if the file's packets cannot be indexed.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from streamvid.errors import DecodeError, StreamvidError
from streamvid.video.clip_index import ClipIndex, checksum, index_clip
from streamvid.video.decode.stored import StoredDecoder
from streamvid.video.decode.window import can_skip
from streamvid.video.encode.clip import encode_clip
from streamvid.video.encode.profiles import Encoding
from streamvid.video.limits import STORED_LIMITS
from streamvid.video.picture import PictureFormat
from streamvid.video.stream_info import StreamInfo, begin_decoding, open_decoder

Bytes = NDArray[np.uint8]
PICTURES: dict[str, dict[str, Any]] = {
    "ours_fast": {"accuracy": "fast"},
    "ours_exact": {"accuracy": "exact"},
    "ours_yuv": {"pixels": "yuv420p"},
}


@dataclass(frozen=True, eq=False)
class Clip:
    """A file in memory, its packet index, and all its packets as decoder input."""

    data: bytes
    index: ClipIndex

    @cached_property
    def packets(self) -> dict[int, av.Packet[Any]]:
        """Packets keyed by timestamp. Each timestamp occurs once in an index."""
        made: dict[int, av.Packet[Any]] = {}
        rows = zip(self.index.times.tolist(), self.index.offsets.tolist(), self.index.sizes.tolist(), strict=True)
        for pts, offset, size in rows:
            packet: av.Packet[Any] = av.Packet(size)  # with the padding that decoders ask for
            packet.update(self.data[offset : offset + size])
            packet.pts = pts
            made[pts] = packet
        return made


@dataclass(frozen=True)
class Window:
    """Requested window: every stride-th frame from `start`, num_frames frames in total, as height x width pixels."""

    clip: Clip
    start: int
    num_frames: int
    stride: int
    height: int
    width: int

    @property
    def times(self) -> list[int]:
        """Timestamps of the frames."""
        packets = self.clip.index.window(self.start, self.num_frames, self.stride).packets
        rows = packets[packets[:, 3] >= 0]
        return [int(pts) for pts in rows[np.argsort(rows[:, 3]), 0]]


@lru_cache(maxsize=256)
def load_clip(path: str) -> Clip:
    """Load a clip and index its packets. Raises DecodeError if the packets cannot be indexed."""
    data = Path(path).read_bytes()
    index = index_clip(data)
    if index is None:
        raise DecodeError("its packets cannot be indexed; streamvid decodes such files through the container")
    return Clip(data, index)


class Ours:
    """Decoding methods of streamvid, with the decoders and the memory that they reuse."""

    def __init__(self) -> None:
        self._decoder = StoredDecoder()
        self._memory: dict[tuple[int, int], Bytes] = {}
        self._kept: dict[StreamInfo, Any] = {}

    def run(self, method: str, window: Window) -> tuple[dict[str, Any], Bytes | None]:
        """Decode a window. Return (costs, pixels)."""
        call = self.call(method, window)
        wall, cpu = time.perf_counter(), time.process_time()
        pixels = call()
        if pixels is not None:
            pixels.reshape(window.num_frames, -1)[:, ::48].sum(dtype=np.uint64)  # a byte of each cache line
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        total = 0 if pixels is None else int(pixels.sum(dtype=np.uint64))
        check = None if pixels is None else zlib.crc32(pixels.data)
        return {"cpu_seconds": cpu, "wall_seconds": wall, "sum": total, "checksum": check}, pixels

    def call(self, method: str, window: Window) -> Callable[[], Bytes | None]:
        """Return a function that decodes a window. All preparation that is not part of the cost has been done."""
        if method == "decode_only":
            index = window.clip.index
            found = index.window(window.start, window.num_frames, window.stride)
            packets = [window.clip.packets[pts] for pts in found.packets[:, 0].tolist()]  # before the clock starts
            wanted = set(found.packets[found.packets[:, 3] >= 0, 0].tolist())
            return lambda: self._decode_only(index, packets, wanted)
        if method in PICTURES:
            picture = PictureFormat(window.height, window.width, **PICTURES[method])
            out = self._out(window.num_frames, picture.num_bytes)
            return lambda: self._ours(window, picture, out)
        times = window.times
        if method == "plain":
            return lambda: _plain(window, times)
        return lambda: _seek(window, times)

    def _out(self, num_frames: int, num_bytes: int) -> Bytes:
        if (num_frames, num_bytes) not in self._memory:
            self._memory[num_frames, num_bytes] = np.ones((num_frames, num_bytes), np.uint8)
        return self._memory[num_frames, num_bytes]

    def _ours(self, window: Window, picture: PictureFormat, out: Bytes) -> Bytes:
        clip = window.clip
        found = clip.index.window(window.start, window.num_frames, window.stride)
        part = memoryview(clip.data)[found.first_byte : found.first_byte + found.num_bytes]
        for low, high, digest in found.pieces:
            if checksum(part[low:high]) != digest:
                raise DecodeError("the bytes do not match the checksum in the packet index")
        self._decoder.decode(clip.index.info, found.packets, part, found.key_time, out, picture)
        return out

    def _decode_only(self, index: ClipIndex, packets: list[av.Packet[Any]], wanted: set[int]) -> None:
        decoder = self._kept.get(index.info)
        if decoder is None:
            decoder = self._kept[index.info] = open_decoder(index.info, STORED_LIMITS)
        begin_decoding(decoder, index.info)
        to_feed, to_come = set(wanted), set(wanted)
        skips = can_skip(index.info.codec, index.info.extradata)
        skipping: bool | None = None
        for packet in packets:
            if skips and skipping is not (packet.pts not in to_feed):
                skipping = packet.pts not in to_feed
                decoder.skip_frame = "NONREF" if skipping else "DEFAULT"
            to_feed.discard(cast("int", packet.pts))
            for frame in decoder.decode(packet):
                to_come.discard(frame.pts)
            if not to_feed:
                break
        for frame in decoder.decode(None):
            to_come.discard(frame.pts)
        decoder.flush_buffers()
        if to_come:
            raise DecodeError(f"{len(to_come)} frames were not decoded")


def _frames(window: Window, times: list[int], take: Callable[[av.VideoFrame, int], None]) -> None:
    slots = {pts: slot for slot, pts in enumerate(times)}
    with av.open(io.BytesIO(window.clip.data), "r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        stream.codec_context.thread_type = cast("Any", "NONE")
        container.seek(times[0], stream=stream)
        for frame in container.decode(stream):
            slot = slots.pop(cast("int", frame.pts), None)
            if slot is not None:
                take(frame, slot)
                if not slots:
                    return
    raise DecodeError(f"{len(slots)} of {len(times)} frames were not decoded")


@cache
def _reformatter() -> VideoReformatter:
    return VideoReformatter()


def _plain(window: Window, times: list[int]) -> Bytes:
    out = np.empty((len(times), window.height, window.width, 3), np.uint8)

    def take(frame: av.VideoFrame, slot: int) -> None:
        out[slot] = _reformatter().reformat(frame, format="rgb24", threads=1).to_ndarray()

    _frames(window, times, take)
    return out


def _seek(window: Window, times: list[int]) -> Bytes:
    from tools.peers.clips import Cover

    out = np.empty((len(times), window.height, window.width, 3), np.uint8)
    cover = Cover(window.height, window.width)
    _frames(window, times, lambda frame, slot: cover(frame, out[slot]))
    return out


METHODS = (*PICTURES, "plain", "seek", "decode_only")


def answer(ours: Ours, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one request, or {"error": reason} if it fails."""
    method = str(request["method"])
    try:
        if method == "encode":
            return _encode(request)
        clip = load_clip(str(request["path"]))
        if method == "facts":
            info = clip.index.info
            return {"num_frames": clip.index.num_frames, "height": info.coded_height, "codec": info.codec}
        if method not in METHODS:
            return {"error": f"method={method!r}: must be one of {METHODS}"}
        window = Window(clip, *(int(request[name]) for name in ("start", "num_frames", "stride", "height", "width")))
        found, pixels = ours.run(method, window)
        if request.get("save") and pixels is not None:
            np.save(request["save"], pixels)
        return found
    except (StreamvidError, av.FFmpegError, OSError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _encode(request: dict[str, Any]) -> dict[str, Any]:
    height, width = int(request["height"]), int(request["width"])
    made = encode_clip(Path(request["path"]), height=height, width=width, encoding=Encoding())
    target = Path(request["save"])
    target.with_suffix(".partial").write_bytes(made.data)
    target.with_suffix(".partial").rename(target)
    return {"num_frames": made.num_frames, "num_bytes": made.num_bytes, "psnr_y": made.psnr_y}


def main() -> None:
    """Answer requests until standard input ends."""
    answers, ours = os.fdopen(os.dup(1), "w"), Ours()
    os.dup2(2, 1)  # what libraries print is no answer
    av.logging.set_level(av.logging.PANIC)
    for line in sys.stdin:
        answers.write(json.dumps(answer(ours, json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
