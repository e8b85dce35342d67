"""Verbs that verify, copy or change a sealed dataset as a whole."""
