"""The verbs of the command line, one file per verb: flags, a call into the library, and what is printed."""
