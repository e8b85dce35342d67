"""Names that the layers of known models have in diffusers and in their original code.

DiffSynth-Studio, musubi-tuner and ComfyUI use the original names, so conversions need only this table. `*` stands for
a number. A line with several diffusers names describes one layer of the original code that computes all of their
outputs. The names come from diffusers' conversion scripts (scripts/convert_*_to_diffusers.py) and LoRA loaders.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from streamvid.errors import ConfigError
from streamvid.modules.adapters.layers import Adapter, fuse, split
from streamvid.modules.parts import some


@dataclass(frozen=True)
class Rule:
    """Names of one layer in the original code and in diffusers.

    theirs: name in the original code.
    ours: names in diffusers; several names if the original layer concatenates the outputs of several layers.
    shares: relative number of outputs per layer in `ours`.
    """

    theirs: str
    ours: tuple[str, ...]
    shares: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Family:
    """Layer names for one model family."""

    name: str
    rules: tuple[Rule, ...]

    @cached_property
    def ours(self) -> tuple[str, ...]:
        return tuple(name for rule in self.rules for name in rule.ours)

    @cached_property
    def theirs(self) -> tuple[str, ...]:
        return tuple(rule.theirs for rule in self.rules)

    def to_original(self, adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
        """Rename adapters from diffusers' layer names to the original names. Every layer must be in the table."""
        groups: dict[str, tuple[Rule, list[Adapter | None]]] = {}
        for layer, adapter in adapters.items():
            rule, place, numbers = next(self._found(layer))
            _, parts = groups.setdefault(_filled(rule.theirs, numbers), (rule, [None] * len(rule.ours)))
            parts[place] = adapter
        return {
            layer: parts[0] if len(parts) == 1 and parts[0] is not None else fuse(parts, rule.shares)
            for layer, (rule, parts) in groups.items()
        }

    def to_diffusers(self, adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
        """Rename adapters from the original layer names to diffusers' names. Every layer must be in the table."""
        found: dict[str, Adapter] = {}
        for layer, adapter in adapters.items():
            rule = next(rule for rule in self.rules if _numbers(rule.theirs, layer) is not None)
            numbers = _numbers(rule.theirs, layer) or ()
            parts = [adapter] if len(rule.ours) == 1 else split(adapter, rule.shares, layer)
            found |= {_filled(name, numbers): part for name, part in zip(rule.ours, parts, strict=True)}
        return found

    def _found(self, layer: str) -> Iterator[tuple[Rule, int, tuple[str, ...]]]:
        for rule in self.rules:
            for place, name in enumerate(rule.ours):
                numbers = _numbers(name, layer)
                if numbers is not None:
                    yield rule, place, numbers


def _rules(
    block_theirs: str, block_ours: str, table: Mapping[str, str], sizes: Mapping[str, str] | None = None
) -> list[Rule]:
    """Return the rules for one kind of block.

    table: maps each original name to its names in diffusers, separated by spaces.
    sizes: maps an original name to the relative output sizes of its layers in diffusers, if these sizes differ.
    """
    found = []
    for theirs, ours in table.items():
        names = tuple(f"{block_ours}{name}" for name in ours.split())
        shares = tuple(map(int, sizes[theirs].split())) if sizes and theirs in sizes else (1,) * len(names)
        found.append(Rule(f"{block_theirs}{theirs}", names, shares))
    return found


_WAN_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_WAN = (
    *_rules("blocks.*.self_attn.", "blocks.*.attn1.", _WAN_ATTENTION),
    *_rules(
        "blocks.*.cross_attn.",
        "blocks.*.attn2.",
        {**_WAN_ATTENTION, "k_img": "add_k_proj", "v_img": "add_v_proj"},
    ),
    *_rules("blocks.*.ffn.", "blocks.*.ffn.", {"0": "net.0.proj", "2": "net.2"}),
    *_rules("time_embedding.", "condition_embedder.time_embedder.", {"0": "linear_1", "2": "linear_2"}),
    *_rules("text_embedding.", "condition_embedder.text_embedder.", {"0": "linear_1", "2": "linear_2"}),
    *_rules("", "", {"time_projection.1": "condition_embedder.time_proj", "head.head": "proj_out"}),
    *_rules("img_emb.proj.", "condition_embedder.image_embedder.ff.", {"1": "net.0.proj", "3": "net.2"}),
)
# VACE has a second stack of the same blocks.
_WAN = (
    *_WAN,
    *(
        Rule(f"vace_{rule.theirs}", tuple(f"vace_{name}" for name in rule.ours))
        for rule in _WAN
        if rule.theirs.startswith("blocks.")
    ),
    *_rules("vace_blocks.*.", "vace_blocks.*.", {"before_proj": "proj_in", "after_proj": "proj_out"}),
)
_SAME_ATTENTION = {name: name for name in ("to_q", "to_k", "to_v", "to_out.0")}
_SAME_FF = {name: name for name in ("net.0.proj", "net.2")}
_BLOCKS = "transformer_blocks.*."
_LTX = (
    *_rules(f"{_BLOCKS}attn1.", f"{_BLOCKS}attn1.", _SAME_ATTENTION),
    *_rules(f"{_BLOCKS}attn2.", f"{_BLOCKS}attn2.", _SAME_ATTENTION),
    *_rules(f"{_BLOCKS}ff.", f"{_BLOCKS}ff.", _SAME_FF),
    *_rules("", "", {"patchify_proj": "proj_in", "proj_out": "proj_out", "adaln_single.linear": "time_embed.linear"}),
)
_LTX2_ATTENTION = _SAME_ATTENTION | {"to_gate_logits": "to_gate_logits"}
_LTX2 = (
    *_LTX,
    *(
        rule
        for part in ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
        for rule in _rules(f"{_BLOCKS}{part}.", f"{_BLOCKS}{part}.", _LTX2_ATTENTION)
    ),
    *_rules(f"{_BLOCKS}audio_ff.", f"{_BLOCKS}audio_ff.", _SAME_FF),
    *_rules("", "", {"audio_patchify_proj": "audio_proj_in", "audio_proj_out": "audio_proj_out"}),
)
_COGVIDEOX = (
    *_rules(f"{_BLOCKS}attn1.", f"{_BLOCKS}attn1.", _SAME_ATTENTION),
    *_rules(f"{_BLOCKS}ff.", f"{_BLOCKS}ff.", _SAME_FF),
)
_REFINER_ATTENTION = {"self_attn_qkv": "attn.to_q attn.to_k attn.to_v", "self_attn_proj": "attn.to_out.0"}
_MLP = {"fc1": "net.0.proj", "fc2": "net.2"}
_REFINER = "context_embedder.token_refiner.refiner_blocks.*."
_HUNYUAN_SHARED = (
    *_rules("double_blocks.*.", _BLOCKS, {"img_attn_proj": "attn.to_out.0", "txt_attn_proj": "attn.to_add_out"}),
    *_rules("double_blocks.*.", _BLOCKS, {"img_mod.linear": "norm1.linear", "txt_mod.linear": "norm1_context.linear"}),
    *_rules("double_blocks.*.img_mlp.", f"{_BLOCKS}ff.", _MLP),
    *_rules("double_blocks.*.txt_mlp.", f"{_BLOCKS}ff_context.", _MLP),
    *_rules("txt_in.individual_token_refiner.blocks.*.", _REFINER, _REFINER_ATTENTION),
    *_rules("txt_in.individual_token_refiner.blocks.*.mlp.", f"{_REFINER}ff.", _MLP),
)
_HUNYUAN = (
    *_HUNYUAN_SHARED,
    *_rules("double_blocks.*.", _BLOCKS, {"img_attn_qkv": "attn.to_q attn.to_k attn.to_v"}),
    *_rules("double_blocks.*.", _BLOCKS, {"txt_attn_qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj"}),
    *_rules(
        "single_blocks.*.",
        "single_transformer_blocks.*.",
        {
            "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
            "linear2": "proj_out",
            "modulation.linear": "norm.linear",
        },
        {"linear1": "1 1 1 4"},  # the model's mlp_ratio
    ),
)
_HUNYUAN_15 = (
    *_HUNYUAN_SHARED,
    *_rules("double_blocks.*.img_attn_", f"{_BLOCKS}attn.", {"q": "to_q", "k": "to_k", "v": "to_v"}),
    *_rules("double_blocks.*.txt_attn_", f"{_BLOCKS}attn.", {"q": "add_q_proj", "k": "add_k_proj", "v": "add_v_proj"}),
)
_MOCHI = (
    *_rules("blocks.*.attn.", f"{_BLOCKS}attn1.", {"qkv_x": "to_q to_k to_v", "proj_x": "to_out.0"}),
    *_rules(
        "blocks.*.attn.", f"{_BLOCKS}attn1.", {"qkv_y": "add_q_proj add_k_proj add_v_proj", "proj_y": "to_add_out"}
    ),
    *_rules("t5_y_embedder.", "time_embed.pooler.", {"to_q": "to_q", "to_kv": "to_kv", "to_out": "to_out"}),
)
FAMILIES: Mapping[str, Family] = {
    name: Family(name, tuple(rules))
    for name, rules in (
        ("wan", _WAN),
        ("ltx-video", _LTX),
        ("ltx-2", _LTX2),
        ("cogvideox", _COGVIDEOX),
        ("hunyuanvideo", _HUNYUAN),
        ("hunyuanvideo1.5", _HUNYUAN_15),
        ("mochi", _MOCHI),
    )
}


#: ComfyUI's names of parts of HunyuanVideo, which its adapters may have instead of the original ones.
_COMFY_PARTS = (
    (r"(img|txt)_attn\.(qkv|proj)", r"\1_attn_\2"),
    (r"(img|txt)_mlp\.0", r"\1_mlp.fc1"),
    (r"(img|txt)_mlp\.2", r"\1_mlp.fc2"),
    (r"(img|txt)_mod\.lin", r"\1_mod.linear"),
    (r"modulation\.lin", "modulation.linear"),
)


def plain_layer(layer: str) -> str:
    """Convert a ComfyUI layer name to the layer's original name. Return any other name unchanged."""
    if not layer.startswith(("double_blocks.", "single_blocks.")):
        return layer
    block, number, part = layer.split(".", 2)
    for theirs, ours in _COMFY_PARTS:
        if re.fullmatch(theirs, part):
            part = re.sub(theirs, ours, part)
            break
    return f"{block}.{number}.{part}"


def original_names(adapters: Mapping[str, Adapter], family: str | None = None) -> dict[str, Adapter]:
    """Rename adapters to their original names. Original names, and names from unknown families, stay unchanged.

    family: name in FAMILIES; None detects the family from the layers.
    Raises ConfigError if the layers match several families with different original names.
    """
    candidates = [one for one in _candidates(family) if _all_match(one.ours, adapters)]
    renamed = {one.name: one.to_original(adapters) for one in candidates}
    if len({tuple(found) for found in renamed.values()}) > 1:
        raise ConfigError(
            f"the adapters' layers exist in several families ({', '.join(renamed)}) under different names; specify "
            f"the family (for example, --family {candidates[0].name})"
        )
    return dict(adapters) if not renamed else renamed[candidates[0].name]


def diffusers_names(adapters: Mapping[str, Adapter], family: str | None = None) -> dict[str, Adapter]:
    """Rename adapters to diffusers' names. Diffusers' names, and names from unknown families, stay unchanged."""
    if any(_all_match(one.ours, adapters) for one in _candidates(family)):
        return dict(adapters)
    found = next((one for one in _candidates(family) if _all_match(one.theirs, adapters)), None)
    return dict(adapters) if found is None else found.to_diffusers(adapters)


def require_known(layers: Collection[str], family: str | None, where: str) -> None:
    """Raise ConfigError if a layer is not in any table, because its names in other formats are then unknown."""
    for one in _candidates(family):
        if _all_match(one.ours, layers) or _all_match(one.theirs, layers):
            return
    known = [name for one in _candidates(family) for name in (*one.ours, *one.theirs)]
    strange = [layer for layer in layers if all(_numbers(name, layer) is None for name in known)] or list(layers)
    raise ConfigError(
        f"{where} has adapters on {some(strange)}, whose names in other formats are not known; allowed: layers of "
        f"{', '.join(FAMILIES)}. Train without these layers, or export in the file's current format"
    )


def dotted(names: Iterable[str], layers: Iterable[str] = ()) -> dict[str, str]:
    """Map each name with underscores instead of dots to the layer's dotted name. Unknown names stay unchanged.

    layers: layers of the model. If empty, the layers of all families are recognized.
    """
    known = {layer.replace(".", "_"): layer for layer in layers}
    patterns = [] if known else [name for one in FAMILIES.values() for name in (*one.theirs, *one.ours)]
    found = {}
    for name in names:
        plain = name.lstrip("_")  # some trainers write two underscores after the prefix
        matches = ((pattern, _numbers(pattern.replace(".", "_"), plain)) for pattern in patterns)
        layer = next((_filled(pattern, numbers) for pattern, numbers in matches if numbers is not None), None)
        found[name] = known.get(plain, layer or name)
    return found


def _candidates(family: str | None) -> list[Family]:
    if family is None:
        return list(FAMILIES.values())
    if family not in FAMILIES:
        raise ConfigError(f"--family {family!r}: must be one of {', '.join(FAMILIES)}")
    return [FAMILIES[family]]


def _all_match(names: Iterable[str], layers: Collection[str]) -> bool:
    known = set(names)
    return bool(layers) and all(
        re.sub(r"(?<=\.)\d+(?=\.)", "*", layer, count=1) in known or layer in known for layer in layers
    )


def _numbers(name: str, layer: str) -> tuple[str, ...] | None:
    pattern = re.escape(name).replace(r"\*", r"(\d+)")
    match = re.fullmatch(pattern, layer)
    return None if match is None else match.groups()


def _filled(name: str, numbers: Iterable[str]) -> str:
    for number in numbers:
        name = name.replace("*", number, 1)
    return name
