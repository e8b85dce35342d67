"""Tests of the rank of a process, as set by launchers."""

from __future__ import annotations

import pytest

from streamvid.errors import ConfigError
from streamvid.loader.world import default_num_workers, detect_world
from streamvid.plan.position import World


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, World()),
        ({"RANK": "3", "WORLD_SIZE": "8"}, World(3, 8)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, World(1, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, World()),  # a batch script that was not started by srun
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, World(2, 3)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, World(1, 2)),
        ({"RANK": "0"}, World()),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16"}, World(1, 2)),
    ],
)
def test_launcher_variables(environ: dict[str, str], world: World) -> None:
    assert detect_world(environ) == world


@pytest.mark.parametrize("environ", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_contradictions_are_named(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"RANK=.*WORLD_SIZE=.*pass world="):
        detect_world(environ)


def test_workers_of_one_rank() -> None:
    assert 0 <= default_num_workers() <= 8
