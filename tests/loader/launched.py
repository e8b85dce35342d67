"""Launcher of real processes in one torch.distributed group.

    python launched.py MODULE SCENARIO RANK NUM FOLDER [ARGUMENT ...]

A scenario is a function in a test module. Its return value is written to a JSON file.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LIMIT_SECONDS = 120


def launch(module: str, scenario: str, num: int, folder: Path, *arguments: str | Path) -> list[Any]:
    """Run `scenario(*arguments)` of a test module in `num` processes.

    Return their results after all of them have ended.
    """
    folder.mkdir(exist_ok=True)
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", __file__, module, scenario]
    ends = [str(folder), *map(str, arguments)]
    running = []
    try:
        for rank in range(num):
            log = (folder / f"log-{rank}.txt").open("w")
            with log:
                running.append(
                    subprocess.Popen(
                        [*command, str(rank), str(num), *ends], cwd=ROOT, env=environ, stdout=log, stderr=log
                    )
                )
        end = time.monotonic() + _LIMIT_SECONDS
        codes = [process.wait(max(0.1, end - time.monotonic())) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"log-{rank}.txt").read_text() for rank in range(num))
    assert codes == [0] * num, logs
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(num)]


def main() -> None:
    module, scenario, rank, num, folder, *arguments = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group(
        "gloo", init_method=store, rank=int(rank), world_size=int(num), timeout=timedelta(seconds=60)
    )
    told = getattr(importlib.import_module(module), scenario)(*arguments)
    (Path(folder) / f"told-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
