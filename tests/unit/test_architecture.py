"""What holds for the sources as a whole: light imports, public names, sizes, habits."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import opal_connector

ROOT = Path(opal_connector.__file__).parent
TESTS = Path(__file__).parent.parent
HOSTS = {"vllm", "torch", "lmcache"}
Function = ast.FunctionDef | ast.AsyncFunctionDef

# The names of DESIGN.md, section 4, as far as they are delivered, and where they are found.
PUBLIC = {
    "opal_connector": ["OpalKVCacheEngine"],
    "opal_connector.keys": ["OpalTokenDatabase", "OpalEngineMetadata", "OpalCacheEngineKey"],
    "opal_connector.tiers": ["OpalMemoryObj", "CPUMemory", "LocalNVMe", "DistributedFS"],
    "opal_connector.managers": [
        "OpalStorageBackend",
        "OpalStorageManager",
        "OpalKVCacheManager",
        "OpalKVCacheCoordinator",
        "NoPrefixCache",
        "Unitary",
    ],
    "opal_connector.events": ["KVCEvent", "KVCEventType"],
}


def modules(root: Path = ROOT) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(root.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


def functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


# Imports.


@pytest.mark.parametrize(
    "module",
    [
        "opal_connector",
        "opal_connector.keys",
        "opal_connector.config",
        "opal_connector.events",
        "opal_connector.transfers",
        "opal_connector.reports",
        "opal_connector.mooncake_helper",
        "opal_connector.eviction",
        "opal_connector.tiers",
        "opal_connector.managers",
        "opal_connector.engine",
        "opal_connector.simulation",
        "opal_connector.simulated_cluster",
        "opal_connector.cli.main",
        "opal_connector.integrations",
    ],
)
def test_import_loads_no_host(module: str) -> None:
    """A router, a tool or a test starts in milliseconds and without an engine installed."""
    program = (
        f"import sys, {module}\n"
        f"print(*sorted({HOSTS!r} & {{name.split('.')[0] for name in sys.modules}}))\n"
    )

    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()

    assert loaded == []


def test_host_engines_are_imported_by_integrations_only() -> None:
    """Nothing below integrations knows vLLM, not even inside a function."""
    guilty = []
    for path, tree in modules():
        if "integrations" in path.parts:
            continue
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            guilty += [
                f"{name_of(path)}:{node.lineno} {name}"
                for name in names
                if name.split(".")[0] in HOSTS
            ]

    assert guilty == []


# Names.


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in PUBLIC.items() for name in names]
)
def test_name_of_the_design_is_where_readers_look(module: str, name: str) -> None:
    """The names that Opal, LMCache and vLLM use lead here; they are public and stay."""
    assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.vllm
def test_connector_is_found_where_the_host_looks() -> None:
    """VLLM imports the module path and asks it for the connector's name."""
    pytest.importorskip("vllm")

    assert opal_connector.OpalConnector.__name__ == "OpalConnector"


@pytest.mark.parametrize(
    "package", [path.parent for path in sorted(ROOT.rglob("__init__.py"))], ids=lambda p: p.name
)
def test_everything_that_is_exported_exists(package: Path) -> None:
    """`__all__` lists what is there, once, in the order that a person can search."""
    name = ".".join(package.relative_to(ROOT.parent).parts)
    module = importlib.import_module(name)
    exported: list[str] = getattr(module, "__all__", [])

    assert len(exported) == len(set(exported))
    for attribute in exported:
        if attribute != "OpalConnector":
            assert hasattr(module, attribute), attribute


def test_unknown_attribute_is_an_attribute_error() -> None:
    """The lazy export answers as a module without it would."""
    with pytest.raises(AttributeError, match=r"'opal_connector' has no attribute 'Opla'"):
        opal_connector.Opla  # noqa: B018


def test_numbers_of_the_events_are_opals() -> None:
    """INSERT 1, DELETE 2, MOVE 3, COPY 4: consumers know them by number."""
    from opal_connector.events import KVCEventType

    assert {kind.name: int(kind) for kind in KVCEventType} == {
        "INSERT": 1,
        "DELETE": 2,
        "MOVE": 3,
        "COPY": 4,
    }


# Sizes.


def test_source_file_fits_in_a_head() -> None:
    """At most 400 lines; what outgrows them is split inside its room."""
    long = {name_of(path): len(path.read_text().splitlines()) for path, _ in modules()}

    assert {name: lines for name, lines in long.items() if lines > 400} == {}


def test_function_fits_on_a_page() -> None:
    """At most 60 lines, docstring included."""
    long = {
        f"{name_of(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path, tree in modules()
        for node in functions(tree)
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > 60
    }

    assert long == {}


def test_test_file_fits_in_a_head() -> None:
    """At most 500 lines."""
    long = {
        str(path.relative_to(TESTS)): lines
        for path, _ in modules(TESTS)
        if (lines := len(path.read_text().splitlines())) > 500
    }

    assert long == {}


# Habits.


def test_nothing_prints_outside_the_command_line() -> None:
    """A library that prints cannot be embedded."""
    guilty = [
        f"{name_of(path)}:{node.lineno}"
        for path, tree in modules()
        if "cli" not in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]

    assert guilty == []


def test_every_logger_is_named_for_its_module() -> None:
    """No line goes through the root logger, and none under another module's name."""
    guilty = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "logging"):
                continue
            call = node.func.attr
            names_module = (
                bool(node.args)
                and isinstance(node.args[0], ast.Name)
                and node.args[0].id == "__name__"
            )
            # The one place that connects Opal's logger to the host's.
            is_bridge = path.name == "logs.py" and "integrations" in path.parts
            if call == "getLogger" and (names_module or is_bridge or "cli" in path.parts):
                continue
            guilty.append(f"{name_of(path)}:{node.lineno} logging.{call}")

    assert guilty == []


def test_nothing_waits_for_the_garbage_collector() -> None:
    """No `__del__`: what must end is ended."""
    guilty = [
        f"{name_of(path)}:{node.lineno}"
        for path, tree in modules()
        for node in functions(tree)
        if node.name == "__del__"
    ]

    assert guilty == []


def test_every_test_states_what_it_protects() -> None:
    """A docstring, or a name that is a sentence; else nobody dares to delete it."""
    silent = [
        f"{path.relative_to(TESTS)}:{node.name}"
        for path, tree in modules(TESTS)
        for node in functions(tree)
        if node.name.startswith("test_")
        and not ast.get_docstring(node)
        and node.name.count("_") < 3
    ]

    assert silent == []


@pytest.mark.parametrize("room", ["unit", "conformance", "property"])
def test_tests_do_not_sleep(room: str) -> None:
    """Events and conditions synchronise; a sleep is slow on one machine and flaky on another."""
    guilty = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path, tree in modules(TESTS / room)
        if "cli" not in path.parts  # it starts real processes and must poll them
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "sleep"
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "asyncio")
    ]

    assert guilty == []


def test_every_test_module_has_its_own_name() -> None:
    """Test directories are no packages: two modules of one name cannot be collected together."""
    names = [path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py"]

    assert sorted(names) == sorted(set(names))
