"""How fast `LocalNVMe` knows again what it holds: 100,000 objects after a restart.

The index is what a day's work leaves: a snapshot and a log of later writes, uses and removals. The
bar is on the whole of `open`: it lists every file and gives every name. Beside it stand the same
without an index, which reads every header, and a bare listing of the same directories. Files are
holes behind real headers; the page cache is warm, as after a restart of the engine.
"""

import os
import random
import shutil
import statistics
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from common import Figures, at_most, emit, interleaved, machine_facts, note, parser

from opal_connector.keys import HASH_BYTES
from opal_connector.tiers.file_names import INDEX_NAME, object_key, object_path
from opal_connector.tiers.local_nvme import LocalNVMe
from opal_connector.tiers.record import RecordHeader, encode_header, file_bytes
from opal_connector.transfers import ObjectName

OBJECTS = 100_000
BLOCKS = 8
ROW_BYTES = 64 << 10
BAR_SECONDS = 1.0
NAMESPACE = sha256(b"benchmark").digest()


def make_name(number: int) -> ObjectName:
    """An object of eight blocks."""
    run = b"".join(sha256(b"%d/%d" % (number, block)).digest() for block in range(BLOCKS))
    return ObjectName(0, run[:HASH_BYTES][::-1], run)


def make_file(directory: str, name: ObjectName) -> None:
    """A file with a true header and a payload that takes no room."""
    path = object_path(directory, object_key(name))
    checks = tuple(range(1, BLOCKS + 1))
    with open(path, "wb") as file:
        file.write(encode_header(RecordHeader(NAMESPACE, 0, ROW_BYTES, name, checks)))
        file.truncate(file_bytes(BLOCKS, ROW_BYTES))


def fill(root: Path, objects: int) -> str:
    """A directory with so many objects and an index with a history; returns the rank's directory.

    The log behind the snapshot has a twentieth of the objects written, as many removed (whose
    files are gone) and as many used again.
    """
    tier = LocalNVMe(root, row_bytes=ROW_BYTES, rank=0)
    assert not list(tier.open(NAMESPACE))
    directory = str(tier.directory)
    for folder in range(256):
        os.makedirs(f"{directory}/{folder:02x}", exist_ok=True)
    recent = objects // 20
    names = [make_name(number) for number in range(objects)]
    for name in names[:-recent]:
        make_file(directory, name)
    tier.close()
    os.unlink(f"{directory}/{INDEX_NAME}")
    tier = LocalNVMe(root, row_bytes=ROW_BYTES, rank=0)
    assert sum(map(len, tier.open(NAMESPACE))) == objects - recent  # makes the snapshot
    removed = [make_name(objects + number) for number in range(recent)]
    for name in (*removed, *names[-recent:]):
        make_file(directory, name)
        tier._published(name)
    for name in removed:
        tier.remove_object(name)
    tier.touch([object_key(name) for name in random.Random(1).sample(names, recent)])
    tier.close()
    return directory


def recover(root: Path, objects: int) -> None:
    """What a worker does when it starts."""
    tier = LocalNVMe(root, row_bytes=ROW_BYTES, rank=0)
    count = sum(map(len, tier.open(NAMESPACE)))
    tier.close()
    assert count == objects, count


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--directory", type=Path, help="where to measure [default: the usual one]")
    arguments = options.parse_args()
    objects = 10_000 if arguments.quick else OBJECTS
    facts = machine_facts()
    root = Path(tempfile.mkdtemp(prefix="opal-recovery-", dir=arguments.directory))
    try:
        note(f"making {objects} files")
        directory = fill(root, objects)
        index = f"{directory}/{INDEX_NAME}"
        index_bytes = os.stat(index).st_size

        def list_only() -> None:
            assert sum(len(os.listdir(f"{directory}/{one:02x}")) for one in range(256)) == objects

        def without_index() -> None:
            os.rename(index, f"{root}/kept")
            recover(root, objects)
            os.rename(f"{root}/kept", index)

        seconds = interleaved(
            {
                "with_index": lambda: recover(root, objects),
                "without_index": without_index,
                "listing_alone": list_only,
            },
            repetitions=3 if arguments.quick else 5,
        )
    finally:
        shutil.rmtree(root)
    medians = {f"{name}_seconds": statistics.median(took) for name, took in seconds.items()}
    figures: Figures = {"objects": objects, "index_bytes": index_bytes, **medians}
    bars: dict[str, Any] = {"recovery_seconds": at_most(medians["with_index_seconds"], BAR_SECONDS)}
    emit(arguments, facts=facts, statistic="median", figures=figures, bars=bars)


if __name__ == "__main__":
    main()
