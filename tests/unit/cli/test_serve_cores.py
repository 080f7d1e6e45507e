"""Cores of engines on the CPU: parts that nobody shares, unless the user says otherwise."""

import os

import pytest

from opal_connector.cli.serving import cores
from opal_connector.cli.serving.cores import BIND, own_cores
from opal_connector.cli.serving.load import serve_config
from opal_connector.cli.serving.plans import Planner


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 2, 3, 4, 5}, raising=False)
    monkeypatch.setattr(cores, "_is_cpu_build", lambda: True)


def test_every_engine_has_adjoining_cores_of_its_own() -> None:
    assert own_cores(1, 2, {}) == {BIND: "2,3"}
    assert own_cores(2, 2, {}) == {BIND: "4,5"}


def test_an_engine_that_is_started_later_takes_the_part_of_one_before() -> None:
    assert own_cores(3, 2, {}) == own_cores(1, 2, {})


def test_what_the_user_says_wins() -> None:
    assert own_cores(1, 2, {BIND: "all"}) == {}


@pytest.mark.parametrize("count", [1, 6])
def test_one_engine_has_all_and_more_engines_than_cores_share_them(count: int) -> None:
    assert own_cores(1, count, {}) == {}


def test_another_build_of_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_is_cpu_build", lambda: False)
    assert own_cores(1, 2, {}) == {}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ["2,3", "4,5"]),
        ({"own_cores": False}, [None, None]),
        ({"environment": {BIND: "9"}}, ["9", "9"]),
        ({"command": ["engine"]}, [None, None]),
    ],
)
def test_plans_have_them(
    more: dict[str, object], expected: list[str | None], tmp_path: str
) -> None:
    config = serve_config({"model": str(tmp_path), "instances": 2, "tiers": None, **more})
    planner = Planner(config, {})
    plans = [planner.plan(one, number) for number, one in enumerate(config.instances, 1)]
    assert [plan.environment.get(BIND) for plan in plans] == expected
