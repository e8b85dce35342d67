"""Ready-made training modules."""
