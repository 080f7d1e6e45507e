"""What `opal demo --cluster` says about its runs: figures, table, and what is wrong with them."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec

from opal_connector.cli.bench import BenchResult
from opal_connector.cli.bench.summary import summarize
from opal_connector.cli.machine import MachineFacts
from opal_connector.simulation import CACHE_MISS

RECOMPUTED_RATIO_MAX: Final = 0.5
BUSIEST_SHARE_MAX: Final = 1.2
_BASELINE: Final = "RoundRobin"
_RECOMMENDED: Final = "Balanced"


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's run. Times are seconds to the first token.

    `work_tokens` of an instance are the prompt tokens that it computed and the tokens that it
    generated; `busiest_share` is the most that one did, as a multiple of an equal share.
    """

    policy: str
    requests: int
    prompt_tokens: int
    recomputed_tokens: int
    hit_tokens_by_tier: dict[str, int]
    ttft_p50_s: float
    ttft_p99_s: float
    duration_s: float
    work_tokens: dict[str, int]
    requests_by_instance: dict[str, int]
    busiest_share: float


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes. `recomputed_ratio` is Balanced to RoundRobin."""

    policies: list[PolicyReport]
    recomputed_ratio: float
    outputs_equal: bool
    model: str
    machine: MachineFacts

    def policy(self, name: str) -> PolicyReport:
        """The report of one policy."""
        return next(one for one in self.policies if one.policy == name)


def summarize_cluster(
    results: Mapping[str, BenchResult],
    *,
    instance_count: int,
    model: str,
    machine: MachineFacts,
) -> ClusterReport:
    """The report of the runs by policy, which all succeeded."""
    policies = [_policy(name, result, instance_count) for name, result in results.items()]
    by_name = {one.policy: one for one in policies}
    answers = [_answers(result) for result in results.values()]
    baseline = by_name[_BASELINE].recomputed_tokens
    return ClusterReport(
        policies=policies,
        recomputed_ratio=round(by_name[_RECOMMENDED].recomputed_tokens / baseline, 3),
        outputs_equal=all(one == answers[0] for one in answers),
        model=model,
        machine=machine,
    )


def complaint(report: ClusterReport) -> str | None:
    """What is wrong with a report in one sentence, None when the policies did their work."""
    balanced = report.policy(_RECOMMENDED)
    if not report.outputs_equal:
        return "The answers differ: where a request went, or what was cached, changed them."
    if report.recomputed_ratio > RECOMPUTED_RATIO_MAX:
        return (
            f"Balanced computed {report.recomputed_ratio:.0%} of what RoundRobin did; "
            f"at most {RECOMPUTED_RATIO_MAX:.0%} was expected."
        )
    if balanced.busiest_share > BUSIEST_SHARE_MAX:
        return (
            f"One instance did {balanced.busiest_share:.2f} times its share; "
            f"at most {BUSIEST_SHARE_MAX} was expected."
        )
    return None


def show_cluster(report: ClusterReport) -> None:
    """Prints the report for a person."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"The same conversations by {len(report.policies)} policies")
    table.add_column("")
    for one in report.policies:
        table.add_column(one.policy, justify="right")
    tiers = dict.fromkeys(tier for one in report.policies for tier in one.hit_tokens_by_tier)
    rows: list[tuple[str, list[str]]] = [
        ("prompt tokens", [f"{one.prompt_tokens:,}" for one in report.policies]),
        ("  of these computed", [f"{one.recomputed_tokens:,}" for one in report.policies]),
    ]
    rows += [
        (
            f"  hit in {'the device' if tier == 'apc' else tier}",
            [f"{one.hit_tokens_by_tier.get(tier, 0):,}" for one in report.policies],
        )
        for tier in tiers
    ]
    rows += [
        ("first token p50, s", [f"{one.ttft_p50_s:.2f}" for one in report.policies]),
        ("first token p99, s", [f"{one.ttft_p99_s:.2f}" for one in report.policies]),
        ("all of it, s", [f"{one.duration_s:.1f}" for one in report.policies]),
        ("the busiest one's share", [f"{one.busiest_share:.2f}" for one in report.policies]),
    ]
    for name, values in rows:
        table.add_row(name, *values)
    console = Console(highlight=False)
    console.print(table)
    same = "the same answers by all of them" if report.outputs_equal else "answers that DIFFER"
    console.print(
        f"Balanced computed {report.recomputed_ratio:.0%} of what RoundRobin did; {same}.",
        markup=False,
    )
    console.print(
        "MaxPrefix sends all that begin with one system prompt to one instance, which then has all "
        "the work: use Balanced.",
        markup=False,
        soft_wrap=True,
    )


def _policy(name: str, result: BenchResult, instance_count: int) -> PolicyReport:
    figures = summarize(result)
    work: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    prompt_tokens = recomputed_tokens = 0
    for record in result.successes:
        computed = (record.prompt_tokens or 0) - (record.cached_tokens or 0)
        prompt_tokens += record.prompt_tokens or 0
        recomputed_tokens += computed
        work[record.worker or ""] += computed + record.output_tokens
        requests[record.worker or ""] += 1
    tiers = {name: n for name, n in (result.tier_tokens or {}).items() if name != CACHE_MISS}
    assert figures.ttft is not None  # every request was answered
    return PolicyReport(
        policy=name,
        requests=len(result.successes),
        prompt_tokens=prompt_tokens,
        recomputed_tokens=recomputed_tokens,
        hit_tokens_by_tier=tiers,
        ttft_p50_s=round(figures.ttft.median_ms / 1_000, 4),
        ttft_p99_s=round(figures.ttft.p99_ms / 1_000, 4),
        duration_s=round(result.duration_seconds, 2),
        work_tokens=dict(sorted(work.items())),
        requests_by_instance=dict(sorted(requests.items())),
        busiest_share=round(max(work.values()) * instance_count / sum(work.values()), 3),
    )


def _answers(result: BenchResult) -> dict[tuple[str, int], str]:
    return {
        (record.conversation_id, record.turn): record.output_text for record in result.successes
    }
