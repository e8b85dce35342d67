"""Input of the sharder: folders, metadata, tars, sealed datasets and object stores, read as records and rejections.

This package imports `sharder/options.py` and the layers below. Read `records.py` (the result) and `layouts.py`
(recognition of sources) first, then `place.py`, `folder.py` and `media.py` (locations, paths and bytes of files),
`captions.py` and `extra_media.py` (columns with a special meaning), `tar_source.py`, `tar_members.py` and
`sealed_source.py` (clips inside other files), and `spool.py` (a seekable remote file).
"""
