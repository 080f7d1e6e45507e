"""Carries requests to instances, and to another one where that is better before the first byte."""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from aiohttp import web

from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.admission import Admission, Placement
from opal_connector.cluster.router.bodies import RequestBody, read_body
from opal_connector.cluster.router.config import LimitsConfig, policy_name
from opal_connector.cluster.router.dashboard_rings import CANCELLED, RecentRequests
from opal_connector.cluster.router.decide import RouteQuestion, Router
from opal_connector.cluster.router.exchange import Exchange, Job
from opal_connector.cluster.router.histogram import (
    FIRST_BYTE_BOUNDS,
    OVERHEAD_BOUNDS,
    Histogram,
)
from opal_connector.cluster.router.instances import Fleet, Instance
from opal_connector.cluster.router.prompt_forms import prompt_form
from opal_connector.cluster.router.prompt_tokens import PromptTokens
from opal_connector.cluster.router.upstream import UpstreamBroken
from opal_connector.cluster.router.wire import POLICY_HEADER, SESSION_HEADER, error_answer
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)

_WITHOUT_PREFILL = frozenset({"/tokenize", "/detokenize"})
_ELSEWHERE = frozenset({429, 502, 503, 504})  # answers that another instance may better
_FAULTS = frozenset({500, 502, 503, 504})  # answers that speak against an instance
_UNREACHABLE = frozenset({"refused", "connect"})


