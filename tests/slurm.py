"""A real Slurm cluster of three nodes on this machine: slurmctld, three slurmd and munged, in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.servers import end_server, free_port, spawn

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
NODES = ("n1", "n2", "n3")
CONFIG = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,defer
ReturnToService=2
SlurmdTimeout=10
SlurmctldParameters=idle_on_node_suspend
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]},{ports[3]} CPUs=2 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES State=UP
"""


@dataclass
class Slurm:
    """A running cluster whose jobs find the `streamvid` of this Python."""

    folder: Path
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: object, cwd: Path | None = None, **env: str) -> str:
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd, env=self.env | env
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def wait_for_jobs(self, seconds: float) -> None:
        """Wait until the queue is empty."""
        end = time.monotonic() + seconds
        while queue := self.run("squeue", "--noheader"):
            assert time.monotonic() < end, queue
            time.sleep(0.3)

    def end(self) -> None:
        for node in self.nodes.values():
            end_server(node)

    def kill_node(self, name: str) -> None:
        """Kill a node and all its processes, as a power failure does."""
        self.nodes[name].kill()
        self.nodes[name].wait()
        for process in self.processes("", name):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def processes(self, command: str, node: str = "") -> list[psutil.Process]:
        """Return the processes of jobs, on all nodes or one, whose command line contains `command`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                env, words = process.environ(), " ".join(process.cmdline())
                if env.get("SLURM_CONF") == self.env["SLURM_CONF"] and node in ("", env.get("SLURMD_NODENAME")):
                    found += [process] if command in words and "SLURMD_NODENAME" in env else []
        return found

    def start_node(self, name: str) -> None:
        command = ["slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf")]
        self.nodes[name] = spawn(command, self.folder / f"{name}.log")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"Slurm cannot run here: needs root and {', '.join(missing or PROGRAMS)}")
    folder = tmp_path_factory.mktemp("slurm")
    cluster, ports = Slurm(folder), [free_port() for _ in range(4)]
    (folder / "state").mkdir()
    config = CONFIG.format(folder=folder, host=socket.gethostname().partition(".")[0], ports=ports)
    (folder / "slurm.conf").write_text(config)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    places = [f"--{name}={folder}/munge.{end}" for name, end in (("socket", "socket"), ("key-file", "key"))]
    places += [f"--{name}={folder}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
    with contextlib.ExitStack() as servers:
        munged = spawn(["munged", "--foreground", "--force", *places], folder / "munged.log")
        servers.callback(end_server, munged)
        controller = ["slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf")]
        servers.callback(end_server, spawn(controller, folder / "slurmctld.log"))
        for name in NODES:
            cluster.start_node(name)
        servers.callback(cluster.end)
        end = time.monotonic() + 60
        while idle_nodes(cluster) < len(NODES):
            logs = "".join(path.read_text()[-600:] for path in folder.glob("*.log"))
            assert time.monotonic() < end, f"the cluster did not come up:\n{logs}"
            time.sleep(0.2)
        yield cluster


def idle_nodes(cluster: Slurm) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format=%t"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=cluster.env)
    return done.stdout.split().count("idle")
