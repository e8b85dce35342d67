"""Operations on whole datasets.

Read verify.py with verify_shard.py, copy.py with copy_file.py, then history.py, remove.py with selection.py, and
compact.py and merge.py, which share new_shards.py and new_index.py.
"""
