"""Which rank this process is: asked of torch.distributed or a mesh, else read from what launchers leave behind."""

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
# shell that srun did not start, where it would make one process wait for ranks that never come: hence the step's.
_LAUNCHERS = (
    ("torchrun, accelerate or deepspeed", "RANK", "WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
)


def detect_world(environ: Mapping[str, str] | None = None) -> World:
    """The data-parallel position of this process: one rank of one where nothing says otherwise (a notebook).

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
                    f"them, name no rank: {error}. Pass world=World(rank, num_ranks) to say it yourself"
                ) from error
    return World()


def is_initialised() -> bool:
    """Return whether torch.distributed is initialised."""
    torch = sys.modules.get("torch")  # only a program that imported it can have done so
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def world_from_mesh(mesh: DeviceMesh, *data_dims: str) -> World:
    """The data-parallel position of this process in a DeviceMesh, whose dimensions `data_dims` take different data.

    `world_from_mesh(mesh, "dp")` for a mesh of ("dp", "tp"); `world_from_mesh(mesh, "dp_replicate", "dp_shard")` where
    there are several, the last named changing fastest. Processes that differ in other dimensions alone share a rank.

    Raises ConfigError for names that the mesh does not have, and in a process that is not part of it.
    """
    names = mesh.mesh_dim_names or ()
    wrong = [name for name in data_dims if name not in names]
    if wrong or not data_dims or len(set(data_dims)) < len(data_dims):
        raise ConfigError(f"data_dims={data_dims!r}: name each dimension that takes different data once, of {names!r}")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"this process is not part of {mesh}; make its loader where the mesh has a place for it")
    rank, num_ranks = 0, 1
    for name in data_dims:
        size = mesh.size(names.index(name))
        rank, num_ranks = rank * size + mesh.get_local_rank(name), num_ranks * size
    return World(rank, num_ranks)


def default_num_workers() -> int:
    """Decode workers for one rank: its share of the usable cores, 8 at most; 0 where workers are not supported."""
    if sys.platform != "linux":
        return 0
    return max(1, min(8, len(os.sched_getaffinity(0)) // num_local_ranks()))


def num_local_ranks() -> int:
    """How many ranks share this machine, as launchers say; 1 where none does."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not text.isdecimal():
        raise ConfigError(f"LOCAL_WORLD_SIZE={text!r} is no number of ranks; unset it, or set how many share a machine")
    return max(1, int(text))
