"""What all tests share: the hypothesis profiles. Helpers that tests import live in `fakes.py`."""

import os

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the property tests skip themselves
    pass
else:
    _COMMON = {
        "deadline": None,
        "derandomize": True,  # the same run every time; `thorough` with a seed looks further
        "suppress_health_check": [HealthCheck.too_slow],
        "print_blob": True,
    }
    settings.register_profile("dev", max_examples=25, stateful_step_count=30, **_COMMON)
    settings.register_profile("thorough", max_examples=400, stateful_step_count=80, **_COMMON)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
