"""Batch contents other than tensors: planes converted to RGB on request, conditioning inputs, and stored clips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamvid.loader.batch.color import yuv420p_to_rgb
from streamvid.loader.options import Layout
from streamvid.loader.view.media import Medium
from streamvid.video.stream_info import StreamInfo

if TYPE_CHECKING:
    import torch

RING_LAYOUT: Layout = "BTHWC"  # layout of decoded frames; every other layout is a view of it


def profiled(name: str) -> AbstractContextManager[Any]:
    """Return a profiler span if torch's profiler is active, otherwise a null context, which has less overhead."""
    from torch.autograd import profiler

    # A torch version without this flag always gets the span.
    return profiler.record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else nullcontext()


@dataclass(frozen=True, eq=False, slots=True)
class Planes:
    """yuv420p video that is converted to RGB on request. The fields are the arguments of `yuv420p_to_rgb`."""

    planes: torch.Tensor
    table: torch.Tensor
    height: int
    width: int
    layout: Layout

    def rgb(self) -> torch.Tensor:
        """Return the video as RGB on the device of the planes."""
        with profiled("streamvid.yuv420p_to_rgb"):
            return yuv420p_to_rgb(self.planes, self.table, self.height, self.width, self.layout)


@dataclass(frozen=True, eq=False, slots=True)
class StoredClip:
    """Stored video of one sample, verified against its checksum, for the caller's own decoder.

    - data: uint8 with shape (n,), in the loader's ring; for a substitute, in separate memory. If `packets` is not None,
      the part of the clip that the wanted frames need; otherwise the whole clip, as a file in its container format.
    - packets: int64 with shape (k, 4). Each row contains timestamp, start in `data`, size in bytes, and index among the
      wanted frames, or -1 for a packet that only other frames need. Packets are in decode order, beginning with a key
      frame, which has the first timestamp. None for a whole clip.
    - stream_json: parameters for a decoder (see `stream`); "" for a whole clip.
    - start, num_frames: index of the first wanted frame in the clip, and number of wanted frames.
    - numbers: indices of all wanted frames in the clip, ascending. Frames repeat if the requested frame rate exceeds
      the clip's. A repeated frame has a single packet, with the index of the frame's first occurrence.
      An index without a packet repeats the frame of the previous index.
    """

    data: torch.Tensor
    packets: torch.Tensor | None
    stream_json: str
    start: int
    num_frames: int
    numbers: tuple[int, ...] = ()

    @property
    def stream(self) -> StreamInfo | None:
        """Codec, headers, picture size and colors for decoding the packets; None for a whole clip in its container."""
        return StreamInfo.from_json(self.stream_json) if self.stream_json else None

    def __reduce__(self) -> Any:
        # A tensor is pickled with its whole storage, of which a caller may have kept a small part.
        own = map_tensors(self, lambda tensor: tensor.clone())
        return StoredClip, tuple(getattr(own, name) for name in self.__slots__)


@dataclass(frozen=True, eq=False, slots=True)
class MediaPictures:
    """Pictures of a conditioning input, with one row per item.

    value: pictures as a tensor with shape (B x N, T, H, W, C), viewed in `layout`, or as yuv420p planes.
    """

    medium: Medium
    value: torch.Tensor | Planes
    layout: Layout

    def tensor(self) -> torch.Tensor:
        """Return the tensor as delivered in `batch.media`."""
        pictures = self.value.rgb() if isinstance(self.value, Planes) else self.value
        if not self.medium.is_list:
            return pictures
        return pictures.reshape(-1, self.medium.num_items, *pictures.shape[1:])


class BatchMedia(Mapping[str, "torch.Tensor"]):
    """Value of `batch.media`: a mapping from the name of each conditioning input to its tensor; see Batch.

    Tensors are in the batch's layout and on the batch's device. Pictures stored as yuv420p are converted to RGB on
    first access.
    """

    def __init__(self, stored: dict[str, MediaPictures | torch.Tensor]) -> None:
        self.stored = stored
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            value = self.stored[name]
            self._made[name] = value.tensor() if isinstance(value, MediaPictures) else value
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __reduce__(self) -> Any:
        return BatchMedia, (self.stored,)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a field of a batch with `function` applied to each of its tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Planes | MediaPictures | StoredClip):
        return replace(value, **{name: map_tensors(getattr(value, name), function) for name in value.__slots__})
    if isinstance(value, BatchMedia):
        return BatchMedia(map_tensors(value.stored, function))
    if isinstance(value, dict):
        return {name: map_tensors(part, function) for name, part in value.items()}
    return [map_tensors(part, function) for part in value] if isinstance(value, list) else value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all stored tensors in a batch field, without converting yuv420p to RGB."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Planes | MediaPictures | StoredClip):
        for name in value.__slots__:
            yield from tensors_of(getattr(value, name))
    elif isinstance(value, BatchMedia):
        yield from tensors_of(value.stored)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)
