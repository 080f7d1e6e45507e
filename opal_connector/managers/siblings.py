"""Objects that begin with the same block, found by their longest common run of blocks.

A block's hash includes its whole prefix, so objects that share their first block share the parent
too. Under one first block the runs (concatenated block hashes) are kept sorted: the run with the
longest common beginning is then a neighbour of the place where the wanted run would stand.
"""

from bisect import bisect_left, insort

from opal_connector.keys import HASH_BYTES


def common_blocks(left: bytes, right: bytes) -> int:
    """Blocks at the start of both runs that are the same.

    Equal hashes at one place imply equal hashes before it, so this is a binary search.
    """
    low, high = 0, min(len(left), len(right)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * HASH_BYTES
        if left[end - HASH_BYTES : end] == right[end - HASH_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low


class SiblingIndex:
    """Sorted runs by (kv group, first block).

    Mutable state: `_families`, guarded by the owner of the books. A run without siblings, which
    most are, stands there itself instead of in a list of one: half the memory, and nothing for the
    garbage collector to visit.
    """

    def __init__(self) -> None:
        self._families: dict[bytes, list[bytes] | bytes] = {}

    def __len__(self) -> int:
        return sum(
            1 if isinstance(family, bytes) else len(family) for family in self._families.values()
        )

    def add(self, run: bytes, group: int) -> None:
        """Add a run."""
        name = _family(run, group)
        family = self._families.get(name)
        if family is None:
            self._families[name] = run
        elif isinstance(family, bytes):
            self._families[name] = sorted((family, run))
        else:
            insort(family, run)

    def discard(self, run: bytes, group: int) -> None:
        """Take a run out, if it is there."""
        name = _family(run, group)
        family = self._family_of(name)
        place = bisect_left(family, run)
        if place == len(family) or family[place] != run:
            return
        if len(family) > 2:
            del family[place]
        elif len(family) == 2:
            self._families[name] = family[1 - place]
        else:
            del self._families[name]

    def longest(self, wanted: bytes, group: int) -> tuple[bytes, int]:
        """The run with the longest common beginning with `wanted`, and that length in blocks.

        `(b"", 0)` when nothing begins with the same block.
        """
        family = self._family_of(_family(wanted, group))
        place = bisect_left(family, wanted)
        best, best_blocks = b"", 0
        for neighbour in family[max(0, place - 1) : place + 1]:
            blocks = common_blocks(neighbour, wanted)
            if blocks > best_blocks:
                best, best_blocks = neighbour, blocks
        return best, best_blocks

    def prefixes(self, run: bytes, group: int) -> list[bytes]:
        """Runs that are a proper beginning of `run`."""
        family = self._family_of(_family(run, group))
        if not family:
            return []
        found = []
        for blocks in range(1, len(run) // HASH_BYTES):
            beginning = run[: blocks * HASH_BYTES]
            place = bisect_left(family, beginning)
            if place < len(family) and family[place] == beginning:
                found.append(beginning)
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._families.clear()

    def _family_of(self, name: bytes) -> list[bytes]:
        """The runs of a family; to be changed in place only if there are more than one."""
        family = self._families.get(name)
        if family is None:
            return []
        return [family] if isinstance(family, bytes) else family


def _family(run: bytes, group: int) -> bytes:
    return run[:HASH_BYTES] + group.to_bytes(2, "little")
