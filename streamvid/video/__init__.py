"""Probing (probe.py), decoding (decode/) and encoding (encode/) of videos with PyAV.

No other package uses PyAV. This package may import only errors, config and host. README.md gives the
reading order of the files.
"""
