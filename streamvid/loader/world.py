"""Rank of this process, from torch.distributed or a mesh, or else from launchers' environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamvid.errors import ConfigError
from streamvid.plan.position import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# (launcher, rank variable, world size variable). Slurm's job-wide SLURM_NTASKS is also set in a batch script or a
# shell that srun did not start, where one process would wait for ranks that never start. Use the step's variable.
_LAUNCHERS = (
    ("torchrun, accelerate or deepspeed", "RANK", "WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
)


def detect_world(environ: Mapping[str, str] | None = None) -> World:
    """Return the data-parallel position of this process. Without a launcher, this process is the only rank.

    Raises ConfigError if a launcher's variables do not contain a valid rank and number of ranks.
    """
    if environ is None:
        if is_initialised():
            torch = sys.modules["torch"]
            return World(rank=torch.distributed.get_rank(), num_ranks=torch.distributed.get_world_size())
        environ = os.environ
    for launcher, rank_name, size_name in _LAUNCHERS:
        if rank_name in environ and size_name in environ:
            try:
                return World(rank=int(environ[rank_name]), num_ranks=int(environ[size_name]))
            except ValueError as error:
                raise ConfigError(
                    f"{rank_name}={environ[rank_name]!r}, {size_name}={environ[size_name]!r} (set by "
                    f"{launcher}) do not describe a valid rank: {error}. Correct them, or pass "
                    "world=World(rank, num_ranks)"
                ) from error
    return World()


def is_initialised() -> bool:
    """Return whether torch.distributed is initialized."""
    torch = sys.modules.get("torch")  # only a program that imported torch can have initialized it
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def world_from_mesh(mesh: DeviceMesh, *data_dims: str) -> World:
    """Return the data-parallel position of this process in a DeviceMesh; ranks along `data_dims` have different data.

    For a mesh of ("dp", "tp"), use `world_from_mesh(mesh, "dp")`. With several names, such as
    `world_from_mesh(mesh, "dp_replicate", "dp_shard")`, the last dimension changes fastest. Processes that differ only
    in other dimensions share a rank.

    Raises ConfigError for names that are not dimensions of the mesh, and in a process that is not part of the mesh.
    """
    names = mesh.mesh_dim_names or ()
    if not names:
        raise ConfigError(f"{mesh} has no dimension names; create it with mesh_dim_names, such as ('dp', 'tp')")
    wrong = [name for name in data_dims if name not in names]
    if wrong or not data_dims or len(set(data_dims)) < len(data_dims):
        raise ConfigError(
            f"data_dims={data_dims!r}: must list the dimensions along which data differs, each once; allowed: {names!r}"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(f"this process is not part of {mesh}; create the loader only in processes of the mesh")
    rank, num_ranks = 0, 1
    for name in data_dims:
        size = mesh.size(names.index(name))
        rank, num_ranks = rank * size + mesh.get_local_rank(name), num_ranks * size
    return World(rank, num_ranks)


def default_num_workers() -> int:
    """Return the default number of decode workers: this rank's share of the usable cores, from 1 to 8.

    The default is 0 on systems other than Linux.
    """
    if sys.platform != "linux":
        return 0
    return max(1, min(8, len(os.sched_getaffinity(0)) // num_local_ranks()))


def local_rank() -> int:
    """Return this process's number among the ranks on this machine, according to the launcher, or 0 if unknown."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"):
        text = os.environ.get(name) or ""
        if text.isdecimal():
            return int(text)
    return 0


def num_local_ranks() -> int:
    """Return the number of ranks on this machine according to the launcher, or 1 if LOCAL_WORLD_SIZE is not set."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not text.isdecimal():
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={text!r}: must be the number of ranks on this machine; correct or unset the variable"
        )
    return max(1, int(text))
