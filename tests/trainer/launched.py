"""Program of one rank of a launched run, with the stand-in loader: `launched.py OUTPUT NUM_STEPS STOP_RANK_1_AT`."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from streamvid.loader.batch.batch import Batch
from streamvid.loader.world import detect_world
from streamvid.trainer import train
from tests.trainer.configs import train_config
from tests.trainer.stand_in import StandInLoader, read_clip_frames


class StoppingLoader(StandInLoader):
    """A loader that sends SIGTERM to its own process with the batch of a given step."""

    def __init__(self, frames: torch.Tensor, stop_at: int, rank: int) -> None:
        super().__init__(frames, rank=rank, num_ranks=2)
        self.stop_at = stop_at

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            if len(self.handed_out) == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


def main() -> None:
    torch.set_num_threads(1)
    output, num_steps, stop_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    world = detect_world()
    frames = read_clip_frames(12, 16, 16)
    loader = StoppingLoader(frames, stop_at if world.rank == 1 else -1, world.rank)
    held_out = StandInLoader(frames, rank=world.rank, num_ranks=world.num_ranks, seed=1)
    changes = {
        "max_steps": num_steps,
        "model.factory": "tests.trainer.modules:build",
        "eval.steps": 4,
        "logging.steps": 1,
    }
    config = train_config("in memory", output, changes)
    result = dataclasses.asdict(train(config, loader, held_out)) | {"output": None}
    told = {"ranks": world.num_ranks, "keys": loader.handed_out, **result}
    (output / f"rank-{world.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
