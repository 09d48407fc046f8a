from __future__ import annotations

import os

from hypothesis import settings

# No deadline: machines are shared. TIDEGATE_TEST_EXAMPLES=10000 looks harder; a failure prints how to repeat it.
settings.register_profile(
    "tidegate", deadline=None, print_blob=True, max_examples=int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "100"))
)
settings.load_profile("tidegate")
