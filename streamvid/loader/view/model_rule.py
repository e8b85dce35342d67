"""Model rule for a loader, and validation of datasets and views against it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.document import load_bucket_config
from streamvid.buckets.model import ModelRule
from streamvid.dataset.manifest import Manifest
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError
from streamvid.loader.view.view import ViewOptions


def rule_of(preset: str | Path | ModelRule | None) -> ModelRule | None:
    """Return the model rule for a preset name, a bucket configuration file or a ModelRule; None if `preset` is None.

    Raises ConfigError if the preset is invalid or has no rule.
    """
    if preset is None or isinstance(preset, ModelRule):
        return preset
    if not isinstance(preset, str | Path):
        raise ConfigError(
            f"preset={preset!r}: must be a preset name such as 'wan2.1-480p', the path to a bucket configuration file, "
            "or a ModelRule"
        )
    rule = load_bucket_config(preset).model
    if rule is None:
        raise ConfigError(
            f"preset={str(preset)!r} has no model; add a model rule to it, such as model: {{name: mine, frame_rule: "
            "4k+1}, or use another preset"
        )
    return rule


def check_dataset(rule: ModelRule, dataset: Dataset, buckets: Sequence[Bucket]) -> None:
    """Raise ConfigError, which names the allowed values, if a dataset does not fit the model.

    The check uses the buckets of the samples and the rate at which clips are read, but not the model that the dataset
    was sealed for, because one dataset may serve several models.
    """
    try:
        rule.check_all(buckets, dataset.manifest.frame_rate)
    except ConfigError as error:
        raise ConfigError(f"{dataset.url}: {error}") from error


def check_view(rule: ModelRule, view: ViewOptions) -> None:
    """Raise ConfigError if a view delivers frames at a rate that differs from the model's."""
    if view.max_interval > 1:
        named, remedy = f"view.max_interval={view.max_interval}", "leave view.max_interval out"
    else:
        named, remedy = f"view.temporal={view.temporal!r}", "use another view.temporal, such as 'random'"
    if rule.fps is not None and (view.max_interval > 1 or view.temporal == "uniform"):
        raise ConfigError(
            f"{named} delivers frames at rates that differ from the {float(rule.fps):g} fps that {rule.name} requires; "
            f"{remedy}, or leave preset out"
        )


def common_rule(manifests: Iterable[Manifest]) -> ModelRule | None:
    """Return the model rule for which the datasets were sealed, or None if no dataset was sealed for a model.

    Raises ConfigError if the rules of the datasets give different token counts.
    """
    rules = [manifest.model for manifest in manifests if manifest.model is not None]
    names = {rule.factors: rule.name for rule in rules}
    if len(names) > 1:
        raise ConfigError(
            f"the datasets were sealed for {' and '.join(sorted(names.values()))}, which count a clip's tokens in "
            "different ways; set preset to the model to train, such as 'wan2.1-480p' or a ModelRule"
        )
    return rules[0] if rules else None
