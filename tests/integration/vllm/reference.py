"""What vLLM answers without Opal, computed once and remembered for the session."""

import contextlib
import json
from pathlib import Path

from engine_process import Answer, EngineProcess, Request, running_engine

from opal_connector.cli.models import ensure_smollm2


class Reference:
    """Engines without a connector and without a prefix cache, one per model."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._engines: dict[Path, EngineProcess] = {}
        self._answers: dict[str, Answer] = {}

    def answers(self, requests: list[Request], *, model: Path | None = None) -> list[Answer]:
        """The answers to these requests, in order; of the cut SmolLM2 unless told otherwise."""
        model = model or ensure_smollm2(layers=4)
        names = [json.dumps([str(model), request], sort_keys=True) for request in requests]
        new = {
            name: request
            for name, request in zip(names, requests, strict=True)
            if name not in self._answers
        }
        if new:
            found = self._engine(model).generate(list(new.values()))
            self._answers.update(zip(new, found, strict=True))
        return [self._answers[name] for name in names]

    def answer(self, tokens: list[int], *, model: Path | None = None, **request: object) -> Answer:
        """The answer to one request."""
        return self.answers([{"tokens": tokens, **request}], model=model)[0]

    def _engine(self, model: Path) -> EngineProcess:
        if model not in self._engines:
            self._engines[model] = self._stack.enter_context(
                running_engine(model=model, enable_prefix_caching=False, max_model_len=4096)
            )
        return self._engines[model]
