"""`python -m soak --ops N --seed N --json FILE`: see `run.py`."""

import argparse
import logging
import sys
from pathlib import Path

import msgspec
from soak.run import Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description="Random work under faults.")
    parser.add_argument("--ops", type=int, default=2000, help="operations (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every fault would be reported by the tier that has it
    soak = Soak(
        operations=arguments.ops,
        seed=arguments.seed,
        say=lambda line: sys.stderr.write(f"soak: {line}\n"),
    )
    report = soak.run()
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
