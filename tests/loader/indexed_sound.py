"""Adds the sound of a copy dataset's clips to its index, as the sharder does it."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from streamvid.dataset.manifest import FileInfo, base_digest, manifest_from_json, manifest_to_json
from streamvid.dataset.packets import encode_packets
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.versions.open import open_dataset
from streamvid.video.audio.index import index_audio
from streamvid.video.clip_index import index_clip

PLACE = ("packets_offset", "packets_bytes", "packets_sha256")


def add_sound(root: Path, without_index: tuple[str, ...] = ()) -> None:
    """`without_index`: extensions of clips whose sound is decoded through the container."""
    source = open_dataset(root)
    if "has_audio" in source.samples_schema.names:
        return
    manifest, samples, packets = source.manifest, [], []
    for samples_file, packet_file in zip(manifest.files.samples, manifest.files.packets, strict=True):
        groups = pq.ParquetFile(root / samples_file.path)
        infos = [info for info in source.shards if info.index_path == samples_file.path]
        sink, content = io.BytesIO(), b""
        writer = None
        for number in range(groups.num_row_groups):
            (info,) = (info for info in infos if info.index_row_group == number)
            table = groups.read_row_group(number)
            tar = (root / info.path).read_bytes()
            clips, audios, has_audio = [], [], []
            for row in table.to_pylist():
                data = tar[row["clip_offset"] : row["clip_offset"] + row["clip_bytes"]]
                clips.append(index_clip(data))
                sound = index_audio(data)
                has_audio.append(sound is not None or row["clip_extension"] in without_index)
                audios.append(None if row["clip_extension"] in without_index else sound)
            packed = encode_packets(clips, audios) if any(clip is not None for clip in clips) else b""
            place = (len(content), len(packed), hashlib.sha256(packed).digest()) if packed else (None, None, None)
            for name, value in zip(PLACE, place, strict=True):
                at = table.schema.get_field_index(name)
                field = table.schema.field(at)
                table = table.set_column(at, field, pa.array([value] * len(table), field.type))
            table = table.append_column("has_audio", pa.array(has_audio))
            writer = writer or pq.ParquetWriter(sink, table.schema, write_page_checksum=True)
            writer.write_table(table, row_group_size=max(1, len(table)))
            content += packed
        assert writer is not None
        writer.close()
        for path, data, files in ((samples_file.path, sink.getvalue(), samples), (packet_file.path, content, packets)):
            (root / path).write_bytes(data)
            files.append(FileInfo.of(path, data))
    path = root / MANIFEST
    old = manifest_from_json(path.read_bytes())
    base = base_digest(source.shards.content_lines(), samples, old.frame_rate, old.media)
    files = replace(old.files, samples=tuple(samples), packets=tuple(packets))
    prints = replace(old.fingerprints, base=base, content=base)
    path.write_bytes(manifest_to_json(replace(old, files=files, fingerprints=prints)))
