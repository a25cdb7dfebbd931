"""The form for launch options in a real kernel, with its button clicked as a front end does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.kernel import Kernel

pytestmark = pytest.mark.notebook

VIEW = "application/vnd.jupyter.widget-view+json"
FORM = """
from notebook_accel.widgets import ConfigForm
def train(word):
    print(word, "from rank", os.environ["RANK"])
    if word == "fail": raise OSError("disk gone")
    if word == "sleep": time.sleep(3600)
    return word
form = ConfigForm(function=train, args=("{word}",), path="c.yaml")
form.set(num_processes=2, use_cpu=True)
form
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    started = Kernel(folder, HF_HOME=str(folder))
    started.run("import os, time").ok()
    yield started
    started.close()


def click(kernel: Kernel, expression: str, *, interrupt_at: str = "") -> list[dict[str, Any]]:
    """Click a button of the form and return the messages that came of it, comm messages included."""
    comm_id = kernel.run(f"print({expression}.model_id)").ok().stdout.strip()
    content = {"comm_id": comm_id, "data": {"method": "custom", "content": {"event": "click"}}}
    request = kernel.client.session.msg("comm_msg", content)
    kernel.client.shell_channel.send(request)
    found: list[dict[str, Any]] = []
    end = time.monotonic() + 240
    while True:
        message = kernel.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
        if message["parent_header"].get("msg_id") != request["header"]["msg_id"]:
            continue
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return found
        found.append(message)
        if interrupt_at and interrupt_at in text_of(found):
            kernel.interrupt()
            interrupt_at = ""


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")


def captured(messages: list[dict[str, Any]]) -> list[bool]:
    """Return for each output whether the form's output area asked for it before."""
    area = False
    found = []
    for message in messages:
        if message["msg_type"] == "comm_msg":
            state = message["content"]["data"].get("state", {})
            area = bool(state.get("msg_id", area))
        elif message["msg_type"] in ("stream", "error", "display_data"):
            found.append(area)
    return found


def test_a_form_is_shown_as_widgets_and_as_a_table(kernel: Kernel) -> None:
    cell = kernel.run("from notebook_accel.widgets import ConfigForm\nConfigForm()").ok()
    (data,) = [o["content"]["data"] for o in cell.outputs if o["type"] == "execute_result"]
    assert data[VIEW]["model_id"] and data["text/plain"].startswith("Launch\n------\ndistributed_type")


def test_a_launch_by_the_button_shows_its_output_in_the_form(kernel: Kernel) -> None:
    kernel.run(FORM.format(word="hello")).ok()
    messages = click(kernel, "form.view.launch")
    assert "Launching train on 2 CPU processes" in text_of(messages)
    assert {"[0] hello from rank 0", "[1] hello from rank 1"} <= set(text_of(messages).splitlines())
    (shown,) = [m["content"]["data"]["text/plain"] for m in messages if m["msg_type"] == "display_data"]
    assert shown == "'hello'" and captured(messages) and all(captured(messages))
    assert kernel.run("form.result, form.view.launch.disabled").value == "('hello', False)"


def test_an_error_is_shown_in_the_form(kernel: Kernel) -> None:
    kernel.run(FORM.format(word="fail")).ok()
    messages = click(kernel, "form.view.launch")
    (error,) = [m["content"] for m in messages if m["msg_type"] == "error"]
    assert (error["ename"], error["evalue"]) == ("OSError", "disk gone")
    assert all(captured(messages))
    assert "view.py" not in "".join(error["traceback"]), "the user's frames only"
    assert kernel.run("form.view.launch.disabled").value == "False"


def test_an_interrupt_stops_what_the_button_started(kernel: Kernel) -> None:
    kernel.run(FORM.format(word="sleep")).ok()
    messages = click(kernel, "form.view.launch", interrupt_at="from rank 1")
    (error,) = [m["content"] for m in messages if m["msg_type"] == "error"]
    assert error["ename"] == "KeyboardInterrupt"
    assert kernel.run("'alive'").value == "'alive'"


def test_a_click_that_comes_in_another_thread_launches_in_the_main_one(kernel: Kernel) -> None:
    kernel.run(FORM.format(word="hello")).ok()
    cell = kernel.run(
        """
        import asyncio, threading
        seen = []
        def note():
            seen.append(threading.current_thread() is threading.main_thread())
            return form.__class__.launch(form)
        form.launch = note
        clicked = threading.Thread(target=form.view.launch.click)
        clicked.start()
        while clicked.is_alive():
            await asyncio.sleep(0.05)
        seen, form.result
        """
    ).ok()
    assert cell.value == "([True], 'hello')"
    assert "[1] hello from rank 1" in cell.stdout


def test_the_magic_shows_the_default_file(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("%load_ext notebook_accel").ok()
    cell = kernel.run("form = %accel_config\nform.path == form.save(), form.config.num_processes").ok()
    assert cell.value.startswith("(True, ")
    path = tmp_path / "a b.yaml"
    path.write_text("num_processes: 3\n")
    assert kernel.run(f"form = %accel_config {path}\nform.config.num_processes").value == "3"
    path.write_text("num_processes: x\n")
    cell = kernel.run(f"%accel_config {path}").ok()
    assert f"{path}:1: num_processes 'x' is no whole number" in cell.stdout
    assert any(VIEW in o["content"].get("data", {}) for o in cell.outputs)
