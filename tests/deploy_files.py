"""What stands in the examples of `configs/deploy`: commands, and files for other programs."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

# ${NAME}, ${NAME:-value}, ${NAME:?message}, as in compose files and units.
_VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?::([-?])([^}]*))?\}")
_EXEC = re.compile(r"^Exec\w+=(.*)$", re.MULTILINE)


def text_of(path: Path) -> str:
    """The text as its program reads it: variables have their defaults, or else a likely value."""

    def value(match: re.Match[str]) -> str:
        if match[2] == "-":
            return match[3]
        return "s3://bucket/opal" if match[1] == "OPAL_BUCKET" else match[1].lower()

    return _VARIABLE.sub(value, path.read_text())


def documents(path: Path) -> list[Any]:
    """The YAML documents of a file; none of a file of another kind."""
    return list(yaml.safe_load_all(text_of(path))) if path.suffix == ".yaml" else []


def commands(path: Path) -> list[list[str]]:
    """Every command with its arguments."""
    if path.suffix == ".service":
        return [shlex.split(line) for line in _EXEC.findall(text_of(path))]
    return [found for document in documents(path) for found in _commands_in(document)]


def _commands_in(node: Any) -> Iterator[list[str]]:
    if isinstance(node, list):
        for item in node:
            yield from _commands_in(item)
    if not isinstance(node, dict):
        return
    # The program is in one field and its arguments in another: compose, then Kubernetes.
    for program, arguments in (("entrypoint", "command"), ("command", "args")):
        if isinstance(node.get(program), list):
            yield [str(word) for word in [*node[program], *(node.get(arguments) or [])]]
            break
    else:
        if isinstance(node.get("command"), list):
            yield [str(word) for word in node["command"]]
    for value in node.values():
        yield from _commands_in(value)


def inner_files(path: Path) -> dict[str, Any]:
    """What a file holds for other programs, by the other file's name: compose and ConfigMaps."""
    found: dict[str, Any] = {}
    for document in documents(path):
        if document.get("kind") == "ConfigMap":
            found |= {name: yaml.safe_load(text) for name, text in document["data"].items()}
        for name, given in (document.get("configs") or {}).items():
            found[f"{name}.yaml"] = yaml.safe_load(given["content"])
    return found


def transfer_configs(path: Path) -> list[dict[str, Any]]:
    """Every --kv-transfer-config."""
    return [
        json.loads(words[place + 1])
        for words in commands(path)
        for place, word in enumerate(words)
        if word == "--kv-transfer-config"
    ]
