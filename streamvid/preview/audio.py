"""Waveform of a clip's audio, decoded in a separate process, because clips may be hostile."""

from __future__ import annotations

import json
import mmap
import os
import resource
import socket
import sys
from dataclasses import astuple
from typing import Any

from streamvid.errors import SampleError
from streamvid.host.processes import describe_exit, end_workers, start_worker
from streamvid.video.audio.waveform import Waveform, read_waveform

NUM_PARTS = 400
_TIMEOUT_SECONDS = 20.0
_MAX_BYTES = 2**30
_MAX_ANSWER = 1 << 16


def waveform_of(data: bytes, duration_seconds: float) -> Waveform | None:
    """Return the waveform of a clip, or None if the clip has no audio or the platform has no memfd.

    Raises SampleError if the audio cannot be decoded within 20 s and with 1 GiB of memory.
    """
    if sys.platform != "linux" or not data:
        return None
    mine, theirs = socket.socketpair()
    clip = os.memfd_create("streamvid-audio", os.MFD_CLOEXEC)
    try:
        with mine, theirs, os.fdopen(os.dup(clip), "wb") as file:
            file.write(data)
            file.flush()
            arguments = (str(duration_seconds),)
            worker = start_worker(
                "streamvid.preview.audio:serve", (theirs.fileno(), clip), arguments, opens_stores=False
            )
            theirs.close()
            mine.settimeout(_TIMEOUT_SECONDS)
            try:
                answer = _received(mine)
            except TimeoutError:
                answer = b'{"problem": "decoding took too long"}'
            mine.close()
            end_workers([worker])
    finally:
        os.close(clip)
    said: dict[str, Any] = (
        json.loads(answer) if answer else {"problem": f"the decoder {describe_exit(worker.returncode)}"}
    )
    if "problem" in said:
        raise SampleError(f"the audio cannot be shown: {said['problem']}")
    if said["waveform"] is None:
        return None
    codec, sample_rate, num_channels, peaks = said["waveform"]
    return Waveform(codec, sample_rate, num_channels, tuple(peaks))


def _received(end: socket.socket) -> bytes:
    parts = bytearray()
    while len(parts) <= _MAX_ANSWER and (part := end.recv(1 << 16)):
        parts += part
    return bytes(parts)


def serve(socket_fd: str, clip_fd: str, duration_seconds: str) -> None:
    """Decode one clip and send the result. This is the entry point of the decoding process."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
    descriptor = int(clip_fd)
    clip = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ))
    try:
        found = read_waveform(clip, NUM_PARTS, float(duration_seconds))
        said: dict[str, Any] = {"waveform": None if found is None else astuple(found)}
    except Exception as error:  # noqa: BLE001 - a hostile clip may raise anything
        said = {"problem": str(error)[:500]}
    with socket.socket(fileno=int(socket_fd)) as end:
        end.sendall(json.dumps(said).encode())
    os._exit(0)
