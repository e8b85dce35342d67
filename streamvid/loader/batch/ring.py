"""Creation of batches that release their ring memory when they are freed, and pinning of the ring for CUDA."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from streamvid.errors import LoaderError
from streamvid.loader.batch.batch import Batch, column_values
from streamvid.loader.batch.color import color_table
from streamvid.loader.batch.contents import RING_LAYOUT, BatchMedia, MediaPictures, Planes, StoredClip, profiled
from streamvid.loader.batch.device import torch_cuda
from streamvid.loader.batch.features import tensor_fields
from streamvid.loader.batch.tokens import tokenize
from streamvid.loader.delivery.pending import VIDEO, ClipPlace, PendingBatch
from streamvid.loader.options import Layout, Tokenizer
from streamvid.loader.view.media import ABSENT_COLORS, PictureRoom
from streamvid.loader.workers.arena import Arena, Block
from streamvid.loader.workers.messages import PictureColors

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from streamvid.video.picture import PictureFormat

    Memory: TypeAlias = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)


def pin(ring: Arena, device: torch.device | None = None) -> bool:
    """Page-lock the ring for copies to CUDA devices. Return True on success.

    Copies to every CUDA device are then direct and asynchronous.

    device: CUDA device through which the memory is registered; None for the current device.
    """
    cuda = torch_cuda()
    if not cuda.is_available() or (device is not None and device.type != "cuda"):
        return False
    address = np.frombuffer(ring.map, np.uint8).ctypes.data
    with cuda.device(device):
        runtime = cuda.cudart()
        error = int(runtime.cudaHostRegister(address, ring.num_bytes, 0))
        number = cuda.current_device()
    if error != 0:
        _log.warning("cannot pin the ring of %d bytes (CUDA error %d); copies will be slower", ring.num_bytes, error)
        return False
    # The mapping outlives the loader until the last batch is freed; only then can the pages be unlocked.
    weakref.finalize(ring.map, _unpin, number, address).atexit = False
    return True


def _unpin(device: int, address: int) -> None:
    cuda = torch_cuda()
    if cuda.is_initialized():  # else this is a fork of the process that pinned the ring
        with cuda.device(device):
            cuda.synchronize()  # the last batch may have been freed before its queued copies are complete
            cuda.cudart().cudaHostUnregister(address)


class RingSlot:
    """Ring memory of one batch, and the CUDA streams that may still copy from this memory (BATCH-1).

    The memory is reused only after all copies that `Batch.to` queued, on any stream, are complete. If CUDA was
    initialized when the batch was created, the ring also waits for all work on the streams that were current when the
    batch was created and when the batch was freed. The slot keeps no reference to the batch's tensors.
    """

    def __init__(self, block: Block) -> None:
        self._block = block
        self._events: dict[Any, Any] = {}  # stream → an event after its last known copy
        cuda = torch_cuda()
        self._stream = cuda.current_stream() if cuda.is_initialized() else None

    def copied(self, device: torch.device) -> None:
        """Record that copies to `device` were just queued on the device's current stream."""
        if device.type == "cuda":
            self._mark(torch_cuda().current_stream(device))

    def release(self) -> None:
        """Return the memory to the ring, which reuses it once the copies are complete."""
        cuda = torch_cuda()
        if self._stream is not None and cuda.is_initialized():
            # A destructor may run in any thread; querying the current device there could initialize another device.
            for stream in {self._stream, cuda.current_stream(self._stream.device)}:
                self._mark(stream)
        self._block.release(self._wait if self._events else None)

    def _mark(self, stream: Any) -> None:
        cuda = torch_cuda()
        with cuda.device(stream.device):
            if cuda.is_current_stream_capturing():  # nothing was queued, and the event would belong to the capture
                return
        self._events[stream] = event = cuda.Event(blocking=True)  # otherwise waiting for it would keep a core busy
        event.record(stream)

    def _wait(self) -> None:
        for event in self._events.values():
            event.synchronize()


def make_batch(
    pending: PendingBatch,
    columns: Sequence[str],
    numeric: Collection[str],
    layout: Layout = "BCTHW",
    tokenizer: Tokenizer | None = None,
) -> Batch:
    """Return the Batch for a complete PendingBatch.

    The batch's ring memory is released when its last tensor is freed.

    Raises LoaderError if the tokenizer fails.
    """
    import torch

    with profiled("streamvid.make_batch"):
        request, deliveries = pending.request, pending.deliveries
        memory = np.ndarray((pending.num_bytes,), np.uint8, pending.memory, pending.block.offset)
        slot = RingSlot(pending.block)
        weakref.finalize(memory, slot.release).atexit = False
        if request.samples[0].part.sidecar is None:
            content = _media(pending, memory, layout)
        else:
            content = tensor_fields(pending, memory.data)
        fields: dict[str, Any] = {
            **content,
            "text": [one.caption for one in deliveries],
            "sample_keys": [one.key for one in deliveries],
            "bucket": request.bucket,
            "fps": torch.from_numpy(np.array([one.fps or np.nan for one in deliveries], np.float32)),
            "is_repeat": torch.from_numpy(np.array([one.sample.is_repeat for one in deliveries], np.bool_)),
            "loss_weight": request.loss_weight,
            "sample_seeds": [one.seed for one in deliveries],
        }
        if "video" in fields:
            fields["layout"] = layout
        for name in columns:
            fields[name] = column_values([one.row.columns[name] for one in deliveries], is_numeric=name in numeric)
        if tokenizer is not None:
            fields |= _tokens(tokenizer, fields)
        return Batch(fields, slot.copied)


