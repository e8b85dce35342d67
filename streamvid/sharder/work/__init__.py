"""How units of work run: worker processes, the staging folder, the destination."""
