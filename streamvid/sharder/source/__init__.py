"""Input of the sharder: folders, metadata, tars, sealed datasets and object stores become records and rejections.

This package imports `sharder/options.py`, `sharder/media_columns.py` and the layers below. Read `records.py` (the
result) and `layouts.py` (recognition of sources) first, then `place.py`, `folder.py` and `media.py` (locations, paths
and bytes of files), `captions.py`, `extra_media.py` and `time_ranges.py` (columns with a special meaning),
`embedded.py`, `tar_source.py`, `tar_members.py` and `sealed_source.py` (clips inside other files), `spool.py` (a
seekable remote file), and `summary.py` (how the input was interpreted).
"""
