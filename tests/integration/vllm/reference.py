"""What vLLM answers without Opal, computed once and remembered for the session."""

import contextlib
import json

from engine_process import Answer, EngineProcess, Request, running_engine


class Reference:
    """What vLLM answers without Opal: one engine per model, every request served once."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._engines: dict[int, EngineProcess] = {}
        self._answers: dict[str, Answer] = {}

    def answers(self, requests: list[Request], *, layers: int = 4) -> list[Answer]:
        """The answers to these requests, in order."""
        names = [json.dumps([layers, request], sort_keys=True) for request in requests]
        new = {
            name: request
            for name, request in zip(names, requests, strict=True)
            if name not in self._answers
        }
        if new:
            found = self._engine(layers).generate(list(new.values()))
            self._answers.update(zip(new, found, strict=True))
        return [self._answers[name] for name in names]

    def answer(self, tokens: list[int], *, layers: int = 4, **request: object) -> Answer:
        """The answer to one request."""
        return self.answers([{"tokens": tokens, **request}], layers=layers)[0]

    def _engine(self, layers: int) -> EngineProcess:
        if layers not in self._engines:
            self._engines[layers] = self._stack.enter_context(
                running_engine(layers=layers, enable_prefix_caching=False, max_model_len=4096)
            )
        return self._engines[layers]
