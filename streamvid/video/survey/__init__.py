"""One decode pass over a file that measures its pictures."""
