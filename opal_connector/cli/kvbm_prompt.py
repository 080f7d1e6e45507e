"""The prompt that `opal kvbm match` asks about: a text with a tokenizer, or token ids."""

from pathlib import Path

import msgspec

from opal_connector.cli.errors import CommandError, CommandFailure, plain_failures

_TOKENS_LIMIT = 1 << 20


def read_tokens(prompt: str | None, tokens: str | None, tokenizer: Path | None) -> list[int]:
    """The token ids of the prompt.

    Raises:
        CommandError: Not exactly one of prompt and tokens is there, or it cannot be read.
    """
    if (prompt is None) == (tokens is None):
        raise CommandError("Give the prompt with --prompt or with --tokens, and not with both.")
    if tokens is not None:
        if tokenizer is not None:
            raise CommandError("--tokenizer belongs to --prompt; --tokens are token ids already.")
        return _parsed(tokens)
    if tokenizer is None:
        raise CommandError("--prompt needs --tokenizer, the directory of the model's tokenizer.")
    return _encoded(prompt or "", tokenizer)


def _parsed(text: str) -> list[int]:
    try:
        if text.startswith("@"):
            found = msgspec.json.decode(Path(text[1:]).read_bytes(), type=list[int])
        else:
            found = [int(part) for part in text.split(",")]
    except OSError as error:
        raise CommandError(f"{text[1:]} cannot be read: {error.strerror}.") from error
    except (ValueError, msgspec.DecodeError) as error:
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise CommandError(
            f"--tokens takes numbers such as 1,2,3 or @FILE with a JSON list, not {shown!r}."
        ) from error
    if not all(0 <= token < 1 << 32 for token in found) or len(found) > _TOKENS_LIMIT:
        raise CommandError(
            f"--tokens takes at most {_TOKENS_LIMIT} token ids, of 0 to 2^32 - 1 each."
        )
    return found


def _encoded(prompt: str, directory: Path) -> list[int]:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CommandError(f"{directory} has no tokenizer.json, which --tokenizer needs.")
    with plain_failures("models"):
        from tokenizers import Tokenizer
    try:
        encoding = Tokenizer.from_file(str(path)).encode(prompt)
    except Exception as error:
        # The library raises plain exceptions and has no class of its own for them.
        raise CommandFailure(f"{path} cannot be used: {error}.") from error
    return list(encoding.ids)