class _Retry(Exception):
    """It failed before the first byte, and can be tried elsewhere."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Forwarder:
    """The data plane.

    Mutable state: the number of the next request, how many are under way, counters; everything else
    is its parts'. The loop's thread alone uses it.
    """

    def __init__(
        self,
        router: Router,
        fleet: Fleet,
        admission: Admission,
        limits: LimitsConfig,
        tokens: Sequence[PromptTokens],
        *,
        hides_authorization: bool = False,
    ) -> None:
        self._router = router
        self._fleet = fleet
        self._admission = admission
        self._limits = limits
        self._tokens = tokens
        self._hides_authorization = hides_authorization
        self._warnings = RateLimitedWarnings(logger)
        self._numbers = itertools.count()
        self.on_cached: Callable[[Placement, int | None], None] = _nobody_listens
        self.on_failure: Callable[[Instance, str], None] = _nobody_listens
        self.counts: Counter[tuple[str, str]] = Counter()
        self.under_way = 0
        self.first_byte_seconds = Histogram(FIRST_BYTE_BOUNDS)
        self.overhead_seconds = Histogram(OVERHEAD_BOUNDS)
        self.recent = RecentRequests()

    async def question(
        self, path: str, body: RequestBody, headers: Mapping[str, str]
    ) -> RouteQuestion:
        """What is to be decided about a request.

        Raises:
            ConfigError: It names a policy that does not exist.
        """
        policy = headers.get(POLICY_HEADER)
        prefix = await self._prefix(path, body)
        self.counts["tokens", "unknown" if prefix is None else "known"] += 1
        if prefix is not None:
            prompt_tokens = len(prefix.token_ids)
        else:
            prompt_tokens = body.estimated_tokens if path not in _WITHOUT_PREFILL else 1
        return RouteQuestion(
            request_id=str(next(self._numbers)),
            prompt_tokens=prompt_tokens,
            prefix=prefix,
            session_id=headers.get(SESSION_HEADER) or body.user,
            policy=policy_name(POLICY_HEADER, policy) if policy is not None else None,
        )

    async def _prefix(self, path: str, body: RequestBody) -> PrefixRequest | None:
        """The prompt's tokens, from the first who knows them."""
        form = prompt_form(path, body)
        if form is None:
            return None
        for source in self._tokens:
            prefix = await source.tokens(*form)
            if prefix is not None:
                return prefix
        return None

    async def forward(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Answer a request with what an instance answers.

        Raises:
            Refusal: No instance can take it.
            ConfigError: It names a policy that does not exist.
            TimeoutError: The client does not send its body.
        """
        async with asyncio.timeout(self._limits.body_timeout_seconds):
            raw = await request.read()
        began = time.monotonic()
        deadline = began + self._limits.request_timeout_seconds
        self.under_way += 1
        try:
            body = read_body(raw)
            question = await self.question(path, body, request.headers)
            return await self._attempts(Job(request, body, question, began, deadline))
        finally:
            self.under_way -= 1

    # ---- inside ----

    async def _attempts(self, job: Job) -> web.StreamResponse:
        last: _Retry | None = None
        for attempt in range(self._limits.max_attempts):
            if last is not None and not self._has_other(job):
                break
            placement = await self._admission.place(
                job.question, job.body.model, without=job.failed, deadline=job.deadline
            )
            if attempt == 0:
                self.overhead_seconds.see(time.monotonic() - job.began)
            is_last = attempt + 1 == self._limits.max_attempts
            try:
                return await self._attempt(job, placement, is_last=is_last)
            except _Retry as retry:
                self.counts["retry", str(retry.status)] += 1
                last = retry
        assert last is not None
        return error_answer(last.status, last.text, headers={"Retry-After": "1"})

    def _has_other(self, job: Job) -> bool:
        """Whether it is worth another attempt."""
        now = time.monotonic()
        return now < job.deadline and bool(self._fleet.well(now, job.body.model, job.failed))

    async def _attempt(
        self, job: Job, placement: Placement, *, is_last: bool
    ) -> web.StreamResponse:
        """One instance's answer; what is counted there is counted off however this ends."""
        instance = placement.instance
        exchange = Exchange(job, placement, self._limits, hides=self._hides_authorization)
        job.failed.append(instance.name)
        sent = self.recent.begin(placement.decision, len(job.failed))
        verdict: bool | None = None  # whether the instance did its part, where that is known
        try:
            await exchange.open()
            status = exchange.status
            verdict = status not in _FAULTS if status != 429 else None
            if status in _ELSEWHERE and not is_last and self._has_other(job):
                raise _Retry(status, f"an instance answered {status}")
            if exchange.is_computed:
                self._router.first_token(job.question.request_id)
                seconds = time.monotonic() - job.began
                self.first_byte_seconds.see(seconds)
                self.recent.first_byte(sent, status, seconds)
            answer = await exchange.pass_on()
            if exchange.is_computed:
                sent.cached_tokens = exchange.cached_tokens
                if sent.cached_tokens is not None:
                    self._router.cached(job.question, sent.cached_tokens)
                self.on_cached(placement, sent.cached_tokens)
            return answer
        except UpstreamBroken as error:
            verdict = False
            sent.failure = error.kind
            return self._broken(exchange, instance, error)
        except asyncio.CancelledError:
            sent.failure = CANCELLED
            raise
        finally:
            exchange.close()
            self._judge(instance, verdict)
            self._admission.leave(job.question, placement, is_computed=exchange.is_computed)
            self.recent.end(sent, exchange.status)

    def _broken(
        self, exchange: Exchange, instance: Instance, error: UpstreamBroken
    ) -> web.StreamResponse:
        """An instance failed: before the first byte, or in the middle, which the client sees."""
        self.counts["broken", error.kind] += 1
        self.on_failure(instance, error.kind)
        self._warnings.warn(
            f"broken {instance.name} {error.kind}", "%s failed a request: %s", instance.name, error
        )
        if exchange.answer is not None:
            self.counts["truncated", error.kind] += 1
            return exchange.cut()
        if error.kind == "timeout":
            return error_answer(504, "the instance did not answer in time")
        status = 503 if error.kind in _UNREACHABLE else 502
        raise _Retry(status, "the instance failed before it answered") from error

    @staticmethod
    def _judge(instance: Instance, verdict: bool | None) -> None:
        if verdict is None:
            instance.breaker.abandon()
        elif verdict:
            instance.breaker.succeed()
        else:
            instance.breaker.fail(time.monotonic())


def _nobody_listens(*_: object) -> None:
    """Until somebody does."""
