from __future__ import annotations

from hypothesis import settings

# Tests assert no timings, and machines are shared.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
