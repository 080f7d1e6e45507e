"""No exception leaves a vLLM hook: it becomes the hook's harmless answer, a count and a warning."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

F = TypeVar("F", bound=Callable[..., Any])
hook_faults: dict[str, int] = {}  # by hook, since the process started; read by tests


def guarded(answer: Callable[[], Any]) -> Callable[[F], F]:
    """Make a hook answer `answer()` instead of raising."""

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def safe(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # the host dies of anything that escapes
                name = hook.__name__
                hook_faults[name] = hook_faults.get(name, 0) + 1
                warnings.warn(name, "%s failed and was answered with a default: %r", name, error)
                logger.debug("%s failed", name, exc_info=True)
                return answer()

        return safe  # type: ignore[return-value]

    return decorate
