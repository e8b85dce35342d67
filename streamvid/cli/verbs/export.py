"""streamvid export: convert trained weights to the file formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from streamvid.cli.console import print_json
from streamvid.cli.flags import Location
from streamvid.errors import ConfigError, printable
from streamvid.modules.config import LoraFormat

_EPILOG = """\b
Examples:
  streamvid export run/ --format comfyui -o my-lora.safetensors
  streamvid export run/ --format peft -o my-lora/          a folder
  streamvid export downloaded.safetensors --format diffusers -o lora.safetensors
  streamvid export run/ --format diffusers -o Wan2.1-T2V-1.3B-mine/     full weights: a diffusers folder

\b
SOURCE is the output folder of a run, whose newest weights are exported, or a file or peft folder with adapters
in any of these formats. Layer names are converted between those of diffusers and those of the model's original code.
Alpha is stored where the format expects it, and otherwise multiplied into the weights."""


@click.command(epilog=_EPILOG)
@click.argument("source", type=Location(exists=True))
@click.option("--format", "format", required=True, type=click.Choice(get_args(LoraFormat)), help="Format to write.")
@click.option(
    "-o", "--output", required=True, type=Location(), help="File to write, or a folder for peft and full weights."
)
@click.option(
    "--model",
    type=Location(exists=True, file_okay=False),
    help="Folder with the base model.  [default: model.args.model of the run]",
)
@click.option(
    "--family", metavar="NAME", help=("Model family whose layer names are used, such as wan.  [default: detected]")
)
@click.option("--ema", is_flag=True, help="Export the moving averages of a run's weights.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    source: str, format: LoraFormat, output: str, model: str | None, family: str | None, ema: bool, as_json: bool
) -> None:
    """Convert LoRA adapters between the formats of diffusers, peft, DiffSynth-Studio, kohya, musubi-tuner and ComfyUI,
    or write full weights as a diffusers folder.
    """
    from streamvid.modules.adapters.convert import family_of
    from streamvid.modules.adapters.reading import is_adapter
    from streamvid.modules.export import export_adapters, write_pipeline_folder
    from streamvid.modules.weight_files import tensor_names

    files, base = _weights_of(Path(source), ema), _model_of(Path(source), model)
    target, file, names = Path(output), files[0], ", ".join(map(str, files))
    if any(is_adapter(name.replace("lora_down", "lora_A")) for one in files for name in tensor_names(one)):
        if len(files) > 1:
            raise ConfigError(
                f"{source}: only one weight file can be exported at a time, but the run's newest "
                f"weights are in several files ({names}); use one of these files as SOURCE"
            )
        num_layers = export_adapters(file, format, target, family or (None if base is None else family_of(base)))
        result: dict[str, object] = {"adapters": num_layers}
        what = f"adapters for {num_layers} layers"
    else:
        if format != "diffusers":
            raise ConfigError(f"{names}: full weights cannot be written with --format {format}; use --format diffusers")
        if base is None:
            raise ConfigError(
                f"{names}: exporting full weights requires the base model; add --model FOLDER, where FOLDER contains "
                "the base model that the run started from"
            )
        components = write_pipeline_folder(files, base, target)
        result, what = {"components": components}, ", ".join(components)
    if as_json:
        print_json({"source": names, "format": format, "output": output, **result})
        return
    click.echo(printable(f"exported {what} from {names} to {output} ({format})"))


def _weights_of(source: Path, ema: bool) -> tuple[Path, ...]:
    """Return the files to export: the newest files of a run (one per model), or the file in a peft folder."""
    from streamvid.modules.export import MODEL_INDEX
    from streamvid.modules.saving import PEFT_WEIGHTS_FILE, written

    if source.is_file():
        return (source,)
    if (source / PEFT_WEIGHTS_FILE).is_file():
        return (source / PEFT_WEIGHTS_FILE,)
    found = [path for path in written(source) if (".ema" in path.suffixes) == ema]
    if not found and (source / MODEL_INDEX).is_file():
        raise ConfigError(
            f"{source} is a diffusers folder, not the output folder of a run; pass a run's output folder or a weight "
            "file as SOURCE, and this folder as --model"
        )
    if not found:
        kind = "no moving averages of weights (.ema)" if ema else "no weights"
        raise ConfigError(
            f"{source} contains {kind}; use the output folder of a run that has saved weights, or a weight file"
        )
    newest = found[-1].name.partition(".")[0]
    files = [path for path in found if path.name.partition(".")[0] == newest]
    return tuple(path / PEFT_WEIGHTS_FILE if path.is_dir() else path for path in files)


def _model_of(source: Path, model: str | None) -> Path | None:
    """Return the path of the base model: `model` or, if it is None, the path in the configuration of the run."""
    from streamvid.config import read_yaml

    if model is not None:
        return Path(model)
    config = next((one for one in (source / "config.yaml", source.parent / "config.yaml") if one.is_file()), None)
    args = {} if config is None else (read_yaml(config).get("model") or {}).get("args") or {}
    named = args.get("model")
    return Path(named) if isinstance(named, str) and Path(named).is_dir() else None
