"""Drives a host in the terms of a test: prompts that are stored, held and loaded."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fakes import tokens_of
from soak.host import Host, Load

from opal_connector.managers import OpalRequest, object_key
from opal_connector.managers.records import ObjectKey

NEAR, FAR = 1, 2
TIMEOUT_SECONDS = 0.3


def request(host: Host, blocks: Sequence[int]) -> tuple[OpalRequest, list[int]]:
    tokens = tokens_of(blocks)
    made = host.manager.new_request(f"r{blocks}")
    made.extend(tokens)
    return made, tokens


def begin_store(host: Host, blocks: Sequence[int]) -> None:
    made, tokens = request(host, blocks)
    assert len(host.free_blocks) >= len(blocks), "loads that ended have kept all paged blocks"
    host.store(made, tokens)
    host.manager.end_request(made)


def store(host: Host, *prompts: Sequence[int]) -> None:
    """Store prompts one after the other, and wait until all that follows from it is done."""
    for blocks in prompts:
        begin_store(host, blocks)
        host.run_until(lambda: host.is_at_rest)


def held(host: Host, blocks: Sequence[int]) -> int:
    made, _ = request(host, blocks)
    result = host.manager.lookup(made, computed_blocks=0, max_blocks=len(blocks), now=1e9)
    host.manager.release(made)
    return result.block_count


def begin_load(host: Host, blocks: Sequence[int]) -> Load:
    made, _ = request(host, blocks)
    result = host.manager.lookup(made, computed_blocks=0, max_blocks=len(blocks), now=1e9)
    assert result.block_count == len(blocks), "it is not there to be loaded"
    load = host.load(made, result.block_count)
    assert load is not None
    host.manager.end_request(made)
    return load


def load(host: Host, blocks: Sequence[int]) -> set[int]:
    """Load a prompt; which of its objects failed."""
    begun = begin_load(host, blocks)
    host.run_until(lambda: begun.ranks_left == 0)
    assert host.wrong_bytes == 0
    return begun.failed


def files(tmp_path: Path, tier: str) -> list[Path]:
    return sorted((tmp_path / tier).rglob("*.opal"))


def temporaries(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob(".tmp-*"))


def raising(number: int, *calls: str, part: str = "near") -> Callable[[str, str], None]:
    """A rule: these calls fail on files of a tier's objects."""

    def rule(call: str, path: str) -> None:
        if call in calls and f"/{part}/" in path:
            raise OSError(number, os.strerror(number), path)

    return rule


def is_of_an_object(path: str) -> bool:
    """Whether it is a file, finished or not, in one of the folders of objects."""
    return Path(path).parent.parent.name == "r0"


def evicted_to_disk(host: Host) -> list[int]:
    """A prompt that only the files hold."""
    store(host, [1], [2], [3], [4])
    assert not host.manager.storage.tiers[0].contains(key(host, [1]))
    return [1]


def key(host: Host, blocks: Sequence[int]) -> ObjectKey:
    made, _ = request(host, blocks)
    return object_key(made.chain.hashes[-1], 0)
