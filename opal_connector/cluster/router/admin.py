"""What an administrator can see and change while the router runs."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from opal_connector.cluster.router.bodies import read_body
from opal_connector.cluster.router.config import instance_config, policy_name
from opal_connector.cluster.router.core import RouterCore
from opal_connector.cluster.router.decide import RouteDecision
from opal_connector.cluster.router.instances import Instance
from opal_connector.cluster.router.prompt_tokens import COMPLETIONS
from opal_connector.cluster.router.wire import error_answer, json_answer
from opal_connector.config import ConfigError

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
INSTANCES: Final = "/admin/instances"


class _Mistake(Exception):
    """What was asked for cannot be; a status and a sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Admin:
    """The admin's paths. Who may use them is judged before; it has no state of its own."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self.handlers: dict[tuple[str, str], Handler] = {
            ("GET", INSTANCES): self._list,
            ("POST", INSTANCES): self._add,
            ("DELETE", INSTANCES): self._remove,
            ("POST", f"{INSTANCES}/drain"): self._drain,
            ("POST", f"{INSTANCES}/resume"): self._resume,
            ("POST", "/admin/policy"): self._set_policy,
            ("GET", "/admin/state"): self._state,
            ("POST", "/route"): self._route,
        }

    async def answer(self, handler: Handler, request: web.BaseRequest) -> web.StreamResponse:
        """A handler's answer, or what was wrong with the question."""
        try:
            return await handler(request)
        except _Mistake as mistake:
            return error_answer(mistake.status, mistake.text)
        except ConfigError as error:
            return error_answer(400, str(error))

    # ---- instances ----

    async def _list(self, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG002
        return json_answer({"instances": [instance_facts(one) for one in self._core.fleet]})

    async def _add(self, request: web.BaseRequest) -> web.StreamResponse:
        config = instance_config(await _object(request))
        try:
            instance = await self._core.add(config)
        except ConfigError:
            raise
        except ValueError as error:
            raise _Mistake(409, str(error)) from error
        self._core.on_admin()
        return json_answer(instance_facts(instance), status=201)

    async def _remove(self, request: web.BaseRequest) -> web.StreamResponse:
        """Drain and remove, or, with `now=true`, remove at once."""
        instance = self._named(request.query.get("name"))
        is_whole = True
        if request.query.get("now", "false").lower() != "true":
            is_whole = await self._drained(instance)
        if self._core.fleet.get(instance.name) is instance:
            self._core.remove(instance)
            self._core.on_admin()
        return json_answer({"removed": instance.name, "all_ended": is_whole})

    async def _drain(self, request: web.BaseRequest) -> web.StreamResponse:
        instance = self._named((await _object(request)).get("name"))
        is_whole = await self._drained(instance)
        return json_answer({**instance_facts(instance), "all_ended": is_whole})

    async def _resume(self, request: web.BaseRequest) -> web.StreamResponse:
        instance = self._named((await _object(request)).get("name"))
        instance.is_draining = False
        self._core.fleet.on_change()
        self._core.on_admin()
        return json_answer(instance_facts(instance))

    async def _drained(self, instance: Instance) -> bool:
        instance.is_draining = True
        self._core.on_admin()  # before the wait: no process may send anything more
        return await self._core.drain(instance)

    def _named(self, name: Any) -> Instance:
        instance = self._core.fleet.get(name) if isinstance(name, str) else None
        if instance is None:
            known = ", ".join(one.name for one in self._core.fleet) or "none"
            raise _Mistake(404, f"name: found {name!r}, there are: {known}")
        return instance

    # ---- decisions ----

    async def _set_policy(self, request: web.BaseRequest) -> web.StreamResponse:
        name = (await _object(request)).get("policy")
        self._core.router.set_policy(policy_name("policy", str(name)))
        self._core.on_admin()
        return json_answer({"policy": self._core.router.policy_name})

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        """Where a request would go, and why; nothing is sent and nothing counted."""
        core, now = self._core, time.monotonic()
        body = read_body(await request.read())
        path = request.query.get("path", COMPLETIONS)
        question = await core.forwarder.question(path, body, request.headers)
        well = core.fleet.well(now, body.model, ())
        taking = [one for one in well if core.fleet.has_room(one)]
        workers = [worker_id for one in taking for worker_id in one.worker_ids]
        decision = core.router.would_decide(question, workers, now)
        not_taking = [instance_facts(one) for one in core.fleet if one not in taking]
        return json_answer(
            {
                "policy": question.policy or core.router.policy_name,
                "session": question.session_id is not None,
                "prompt_tokens": question.prompt_tokens,
                "tokens_known": question.prefix is not None,
                "choice": None if decision is None else decision.worker_id,
                "reason": None if decision is None else decision.reason,
                "expected_tokens": 0 if decision is None else decision.expected_tokens,
                "predicted_tokens": 0 if decision is None else decision.predicted_tokens,
                "workers": {} if decision is None else self._explained(decision),
                "not_taking": not_taking,
            }
        )

    def _explained(self, decision: RouteDecision) -> dict[str, Any]:
        weight = self._core.config.balanced.work_weight
        explained: dict[str, Any] = {}
        for worker_id, match in decision.matches.items():
            facts: dict[str, Any] = {
                "match": msgspec.to_builtins(match),
                "load": msgspec.to_builtins(self._core.router.loads.load(worker_id)),
            }
            cost = decision.costs.get(worker_id)
            if cost is not None:
                facts["cost"] = {
                    **msgspec.to_builtins(cost),
                    "first_token_seconds": cost.first_token_seconds,
                    "weighted_seconds": cost.weighted_seconds(weight),
                }
            explained[worker_id] = facts
        return explained

    async def _state(self, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG002
        core = self._core
        workers = {
            worker_id: {
                "model": state.description.model,
                "is_live": state.is_live,
                "blocks": {f"{group}/{tier}": n for (group, tier), n in state.block_counts.items()},
                "system": msgspec.to_builtins(state.system),
                "load": msgspec.to_builtins(core.router.loads.load(worker_id)),
            }
            for worker_id, state in core.index.workers.items()
        }
        audit = {
            worker_id: {
                "requests": found.requests,
                "expected_tokens": found.expected_tokens,
                "actual_tokens": found.actual_tokens,
                "trust": found.trust,
                "resyncs": found.resyncs,
            }
            for worker_id, found in core.audit.workers.items()
        }
        return json_answer(
            {
                "policy": core.router.policy_name,
                "is_draining": core.admission.is_draining,
                "waiting": core.admission.waiting,
                "under_way": core.forwarder.under_way,
                "under_way_elsewhere": sum(map(core.fleet.elsewhere, core.fleet)),
                "sessions": len(core.router.sessions),
                "index": {"blocks": core.index.entry_count, "bytes": core.index.used_bytes},
                "instances": [instance_facts(one) for one in core.fleet],
                "workers": workers,
                "sources": [_source_facts(one) for one in core.sources.feed.statuses()],
                "audit": audit,
            }
        )


def instance_facts(instance: Instance) -> dict[str, Any]:
    """An instance as an administrator sees it; never its key."""
    now = time.monotonic()
    return {
        "name": instance.name,
        "url": instance.config.url,
        "events": list(instance.config.channels),
        "health": instance.health.value,
        "breaker": instance.breaker.state(now).value,
        "takes_requests": instance.is_well(now),
        "is_draining": instance.is_draining,
        "in_flight": instance.in_flight,
        "workers": list(instance.worker_ids),
        "models": sorted(instance.models),
    }


def _source_facts(status: Any) -> dict[str, Any]:
    return {
        "name": status.name,
        "state": status.state.value,
        "is_settled": status.is_settled,
        "workers": list(status.worker_ids),
        "applied": status.applied,
        "events": status.metrics.events,
    }


async def _object(request: web.BaseRequest) -> dict[str, Any]:
    try:
        return msgspec.json.decode(await request.read(), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise _Mistake(400, "the body must be a JSON object") from None
