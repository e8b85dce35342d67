"""What this machine offers to every room: locks, journals, processes, memory and cores."""
