"""Rank of this process: from torch.distributed or a mesh, else from the environment variables of launchers."""

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
# shell that srun did not start, where one process would wait for ranks that never come; so use the step's variable.
_LAUNCHERS = (
    ("torchrun, accelerate or deepspeed", "RANK", "WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
)


def detect_world(environ: Mapping[str, str] | None = None) -> World:
    """Return the data-parallel position of this process: one rank of one if nothing states otherwise (a notebook).

    Raises ConfigError for launcher variables that contradict themselves.
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
                    f"{rank_name}={environ[rank_name]!r} and {size_name}={environ[size_name]!r}, as {launcher} sets "
                    f"them, are not a valid rank: {error}. Pass world=World(rank, num_ranks) to set it explicitly"
                ) from error
    return World()


def is_initialised() -> bool:
    """Return whether torch.distributed is initialized."""
    torch = sys.modules.get("torch")  # only a program that imported it can have done so
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def world_from_mesh(mesh: DeviceMesh, *data_dims: str) -> World:
    """Return the data-parallel position of this process in a DeviceMesh; ranks along `data_dims` have different data.

    `world_from_mesh(mesh, "dp")` for a mesh of ("dp", "tp"); `world_from_mesh(mesh, "dp_replicate", "dp_shard")` for
    several dimensions, the last named changing fastest. Processes that differ only in other dimensions share a rank.

    Raises ConfigError for names that the mesh does not have, and in a process that is not part of it.
    """
    names = mesh.mesh_dim_names or ()
    wrong = [name for name in data_dims if name not in names]
    if wrong or not data_dims or len(set(data_dims)) < len(data_dims):
        raise ConfigError(f"data_dims={data_dims!r}: name each dimension with different data once, out of {names!r}")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"this process is not part of {mesh}; create its loader only in processes of the mesh")
    rank, num_ranks = 0, 1
    for name in data_dims:
        size = mesh.size(names.index(name))
        rank, num_ranks = rank * size + mesh.get_local_rank(name), num_ranks * size
    return World(rank, num_ranks)


def default_num_workers() -> int:
    """Return the number of decode workers for one rank: its share of the usable cores, at most 8; 0 if unsupported."""
    if sys.platform != "linux":
        return 0
    return max(1, min(8, len(os.sched_getaffinity(0)) // num_local_ranks()))


def num_local_ranks() -> int:
    """Return how many ranks share this machine, according to the launcher; 1 if it sets nothing."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not text.isdecimal():
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={text!r} is not a number of ranks; unset it, or set it to this machine's ranks"
        )
    return max(1, int(text))
