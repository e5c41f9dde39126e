"""The time that the tests may take in CI (CI=true, as .ci/run says): where a machine is slow, the last ones are left
out, counted and said at the end. Everywhere else all tests run."""
from __future__ import annotations

import os
import time

# seconds: all tests take 650 to 740 on two cores of Zen 5, 900 on those of Zen 4, and 1,700 on those of a slow Xeon,
# where CI ends after 1,200
BUDGET = 780
_BEGAN = "TESTS_BEGAN"  # in the environment, so that processes that pytest-xdist starts know it
REASON = f"CI's {BUDGET // 60} minutes for tests are used up"


def is_ci() -> bool:
    """Is this a run of CI?"""
    return os.environ.get("CI") == "true"


def begin() -> None:
    """The run begins, if it is one of CI."""
    if is_ci():
        os.environ.setdefault(_BEGAN, repr(time.time()))


def is_spent() -> bool:
    """Whether no further test begins."""
    return _BEGAN in os.environ and time.time() - float(os.environ[_BEGAN]) > BUDGET