def _tokens(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    found = tokenize(tokenizer, fields["text"], fields["sample_keys"])
    if taken := [name for name in found if name in fields]:
        raise LoaderError(
            f"the tokenizer's result contains names of other batch fields: {', '.join(taken)}; rename them in the "
            "result, or leave out columns with these names"
        )
    return found


# These functions take parts of the memory with NumPy, whose views take a tenth of the time of torch's.
def _media(pending: PendingBatch, memory: Memory, layout: Layout) -> Mapping[str, Any]:
    bucket, num_samples, room = pending.request.bucket, len(pending.deliveries), pending.room
    if bucket.is_text:
        return {}
    if room is None:
        return {"clips": [_clip(pending.clips[index], memory, bucket.num_frames) for index in range(num_samples)]}
    if room.picture is None:
        return _audio(pending, room, memory)
    colors = [pending.colors[index, *VIDEO] for index in range(num_samples)]
    video = _pictures(memory[: room.start(0)], bucket.num_frames, room.picture, colors, layout)
    media = _further_media(pending, room, memory, layout) if room.media else {}
    return {"video": video, **media, **({} if room.audio is None else _audio(pending, room, memory))}


def _audio(pending: PendingBatch, room: PictureRoom, memory: Memory) -> Mapping[str, Any]:
    import torch

    found = [pending.audio.get(index) or (False, 0.0) for index in range(room.num_samples)]
    return {
        "audio": _audio_section(room, memory, room.audio_place(0)),
        "audio_present": torch.tensor([is_present for is_present, _ in found]),
        "audio_offset_seconds": torch.tensor([seconds for _, seconds in found], dtype=torch.float64),
    }


def _audio_section(room: PictureRoom, memory: Memory, place: int) -> torch.Tensor:
    """Return the audio of all samples from `memory`, starting at the byte offset `place`."""
    import torch

    shape = room.audio
    assert shape is not None
    section = memory[place : place + room.num_samples * shape.num_bytes].view(np.float32)
    return torch.from_numpy(section.reshape(room.num_samples, shape.num_channels, shape.num_samples))


def _further_media(pending: PendingBatch, room: PictureRoom, memory: Memory, layout: Layout) -> Mapping[str, Any]:
    import torch

    stored: dict[str, MediaPictures | torch.Tensor] = {}
    present: dict[str, torch.Tensor] = {}
    for number, medium in enumerate(room.media):
        places = [(i, medium.name, item) for i in range(room.num_samples) for item in range(medium.num_items)]
        colors = [pending.colors.get(place, ABSENT_COLORS) for place in places]
        section = memory[room.start(number) : room.start(number + 1)]
        if medium.is_audio:
            stored[medium.name] = _audio_section(room, memory, room.place(medium, 0, 0))
        else:
            value = _pictures(section, medium.num_pictures(room.bucket), room.picture_of(medium), colors, layout)
            stored[medium.name] = MediaPictures(medium, value, layout)
        there = torch.tensor([place in pending.colors for place in places])
        present[medium.name] = there.reshape(-1, medium.num_items) if medium.is_list else there
    return {"media": BatchMedia(stored), "media_present": present}


def _pictures(
    memory: Memory, num_frames: int, picture: PictureFormat, colors: Sequence[PictureColors], layout: Layout
) -> torch.Tensor | Planes:
    """Return the pictures in `memory`: `num_frames` pictures for each entry of `colors`."""
    import torch

    if picture.pixels == "yuv420p":
        matrices, ranges, sitings = zip(*(color or ABSENT_COLORS for color in colors), strict=True)
        table = color_table(matrices, ranges, sitings)
        planes = memory.reshape(len(colors), num_frames, picture.num_bytes)
        return Planes(torch.from_numpy(planes), table, picture.height, picture.width, layout)
    shape = (len(colors), num_frames, picture.height, picture.width, 1 if picture.pixels == "mask" else 3)
    return torch.from_numpy(memory.reshape(shape).transpose([RING_LAYOUT.index(name) for name in layout]))


def _clip(place: ClipPlace, memory: Memory, num_frames: int) -> StoredClip:
    import torch

    numbers = tuple(place.numbers or ())
    if place.own is not None:
        own = torch.frombuffer(bytearray(place.own), dtype=torch.uint8)
        return StoredClip(own, None, "", numbers[0], num_frames, numbers)
    first = place.offset + place.table_bytes
    packets = None
    if place.table_bytes:
        packets = torch.from_numpy(memory[place.offset : first].view(np.int64).reshape(-1, 4))
    data = torch.from_numpy(memory[first : first + place.num_bytes])
    return StoredClip(data, packets, place.stream, numbers[0], num_frames, numbers)
