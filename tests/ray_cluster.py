"""A Ray cluster of three raylets on this machine, two of which declare a GPU.

It runs as a separate program because Ray handles the signals of its process. The program prints its address, then reads
commands from standard input: "add" starts a raylet, "kill" kills the last one added. It answers each command and exits
at the end of its input.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.clips import ROOT


@dataclass
class RayCluster:
    """The program below, running as a process."""

    process: subprocess.Popen[str]
    address: str = ""

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.answer() == "done"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tasks(self) -> list[psutil.Process]:
        """Return the processes that currently run a task."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if child.name().startswith("ray::do_share")]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    keys = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_REGION": "us-east-1"}
    env = {**os.environ, **keys, "PYTHONPATH": str(ROOT)}  # keys of `rgw`; moto accepts any
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.ray_cluster"], cwd=ROOT, env=env, text=True, **pipes
    ) as process:
        found = RayCluster(process)
        found.address = found.answer()
        assert found.address
        yield found
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    added = [cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "add\n":
            added.append(cluster.add_node(num_cpus=1))
        else:
            cluster.remove_node(added.pop(), allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
