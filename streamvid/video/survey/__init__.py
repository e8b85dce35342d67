"""One pass over a file: its pictures are measured, and the time that its audio covers."""
