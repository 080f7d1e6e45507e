"""No exception leaves a vLLM hook: it becomes the hook's harmless answer, a count and a warning."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
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
            except Exception as error:  # noqa: BLE001 - the host dies of what escapes
                _report(hook.__name__, error)
                return answer()

        return safe  # type: ignore[return-value]

    return decorate


@contextlib.contextmanager
def contained(hook: str) -> Iterator[None]:
    """Keep a fault in one part of a hook from undoing the others."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - as in `guarded`
        _report(hook, error)


def _report(hook: str, error: Exception) -> None:
    hook_faults[hook] = hook_faults.get(hook, 0) + 1
    warnings.warn(hook, "%s failed and was answered with a default: %r", hook, error)
    logger.debug("%s failed", hook, exc_info=error)
