"""Records of bad samples, the quarantine file that lists them, and the limit on their share."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, SampleError, StorageError
from streamvid.loader.options import LimitOptions
from streamvid.storage import LocalStore

_log = logging.getLogger(__name__)

# With a smaller base for the share, a single bad sample near the start would end a run.
_LEAST_DELIVERED = 1000
_KEPT_RECORDS = 10_000


@dataclass(frozen=True, slots=True)
class Substitution:
    """Record of a sample that was verified to be bad, and of its substitute (BAD-1).

    dataset: dataset URL without credentials.
    shard: path of the tar.
    place: index of the sample among the shard's samples that pass the filter.
    substitute_key: key of the substitute; None if the run ends because the bucket has no good sample.
    is_removed: True if the sample is not bad, but a later version of the dataset removed it.
    """

    dataset: str
    shard: str
    bucket_id: str
    place: int
    key: str
    reason: str
    substitute_key: str | None
    is_removed: bool = False

    def to_json(self) -> str:
        """Return the record as one line for the quarantine file."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


class Quarantine:
    """Counter for the substitutions in batches that were handed over. Prefetched batches do not count.

    If a quarantine folder is given, each substitution is appended as a line to a file in this folder
    (`quarantine-rank00000.jsonl` for rank 0). The file is created on first use.

    Raises ConfigError if the folder is inside one of the loader's datasets.
    """

    def __init__(self, limits: LimitOptions, rank: int, datasets: Sequence[Dataset]) -> None:
        self.path: Path | None = None
        if limits.quarantine is not None:
            folder = Path(limits.quarantine)
            refuse_inside("limits.quarantine", folder, datasets)
            self.path = folder / f"quarantine-rank{rank:05d}.jsonl"
        self._max_bad_fraction = limits.max_bad_fraction
        self.records: deque[Substitution] = deque(maxlen=_KEPT_RECORDS)
        self.num_substituted = self.num_delivered = 0

    def add(self, substitutions: Sequence[Substitution], num_samples: int) -> None:
        """Count a batch of `num_samples` samples that is being handed over, and log and write its substitutions.

        Raises SampleError if max_bad_fraction is exceeded, and StorageError if the file cannot be written.
        """
        self.num_delivered += num_samples
        for record in substitutions:
            self.records.append(record)
            self._write(record)
            if record.is_removed:
                continue
            _log.warning(
                "%s: bad sample %s (index %d in %s): %s; %s",
                record.dataset,
                record.key,
                record.place,
                record.shard,
                record.reason,
                f"{record.substitute_key} takes its place" if record.substitute_key else "no good sample found",
            )
            self.num_substituted += 1
        allowed = self._max_bad_fraction * max(self.num_delivered, _LEAST_DELIVERED)
        bad = [record for record in substitutions if not record.is_removed]
        if bad and self.num_substituted > allowed:
            raise SampleError(
                f"{self.num_substituted} of {self.num_delivered} samples were bad and had to be replaced "
                f"({self.num_substituted / max(1, self.num_delivered):.1%}), which is more than "
                f"limits.max_bad_fraction={self._max_bad_fraction} allows (the share is calculated over at least "
                f"{_LEAST_DELIVERED} samples). The last bad sample was {bad[-1].key} in {bad[-1].shard} of "
                f"{bad[-1].dataset}. {self._where()} Verify the dataset or copy it again, or raise "
                "limits.max_bad_fraction"
            )

    def _where(self) -> str:
        return (
            f"{self.path} lists them."
            if self.path
            else "Set limits.quarantine to a local folder to list them in a file."
        )

    def _write(self, record: Substitution) -> None:
        if self.path is None:
            return
        line = (record.to_json() + "\n").encode("utf-8", "backslashreplace")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Open the file for each line: lines are few, and the file is closed however the run ends.
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            raise StorageError(
                f"limits.quarantine: cannot write {self.path}: {error.strerror or error}; choose a writable folder"
            ) from error


def refuse_inside(name: str, folder: Path, datasets: Sequence[Dataset]) -> None:
    """Raise ConfigError if the folder that an option names is inside a dataset.

    name: name of the option.
    """
    for dataset in datasets:
        if isinstance(dataset.store, LocalStore) and folder.resolve().is_relative_to(dataset.store.root.resolve()):
            raise ConfigError(
                f"{name}={str(folder)!r}: must not be inside the dataset at {dataset.url}, which is never "
                "modified; choose a folder outside it"
            )
