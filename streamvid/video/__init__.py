"""The only package that uses PyAV: facts about a video (probe.py), its frames (decode/) and new clips (encode/).

It may import only errors, config and host. README.md gives the reading order of the files.
"""
