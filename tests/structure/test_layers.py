"""A module imports from lower floors or from its own package, so that no two parts need each other."""

from __future__ import annotations

import re

from tests.structure.source import ROOT, modules, resolve

# Bottom to top. A name stands for the module, or for the package with all that is in it; where both a package
# and one of its modules are listed, the module has its own floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "events", "environ", "probes", "registry", "choices"),
    ("tpu",),
    ("topology", "nested", "devices", "handlers", "stopping", "fsdp", "parallelism", "dtensors"),
    ("comm", "stream", "affinity", "compilation", "fp8", "config"),
    ("runtime", "zero"),
    ("detect",),
    ("state",),
    ("precision", "seeding", "logging", "optimizer", "scheduler", "hooks"),
    ("data_loader",),
    ("launch",),
    ("tracking", "checkpointing", "launch.run", "launch.registry", "launch.start", "diagnosis"),
    ("big_modeling",),
    ("strategies",),
    ("accelerator", "memory", "inference", "quantization", "estimation", "metrics"),
    ("local_sgd",),
    ("widgets.run",),
    ("launchers", "session"),
    ("widgets",),
    ("cli", "utils"),
    ("", "__main__"),
)
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


def test_every_module_has_a_floor() -> None:
    unknown = []
    for module in modules():
        try:
            floor_of(short(module.name))
        except KeyError as error:
            unknown.append(error.args[0])
    assert not unknown, "\n".join(unknown)


def test_no_entry_of_the_table_is_stale() -> None:
    names = {short(module.name) for module in modules()}
    planned = {"registry", "checkpointing"}
    missing = {entry for row in FLOORS for entry in row} - names - planned
    assert not missing, f"FLOORS lists modules that do not exist: {sorted(missing)}"


def test_imports_go_down() -> None:
    known = {module.name for module in modules()}
    wrong = []
    for module in modules():
        importer = short(module.name)
        for line, name in module.imports():
            imported = short(resolve(name, known))
            if (importer, imported) in EXCEPTIONS or imported == importer:
                continue
            same_package = importer and imported and importer.split(".")[0] == imported.split(".")[0]
            if not same_package and floor_of(imported) >= floor_of(importer):
                wrong.append(
                    f"{module.where}:{line}: {importer or '__init__'} (floor {floor_of(importer)}) imports "
                    f"{imported or 'notebook_accel'} (floor {floor_of(imported)})"
                )
    assert not wrong, "\n".join(wrong)


def imported_by(package: str, but: str = "-") -> set[str]:
    """Return what the modules of a package import of ours, those of a part of it left out."""
    known = {module.name for module in modules()}
    return {
        short(resolve(name, known))
        for module in modules()
        if short(module.name).startswith(package) and not short(module.name).startswith(but)
        for _, name in module.imports()
    }


def test_the_form_and_the_magics_know_what_they_show_only() -> None:
    allowed = ("config", "diagnosis", "errors", "launchers", "session", "widgets")
    foreign = {
        name for name in imported_by("widgets", but="widgets.run") if name.split(".")[0] not in allowed
    }
    assert not foreign, f"widgets import {sorted(foreign)}"


def test_the_view_of_a_run_reads_the_run_only() -> None:
    """It gets by without the form, and without what trains."""
    allowed = {"environ", "errors", "events", "probes", "launch", "stream", "widgets.run"}
    foreign = {
        name
        for name in imported_by("widgets.run")
        if not {name, name.split(".")[0]} & allowed and not name.startswith("widgets.run.")
    }
    assert not foreign, f"widgets.run imports {sorted(foreign)}"


def test_no_exception_is_stale() -> None:
    known = {module.name for module in modules()}
    used = {
        (short(module.name), short(resolve(name, known)))
        for module in modules()
        for _, name in module.imports()
    }
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
