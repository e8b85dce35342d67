"""Tests of DiffSynth-Studio's flags: their fields in TrainConfig, and their precedence with --set and a file."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.cli.verbs.train import command, request_of
from streamvid.compat.dataset_cache import cached_dataset
from streamvid.compat.diffsynth import FLAGS, flag_options, named_options
from streamvid.config import load_config
from streamvid.errors import ConfigError
from streamvid.sharder.options import ShardOptions
from streamvid.trainer.config import DataConfig, TrainConfig
from tests.cli.conftest import Tiny

# The flags of its training document, in the same order, plus num_frames and initialize_model_on_cpu from its scripts.
DOCUMENTED = re.findall(
    r"\w+",
    """
    dataset_base_path dataset_metadata_path dataset_repeat dataset_num_workers data_file_keys model_paths
    model_id_with_origin_paths extra_inputs fp8_models learning_rate num_epochs trainable_models
    find_unused_parameters weight_decay task output_path remove_prefix_in_ckpt save_steps lora_base_model
    lora_target_modules lora_rank lora_checkpoint preset_lora_path preset_lora_model use_gradient_checkpointing
    use_gradient_checkpointing_offload gradient_accumulation_steps height width max_pixels num_frames
    initialize_model_on_cpu resume_from_checkpoint
    """,
)

# From its document: the full training of Qwen-Image, without the location of the data.
FULL = """--dataset_repeat 50
  --model_id_with_origin_paths "Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors,Qwen/Qwen-Image:text_encoder/model*.safetensors,Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"
  --learning_rate 1e-5 --num_epochs 2 --remove_prefix_in_ckpt "pipe.dit." --output_path "./models/train/Qwen-Image_full"
  --trainable_models "dit" --use_gradient_checkpointing --find_unused_parameters"""
LORA = """--learning_rate 1e-4 --num_epochs 5 --remove_prefix_in_ckpt "pipe.dit." --output_path "./models/train/Qwen-Image_lora"
  --lora_base_model "dit" --lora_target_modules "to_q,to_k,to_v,add_q_proj,to_out.0,img_mod.1" --lora_rank 32
  --use_gradient_checkpointing --dataset_num_workers 8 --find_unused_parameters --initialize_model_on_cpu"""


def parsed(*arguments: object) -> dict[str, Any]:
    """Return the values that click parses from a command line."""
    return dict(command.make_context("train", [str(argument) for argument in arguments]).params)


def shard(source: str, options: ShardOptions) -> str:
    """Return the dataset from the cache, as the command obtains it."""
    folder, _ = cached_dataset(source, options, lambda *_: None, lambda _: None)
    return str(folder)


def config_of(*arguments: object) -> TrainConfig:
    """Return the configuration of the run that a command line describes."""
    given = parsed(*arguments)
    given.pop("init")
    request = request_of(*(given.pop(name) for name in ("config", "overrides", "factory", "trackers")), given)
    return request.resolve(shard)


def test_every_documented_flag_exists() -> None:
    """Checklist: every flag of the document exists, and --help shows the flags in groups, with examples."""
    assert {flag.name for flags in FLAGS.values() for flag in flags} == set(DOCUMENTED)
    shown = CliRunner().invoke(command, ["--help"]).output
    assert [name for name in DOCUMENTED if f"--{name}" not in shown] == []
    assert all(f"{title} (as in DiffSynth-Studio):" in shown for title in FLAGS) and "Examples:" in shown


def test_a_full_training_of_the_document(tiny: Tiny) -> None:
    config = config_of("--dataset_base_path", tiny.dataset, *shlex.split(FULL))
    assert config.data.dataset == {"url": str(tiny.dataset), "num_repeats": 50}
    assert config.model.weights.id_with_origin_paths.split(",")[1] == "Qwen/Qwen-Image:text_encoder/model*.safetensors"
    assert (config.optimizer.lr, config.num_epochs, config.checkpoints.remove_prefix) == (1e-5, 2, "dit.")
    assert (config.output, config.model.trainable) == (Path("models/train/Qwen-Image_full"), ("dit",))
    assert (
        config.model.activation_checkpointing.blocks
        and not config.model.activation_checkpointing.offload
        and config.accelerate.find_unused_parameters
    )
    # Other defaults are those of DiffSynth: one clip per step, first frames, no gradient clipping, a save per epoch.
    assert (config.data.batch_size, config.data.loader, config.checkpoints.steps, config.data.accumulate) == (
        1,
        {"view": {"temporal": "head"}},
        None,
        1,
    )
    assert (config.optimizer.betas, config.optimizer.weight_decay) == ((0.9, 0.999), 0.01)
    assert (config.optimizer.grad_clip, config.optimizer.schedule, config.optimizer.warmup_steps) == (
        None,
        "constant",
        0,
    )


def test_a_lora_training_of_the_document(tiny: Tiny) -> None:
    config = config_of("--dataset_base_path", tiny.dataset, *shlex.split(LORA))
    layers = ("to_q", "to_k", "to_v", "add_q_proj", "to_out.0", "img_mod.1")
    assert (config.model.lora.base_model, config.model.lora.target_modules, config.model.lora.rank) == (
        "dit",
        layers,
        32,
    )
    # Without --trainable_models, everything except the adapters is frozen.
    assert (config.model.trainable, config.data.num_workers, config.model.init) == ((), 8, "cpu")
    both = config_of("--dataset_base_path", tiny.dataset, *shlex.split(LORA), "--trainable_models", "vae,text_encoder")
    assert both.model.trainable == ("vae", "text_encoder") and both.model.lora == config.model.lora


FIELDS: dict[str, tuple[str, Any]] = {
    "learning_rate": ("optimizer.lr", st.floats(1e-8, 1.0)),
    "weight_decay": ("optimizer.weight_decay", st.floats(0, 1)),
    "num_epochs": ("num_epochs", st.integers(1, 99)),
    "save_steps": ("checkpoints.steps", st.integers(1, 99)),
    "gradient_accumulation_steps": ("data.accumulate", st.integers(1, 9)),
    "lora_rank": ("model.lora.rank", st.integers(1, 99)),
    "dataset_num_workers": ("data.num_workers", st.integers(0, 9)),
    "output_path": ("output", st.text("ab /.é𝄞", min_size=1).map(lambda text: f"out{text}")),
    "lora_base_model": ("model.lora.base_model", st.text("ab._1", min_size=1)),
}
SAID = st.fixed_dictionaries({}, optional={name: values for name, (_, values) in FIELDS.items()})


PLAIN = TrainConfig(data=DataConfig(dataset="ds"), output=Path("run"))


def value_at(config: object, name: str) -> object:
    for part in name.split("."):
        config = getattr(config, part)
    return str(config) if isinstance(config, Path) else config


@settings(max_examples=40)
@given(file=SAID, flags=SAID, sets=SAID)
def test_set_overrides_flags_and_flags_override_the_file(
    file: dict[str, Any], flags: dict[str, Any], sets: dict[str, Any]
) -> None:
    """Fields set nowhere keep the defaults of TrainConfig, because there is a file."""
    tree: dict[str, Any] = {"data": {"dataset": "ds"}, "output": "run"}
    for name, value in file.items():
        *sections, last = FIELDS[name][0].split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    overrides = [(FIELDS[name][0], value) for name, value in sets.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(tree))  # JSON is YAML
        given = {"dataset_base_path": "ds", **flags}
        lines = flag_options(given, named_options(tree) | dict(overrides).keys(), has_config=True)
        config = load_config(TrainConfig, path, [*lines.items(), *overrides])
    for name, (field, _) in FIELDS.items():
        said = [where[name] for where in (sets, flags, file) if name in where]
        expected = said[0] if said else value_at(PLAIN, field)
        assert value_at(config, field) == (str(Path(expected)) if field == "output" else expected)


@settings(max_examples=50)
@given(text=st.text().filter(lambda text: "\x7f" not in text))
def test_any_text_reaches_the_config_unchanged(text: str) -> None:
    config = load_config(TrainConfig, None, [("data.dataset", text or "x"), ("output", "run")])
    assert config.data.dataset == (text or "x")


def test_sharded_models_are_nested_lists() -> None:
    """Checklist 14 and 18: model_paths is nested JSON and may have trailing commas; fp8_models has the same form."""
    nested = '[\n\t["dit-1.safetensors", "dit-2.safetensors"],\n\t"vae.safetensors"\n]'
    expected = (("dit-1.safetensors", "dit-2.safetensors"), "vae.safetensors")
    for text in (nested, '[["dit-1.safetensors", "dit-2.safetensors",], "vae.safetensors",]'):
        lines = flag_options({"model_paths": text}, (), has_config=True)
        assert (
            load_config(TrainConfig, None, ["data.dataset=ds", "output=run", *lines.items()]).model.weights.paths
            == expected
        )
    lines = flag_options({"fp8_models": nested, "extra_inputs": "edit_image, mask"}, (), has_config=True)
    config = load_config(TrainConfig, None, ["data.dataset=ds", "output=run", *lines.items()])
    assert config.model.fp8 == ("dit-1.safetensors", "dit-2.safetensors", "vae.safetensors")
    assert config.data.extra_inputs == ("edit_image", "mask")
    with pytest.raises((ConfigError, click.BadParameter), match="JSON"):
        flag_options({"fp8_models": "[a, b"}, (), has_config=True)


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ("to_q", ("to_q",)),
        ("", ""),
        ("regex:.*to_[qk]", "regex:.*to_[qk]"),
        (None, ("q", "k", "v", "o", "ffn.0", "ffn.2")),
    ],
)
def test_target_modules(tiny: Tiny, given: str | None, targets: object) -> None:
    """Checklist 29 and 30: a single name is a name, expressions are marked, and no layer is chosen automatically."""
    flags = () if given is None else ("--lora_target_modules", given)
    config = config_of("--dataset_base_path", tiny.dataset, "--lora_base_model", "dit", *flags)
    assert config.model.lora.target_modules == targets


def test_a_config_keeps_its_own_defaults(tiny: Tiny, tmp_path: Path) -> None:
    """With --config, other fields keep TrainConfig's defaults, except for one clip per step and its first frames."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "output: run\nmax_steps: 7\ndata: {max_tokens_per_batch: 4000, loader: {view: {temporal: random}}}\n"
    )
    config = config_of("--config", file, "--dataset_base_path", tiny.dataset)
    assert (config.max_steps, config.data.max_tokens_per_batch, config.data.batch_size) == (7, 4000, None)
    assert config.data.loader == {"view": {"temporal": "random"}} and config.optimizer == PLAIN.optimizer
    file.write_text("output: run\n")
    config = config_of("--config", file, "--dataset_base_path", tiny.dataset, "--set", "max_steps=3")
    assert (config.data.batch_size, config.data.loader, config.max_steps) == (1, {"view": {"temporal": "head"}}, 3)


