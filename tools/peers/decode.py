"""Other ways to decode a window of frames, as a process that is asked line by line.

    .peers/bin/python -m tools.peers.decode         (from the root of the checkout)

Reads JSON lines: {"method", "path", "start", "num_frames", "stride", "height", "width"}, and "save": a file for the
pixels (NumPy's format), if wanted. Answers each with a line: {"cpu_seconds", "wall_seconds", "sum", "checksum",
"pts_seconds"}, or {"error"}. {"method": "versions"} answers what there is: {"versions": …, "missing": {method: why}}.

All give uint8 RGB, (T, H, W, 3), scaled to cover and centre-cropped, from the file's bytes in memory, on one thread.
cpu_seconds is of the whole process, opening of the file and reading of the output, one byte a cache line, included.
"sum" and checksum (CRC-32) of the pixels and pts_seconds (of the frames that were delivered) are made outside the
measured part. A peer is told the frame's size and, where it asks for timestamps, the timestamps: what metadata would
hold.

- pyav_seek: seek to the window, decode from the key frame before it, convert the wanted frames (swscale, area).
- opensora: the whole file to RGB at full size, then the wanted frames as float32 through torch's bilinear resize.
- torchcodec: VideoDecoder, seek_mode "exact", its own Resize and CenterCrop (swscale, bilinear).
- torchcodec_approximate: the same with "approximate": no scan of the file, wrong frames where the frame rate varies.
- torchcodec_torch: "exact", full-size frames, then torch's antialiased bilinear resize on uint8.
- decord: VideoReader with width and height (swscale, bilinear).
- decode_only: the file is opened and sought in, the needed packets decoded, what nothing refers to skipped, the
  decoder drained after the last wanted packet; nothing is converted.
- decode_only_packets: the same packets, read beforehand, through a decoder that is kept open: the limit. The first
  request for a codec pays for opening its decoder.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import av
import numpy as np

from tools.peers.clips import (
    Clip,
    Cover,
    PeerError,
    Pixels,
    covering,
    crop_offsets,
    load_clip,
    one_thread,
    stand_in_for_torchvision,
    wanted_times,
)

#: Where "nothing refers to this picture" is said by the picture itself.
SKIPPING_CODECS = frozenset({"h264", "mpeg4", "mpeg2video", "mpeg1video", "vp8"})


@dataclass(frozen=True)
class Window:
    """What is asked for: T = num_frames frames from number `start`, every stride-th, of height x width pixels."""

    clip: Clip
    start: int
    num_frames: int
    stride: int
    height: int
    width: int

    @property
    def numbers(self) -> list[int]:
        """Frame numbers."""
        return list(range(self.start, self.start + self.num_frames * self.stride, self.stride))

    @property
    def times(self) -> list[int]:
        """The frames' timestamps, in ticks."""
        return wanted_times(self.clip, self.start, self.num_frames, self.stride)

    @property
    def full_size(self) -> tuple[int, int]:
        """(height, width) of the scaled frame, before the crop."""
        return covering((self.clip.height, self.clip.width), (self.height, self.width))


@dataclass(frozen=True)
class Decoded:
    """pixels: (T, H, W, 3) uint8, None where nothing is converted; seconds: the frames' timestamps, made when asked."""

    pixels: Pixels | None
    seconds: Callable[[], list[float]]


def pyav_seek(window: Window) -> Decoded:
    """Plain PyAV, with the reformatter kept and the output filled in place."""
    clip, wanted = window.clip, window.times
    out, cover = (
        np.empty((window.num_frames, window.height, window.width, 3), np.uint8),
        Cover(window.height, window.width),
    )
    slots = {pts: slot for slot, pts in enumerate(wanted)}
    with av.open(io.BytesIO(clip.data), "r") as container:
        stream = container.streams.video[0]
        one_thread(stream)
        container.seek(wanted[0], stream=stream)
        for frame in container.decode(stream):
            slot = slots.pop(frame.pts, None) if frame.pts is not None else None
            if slot is not None:
                cover(frame, out[slot])
                if not slots:
                    break
    if slots:
        raise PeerError(f"{len(slots)} of {len(wanted)} frames did not come out")
    return Decoded(out, lambda: [pts * clip.time_base for pts in wanted])


