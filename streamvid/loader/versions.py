"""Versions of a loader's datasets: how a loader resumes in a state's version and continues in the newest version."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamvid.dataset.manifest import read_manifest
from streamvid.dataset.versions.later import Later
from streamvid.errors import ConfigError, DatasetError, StateError, StreamvidError
from streamvid.loader.delivery.requests import EarlierVersion, Selection
from streamvid.loader.exchange import gather_values
from streamvid.loader.mix import DataArguments, Mix, MixPart, can_change_version, configs_of
from streamvid.loader.options import ProcessGroups
from streamvid.loader.setup import DeliveryArguments, PlanArguments, Setup, set_up
from streamvid.loader.state import StateVersions, belongs, read_state
from streamvid.loader.stores import Stores
from streamvid.plan import Cursor, World
from streamvid.plan.versions.continued import AnyPlan
from streamvid.plan.versions.leftovers import IsKept

_log = logging.getLogger("streamvid.loader")

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoaderArguments:
    """All arguments of a VideoLoader, kept so that it can be set up again with other versions of its datasets."""

    data: DataArguments
    plan: PlanArguments
    delivery: DeliveryArguments

    def set_up(self, versions: Sequence[int | None] = (), stores: Stores | None = None) -> Setup:
        """Return the setup for these versions of the datasets. Raises the same errors as `setup.set_up`.

        stores: open stores from an earlier setup.
        """
        return set_up(replace(self.data, versions=tuple(versions)), self.plan, self.delivery, stores)

    def check_follow(self) -> None:
        """Raise ConfigError if `schedule.follow` is set, but cannot be used with these datasets or with features."""
        if not self.plan.schedule.follow:
            return
        if self.data.features is not None:
            raise ConfigError(
                "schedule.follow=True cannot be combined with features, which were created from one version of the "
                "dataset; omit one of them"
            )
        for config in configs_of(self.data.dataset):
            if not can_change_version(config):
                raise ConfigError(
                    f"schedule.follow=True cannot be combined with the dataset {config.url!s}, which is already "
                    "open or has a fixed version; pass its URL without a version, or leave schedule.follow out"
                )

    # Resuming.

    def resumed(self, setup: Setup, state: Mapping[str, Any], force: bool) -> tuple[Setup, Cursor]:
        """Return the setup and the position for a state.

        The setup is `setup` itself if the samples of its datasets are the samples recorded in the state.

        Raises StateError if the state is invalid, belongs to another plan, or is from a version that was deleted. With
        `force`, such a state is used as an approximate position in `setup`.
        """
        versions = StateVersions.of(state)
        if not force:
            setup = self._with_versions(setup, versions, _fingerprints(state))
        cursor, progress, belongs_to = read_state(state, setup.selection.batch_sizes, force)
        is_ours = belongs(belongs_to, setup.belongs_to, force)
        if not is_ours or (cursor.carried and setup.selection.earlier is None):
            cursor = setup.selection.at_share(cursor.epoch, progress)
        setup.selection.check(cursor)
        return setup, cursor

    def _with_versions(self, setup: Setup, versions: StateVersions, fingerprints: Sequence[object]) -> Setup:
        parts = setup.mix.parts
        if len(parts) != len(versions.current) or len(parts) != len(fingerprints):
            return setup  # the state belongs to other datasets, which a later check reports
        configs = configs_of(self.data.dataset)
        wanted = list(setup.mix.versions)
        for number, (part, config) in enumerate(zip(parts, configs, strict=True)):
            is_same = part.dataset.manifest.fingerprints.samples == fingerprints[number]
            if not is_same and can_change_version(config):
                wanted[number] = versions.current[number]
        if tuple(wanted) != setup.mix.versions:
            setup = self._at(setup, wanted)
        if versions.carried and all(map(can_change_version, configs)):
            setup = after(setup, self._at(setup, versions.carried))
        return setup

    def _at(self, setup: Setup, versions: Sequence[int]) -> Setup:
        try:
            return self.set_up(versions, setup.stores)
        except (DatasetError, ConfigError) as error:
            named = ", ".join(
                f"version {version} of {part.dataset.url}"
                for version, part in zip(versions, setup.mix.parts, strict=True)
            )
            raise StateError(
                f"the state was saved with {named}, which cannot be opened: {error}. If the version was deleted, start "
                "without the state, or call load_state_dict(state, force=True) to use the state as an approximate "
                "position in the version that is open. Versions with a tag are never deleted"
            ) from error


def agreed_versions(mix: Mix, is_due: bool, world: World, groups: ProcessGroups | None) -> tuple[int, ...] | None:
    """Return the versions with which all ranks begin an epoch: the newest versions that rank 0 sees.

    Every rank must call this function. The result is None unless an epoch is due on every rank.

    is_due: True if this rank is about to begin an epoch.
    Raises the same error on all ranks if rank 0 cannot read the datasets. Raises ConfigError if there are several ranks
    and they cannot communicate.
    """
    found: dict[str, Any] = {"is_due": is_due}
    if is_due and world.rank == 0:
        try:
            found["newest"] = [read_manifest(part.dataset.store).version for part in mix.parts]
        except StreamvidError as error:
            found["error"] = f"schedule.follow: the newest version cannot be read: {error}"
    told = gather_values(found, world, groups)
    if not all(value["is_due"] for _, value in told):
        return None
    first = next(value for rank, value in told if rank == 0)
    if "error" in first:
        raise DatasetError(str(first["error"]))
    return tuple(int(version) for version in first["newest"])


def followed(
    arguments: LoaderArguments, setup: Setup, plan: AnyPlan, versions: tuple[int, ...]
) -> tuple[Setup, Cursor]:
    """Return the setup with newer versions, and the position at which the epoch of `plan` begins with these versions.

    plan: plan of an epoch that has not begun, with the versions of `setup`.
    """
    new = arguments.set_up(versions, setup.stores)
    start = start_in(new.selection, plan)
    if start.carried:
        new = after(new, setup)
    _announce(setup, new, start.epoch)
    return new, start


def start_in(new: Selection, plan: AnyPlan) -> Cursor:
    """Return the position at which the epoch of `plan`, a plan for the previous version, begins with a new version."""
    epoch, places = plan.cursor.epoch, plan.cursor.positions
    carries = plan.options.tail_rule.carries
    carried = {name: place for name, place in places.items() if carries and place < plan.start_of(name)}
    start = new.epoch_plan(Cursor(epoch))
    return Cursor(epoch, {name: start.start_of(name) for name in new.mix.buckets}, carried=carried)


def _announce(old: Setup, new: Setup, epoch: int) -> None:
    if new.selection.world.rank:
        return
    for before, part in zip(old.mix.parts, new.mix.parts, strict=True):
        _log.info(
            "epoch %d: %s now uses version %d (%d samples) instead of version %d (%d samples)",
            epoch,
            part.dataset.url,
            part.dataset.manifest.version,
            part.subset.num_samples,
            before.dataset.manifest.version,
            before.subset.num_samples,
        )


def after(new: Setup, old: Setup) -> Setup:
    """Return the new setup, extended so that it first delivers the samples that the old setup has carried over."""
    mine, theirs = new.pipeline, old.pipeline
    return replace(
        new,
        selection=with_earlier(new.selection, old.selection),
        pipeline=replace(
            mine,
            num_workers=max(mine.num_workers, theirs.num_workers),
            clip_bytes=max(mine.clip_bytes, theirs.clip_bytes),
            frame_bytes=max(mine.frame_bytes, theirs.frame_bytes),
        ),
    )


def with_earlier(new: Selection, old: Selection) -> Selection:
    """Return the new selection, changed so that its plans begin with the samples that `old` has carried over."""
    numbers = range(len(new.mix.parts), 2 * len(new.mix.parts))
    parts = tuple(
        replace(part, number=number, later=part.number) for part, number in zip(old.mix.parts, numbers, strict=True)
    )
    earlier = replace(old, mix=replace(old.mix, parts=parts), earlier=None)
    return replace(new, earlier=EarlierVersion(earlier, _is_kept(earlier, new.mix)))


def _is_kept(old: Selection, new: Mix) -> IsKept:
    pairs = zip(old.mix.parts, new.parts, strict=True)
    removed = [Later.of(before.dataset, part.dataset.manifest).removed for before, part in pairs]

    def is_kept(bucket_id: str, sources: Int64Array, shards: Int64Array, indices: Int64Array) -> npt.NDArray[np.bool_]:
        kept = np.ones(len(sources), np.bool_)
        for source, shard in sorted(set(zip(sources.tolist(), shards.tolist(), strict=True))):
            if removed[source]:
                here = np.flatnonzero((sources == source) & (shards == shard))
                keys = _keys(old.mix.parts[source], bucket_id, shard)
                kept[here] = [keys[index] not in removed[source] for index in indices[here].tolist()]
        return kept

    return is_kept


def _keys(part: MixPart, bucket_id: str, shard: int) -> list[str]:
    """Return the keys of a shard's samples that pass the part's filter."""
    info, chosen = part.subset.shard_info(bucket_id, shard), part.subset.filter
    table = part.dataset.samples(info, list(dict.fromkeys(["key", *(chosen.columns if chosen else ())])))
    keys: list[str] = table.column("key").to_pylist()
    return keys if chosen is None else [keys[row] for row in chosen.matching(table).tolist()]


def _fingerprints(state: Mapping[str, Any]) -> list[object]:
    """Return the samples fingerprint of each dataset in a state."""
    datasets = state.get("datasets")
    if not isinstance(datasets, list):
        return []
    return [one.get("samples_fingerprint") if isinstance(one, Mapping) else None for one in datasets]
