"""A module imports from lower floors, and inside its package from lower rows, so that no two parts need each other."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping

import pytest

from tests.structure.source import ROOT, modules, resolve

# Bottom to top. A name stands for the module, or for the package with all that is in it; where both a package
# and one of its modules are listed, the module has its own floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "events",
        "environ",
        "probes",
        "caller",
        "checked",
        "choices",
        "collector",
        "combinations",
        "interrupts",
        "notices",
        "owners",
        "requirements",
    ),
    ("tpu", "takeover", "cuda_count"),
    (
        "topology",
        "nested",
        "devices",
        "handlers",
        "stopping",
        "fsdp",
        "parallelism",
        "dtensors",
        "trust",
    ),
    ("comm", "stream", "affinity", "compilation", "fp8", "config"),
    ("runtime",),
    ("detect", "processes", "state_views"),
    ("state_pickles",),
    ("gradient_state", "gradients"),
    ("state",),
    ("loss_scaler",),
    ("precision", "seeding", "logging", "optimizer", "scheduler", "hooks"),
    ("data_loader",),
    ("launch",),
    ("tracking", "checkpointing"),
    ("big_modeling",),
    ("strategies",),
    ("deepspeed",),
    ("accelerator", "memory", "inference", "quantization", "estimation", "metrics", "launch.preflight"),
    ("local_sgd", "diagnosis"),
    ("widgets.run",),
    ("launchers", "session"),
    ("widgets",),
    ("utils", "memory_utils", "parallelism_config"),
    ("cli", "test_utils"),
    ("commands",),
    ("", "__main__"),
)
# The modules and packages of each package, bottom to top; those of one row do not import each other. A "*" stands for
# all that no row names: these may import each other, without a circle.
INSIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "accelerator": (("arguments", "base", "strategy_table"), ("*",), ("core",)),
    "big_modeling": (
        ("conversion", "eight_bit", "explanation", "init", "mapped", "moves", "sizes", "state"),
        ("limits", "offload", "ties"),
        ("device_map", "placing"),
        ("load", "whole"),
        ("dispatch",),
    ),
    "checkpointing": (
        ("names", "optimizers", "randomness", "rawio"),
        ("checksums",),
        ("pickled", "weights"),
        ("manifest",),
        ("folder",),
        ("copies", "models", "plain", "shards"),
        ("merge", "parts"),
        ("read", "sharded", "write"),
        ("background",),
    ),
    "cli": (
        ("console", "flags", "places", "progress", "questions", "refusal"),
        ("plan",),
        ("start",),
        ("*",),
    ),
    "commands": (("*",),),
    "commands.config": (("*",),),
    "comm": (
        ("local_sockets", "packing"),
        ("base", "gathers"),
        ("check", "single", "torch_dist", "xla"),
        ("ops",),
    ),
    "config": (
        ("argument_checks", "comments", "hosts", "slurm"),
        ("document", "option"),
        ("readers",),
        ("launch_options", "problems", "sections"),
        ("arguments", "schema"),
        ("export", "file", "tables"),
        ("basic", "launch"),
    ),
    "data_loader": (
        ("exchange", "failing", "indices", "lead", "rounds", "rows"),
        ("samplers",),
        ("iterable", "own", "resume"),
        ("base",),
        ("dispatch", "shard"),
        ("prepare", "skip"),
    ),
    "deepspeed": (
        ("config", "cpu_order", "dummies", "resharding", "wrappers"),
        ("checkpoints", "library", "released", "settings"),
        ("plugin",),
        ("fill", "pairs", "plugin_set"),
        ("resolve", "strategy"),
    ),
    "diagnosis": (
        ("check", "environment", "packages"),
        ("compiled", "hosted"),
        ("checks",),
        ("report",),
    ),
    "estimation": (("building", "sizes"), ("sources",)),
    "hooks": (("*",), ("align", "cpu"), ("attach",)),
    "launch": (
        ("process_table",),
        (
            "children",
            "descriptors",
            "durations",
            "job",
            "main_module",
            "memory_kills",
            "rank_names",
            "request",
            "signals",
        ),
        ("callbacks", "leftovers", "script"),
        ("checks", "transfer"),
        ("worker",),
        ("agent",),
        ("supervise",),
        ("engines",),
        ("attaching", "preflight", "run_errors"),
        ("run",),
        ("registry",),
        ("dry_run",),
    ),
    "launch.agent": (("modules",), ("orders",), ("*",), ("client",), ("background",)),
    "launch.checks": (("addresses", "cuda_use", "problems"), ("*",)),
    "launch.engines": (
        ("base", "stores"),
        ("attempts",),
        ("detached",),
        ("nodes", "remote"),
        ("*",),
        ("local_driver",),
    ),
    "launch.engines.detached": (("recording",), ("folder",), ("driving", "watch"), ("engine", "local")),
    "launch.engines.nodes": (
        ("node_info", "waiting"),
        ("outcomes",),
        ("messages",),
        ("link", "values"),
        ("coordinator",),
        ("meeting",),
        ("agent",),
    ),
    "launch.engines.ray": (("cluster",), ("*",), ("engine",)),
    "launch.engines.remote": (
        ("transport",),
        ("client", "keep_alive", "routes"),
        ("channel", "rank_process"),
        ("messages", "relay"),
        ("link", "reaching", "run_sender"),
        ("agent",),
        ("bootstrap", "pool"),
        ("host_run", "hosts_group"),
        ("hosts_engine",),
        ("driver",),
    ),
    "launch.engines.slurm": (
        ("command",),
        ("submission",),
        ("allocation", "detached"),
        ("engine",),
        ("driver",),
    ),
    "launch.engines.ssh": (("command",), ("engine",)),
    "launch.supervise": (
        ("control", "delivery", "hang_report"),
        ("hang_watch", "stop_agreement"),
        ("*",),
    ),
    "launch.transfer": (
        ("cell_sources", "left_behind", "pickled", "settings", "sharing", "tracebacks"),
        ("pickling",),
        ("*",),
    ),
    "launch.worker": (("*",), ("main",)),
    "session": (("call", "cells"), ("service",), ("workers",), ("core",)),
    "strategies": (
        ("base", "blocks", "context_parallel", "filling", "meshes", "tensor_parallel"),
        ("single",),
        ("ddp", "fsdp2", "xla"),
    ),
    "stream": (("lines", "readable", "wire"), ("emit", "inbox", "sinks"), ("*",), ("capture",)),
    "takeover": (("paths", "startup", "tried"), ("names",), ("finder",)),
    "takeover.startup": (("*",),),
    "test_utils": (("*",),),
    "test_utils.scripts": (("*",),),
    "trust": (("plain", "proof"), ("*",)),
    "tracking": (("base", "values"), ("*",), ("choose",)),
    "utils": (("*",),),
    "widgets": (("run",), ("draft", "main_thread"), ("fields",), ("*",), ("magics",)),
    "widgets.run": (("ansi", "picture"), ("lines",), ("*",)),
}
# (importer, imported): why it is right
EXCEPTIONS: dict[tuple[str, str], str] = {}


def floor_of(name: str) -> int:
    """Return the floor of a module named without `notebook_accel.`; the longest listed prefix counts."""
    listed = {entry: number for number, row in enumerate(FLOORS) for entry in row}
    parts = name.split(".") if name else []
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in listed:
            return listed[prefix]
    if name == "":
        return listed[""]
    raise KeyError(f"notebook_accel.{name} has no floor: add it to FLOORS and to the map in CONTRIBUTING.md")


def short(name: str) -> str:
    return name.removeprefix("notebook_accel").removeprefix(".")


@functools.cache
def arrows() -> dict[str, dict[str, str]]:
    """Return for each module the modules of ours that it imports, and where; imports inside functions count too."""
    known = {module.name for module in modules()}
    found: dict[str, dict[str, str]] = {}
    for module in modules():
        own = found.setdefault(short(module.name), {})
        for line, name in module.imports():
            if (imported := short(resolve(name, known))) != short(module.name):
                own.setdefault(imported, f"{module.where}:{line}")
    return found


def circles(graph: Mapping[str, Collection[str]]) -> set[frozenset[str]]:
    """Return the sets of nodes that reach each other."""
    reach = {name: reachable(graph, name) for name in graph}
    return {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in graph
        if name in reach[name]
    }


def reachable(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        if (name := ahead.pop()) not in found:
            found.add(name)
            ahead += graph[name]
    return found


def parts_of(package: str) -> dict[str, set[str]]:
    """Return the modules and packages of a package, by their names in it, each with the names of its modules."""
    parts: dict[str, set[str]] = {}
    for name in arrows():
        if name.startswith(f"{package}."):
            parts.setdefault(name.removeprefix(f"{package}.").split(".")[0], set()).add(name)
    return parts


def test_every_module_has_a_floor() -> None:
    unknown = []
    for module in modules():
        try:
            floor_of(short(module.name))
        except KeyError as error:
            unknown.append(error.args[0])
    assert not unknown, "\n".join(unknown)


def test_no_entry_of_the_table_is_stale() -> None:
    missing = {entry for row in FLOORS for entry in row} - arrows().keys()
    assert not missing, f"FLOORS lists modules that do not exist: {sorted(missing)}"


def test_imports_go_down() -> None:
    wrong = []
    for importer, imports in arrows().items():
        for imported, where in imports.items():
            same_package = importer and imported and importer.split(".")[0] == imported.split(".")[0]
            if same_package or (importer, imported) in EXCEPTIONS:
                continue
            if floor_of(imported) >= floor_of(importer):
                wrong.append(
                    f"{where}: {importer or '__init__'} (floor {floor_of(importer)}) imports "
                    f"{imported or 'notebook_accel'} (floor {floor_of(imported)})"
                )
    assert not wrong, "\n".join(wrong)


def test_every_package_has_rows() -> None:
    packages = {short(module.name) for module in modules() if module.is_package} - {""}
    assert packages == INSIDE.keys(), f"INSIDE and the packages differ: {sorted(packages ^ INSIDE.keys())}"


@pytest.mark.parametrize("package", INSIDE)
def test_the_rows_of_a_package_are_complete(package: str) -> None:
    listed = [entry for row in INSIDE[package] for entry in row]
    parts = set(parts_of(package))
    assert len(listed) == len(set(listed)), f"a name stands twice in INSIDE[{package!r}]"
    stale = set(listed) - parts - {"*"}
    assert not stale, f"INSIDE[{package!r}] lists what does not exist: {sorted(stale)}"
    if "*" not in listed:
        assert not parts - set(listed), f"INSIDE[{package!r}] lacks {sorted(parts - set(listed))}"
    else:
        assert parts - set(listed), f"the * of INSIDE[{package!r}] stands for nothing"


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package_go_down(package: str) -> None:
    row_of = {entry: number for number, row in enumerate(INSIDE[package]) for entry in row}
    rest = row_of.get("*", -1)
    part_of = {name: part for part, names in parts_of(package).items() for name in names}
    wrong = []
    for importer, part in part_of.items():
        for imported, where in arrows()[importer].items():
            other = part_of.get(imported, part)
            if other == part:
                continue
            upper, lower = row_of.get(part, rest), row_of.get(other, rest)
            if lower > upper or (lower == upper != rest):
                wrong.append(f"{where}: {part} (row {upper}) imports {other} (row {lower}) of {package}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = circles(arrows())
    assert not found, f"circles: {sorted(map(sorted, found))}"


def test_no_packages_import_each_other_in_a_circle() -> None:
    """A package counts with all that is in it; `widgets.run`, which gets by without the form, counts by itself."""
    graph: dict[str, set[str]] = {}
    for importer, imports in arrows().items():
        own = graph.setdefault(room_of(importer), set())
        own |= {room_of(imported) for imported in imports} - {room_of(importer)}
    assert not circles(graph)


def room_of(name: str) -> str:
    return "widgets.run" if name.startswith("widgets.run") else name.split(".")[0]


def imported_by(package: str, but: str = "-") -> set[str]:
    """Return what the modules of a package import of ours, those of a part of it left out."""
    return {
        imported
        for importer, imports in arrows().items()
        if importer.startswith(package) and not importer.startswith(but)
        for imported in imports
    }


def test_the_form_and_the_magics_know_what_they_show_only() -> None:
    allowed = ("config", "diagnosis", "errors", "launchers", "session", "widgets")
    foreign = {
        name for name in imported_by("widgets", but="widgets.run") if name.split(".")[0] not in allowed
    }
    assert not foreign, f"widgets import {sorted(foreign)}"


def test_the_view_of_a_run_reads_the_run_only() -> None:
    """It gets by without the form, and without what trains."""
    allowed = {
        "caller",
        "config",
        "environ",
        "errors",
        "events",
        "probes",
        "launch",
        "notices",
        "stream",
        "widgets.run",
    }
    foreign = {
        name
        for name in imported_by("widgets.run")
        if not {name, name.split(".")[0]} & allowed and not name.startswith("widgets.run.")
    }
    assert not foreign, f"widgets.run imports {sorted(foreign)}"


def test_no_exception_is_stale() -> None:
    used = {(importer, imported) for importer, imports in arrows().items() for imported in imports}
    assert not EXCEPTIONS.keys() - used


def test_the_map_in_contributing_is_true() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text.partition("<!-- map -->")[2].partition("<!-- end of map -->")[0].splitlines()
    cells = [row.split("|") for row in rows if row.startswith("|")][2:]
    drawn = {
        name.rstrip("/").replace("/", ".").replace("__init__", "")
        for cell in cells
        for name in re.findall(r"`([^`]+)`", cell[2])
    }
    names = {short(module.name) for module in modules()}
    assert not drawn - names, f"the map shows what does not exist: {sorted(drawn - names)}"
    missing = {name.split(".")[0] for name in names} - {name.split(".")[0] for name in drawn}
    assert not missing, f"the map does not show {sorted(missing)}"
