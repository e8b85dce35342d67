"""The contract between sharder and loader: the on-disk format, which README.md in this folder specifies.

Imports buckets, video and storage, never sharder or loader. Read manifest.py and index.py first, then reader.py with
integrity.py and shard_table.py, then packets.py and tar.py. filter/ has `where=`, features/ precomputed features,
annotate/ later columns, upkeep/ verify and copy. These rooms use the files here, which import none of them.
"""
