"""DiffSynth-Studio's flags of training, under their own names: each as a field of TrainConfig, or of the data.

--learning_rate 1e-5 ─► optimizer.lr=1e-05 ─┐
a file (--config) ──────────────────────────┴─► TrainConfig        said twice: --set, then flags, then the file
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SURROGATES = re.compile(r"\\ud[89ab]..\\ud[c-f]..")


def _text(value: str) -> Any:
    return value


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


def _layers(value: str) -> Any:
    """A name, or several, is a list of them; what is an expression says so, and nothing is for us to choose."""
    return value if not value or value.startswith("regex:") else _words(value)


def _child_prefix(value: str) -> str:
    """Their modules are parts of a `pipe`; ours are children of the training module."""
    return value.removeprefix("pipe.")


def _paths(value: str) -> Any:
    """JSON; what is none may be YAML, which the configuration reads, or says what is wrong with."""
    try:
        return json.loads(value)
    except ValueError:
        return _Yaml(value)


def _fp8(value: str) -> list[str]:
    """Comma-separated, or JSON as --model_paths, where the files of a sharded model are a list of their own."""
    if not value.lstrip().startswith("["):
        return _words(value)
    found = _paths(value)
    if not isinstance(found, list):
        raise click.BadParameter(f'{value!r} is no JSON; write it as dit,text_encoder or ["a.safetensors"]')
    return [path for one in found for path in (one if isinstance(one, list) else [one])]


class _Yaml(str):
    """A value that is YAML already."""


@dataclass(frozen=True)
class Flag:
    """One flag. field: what it says in TrainConfig, dotted; "": it is about the data. theirs: what they take where it
    is not given, and so do we without a --config. kind: a click type; a switch where it is bool."""

    name: str
    group: str
    help: str
    field: str = ""
    kind: type = str
    parse: Callable[[Any], Any] = _text
    theirs: Any = None

    def option(self) -> Callable[[_Command], _Command]:
        """As click has it: None where it is not given."""
        if self.kind is bool:
            return click.option(f"--{self.name}", self.name, is_flag=True, default=None, help=self.help)
        metavar = {int: "N", float: "X"}.get(self.kind, "TEXT")
        return click.option(f"--{self.name}", self.name, type=self.kind, metavar=metavar, help=self.help)


DATA, MODEL, BASIC, OUTPUT, LORA, GRADIENT, SIZE = (
    "Dataset", "Model files", "Training", "Output", "LoRA", "Gradients", "Sizes of clips, where they are sharded",
)  # fmt: skip
FLAGS = (
    Flag("dataset_base_path", DATA, "Folder or s3:// prefix of the files; or a sealed dataset; or what "
         "sft:data_process has written."),
    Flag("dataset_metadata_path", DATA, "CSV, JSON or JSONL with a row a clip. Sharded on first use, into a cache."),
    Flag("dataset_repeat", DATA, "How often an epoch takes each clip.  [default: 1]", kind=int),
    Flag("dataset_num_workers", DATA, "Decode processes a rank; 0: in the process that trains.  [default: what fits]",
         "num_workers", int),
    Flag("data_file_keys", DATA, "Columns of files, as 'video,control_video'.  [default: image,video]"),
    Flag("extra_inputs", DATA, "Columns and media that the module reads, as 'control_video'.",
         "model.extra_inputs", parse=_words),
    Flag("model_paths", MODEL, "JSON list; of a model in several files a list in it.", "model.paths", parse=_paths),
    Flag("model_id_with_origin_paths", MODEL, "'ID:GLOB,ID:GLOB' below ./models.", "model.id_with_origin_paths"),
    Flag("fp8_models", MODEL, "Frozen models to store in 8 bits: names, or paths of --model_paths.",
         "model.fp8", parse=_fp8),
    Flag("initialize_model_on_cpu", MODEL, "Make the module in the host's memory, as is always done.",
         "model.init", bool, lambda _: "cpu"),
    Flag("task", BASIC, "sft, sft:data_process, sft:train or package.module:name.  [default: sft]", "task"),
    Flag("learning_rate", BASIC, "Constant, from the first step on.  [default: 1e-4]", "optimizer.lr", float),
    Flag("weight_decay", BASIC, "[default: 0.01]", "optimizer.weight_decay", float),
    Flag("num_epochs", BASIC, "[default: 1]", "num_epochs", int),
    Flag("trainable_models", BASIC, "Children that train as a whole, as 'dit,text_encoder'; dotted names too.",
         "model.trainable", parse=_words),
    Flag("find_unused_parameters", BASIC, "Some trainable parameters take no part in some steps.",
         "find_unused_parameters", bool),
    Flag("resume_from_checkpoint", BASIC, "latest, or OUTPUT/state/step-N.  [default: latest]",
         "resume_from_checkpoint"),
    Flag("output_path", OUTPUT, "Folder of the run; of sft:data_process: what it writes.  [default: ./models]",
         "output", theirs="./models"),
    Flag("save_steps", OUTPUT, "Save every N steps.  [default: after each epoch]", "save_steps", int),
    Flag("remove_prefix_in_ckpt", OUTPUT, "Cut from names of saved tensors; 'pipe.' is.  [default: pipe.dit.]",
         "remove_prefix", parse=_child_prefix, theirs="pipe.dit."),
    Flag("lora_base_model", LORA, "Child that gets adapters.", "lora.base_model"),
    Flag("lora_target_modules", LORA, "Its layers, by their last names; '': chosen.  [default: q,k,v,o,ffn.0,ffn.2]",
         "lora.target_modules", parse=_layers, theirs="q,k,v,o,ffn.0,ffn.2"),
    Flag("lora_rank", LORA, "[default: 32]", "lora.rank", int),
    Flag("lora_checkpoint", LORA, "Adapters to go on from.", "lora.checkpoint"),
    Flag("preset_lora_path", LORA, "Adapters fused into a child before all else.", "lora.preset_path"),
    Flag("preset_lora_model", LORA, "That child.", "lora.preset_model"),
    Flag("use_gradient_checkpointing", GRADIENT, "Compute activations of blocks again on the way back.", kind=bool),
    Flag("use_gradient_checkpointing_offload", GRADIENT, "And keep blocks' inputs in the host's memory.", kind=bool),
    Flag("gradient_accumulation_steps", GRADIENT, "Batches a step.  [default: 1]", "accumulate", int),
    Flag("height", SIZE, "One size for all clips, with --width.", kind=int),
    Flag("width", SIZE, "See --height.", kind=int),
    Flag("max_pixels", SIZE, "Each clip's own size, scaled down to so many pixels.  [default: 1048576]", kind=int),
    Flag("num_frames", SIZE, "The first so many frames, 4k+1; fewer of shorter clips.  [default: 81]", kind=int),
)  # fmt: skip
_THEIR_OPTIMIZER = {"optimizer.betas": [0.9, 0.999], "optimizer.grad_clip": None}


def train_flags(command: _Command) -> _Command:
    """All of them, for a command."""
    for flag in reversed(FLAGS):
        command = flag.option()(command)
    return command


def override(field: str, value: object) -> str:
    """A line for `load_config`. JSON is YAML, but for pairs of surrogates."""
    if isinstance(value, _Yaml):
        return f"{field}={value}"
    text = _SURROGATES.sub(lambda pair: f"\\U{ord(json.loads(chr(34) + pair[0] + chr(34))):08x}", json.dumps(value))
    return f"{field}={text}"


def flag_overrides(
    given: Mapping[str, Any], named: Collection[str], *, has_config: bool, task: str | None = None
) -> list[str]:
    """What the flags say of a run, as lines for `load_config`; those about the data are `train_data`'s.

    given: flag → value, None where it was not given.   named: fields that the file or --set names.
    has_config: without a file, what nobody says is as DiffSynth-Studio has it.   task: of the run, whoever says it.
    """
    found = {
        flag.field: flag.parse(given[flag.name]) for flag in FLAGS if flag.field and given.get(flag.name) is not None
    }
    found |= _recompute(given, named)
    said = {*found, *named}
    if given.get("dataset_base_path") is not None and not {"batch_size", "max_tokens_per_batch"} & said:
        found["batch_size"] = 1
    if not has_config and given.get("dataset_base_path") is not None:
        found |= {name: value for name, value in _theirs(said).items() if name not in said}
    if given.get("num_epochs") is not None and "max_steps" in named:
        found["max_steps"] = None  # of the file; of --set it is said once more behind this
    if (task or found.get("task")) == "sft:data_process":
        if "output" in found:
            found["sidecar"] = found["output"]
        # Nothing trains, and what would is not there: their scripts name it in both stages all the same.
        found = {name: value for name, value in found.items() if not name.startswith(_TRAINED)}
    return [override(name, value) for name, value in found.items()]


_TRAINED = ("lora.", "recompute.", "model.trainable", "num_epochs")


def _theirs(said: Collection[str]) -> dict[str, Any]:
    found = {flag.field: flag.parse(flag.theirs) for flag in FLAGS if flag.field and flag.theirs is not None}
    found |= _THEIR_OPTIMIZER
    if "lora.base_model" not in said:
        del found["lora.target_modules"]
    elif "model.trainable" not in said:
        found["model.trainable"] = []
    return found


def _recompute(given: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    offload = given.get("use_gradient_checkpointing_offload")
    if not (offload or given.get("use_gradient_checkpointing")):
        return {}
    found: dict[str, Any] = {} if "recompute.blocks" in named else {"recompute.blocks": ["auto"]}
    return found | ({"recompute.offload": True} if offload else {})


def named_fields(tree: Mapping[str, Any], overrides: Sequence[str]) -> set[str]:
    """Every field that a file, as a tree, or an override names, dotted; a section counts with all in it."""
    found = {override.partition("=")[0].strip() for override in overrides}
    pending = [("", tree)]
    while pending:
        prefix, node = pending.pop()
        for name, value in node.items():
            found.add(f"{prefix}{name}")
            if isinstance(value, Mapping):
                pending.append((f"{prefix}{name}.", value))
    return found
