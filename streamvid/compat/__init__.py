"""Flags and file layouts of other trainers."""
