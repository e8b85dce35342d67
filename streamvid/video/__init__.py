"""The only room that uses PyAV: facts about a video (probe.py), its frames as arrays (decode/), new clips (encode/).

May import errors, config and host only. README.md gives the reading order of the files.
"""
