"""Precomputed features: tensors made once of each sample, in shards of their own. Read sidecar.py, then writer.py."""
