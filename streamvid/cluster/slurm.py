"""Slurm engine: submits arrays of tasks as jobs that run a streamvid command.

The jobs need no process that outlives the submission: Slurm starts them one after the other, and starts a task again if
its node fails or its time limit is near.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from streamvid.cluster.options import ClusterOptions
from streamvid.errors import ConfigError, DatasetError, StreamvidError

DEFAULT_TASKS = 16
_SECONDS_TO_ANSWER = 300.0
_SCRIPT = """\
#!/bin/sh
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}"
if [ -n "${{SLURM_ARRAY_TASK_ID:-}}" ]; then
  set -- --task "$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))/$SLURM_ARRAY_TASK_COUNT"
fi
srun {program} "$@" {arguments}
code=$?
# 128 + SIGUSR1: the time limit is near.
if [ "$code" -eq 138 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


@dataclass(frozen=True, slots=True)
class SlurmJobs:
    """Slurm jobs to submit for one destination.

    program, arguments: command that each job runs. For a task, `--task I/N` is inserted between them.
    dest: URL at which the results are stored. It identifies the jobs.
    num_cpus: number of CPUs per task.
    num_arrays: number of arrays that run one after the other.
    has_last: True to run the command once more at the end, without `--task`.
    """

    verb: str
    dest: str
    num_cpus: int
    program: Sequence[str] = ()
    arguments: Sequence[str] = ()
    uses_gpu: bool = False
    num_arrays: int = 1
    has_last: bool = False

    @property
    def name(self) -> str:
        """Name of the jobs, which is the same for every submission to this destination."""
        return f"streamvid-{self.verb}-{hashlib.sha256(self.dest.encode()).hexdigest()[:8]}"

    @property
    def script(self) -> bytes:
        """Batch script for all jobs. Every argument is quoted for the shell (SAFE-1)."""
        return os.fsencode(_SCRIPT.format(program=shlex.join(self.program), arguments=shlex.join(self.arguments)))

    @property
    def options(self) -> list[str]:
        """Options for sbatch that are the same for all jobs."""
        gpus = ["--gpus-per-task=1"] if self.uses_gpu else []
        return [
            *("--parsable", "--ntasks=1", f"--cpus-per-task={self.num_cpus}", *gpus),
            *("--requeue", "--signal=USR1@120", "--open-mode=append", f"--job-name={self.name}"),
        ]


def submit(jobs: SlurmJobs, options: ClusterOptions) -> list[str]:
    """Submit arrays of tasks. Each array starts when the previous array has ended. Return the job ids.

    Raises ConfigError if Slurm's programs are missing, DatasetError if jobs for the same destination are queued or
    running, and StreamvidError with Slurm's message if Slurm refuses a job.
    """
    _refuse_second(jobs)
    size = f"--array=0-{(options.num_tasks or DEFAULT_TASKS) - 1}"
    ids: list[str] = []
    for each in [[size, "--output=%x-%A-%a.log"]] * jobs.num_arrays + [["--output=%x-%j.log"]] * jobs.has_last:
        after = [f"--dependency=afterany:{ids[-1]}"] if ids else []
        # The user's options come last, so that they take precedence.
        answer = _run(["sbatch", *each, *jobs.options, *after, *(options.sbatch_options or ())], jobs.script)
        ids.append(answer.strip().partition(";")[0])
        if len(ids) == 1:
            _refuse_second(jobs, ids[0])  # of two commands at the same time, the one with the lower id stays
    return ids


def _refuse_second(jobs: SlurmJobs, own: str = "") -> None:
    """Raise DatasetError if there are other jobs for this destination.

    own: id of a job that this process has submitted. If it is given, only jobs with lower ids count, and the submitted
        job is canceled before the error is raised.
    """
    found = re.findall(r"^\d+", _run(["squeue", "--noheader", "--format=%i", f"--name={jobs.name}"]), re.MULTILINE)
    others = sorted({int(number) for number in found if not own or int(number) < int(own)})
    if others:
        if own:
            _run(["scancel", own])
        raise DatasetError(
            f"Slurm jobs for {jobs.dest} are queued or running: {', '.join(map(str, others))}; wait until they end, or "
            f"cancel them with `scancel --name={jobs.name}`"
        )


def _run(command: Sequence[str], script: bytes = b"") -> str:
    try:
        done = subprocess.run(command, input=script, capture_output=True, check=False, timeout=_SECONDS_TO_ANSWER)
    except FileNotFoundError:
        raise ConfigError(
            f"engine='slurm' requires the {command[0]} program; run streamvid on a login node of the Slurm cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise StreamvidError(
            f"{command[0]} did not respond within {_SECONDS_TO_ANSWER:.0f} s; run the same command again"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        remedy = "change --sbatch-option, --num-tasks, or the number of CPUs per task (--workers or data.num_workers)"
        is_refused = command[0] == "sbatch"
        raise StreamvidError(f"{command[0]} failed: {said}; {remedy if is_refused else 'run the same command again'}")
    return done.stdout.decode(errors="replace")