def opensora(window: Window) -> Decoded:
    """Whole file to RGB, then float32."""
    import torch
    from torch.nn.functional import interpolate

    clip = window.clip
    with av.open(io.BytesIO(clip.data), "r") as container:
        one_thread(container.streams.video[0])
        decoded = [(frame.time, frame.to_rgb().to_ndarray()) for frame in container.decode(video=0)]
    if window.numbers[-1] >= len(decoded):
        raise PeerError(f"{len(decoded)} frames came out, number {window.numbers[-1]} is wanted")
    video = torch.from_numpy(np.stack([pixels for _, pixels in decoded])).permute(0, 3, 1, 2)
    chosen = video[torch.tensor(window.numbers)].float() / 255
    scaled = interpolate(chosen, size=window.full_size, mode="bilinear", align_corners=False)
    pixels = (_cropped(scaled, window) * 255).round().clamp(0, 255).to(torch.uint8)
    out: Pixels = pixels.permute(0, 2, 3, 1).contiguous().numpy()
    return Decoded(out, lambda: [float(decoded[number][0]) for number in window.numbers])


def _cropped(video: Any, window: Window) -> Any:
    top, left = crop_offsets(window.full_size, (window.height, window.width))
    return video[..., top : top + window.height, left : left + window.width]


def torchcodec(window: Window, seek_mode: str = "exact") -> Decoded:
    """The decoder's own resize and crop."""
    from torchcodec.decoders import VideoDecoder
    from torchcodec.transforms import CenterCrop, Resize

    transforms = [Resize(window.full_size), CenterCrop((window.height, window.width))]
    decoder = VideoDecoder(
        window.clip.data,
        dimension_order="NHWC",
        num_ffmpeg_threads=1,
        seek_mode=seek_mode,
        transforms=transforms,
    )
    frames = decoder.get_frames_at(window.numbers)
    return Decoded(frames.data.numpy(), frames.pts_seconds.tolist)


def torchcodec_approximate(window: Window) -> Decoded:
    """No scan of the file."""
    return torchcodec(window, "approximate")


def torchcodec_torch(window: Window) -> Decoded:
    """Full-size frames, torch's resize."""
    from torch.nn.functional import interpolate
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(window.clip.data, num_ffmpeg_threads=1)
    frames = decoder.get_frames_at(window.numbers)
    scaled = interpolate(frames.data, size=window.full_size, mode="bilinear", antialias=True)
    out: Pixels = _cropped(scaled, window).permute(0, 2, 3, 1).contiguous().numpy()
    return Decoded(out, frames.pts_seconds.tolist)


def decord(window: Window) -> Decoded:
    """The reader's own resize."""
    from decord import VideoReader, cpu

    full = window.full_size
    reader = VideoReader(io.BytesIO(window.clip.data), ctx=cpu(0), width=full[1], height=full[0], num_threads=1)
    pixels = reader.get_batch(window.numbers).asnumpy()
    top, left = crop_offsets(full, (window.height, window.width))
    out = pixels[:, top : top + window.height, left : left + window.width]
    return Decoded(out, lambda: [float(reader.get_frame_timestamp(number)[0]) for number in window.numbers])


def decode_only(window: Window) -> Decoded:
    """Opening, seeking and decoding."""
    wanted, clip = window.times, window.clip
    with av.open(io.BytesIO(clip.data), "r") as container:
        stream = container.streams.video[0]
        one_thread(stream)
        container.seek(wanted[0], stream=stream)
        packets = (packet for packet in container.demux(stream) if packet.size)
        count = _decode_packets(stream.codec_context, packets, wanted, clip.codec)
    return _counted(count, window)


_open_decoders: dict[tuple[str, int, int, bytes | None], Any] = {}


def decode_only_packets(window: Window) -> Decoded:
    """Decoding alone."""
    wanted, clip = window.times, window.clip
    key = (clip.codec, clip.width, clip.height, clip.extradata)
    decoder = _open_decoders.get(key)
    if decoder is None:
        decoder = _open_decoders[key] = av.CodecContext.create(clip.codec, "r")
        decoder.extradata, decoder.thread_count, decoder.thread_type = clip.extradata, 1, "NONE"
    else:
        decoder.flush_buffers()
    starts = [i for i, packet in enumerate(clip.packets) if packet.is_keyframe and packet.pts <= wanted[0]]
    first = starts[-1] if starts else 0
    return _counted(_decode_packets(decoder, clip.packets[first:], wanted, clip.codec), window)


def _decode_packets(decoder: Any, packets: Iterable[Any], wanted: list[int], codec: str) -> int:
    to_feed, to_come, can_skip = set(wanted), set(wanted), codec in SKIPPING_CODECS
    for packet in packets:
        decoder.skip_frame = "NONREF" if can_skip and packet.pts not in to_feed else "DEFAULT"
        to_feed.discard(packet.pts)
        to_come.difference_update(frame.pts for frame in decoder.decode(packet))
        if not to_feed:
            break
    to_come.difference_update(frame.pts for frame in decoder.decode(None))
    return len(wanted) - len(to_come)


