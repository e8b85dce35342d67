"""Work on whole datasets: verify and copy."""
