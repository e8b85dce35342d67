"""The pictures of a batch as they are held: planes that become RGB on request, and those of conditioning inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamvid.loader.batch.color import yuv420p_to_rgb
from streamvid.loader.options import Layout
from streamvid.loader.view.media import Medium

if TYPE_CHECKING:
    import torch

RING_LAYOUT: Layout = "BTHWC"  # how frames are decoded; every other layout is a view of it


def profiled(name: str) -> AbstractContextManager[Any]:
    """A span of torch's profiler, where one runs: else it would cost a batch as much as all the rest."""
    from torch.autograd import profiler

    # A torch that says it otherwise gets the span in any case.
    return profiler.record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else nullcontext()


@dataclass(frozen=True, eq=False, slots=True)
class Planes:
    """yuv420p video that becomes RGB where and when it is asked for: what `yuv420p_to_rgb` takes."""

    planes: torch.Tensor
    table: torch.Tensor
    height: int
    width: int
    layout: Layout

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Planes:
        """The same with `function` of its tensors."""
        return replace(self, planes=function(self.planes), table=function(self.table))

    def rgb(self) -> torch.Tensor:
        """The video, on the device where the planes are."""
        with profiled("streamvid.yuv420p_to_rgb"):
            return yuv420p_to_rgb(self.planes, self.table, self.height, self.width, self.layout)


@dataclass(frozen=True, eq=False, slots=True)
class _MediaPictures:
    """value: of a medium, its items like samples of their own."""

    medium: Medium
    value: torch.Tensor | Planes
    layout: Layout

    def tensor(self) -> torch.Tensor:
        """As it is delivered."""
        pictures = self.value.rgb() if isinstance(self.value, Planes) else self.value
        if self.medium.is_mask:
            pictures = pictures.narrow(self.layout.index("C"), 0, 1)
        if not self.medium.is_list:
            return pictures
        return pictures.reshape(-1, self.medium.num_items, *pictures.shape[1:])


class BatchMedia(Mapping[str, "torch.Tensor"]):
    """`batch.media`: uint8 tensors by name, in the batch's layout and where it is; see Batch."""

    def __init__(self, pictures: Mapping[str, _MediaPictures]) -> None:
        self._pictures = dict(pictures)
        self._made: dict[str, torch.Tensor] = {}

    @staticmethod
    def of(values: Mapping[Medium, torch.Tensor | Planes], layout: Layout) -> BatchMedia:
        """values: (B x N, T, H, W, C) seen in `layout`, or planes of as many."""
        return BatchMedia({medium.name: _MediaPictures(medium, value, layout) for medium, value in values.items()})

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            self._made[name] = self._pictures[name].tensor()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pictures)

    def __len__(self) -> int:
        return len(self._pictures)

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> BatchMedia:
        """The same with `function` of each tensor as it is held."""

        def mapped(value: torch.Tensor | Planes) -> torch.Tensor | Planes:
            return value.map_tensors(function) if isinstance(value, Planes) else function(value)

        return BatchMedia({name: replace(one, value=mapped(one.value)) for name, one in self._pictures.items()})

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors as they are held."""
        for one in self._pictures.values():
            if isinstance(one.value, Planes):
                yield one.value.planes
                yield one.value.table
            else:
                yield one.value

    def __reduce__(self) -> Any:
        return BatchMedia, (self._pictures,)
