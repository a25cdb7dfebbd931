"""What lies around the code agrees with it: the workflow, templates, hooks of pre-commit, citation and changelog."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from notebook_accel.cli.main import COMMANDS
from tests.matrix.rows import ROWS
from tests.plain.test_extras import PROGRAMS
from tests.structure.source import ROOT

HOME = "https://github.com/notebook-accel/notebook-accel"
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"
FORMS = [ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("bug", "feature")]
YAML = [
    *sorted((ROOT / ".github").rglob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def read(path: Path) -> Any:
    """Return what a YAML file says."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def find(pattern: str, text: str) -> str:
    """Return what the group of a pattern matches, which stands at the start of a line."""
    found = re.search(pattern, text, re.MULTILINE)
    assert found, pattern
    return found[1]


def steps() -> Iterator[dict[str, Any]]:
    """Yield the steps of all jobs of the workflow."""
    for job in read(WORKFLOW)["jobs"].values():
        yield from job["steps"]


def words_of_commands() -> list[list[str]]:
    """Return the words of each line that the workflow runs."""
    return [shlex.split(line) for step in steps() for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_it_is_yaml(path: Path) -> None:
    assert isinstance(read(path), dict)


def test_the_workflow_may_only_read_and_ends() -> None:
    workflow = read(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]["group"]
    assert not [name for name, job in workflow["jobs"].items() if "timeout-minutes" not in job]


def test_actions_are_pinned_to_major_versions() -> None:
    used = {step["uses"] for step in steps() if "uses" in step}
    assert used and not [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", name)]


def test_make_has_the_targets_that_the_workflow_names() -> None:
    makefile = MAKEFILE
    for name in ("VENV", "PLAIN"):
        makefile = makefile.replace(f"$({name})", find(rf"^{name} := (\S+)$", MAKEFILE))
    targets = set(" ".join(re.findall(r"^([\w./ -]+):(?!=)", makefile, re.MULTILINE)).split())
    named = {word for words in words_of_commands() if words[0] == "make" for word in words[1:]}
    assert "test" in named and named <= targets


def test_every_extra_that_users_install_is_tried_alone() -> None:
    table = PROJECT.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", table, re.MULTILINE))
    of_this_project = {
        "bench",
        "browser-test",
        "compare",
        "dev",
        "docs",
        "lint",
        "notebook-test",
        "release",
        "test",
    }
    has_another_torch = {"xla"}
    tried = find(r"^EXTRAS := (.+)$", MAKEFILE).split()
    assert sorted(extras - of_this_project - has_another_torch) == tried == sorted(PROGRAMS)


def test_git_ignores_the_environments_that_make_clean_removes() -> None:
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    names = dict(re.findall(r"^([A-Z]+) := (\.venv[\w-]*)$", MAKEFILE, re.MULTILINE))
    removed = find(r"^clean:\n\trm -rf (.+)$", MAKEFILE)
    assert "PLAIN" in names
    assert not [name for name in names.values() if f"{name}/" not in ignored]
    assert not [key for key in names if f"$({key})" not in removed]


def test_files_and_modules_that_the_workflow_names_exist() -> None:
    words = [word for line in words_of_commands() for word in line]
    modules = {word for word in words if re.fullmatch(r"tests(\.\w+)+", word)}
    files = {word for word in words if re.match(r"(\.ci|docs|tests|tutorials)/|constraints", word)}
    assert "tests.matrix" in modules and {"tests/unit", "constraints.txt"} <= files
    assert not [name for name in files if not (ROOT / name).exists()]
    places = [ROOT / name.replace(".", "/") for name in modules]
    assert not [
        place
        for place in places
        if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists()
    ]


def test_pythons_are_those_of_the_classifiers() -> None:
    classified = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT))
    setups = [step for step in steps() if "setup-python" in step.get("uses", "")]
    named = {line for step in setups for line in str(step["with"]["python-version"]).splitlines()}
    plain = {version for version in named if "matrix" not in version}
    assert named - plain == {"${{ matrix.python }}"}
    assert plain | {row.python for row in ROWS} == classified


def test_systems_that_nobody_tried_stop_nothing() -> None:
    jobs = read(WORKFLOW)["jobs"]
    others = [name for name, job in jobs.items() if job["runs-on"] != "ubuntu-latest"]
    assert others == ["smoke"] and jobs["smoke"]["continue-on-error"] is True


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_something(path: Path) -> None:
    """What GitHub demands of a form."""
    form = read(path)
    assert form["name"] and form["description"]
    identifiers = [part["id"] for part in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "dropdown", "checkboxes") and part["attributes"]["label"]


def test_the_form_for_bugs_asks_for_output_of_a_command_that_exists() -> None:
    labels = " ".join(part["attributes"]["label"] for part in read(FORMS[0])["body"])
    (name,) = re.findall(r"`notebook-accel (\w+)`", labels)
    assert name in COMMANDS


def test_pre_commit_has_the_ruff_of_the_constraints() -> None:
    repos = read(ROOT / ".pre-commit-config.yaml")["repos"]
    (ruff,) = [repo for repo in repos if repo["repo"].endswith("/ruff-pre-commit")]
    assert ruff["rev"] == f"v{find(r'^ruff==(.+)$', CONSTRAINTS)}"
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]


def test_the_newest_version_of_the_changelog_is_that_of_the_project() -> None:
    heads = re.findall(r"^## (.+)$", CHANGES, re.MULTILINE)
    dated = [head for head in heads if head != "Unreleased"]
    assert "Unreleased" not in heads[1:], "what is not released stands above what is"
    wrong = [head for head in dated if not re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", head)]
    assert not wrong, f"not of the form '1.2.3 - 2026-01-31': {wrong}"
    versions = [Version(head.split()[0]) for head in dated]
    assert versions == sorted(versions, reverse=True)
    own = Version(find(r'^version = "(.+)"$', PROJECT))
    assert own == versions[0] or (heads[0] == "Unreleased" and own > versions[0])


def test_the_citation_is_that_of_the_last_release() -> None:
    citation = read(ROOT / "CITATION.cff")
    version, date = find(r"^## (\d.+)$", CHANGES).split(" - ")
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["title"]
    assert (citation["version"], citation["date-released"]) == (version, date)
    assert citation["authors"] == [{"name": find(r'^authors = \[\{ name = "(.+)" \}\]$', PROJECT)}]
    assert citation["license"] == find(r'^license = "(.+)"$', PROJECT)
    assert citation["repository-code"] == HOME


def test_urls_lead_home() -> None:
    table = PROJECT.partition("[project.urls]\n")[2].partition("\n[")[0]
    urls = dict(re.findall(r'^(\w+) = "(.+)"$', table, re.MULTILINE))
    assert set(urls) == {"Homepage", "Documentation", "Issues", "Changelog"}
    assert not [url for url in urls.values() if not f"{url}/".startswith(f"{HOME}/")]
    inside = [url.partition("/main/")[2] for url in urls.values() if "/main/" in url]
    assert not [name for name in inside if not (ROOT / name).exists()]
