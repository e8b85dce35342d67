"""DiffSynth-Studio's training flags under their original names: each sets an option of TrainConfig or describes data.

--learning_rate 1e-5 ─► optimizer.lr=1e-05 ─┐
a file (--config) ──────────────────────────┴─► TrainConfig      precedence: --set, then flags, then the file
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import click

from streamvid.compat.diffsynth_data import DataFlags, Shard, data_options
from streamvid.config import (
    OptionInfo,
    load_config,
    nested_options,
    option_info,
    option_types,
    parse_yaml,
    read_yaml,
)
from streamvid.errors import ConfigError
from streamvid.trainer.config import TrainConfig

Command = TypeVar("Command", bound=Callable[..., object])
Given = Mapping[str, object]
"""Flag → value; None for a flag that was not given."""


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


def _layers(value: str) -> object:
    """Parse comma-separated layer names. Return "regex:…" and "" unchanged; with "", streamvid chooses the layers."""
    return value if not value or value.startswith("regex:") else _words(value)


def _child_prefix(value: str) -> str:
    """Remove the `pipe.` prefix, because our models belong to the training module rather than to a pipe."""
    return value.removeprefix("pipe.")


def _paths(value: str) -> object:
    """Parse a value as JSON or, if that fails, as YAML, which allows a trailing comma."""
    try:
        return json.loads(value)
    except ValueError:
        return parse_yaml(value, f"{value!r} is not JSON, and it")


def _fp8(value: str) -> list[str]:
    """Parse comma-separated names, or JSON as in --model_paths. In JSON, the shards of a model form a nested list."""
    found = _paths(value) if value.lstrip().startswith("[") else _words(value)
    return [path for one in found for path in (one if isinstance(one, list) else [one])]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class DiffsynthFlag:
    """One flag of DiffSynth-Studio.

    option: option of TrainConfig that the flag sets; "" if the flag describes data.
    help, kind: help text and type of the flag, taken from the option by default. A flag of type bool is a switch.
    theirs: default value in DiffSynth-Studio, if streamvid's default differs. It applies only without --config.
    """

    name: str
    option: str = ""
    help: str = ""
    kind: type | None = None
    parse: Callable[[str], object] = str
    theirs: str | None = None

    def declare(self, group: str) -> click.Option:
        """Create the click option. Its value is None if the flag is not given."""
        info, kind = _declaration(self.option) if self.option else (None, self.kind or str)
        kind = self.kind or kind
        text = self.help or (info.help if info is not None else "")
        if self.theirs is not None:
            text += f"  [default: {self.theirs}]"
        if kind is bool:
            return GroupedOption([f"--{self.name}"], group=group, is_flag=True, default=None, help=text)
        metavar = {int: "N", float: "X"}.get(kind, "TEXT")
        return GroupedOption([f"--{self.name}"], group=group, type=kind, default=None, metavar=metavar, help=text)

    def value(self, given: object) -> object:
        try:
            return self.parse(given) if isinstance(given, str) else given
        except ConfigError as error:
            raise ConfigError(f"--{self.name}: {error}") from None


class GroupedOption(click.Option):
    """Click option that stores the heading under which the help lists it."""

    def __init__(self, declarations: Sequence[str], *, group: str, **attributes: object) -> None:
        self.group = group
        super().__init__(declarations, **attributes)  # type: ignore[arg-type]


@functools.cache
def _declaration(name: str) -> tuple[OptionInfo, type]:
    """Return the declaration and the flag type of the TrainConfig option with this dotted name."""
    cls: type = TrainConfig
    *sections, last = name.split(".")
    for section in sections:
        nested = nested_options(option_types(cls)[section])
        assert nested is not None, name
        cls = nested
    members = option_types(cls)[last]
    info = option_info(next(one for one in dataclasses.fields(cls) if one.name == last))
    assert info is not None, name
    return info, next((kind for kind in (bool, float, int) if kind in members), str)


FLAGS: Mapping[str, tuple[DiffsynthFlag, ...]] = {
    "Dataset": (
        DiffsynthFlag("dataset_base_path", help="Media folder, sealed dataset, or output folder of sft:data_process."),
        DiffsynthFlag("dataset_metadata_path", help="Metadata file (CSV, JSON or JSONL) with one row per clip."),
        DiffsynthFlag("dataset_repeat", help="Number of times to deliver each clip per epoch.  [default: 1]", kind=int),
        DiffsynthFlag("dataset_num_workers", "data.num_workers"),
        DiffsynthFlag("data_file_keys", help="Metadata columns that contain file paths.  [default: image,video]"),
        DiffsynthFlag("extra_inputs", "data.extra_inputs", parse=_words),
    ),
    "Model files": (
        DiffsynthFlag(
            "model_paths",
            "model.weights.paths",
            "JSON list of weight files; a nested list contains the shards of one model.",
            parse=_paths,
        ),
        DiffsynthFlag(
            "model_id_with_origin_paths",
            "model.weights.id_with_origin_paths",
            "Additional weight files in model.weights.root, as 'ID:GLOB,ID:GLOB'.",
        ),
        DiffsynthFlag("fp8_models", "model.fp8", parse=_fp8),
        DiffsynthFlag(
            "initialize_model_on_cpu",
            "model.init",
            "Build the module in host memory, which is the default.",
            kind=bool,
        ),
    ),
    "Training": (
        DiffsynthFlag("task", "task"),
        DiffsynthFlag("learning_rate", "optimizer.lr", "Learning rate.  [default: 1e-4]"),
        DiffsynthFlag("weight_decay", "optimizer.weight_decay", "Weight decay.  [default: 0.01]"),
        DiffsynthFlag("num_epochs", "num_epochs"),
        DiffsynthFlag("trainable_models", "model.trainable", "Child modules to train in full.", parse=_words),
        DiffsynthFlag("find_unused_parameters", "accelerate.find_unused_parameters"),
        DiffsynthFlag(
            "resume_from_checkpoint",
            "checkpoints.resume",
            "Checkpoint to resume: 'latest' or a folder OUTPUT/state/step-N.  [default: latest]",
        ),
    ),
    "Output": (
        DiffsynthFlag("output_path", "output", "Output folder for the run or for the features.", theirs="./models"),
        DiffsynthFlag("save_steps", "checkpoints.steps"),
        DiffsynthFlag("remove_prefix_in_ckpt", "checkpoints.remove_prefix", parse=_child_prefix, theirs="pipe.dit."),
    ),
    "LoRA": (
        DiffsynthFlag("lora_base_model", "model.lora.base_model"),
        DiffsynthFlag("lora_target_modules", "model.lora.target_modules", parse=_layers, theirs="q,k,v,o,ffn.0,ffn.2"),
        DiffsynthFlag("lora_rank", "model.lora.rank", "Rank of the adapters.  [default: 32]"),
        DiffsynthFlag("lora_checkpoint", "model.lora.checkpoint"),
        DiffsynthFlag(
            "preset_lora_path",
            "model.lora.preset_path",
            "Adapter file to fuse into the module named by --preset_lora_model before training.",
        ),
        DiffsynthFlag("preset_lora_model", "model.lora.preset_model"),
    ),
    "Gradients": (
        DiffsynthFlag("use_gradient_checkpointing", help="Recompute activations in the backward pass.", kind=bool),
        DiffsynthFlag(
            "use_gradient_checkpointing_offload",
            help="Recompute activations, and keep block inputs in host memory.",
            kind=bool,
        ),
        DiffsynthFlag("gradient_accumulation_steps", "data.accumulate"),
    ),
    "Clip sizes when sharding": (
        DiffsynthFlag("height", help="Height of all clips; requires --width.", kind=int),
        DiffsynthFlag("width", help="Width of all clips; requires --height.", kind=int),
        DiffsynthFlag(
            "max_pixels",
            help="Maximum number of pixels per frame if neither --height nor --width is given.  [default: 1048576]",
            kind=int,
        ),
        DiffsynthFlag("num_frames", help="Maximum number of frames, of the form 4k+1.  [default: 81]", kind=int),
    ),
}
_ALL = tuple(flag for flags in FLAGS.values() for flag in flags)
_OF_SCRIPTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("tokenizer_path", "processor_path"),
        "is not available; add a parameter {name} to your factory, and set model.args.{name}",
    ),
    **dict.fromkeys(
        ("min_timestep_boundary", "max_timestep_boundary"),
        "is not available, because only some losses use it; add a parameter {name} to your factory, and set "
        "model.args.{name}",
    ),
    "offload_models": "is not available; store frozen models in FP8 with --fp8_models, or encode once with "
    "--task sft:data_process, so that training needs no encoder",
}
"""Maps each flag that only some DiffSynth-Studio scripts have to the rest of its error message."""
_THEIR_OPTIMIZER: Mapping[str, object] = {"optimizer.betas": [0.9, 0.999], "optimizer.grad_clip": None}
_RECIPE_FLAGS: Mapping[str, str] = {
    "model.args.model": "--model FOLDER",
    "data.dataset": "--dataset URL",
    "output": "--output FOLDER",
}
"""Maps each recipe option that has no default to its flag."""
_ABOUT_TRAINING = ("model.lora.", "model.activation_checkpointing.", "model.trainable", "num_epochs")


def add_train_flags(command: Command) -> Command:
    """Add all flags of DiffSynth-Studio to a command, in groups."""
    params = command.__dict__.setdefault("__click_params__", [])
    flags = [flag.declare(f"{title} (as in DiffSynth-Studio)") for title, flags in FLAGS.items() for flag in flags]
    refused = [
        click.Option([f"--{name}"], hidden=True, expose_value=False, callback=_refuse, default=None)
        for name in _OF_SCRIPTS
    ]
    params.extend(reversed([*flags, *refused]))
    return command


def _refuse(context: click.Context, option: click.Parameter, value: object) -> None:
    if value is not None:
        raise click.UsageError(f"--{option.name} {_OF_SCRIPTS[str(option.name)].format(name=option.name)}")


@dataclass(frozen=True)
class TrainRequest:
    """Parsed command line of `streamvid train`.

    file: YAML file of a TrainConfig.
    overrides: arguments of --set.
    settings: options set by streamvid's own flags.
    given: values of DiffSynth-Studio's flags.
    defaults: function that takes the --set options as text and returns default values, both keyed by dotted name.
        All other settings override these values.
    """

    file: Path | None
    overrides: Sequence[str]
    settings: Mapping[str, object] = field(default_factory=dict)
    given: Given = field(default_factory=dict)
    defaults: Callable[[Mapping[str, str]], Mapping[str, object]] | None = None

    def resolve(self, shard: Shard) -> TrainConfig:
        """Return the configuration of the run. If the flags describe a dataset that does not exist yet, shard it first.

        Raises ConfigError for invalid settings, and the same errors as `shard`. Settings that can be checked without
        the data are validated before sharding starts.
        """
        tree = {} if self.file is None else read_yaml(self.file)
        sets = {line.partition("=")[0].strip(): line.partition("=")[2] for line in self.overrides}
        named = frozenset({*named_options(tree), *sets})
        task = str(sets.get("task") or self.given.get("task") or tree.get("task", "sft"))
        options = flag_options(self.given, named, has_config=self.file is not None, task=task)
        options |= self.settings
        if self.defaults is not None:
            options = self._defaults(sets, {*named, *options}) | options
            self._check_places(sets, {*named, *options})
        base = self.given.get("dataset_base_path")
        if base is None:
            self._check_without_data()
            return self._load(options)
        flags = DataFlags.of(self.given, named=named, in_sets=frozenset(sets))
        # The folder is either the dataset or the features; other mistakes do not depend on which.
        pending = {"data.dataset": base}
        if flags.dataset_metadata_path is None:
            pending["data.features.url"] = base
        assumed = {name: value for name, value in pending.items() if name not in named}
        return self._load(options | data_options(flags, self._load(assumed | options), shard))

    def _defaults(self, sets: Mapping[str, str], said: set[str]) -> dict[str, object]:
        assert self.defaults is not None
        skipped = {"data.batch_size"} if "data.max_tokens_per_batch" in said else set()
        return {name: value for name, value in self.defaults(sets).items() if name not in said | skipped}

    def _check_places(self, sets: Collection[str], said: Collection[str]) -> None:
        """Raise ConfigError if a recipe lacks its model, its dataset or its output folder.

        The message names the missing flags.
        """
        has_data = self.given.get("dataset_base_path") is not None
        missing = [
            flag
            for option, flag in _RECIPE_FLAGS.items()
            if option not in said
            and not any(option.startswith(f"{section}.") for section in sets)
            and not (has_data and option == "data.dataset")
        ]
        if missing:
            raise ConfigError(f"a recipe needs {' and '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}")

    def _load(self, options: Mapping[str, object]) -> TrainConfig:
        return load_config(TrainConfig, self.file, [*options.items(), *self.overrides])

    def _check_without_data(self) -> None:
        about_data = [flag.name for flag in _ALL if not flag.option and not flag.name.startswith("use_")]
        for name in about_data:
            if self.given.get(name) is not None:
                raise click.UsageError(f"--{name} requires --dataset_base_path; add --dataset_base_path FOLDER")


def flag_options(
    given: Given, named: Collection[str], *, has_config: bool, task: str | None = None
) -> dict[str, object]:
    """Return the TrainConfig options that the flags set, as a mapping from dotted names to values.

    Options that `data_options` sets are omitted.

    named: options that are in the file or in --set.
    has_config: True if a file is given; without a file, DiffSynth-Studio's defaults apply.
    task: task of the run, whether it comes from a flag, the file or --set.
    """
    found = {
        flag.option: flag.value(given[flag.name]) for flag in _ALL if flag.option and given.get(flag.name) is not None
    }
    if found.pop("model.init", None):
        found["model.init"] = "cpu"
    found |= _activation_checkpointing(given, named)
    has_data = given.get("dataset_base_path") is not None
    said = {*found, *named}
    if has_data and not {"data.batch_size", "data.max_tokens_per_batch"} & said:
        found["data.batch_size"] = 1
    if has_data and not has_config:
        found |= {name: value for name, value in _theirs(said).items() if name not in said}
    if given.get("num_epochs") is not None and "max_steps" in named:
        found["max_steps"] = None  # from the file; --set is applied again after this
    if (task or found.get("task")) == "sft:data_process":
        if "output" in found:
            found["data.features.url"] = found["output"]
        # Nothing is trained, and trainable models may not exist, although scripts name them in both stages.
        found = {name: value for name, value in found.items() if not name.startswith(_ABOUT_TRAINING)}
    return found


def _theirs(said: Collection[str]) -> dict[str, object]:
    found = {flag.option: flag.value(flag.theirs) for flag in _ALL if flag.theirs is not None}
    found |= _THEIR_OPTIMIZER
    if "model.lora.base_model" not in said:
        del found["model.lora.target_modules"]
        return found
    found["model.lora.format"] = "diffsynth"
    if "model.trainable" not in said:
        found["model.trainable"] = []
    return found


def _activation_checkpointing(given: Given, named: Collection[str]) -> dict[str, object]:
    offload = given.get("use_gradient_checkpointing_offload")
    if not (offload or given.get("use_gradient_checkpointing")):
        return {}
    section = "model.activation_checkpointing"
    found: dict[str, object] = {} if f"{section}.blocks" in named else {f"{section}.blocks": ["auto"]}
    return found | ({f"{section}.offload": True} if offload else {})


def named_options(tree: Mapping[str, object], prefix: str = "") -> set[str]:
    """Return the dotted names of all options and sections in the parsed content of a configuration file."""
    found = {f"{prefix}{name}" for name in tree}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= named_options(value, f"{prefix}{name}.")
    return found
