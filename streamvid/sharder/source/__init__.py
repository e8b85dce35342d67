"""Input of the sharder: folders, metadata, tars, sealed datasets and object stores, as records and rejections.

Imports `sharder/options.py` and the floors below. Read `records.py` (the result) and `layouts.py` (how a source is
recognized), then `place.py`, `folder.py` and `media.py` (where files are, their paths and their bytes), `captions.py`
and `extra_media.py` (columns with a meaning), `tar_source.py`, `tar_members.py` and `sealed_source.py` (clips inside
other files), and `spool.py` (a remote file that can seek).
"""
