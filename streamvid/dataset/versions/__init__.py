"""Versions of a dataset: opening them by name, and publishing the next one."""
