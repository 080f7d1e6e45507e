"""Counts of what the books saw, as plain dictionaries that can cross a process."""

from collections.abc import Mapping

import msgspec


class BookCounters(msgspec.Struct):
    """Increments since the last `take`. Keys of the dictionaries are metric labels.

    Mutable state: all of it, guarded by the lock of `OpalKVCacheManager`.
    """

    hit_tokens: dict[str, int] = {}
    miss_tokens: dict[str, int] = {}
    load_bytes: dict[str, int] = {}
    load_seconds: dict[str, float] = {}
    store_bytes: dict[str, int] = {}
    store_seconds: dict[str, float] = {}
    dropped_stores: dict[str, int] = {}
    failures: dict[str, int] = {}

    def add_admission(
        self, tier_names: tuple[str, ...], hit_tokens: Mapping[str, int], queried_tokens: int
    ) -> None:
        """Count one lookup that led to an admission.

        A tier is asked for what the faster ones did not have.
        """
        asked = queried_tokens
        for name in tier_names:
            hit = hit_tokens.get(name, 0)
            if hit:
                add(self.hit_tokens, name, hit)
            asked -= hit
            if asked > 0:
                add(self.miss_tokens, name, asked)

    def take(self) -> dict[str, dict[str, int | float]]:
        """The non-empty counters; they start again from nothing."""
        taken = {
            field: value for field in self.__struct_fields__ if (value := getattr(self, field))
        }
        for field in taken:
            setattr(self, field, {})
        return taken


def add(counter: dict[str, int] | dict[str, float], label: str, amount: float) -> None:
    """Count `amount` under `label`."""
    counter[label] = counter.get(label, 0) + amount  # type: ignore[assignment]
