"""`%accel_env` and `%accel_doctor` in a real kernel."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.kernel import Cell, Kernel

pytestmark = pytest.mark.notebook


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    started = Kernel(folder, HF_HOME=str(folder), ACCELERATE_TOKEN="very secret", NCCL_DEBUG="<INFO & more>")
    started.run("%load_ext notebook_accel").ok()
    yield started
    started.close()


def data_of(cell: Cell) -> dict[str, Any]:
    """Return what the cell's value is shown as, which is all that the cell shows."""
    assert [output["type"] for output in cell.ok().outputs] == ["execute_result"], cell.outputs
    data: dict[str, Any] = cell.outputs[0]["content"]["data"]
    return data


class Page(HTMLParser):
    """Takes HTML apart and fails where tags do not close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names = set[str]()
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def test_env_shows_the_block_of_a_bug_report(kernel: Kernel) -> None:
    data = data_of(kernel.run("%accel_env"))
    text, page = data["text/plain"], Page(data["text/html"])
    assert text.startswith("- notebook_accel: ")
    assert "NCCL_DEBUG=<INFO & more>" in text
    assert page.text.strip() == text
    assert page.names == {"pre"}
    assert "secret" not in str(data)


def test_doctor_shows_what_each_look_found(kernel: Kernel) -> None:
    data = data_of(kernel.run("%accel_doctor"))
    lines, page = data["text/plain"].splitlines(), Page(data["text/html"])
    assert all(re.match(r"(ok|warning|problem) +[a-z_ ]+: ", line) for line in lines[:-1])
    assert len(lines) > 8
    assert page.names <= {"table", "thead", "tbody", "tr", "th", "td", "b", "br", "p"}
    assert page.text.count("✓ ok") == sum(line.startswith("ok ") for line in lines)
    for line in lines[:-1]:
        assert re.split(": | -> ", line, maxsplit=1)[1].partition(" -> ")[0] in page.text
    # text takes the page's colour, whatever the theme
    assert set(re.findall(r"(?<![-\w])(?:color|background): (\w+)", data["text/html"])) == {"inherit"}


@pytest.mark.not_on("darwin", "another process stands by, or none")
def test_doctor_looks_at_this_kernel(fresh_kernel: Kernel) -> None:
    fresh_kernel.run("%load_ext notebook_accel").ok()
    before = data_of(fresh_kernel.run("%accel_doctor"))["text/plain"]
    assert re.search(r"^ok +this process: nothing was initialised", before, re.MULTILINE)
    fresh_kernel.run("torch.set_num_threads(2); x = torch.rand(700, 700) @ torch.rand(700, 700)").ok()
    after = data_of(fresh_kernel.run("%accel_doctor"))["text/plain"]
    assert re.search(r"^ok +this process: .*thread.*: launches start fresh processes", after, re.MULTILINE), (
        after
    )


def test_the_reports_are_values(kernel: Kernel) -> None:
    shown = kernel.run(
        "found = %accel_doctor\nprint([check.name for check in found.checks][0], found.summary)"
    )
    assert shown.ok().stdout.startswith("launch ")
    block = kernel.run("block = %accel_env\nprint(block)").ok()
    assert block.stdout.count("- torch: ") == 1
    assert not block.value


@pytest.mark.parametrize(
    ("magic", "taken"),
    [("accel_env", "no arguments,"), ("accel_doctor", "--fix,")],
)
def test_arguments_are_refused(kernel: Kernel, magic: str, taken: str) -> None:
    cell = kernel.run(f"%{magic} --json")
    assert f"UsageError: %{magic} takes {taken} and was given '--json'" in cell.stderr
    assert not cell.value


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is in use")
@pytest.mark.not_on("darwin", "the system does not tell what is in use")
def test_doctor_says_what_to_type(kernel: Kernel) -> None:
    kernel.run(
        "import os, subprocess, sys, tempfile\n"
        "folder = tempfile.mkdtemp()\n"
        "code = 'from notebook_accel.launch import leftovers; import os\\n'\n"
        "code += 'leftovers.make_sockets_folder(); os._exit(0)'\n"
        "subprocess.run([sys.executable, '-c', code], env={**os.environ, 'TMPDIR': folder}, check=True)\n"
        "(left,) = os.listdir(folder)\n"
        "before, tempfile.tempdir = tempfile.tempdir, folder"
    ).ok()
    shown = kernel.run("%accel_doctor --fix").ok()
    assert "rm -r " in shown.stdout and "warning  leftovers: killed runs have left" in shown.value
    after = kernel.run(
        "import shutil; tempfile.tempdir = before; print(len(os.listdir(folder))); shutil.rmtree(folder)"
    ).ok()
    assert after.stdout == "1\n", "it removes nothing itself"


def test_without_a_front_end(tmp_path: Path) -> None:
    from notebook_accel.diagnosis import checks, report

    check = checks.Check(name="<b>", status="problem", text="a < b & c", remedy="none")
    found = report.DoctorReport((check, check))
    assert repr(found) == "problem  <b>: a < b & c -> none\n" * 2 + "2 problems"
    assert "a &lt; b &amp; c" in found._repr_html_()
    assert Page(found._repr_html_()).text.count("✗ problem") == 2