def test_flags_override_a_file_that_sets_other_fields(tiny: Tiny, tmp_path: Path) -> None:
    """Flags override the file's dataset and number of steps; a task from --set has the same effect as a flag."""
    file = tmp_path / "mine.yaml"
    file.write_text("data: {dataset: other/, features: {url: elsewhere/}}\noutput: run\nmax_steps: 7\n")
    config = config_of("--config", file, "--dataset_base_path", tiny.dataset, "--num_epochs", 2)
    assert (config.data.dataset, config.max_steps, config.num_epochs) == (str(tiny.dataset), None, 2)
    given = ("--config", file, "--dataset_base_path", tiny.dataset, "--output_path", "latents")
    assert config_of(*given, "--set", "task=sft:data_process").data.features.url == "latents"
    assert config_of(*given).data.features.url == "elsewhere/"


def test_stage_one_writes_to_output_path(tiny: Tiny) -> None:
    """The first stage trains nothing, so options of trained models are ignored."""
    config = config_of("--dataset_base_path", tiny.dataset, *shlex.split(LORA), "--task", "sft:data_process")
    assert config.data.features.url == "./models/train/Qwen-Image_lora"
    assert (
        config.model.lora.base_model is None
        and not config.model.activation_checkpointing.blocks
        and config.model.trainable is None
    )


