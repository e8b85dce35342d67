"""Syntax of coded pictures: what their first bits declare. It needs no library."""
