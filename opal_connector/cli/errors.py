"""What goes wrong in a command, said in one sentence and an exit code; never a traceback."""

import contextlib
from collections.abc import Iterator
from typing import Final

import click

USER_MISTAKE: Final = 2
FAILURE: Final = 1


class CommandError(click.ClickException):
    """The user asked for something that cannot be; the message says what can."""

    exit_code = USER_MISTAKE


class CommandFailure(CommandError):
    """The request was right and could not be carried out: no network, or a full disk."""

    exit_code = FAILURE


@contextlib.contextmanager
def plain_failures(extra: str = "models") -> Iterator[None]:
    """Turns what the machine refuses, and what is not installed, into a `CommandFailure`.

    `extra` is the package's extra that has everything the command imports.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads the output any more, and click ends quietly
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        reason = error.strerror or str(error)
        raise CommandFailure(f"The system refused: {reason}{place}.") from error
    except ModuleNotFoundError as error:
        raise CommandFailure(
            f"The Python package {error.name!r} is missing: pip install 'opal-connector[{extra}]'."
        ) from error
