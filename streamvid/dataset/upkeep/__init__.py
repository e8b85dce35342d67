"""Verification and copying of whole datasets. Read verify.py with verify_shard.py, then copy.py with copy_file.py."""
