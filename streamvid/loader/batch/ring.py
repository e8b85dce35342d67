"""The ring as torch sees it: pinned memory, and batches over it that give their place back when they die."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from streamvid.errors import LoaderError, StreamvidError
from streamvid.loader.batch.batch import RING_LAYOUT, Batch, Planes, column_values, profiled
from streamvid.loader.batch.color import color_table
from streamvid.loader.batch.features import tensor_fields
from streamvid.loader.batch.tokens import MASK, TOKENS, tokenize
from streamvid.loader.delivery.pending import PendingBatch, PictureColors, StoredClip, sample_error
from streamvid.loader.options import Layout, Tokenizer
from streamvid.loader.view.media import ABSENT_COLORS, BatchMedia, MediaRoom, Medium
from streamvid.loader.view.sampling import sample_seed
from streamvid.loader.workers.arena import Arena, Block
from streamvid.loader.workers.encoded import EncodedClip

if TYPE_CHECKING:
    import torch

    from streamvid.video.picture import PictureFormat

_log = logging.getLogger(__name__)


def pin(ring: Arena, device: torch.device | None = None) -> bool:
    """Page-lock the ring for copies to a CUDA device, None: the current one; False where there is no CUDA.

    So they are direct and asynchronous. `device` matters little, every device may copy from the pages; but no other
    device's memory pays for it.
    """
    import numpy as np

    cuda = _cuda()
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
    # The mapping outlives the loader while a batch of it lives; only then may the pages be let go.
    weakref.finalize(ring.map, _unpin, number, address).atexit = False
    return True


def _unpin(device: int, address: int) -> None:
    cuda = _cuda()
    if cuda.is_initialized():  # else this is a fork of the process that pinned
        with cuda.device(device):
            cuda.synchronize()  # the last batch may have died before the copies that were queued from it are over
            cuda.cudart().cudaHostUnregister(address)


class RingSlot:
    """A batch's place in the ring, and the CUDA streams that may still copy from it (BATCH-1).

    Waited for is what was queued until the batch died on the streams that were current where it was made and where it
    died, and what `Batch.to` queued on any stream. Holds no tensor of the batch.
    """

    def __init__(self, block: Block) -> None:
        self._block = block
        self._events: dict[Any, Any] = {}  # stream → an event behind the last copy known of it
        cuda = _cuda()
        self._stream = cuda.current_stream() if cuda.is_initialized() else None

    def copied(self, device: torch.device) -> None:
        """Copies to `device` were just queued on its current stream."""
        if device.type == "cuda":
            self._mark(_cuda().current_stream(device))

    def release(self) -> None:
        """Give the place back; the ring uses it again when the copies are over."""
        cuda = _cuda()
        if self._stream is not None and cuda.is_initialized():
            # A destructor may run in any thread; asking for the current device there would wake up a device of others.
            for stream in {self._stream, cuda.current_stream(self._stream.device)}:
                self._mark(stream)
        self._block.release(self._wait if self._events else None)

    def _mark(self, stream: Any) -> None:
        cuda = _cuda()
        with cuda.device(stream.device):
            if cuda.is_current_stream_capturing():  # it has queued nothing, and the event would belong to the capture
                return
        self._events[stream] = event = cuda.Event(blocking=True)  # else who waits for it keeps a core busy
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
    """The Batch of a complete PendingBatch; its place in the ring is free again when its last tensor has died.

    Raises LoaderError for a tokenizer that fails.
    """
    import numpy as np
    import torch

    with profiled("streamvid.make_batch"):
        request, rows = pending.request, pending.rows
        memory = np.ndarray((pending.num_bytes,), np.uint8, pending.memory, pending.block.offset)
        slot = RingSlot(pending.block)
        weakref.finalize(memory, slot.release).atexit = False
        texts = _texts(pending)
        if request.samples[0].part.sidecar is None:
            content = _media(pending, torch.from_numpy(memory), layout)
        else:
            content = tensor_fields(pending, memory.data, texts)
        fields: dict[str, Any] = {
            **content,
            "text": texts,
            "sample_keys": [row["key"] for row in rows],
            "bucket": request.bucket,
            "fps": torch.tensor([row["fps"] or float("nan") for row in rows], dtype=torch.float32),
            "is_repeat": torch.tensor([sample.is_repeat for sample in request.samples], dtype=torch.bool),
            "loss_weight": request.loss_weight,
            "sample_seeds": _seeds(pending),
        }
        if "video" in fields:
            fields["layout"] = layout
        for name in columns:
            fields[name] = column_values([row["columns"][name] for row in rows], is_numeric=name in numeric)
        if tokenizer is not None:
            fields |= _tokens(tokenizer, fields)
        return Batch(fields, slot.copied)


def _texts(pending: PendingBatch) -> list[str]:
    """One a sample (SAMPLE-1): made last, as it may name the rate of what is delivered."""
    texts = []
    for sample, row in zip(pending.request.samples, pending.rows, strict=True):
        try:
            visits = {"visit": sample.shown_visit, "dropout_visit": sample.visit}
            texts.append(sample.part.text.text(row, seed=sample.part.seed, **visits))
        except StreamvidError as error:
            raise sample_error(sample, row["key"], str(error)) from error
    return texts


def _seeds(pending: PendingBatch) -> list[int]:
    samples = zip(pending.request.samples, pending.rows, strict=True)
    return [sample_seed(seed=one.part.seed, key=row["key"], visit=one.visit) for one, row in samples]


def _tokens(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    found = tokenize(tokenizer, fields["text"], fields["sample_keys"])
    if taken := [name for name in found if name in fields]:
        raise LoaderError(f"the tokenizer gave {', '.join(taken)}, which the batch has already; rename it")
    kinds = {TOKENS: torch.int64, MASK: torch.bool}
    return {
        name: value if isinstance(value, list) else torch.as_tensor(value, dtype=kinds.get(name))
        for name, value in found.items()
    }


def _media(pending: PendingBatch, memory: torch.Tensor, layout: Layout) -> dict[str, Any]:
    picture, num_samples, num_frames = pending.picture, len(pending.rows), pending.request.bucket.num_frames
    if pending.request.bucket.is_text:
        return {}
    if picture is None:
        return {"clips": [_clip(pending.clips[slot], memory, num_frames) for slot in range(num_samples)]}
    video_bytes = num_samples * num_frames * picture.num_bytes
    colors = [pending.colors[slot] for slot in range(num_samples)]
    fields: dict[str, Any] = {"video": _pictures(memory[:video_bytes], num_frames, picture, colors, layout)}
    if pending.room is not None:
        fields |= _further_media(pending, pending.room, picture, memory, layout)
    return fields


def _further_media(
    pending: PendingBatch, room: MediaRoom, picture: PictureFormat, memory: torch.Tensor, layout: Layout
) -> dict[str, Any]:
    import torch

    values: dict[Medium, torch.Tensor | Planes] = {}
    present: dict[str, torch.Tensor] = {}
    for number, medium in enumerate(room.media):
        places = [(slot, item) for slot in range(len(pending.rows)) for item in range(medium.num_items)]
        colors = [pending.media_colors.get((slot, medium.name, item), ABSENT_COLORS) for slot, item in places]
        section = memory[room.start(number) : room.start(number + 1)]
        values[medium] = _pictures(section, medium.num_pictures(room.bucket), picture, colors, layout)
        there = torch.tensor([(slot, medium.name, item) in pending.media_colors for slot, item in places])
        present[medium.name] = there.reshape(-1, medium.num_items) if medium.is_list else there
    return {"media": BatchMedia.of(values, layout), "media_present": present}


def _pictures(
    memory: torch.Tensor, num_frames: int, picture: PictureFormat, colors: Sequence[PictureColors], layout: Layout
) -> torch.Tensor | Planes:
    """Pictures that lie one after the other, `num_frames` a sample, one of `colors` a sample."""
    if picture.pixels == "yuv420p":
        matrices, ranges, sitings = zip(*(color or ABSENT_COLORS for color in colors), strict=True)
        table = color_table(matrices, ranges, sitings)
        return Planes(memory.view(len(colors), num_frames, -1), table, picture.height, picture.width, layout)
    video = memory.view(len(colors), num_frames, picture.height, picture.width, 3)
    return video.permute(*(RING_LAYOUT.index(name) for name in layout))


def _clip(stored: StoredClip, memory: torch.Tensor, num_frames: int) -> EncodedClip:
    import torch

    numbers = tuple(stored.numbers or ())
    if stored.own is not None:
        return EncodedClip(
            torch.frombuffer(bytearray(stored.own), dtype=torch.uint8), None, "", numbers[0], num_frames, numbers
        )
    data = memory[stored.offset + stored.table_bytes :][: stored.num_bytes]
    packets = None
    if stored.table_bytes:
        packets = memory[stored.offset : stored.offset + stored.table_bytes].view(torch.int64).view(-1, 4)
    return EncodedClip(data, packets, stored.stream, numbers[0], num_frames, numbers)


def _cuda() -> Any:
    import torch

    return torch.cuda  # untyped in torch's own stubs
