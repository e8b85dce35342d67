"""Long-running rank processes: `python ranks.py RANK NUM FOLDER` reads one JSON command per line.

Each process has at most one loader. A command for N ranks is sent to the first N processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Ranks:
    """Processes of one torch.distributed group, with a subgroup for each smaller number of ranks."""

    def __init__(self, num: int, folder: Path) -> None:
        environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._logs = [(folder / f"rank-{rank}.txt").open("w") for rank in range(num)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-W", "error", __file__, str(rank), str(num), str(folder)],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for rank, log in enumerate(self._logs)
        ]

    def request(self, num_ranks: int, command: str, *arguments: Any) -> list[Any]:
        """Call a method of Rank in each of the first `num_ranks` processes and return the results."""
        members = self._processes[:num_ranks]
        for process in members:
            assert process.stdin is not None
            process.stdin.write(json.dumps([command, num_ranks, *arguments]) + "\n")
            process.stdin.flush()
        told = []
        for process in members:
            assert process.stdout is not None
            told.append(json.loads(process.stdout.readline()))
        errors = [answer["error"] for answer in told if "error" in answer]
        assert not errors, errors[0]
        return [answer["value"] for answer in told]

    def close(self) -> None:
        for process, log in zip(self._processes, self._logs, strict=True):
            process.kill()
            process.communicate()  # also closes the pipes
            log.close()


class Rank:
    """Loader of one rank process."""

    def __init__(self, rank: int, groups: list[Any]) -> None:
        self._rank, self._groups = rank, groups
        self._loader: Any = None

    def open(self, num_ranks: int, dataset: str, state: Any, options: dict[str, Any]) -> None:
        """Open a loader and load `state` if given."""
        import streamvid

        if self._loader is not None:
            self._loader.close()
        groups = {"process_group": self._groups[num_ranks - 1]} if num_ranks > 1 else None
        world = streamvid.World(self._rank, num_ranks)
        self._loader = streamvid.VideoLoader(dataset, world=world, groups=groups, num_workers=0, **options)
        if state is not None:
            self._loader.load_state_dict(state)
        self._batches: Iterator[Any] | None = None
        self._began = 0

    def run(self, num_ranks: int, call: int, num_steps: int | None) -> dict[str, Any]:
        """Take `num_steps` steps, or all remaining steps of the epoch if it is None.

        call: number of this command.
        """
        batches: list[Any] = []
        ends: list[Any] = []
        while num_steps is None or len(batches) < num_steps:
            if self._batches is None:
                self._length, self._begin = len(self._loader), len(self._loader) - self._loader.num_steps_left
                self._batches, self._began, self._count = iter(self._loader), call, 0
            batch = next(self._batches, None)
            if batch is None:
                ends.append([self._loader.epoch - 1, self._length, self._begin + self._count])
                self._batches = None
                if num_steps is None:
                    break
                continue
            self._count += 1
            version = self._loader.dataset.manifest.version
            place = [self._loader.epoch, version, self._began]
            batches.append([*place, batch.bucket.id, batch.sample_keys, batch.is_repeat.tolist()])
        return {"batches": batches, "ends": ends, "state": self._loader.state_dict()}

    def close(self, num_ranks: int) -> None:
        self._loader.close()
        self._loader = None


def main() -> None:
    rank, num, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num)
    mine = Rank(rank, [dist.new_group(list(range(count + 1))) for count in range(num)])
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(mine, command)(*arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