def test_factory_and_trackers(tiny: Tiny) -> None:
    config = config_of(
        "--dataset_base_path",
        tiny.dataset,
        "--factory",
        "my.train:build",
        "--tracker",
        "tensorboard",
        "--tracker",
        "wandb",
    )
    assert config.model.factory == "my.train:build" and config.logging.trackers == ("tensorboard", "wandb")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--config FILE, --dataset_base_path FOLDER or --init FOLDER"),
        (
            ("--max_pixels", "100", "--set", "data.dataset=ds", "--set", "output=run"),
            "--max_pixels requires --dataset_base_path",
        ),
        (
            ("--dataset_base_path", "{tiny}", "--dataset_repeat", "0"),
            "dataset_repeat=0: must be an integer of at least 1",
        ),
        (
            ("--dataset_base_path", "{tiny}", "--set", "data.dataset=ds"),
            "data.dataset cannot be combined with --dataset_base_path",
        ),
        (("--dataset_base_path", "{tiny}", "--set", "data.datset=ds"), "did you mean 'dataset'?"),
        (("--dataset_base_path", "{tiny}", "--max_pixel", "100"), "--max_pixels"),
        (("--dataset_base_path", "{tiny}", "--max_pixels", "100"), "max_pixels is 100, but the dataset"),
        (
            ("--dataset_base_path", "{tiny}", "--dataset_metadata_path", "m.csv"),
            "is a sealed dataset; omit --dataset_metadata_path",
        ),
        (("--dataset_base_path", "{videos}"), "dataset_metadata_path"),
        (("--offload_models", "a"), "--offload_models is not available; store frozen models in FP8 with --fp8_models"),
        (("--tokenizer_path", "a"), "--tokenizer_path is not available; add a parameter tokenizer_path to your"),
        (("--processor_path", "a"), "and set model.args.processor_path"),
        (("--max_timestep_boundary", "1"), "and set model.args.max_timestep_boundary"),
        (("--dataset_base_path", "{tiny}", "--task", "sft:train"), "data.features.url is null"),
        (("--dataset_base_path", "{tiny}", "--lora_checkpoint", "a.safetensors"), "base_model"),
    ],
)
def test_mistakes_are_reported_before_any_work(tiny: Tiny, arguments: tuple[str, ...], says: str) -> None:
    given = [text.format(tiny=tiny.dataset, videos=tiny.videos) for text in arguments]
    with pytest.raises((ConfigError, click.UsageError)) as caught:
        command.main(given, standalone_mode=False) if not given else config_of(*given)
    assert says in (
        caught.value.format_message() if isinstance(caught.value, click.ClickException) else str(caught.value)
    )
