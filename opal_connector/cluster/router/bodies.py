"""What a request's body says about its route. Whatever it is, it is passed on as it came."""

from typing import Annotated, Any, Final

import msgspec

_CHARACTERS_PER_TOKEN: Final = 4

TokenIds = list[int]


class _Fields(msgspec.Struct):
    """The fields that matter, of any type: it is the engine that judges them."""

    model: Any = None
    user: Any = None
    cache_salt: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    documents: Any = None
    reasoning_effort: Any = None
    prompt_embeds: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    logprobs: Any = None
    top_logprobs: Any = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's own tokens are judged: then an engine computes all of it."""
        if self.prompt_logprobs is not None:
            return True
        logprobs = self.top_logprobs if bytes(self.messages) else self.logprobs
        return bool(self.echo) and logprobs is not None


_fields = msgspec.json.Decoder(_Fields)
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_token_ids = msgspec.json.Decoder(list[_TokenId])
_listed_token_ids = msgspec.json.Decoder(list[list[_TokenId]])
_text = msgspec.json.Decoder(str | list[str])


class RequestBody(msgspec.Struct, frozen=True):
    """A body, as bytes and as far as it was understood; `fields` is None where it is no JSON."""

    raw: bytes
    fields: _Fields | None

    @property
    def model(self) -> str | None:
        """The model, or the adapter, that is asked for."""
        return _str(self.fields.model) if self.fields is not None else None

    @property
    def user(self) -> str | None:
        """Who asks."""
        return _str(self.fields.user) if self.fields is not None else None

    @property
    def cache_salt(self) -> str | None:
        """Who may share its cache."""
        return _str(self.fields.cache_salt) if self.fields is not None else None

    @property
    def estimated_tokens(self) -> int:
        """About how long its prompt is, where nothing better is known."""
        return max(1, len(self.raw) // _CHARACTERS_PER_TOKEN)

    @property
    def token_ids(self) -> TokenIds | None:
        """The prompt, where it is token ids, and one prompt only."""
        if self.fields is None:
            return None
        raw = bytes(self.fields.prompt)
        if raw[:1] != b"[":
            return None
        try:
            if raw[1:64].lstrip()[:1] != b"[":
                return _token_ids.decode(raw) or None
            prompts = _listed_token_ids.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return None
        return (prompts[0] or None) if len(prompts) == 1 else None

    @property
    def text(self) -> str | None:
        """The prompt, where it is text, and one prompt only."""
        if self.fields is None or not bytes(self.fields.prompt):
            return None
        try:
            found = _text.decode(self.fields.prompt)
        except (msgspec.DecodeError, RecursionError):
            return None
        if isinstance(found, list):
            return found[0] if len(found) == 1 else None
        return found


def read_body(raw: bytes) -> RequestBody:
    """A body; one that is no JSON object, or too deep, is not understood and no error."""
    try:
        return RequestBody(raw, _fields.decode(raw))
    except (msgspec.DecodeError, RecursionError):
        return RequestBody(raw, None)


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
