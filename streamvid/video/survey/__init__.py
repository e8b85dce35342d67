"""Measurements from one pass over a file: its pictures, and the time that its audio covers."""
