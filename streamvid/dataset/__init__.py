"""On-disk dataset format, which is the contract between the sharder and the loader. README.md specifies the format.

This package imports neither the sharder nor the loader. Read manifest.py and index.py first, then reader.py with
integrity.py and shard_table.py, then packets.py and tar.py. The subpackages are filter (`where=`), features
(precomputed features), annotate (columns added after sealing), tabular (metadata files) and upkeep (verify and copy).
Modules in this folder do not import the subpackages.
"""
