"""Subcommands of the command line. Each file declares flags, calls the library, and prints the result."""