def _counted(count: int, window: Window) -> Decoded:
    if count != window.num_frames:
        raise PeerError(f"{count} of {window.num_frames} frames came out")
    return Decoded(None, lambda: [pts * window.clip.time_base for pts in window.times])


METHODS: dict[str, Callable[[Window], Decoded]] = {
    "pyav_seek": pyav_seek,
    "opensora": opensora,
    "torchcodec": torchcodec,
    "torchcodec_approximate": torchcodec_approximate,
    "torchcodec_torch": torchcodec_torch,
    "decord": decord,
    "decode_only": decode_only,
    "decode_only_packets": decode_only_packets,
}
NEEDS = {"opensora": "torch", "torchcodec": "torchcodec.decoders", "decord": "decord"}
NEEDS |= {"torchcodec_approximate": NEEDS["torchcodec"], "torchcodec_torch": NEEDS["torchcodec"]}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One request's answer; {"error": why} where the peer cannot do it."""
    method = request.get("method")
    if method == "versions":
        return {"versions": _versions(), "missing": missing(NEEDS)}
    if method not in METHODS:
        return {"error": f"method is {method!r}, there are {sorted(METHODS)}"}
    try:
        _load(method)
        numbers = [int(request[name]) for name in ("start", "num_frames", "stride", "height", "width")]
        window = Window(load_clip(str(request["path"])), *numbers)
        _ = window.times
        return _measure(METHODS[method], window, request.get("save"))
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is its answer
        return {"error": f"{type(error).__name__}: {error}"}


def _load(method: str) -> None:
    """Imports, so that no measured call pays for one."""
    if method.startswith("torchcodec"):
        stand_in_for_torchvision()
        __import__("torchcodec.transforms")
        with suppress(ImportError):
            __import__("torchvision.transforms.v2")
    __import__(NEEDS.get(method, "av"))


def _measure(method: Callable[[Window], Decoded], window: Window, save: str | None) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    decoded = method(window)
    if decoded.pixels is not None:
        decoded.pixels[:, :, ::16].sum(dtype=np.uint64)  # a byte of each cache line: NumPy needs 1 ns a byte
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    total = 0 if decoded.pixels is None else int(decoded.pixels.sum(dtype=np.uint64))
    checksum = None
    if decoded.pixels is not None:
        pixels = np.ascontiguousarray(decoded.pixels)
        shape = (window.num_frames, window.height, window.width, 3)
        if pixels.shape != shape or pixels.dtype != np.uint8:
            raise PeerError(f"{pixels.dtype} of shape {pixels.shape} came out, uint8 of {shape} is wanted")
        checksum = zlib.crc32(pixels.data)
        if save:
            np.save(save, pixels)
    return {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "sum": total,
        "checksum": checksum,
        "pts_seconds": decoded.seconds(),
    }


def missing(needs: dict[str, str]) -> dict[str, str]:
    """Method → why it cannot run here, for those that cannot."""
    reasons = {}
    for method, module in needs.items():
        try:
            __import__(module)
        except Exception as error:  # noqa: BLE001  # a library that does not load is a library that is missing
            lines = str(error).strip().splitlines() or [""]
            reasons[method] = f"{type(error).__name__}: {lines[0]}"
    return reasons


def _versions() -> dict[str, str]:
    found = {"ffmpeg": ".".join(map(str, av.library_versions["libavcodec"]))}
    for name in ("av", "torch", "torchcodec", "decord", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def with_ffmpeg() -> None:
    """Start again with the environment's FFmpeg libraries on the loader's path: torchcodec brings none."""
    folder = str(Path(sys.prefix) / "ffmpeg")
    paths = os.environ.get("LD_LIBRARY_PATH", "")
    if Path(folder).is_dir() and folder not in paths.split(":"):
        os.environ["LD_LIBRARY_PATH"] = f"{folder}:{paths}" if paths else folder
        os.execv(sys.executable, [sys.executable, "-m", "tools.peers.decode", *sys.argv[1:]])


def requests(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The requests on standard input."""
    for line in lines:
        if line.strip():
            yield json.loads(line)


def main() -> None:
    """Answer until standard input ends."""
    with_ffmpeg()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        import torch

        torch.set_num_threads(1)
    except ImportError:
        pass
    for request in requests(sys.stdin):
        answers.write(json.dumps(answer(request)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
