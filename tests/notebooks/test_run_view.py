"""The view of a run in a kernel: what it sends while the run goes on, and the page that it leaves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.notebooks.conftest import IMPORTS
from tests.notebooks.kernel import ROOT, Cell, Kernel, prepare_kernel, wait_until

pytestmark = pytest.mark.notebook

WIDGET = "application/vnd.jupyter.widget-view+json"
TALK = """
from IPython.display import display, clear_output, HTML
from notebook_accel import print_metrics, runs

def talk(seconds=0.5, fails=False):
    rank = int(os.environ["RANK"])
    print("hello", rank)
    print("<script>careful</script>", file=sys.stderr)
    print_metrics(loss=0.5, step=1)
    if fails and rank == 1:
        time.sleep(0.3)
        raise ValueError("bad batch")
    time.sleep(seconds)
    return 7

def talk_until(name, fails=False):
    talk(0)
    while not os.path.exists(name):
        time.sleep(0.01)
    return talk(0, fails)

def draw():
    for number in range(3):
        clear_output(wait=True)
        display(HTML(f"<i>picture {number}</i>"))
    time.sleep(0.3)
"""


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel whose launches show the view that a notebook gets."""
    started = Kernel(tmp_path_factory.mktemp("viewer"), NOTEBOOK_ACCEL_VIEW="auto")
    started.run(IMPORTS + TALK).ok()
    yield started
    started.close()


def views(cell: Cell) -> list[dict[str, Any]]:
    """Return the displays of a cell that were a live view first, as they are now."""
    return [data for data in cell.displays if "accel-run-static" in str(data.get("text/html", ""))]


def live(cell: Cell) -> int:
    """Return how many live views a cell was sent."""
    return sum(WIDGET in o["content"]["data"] for o in cell.outputs if o["type"] == "display_data")


def updates(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [m["content"] for m in messages if m["msg_type"] == "update_display_data"]


def sent_later(kernel: Kernel, word: str, seconds: float = 120) -> list[dict[str, Any]]:
    """Return the updates that come after a cell has ended, until one has this word."""
    found: list[dict[str, Any]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end and not any(word in str(content["data"]) for content in found):
        found += updates(kernel.late_output(0.2))
    return found


def final_page(kernel: Kernel, cell: Cell) -> dict[str, Any]:
    """Return the page that a run in the background leaves, in the cell or after its end."""
    found = views(cell) or [content["data"] for content in sent_later(kernel, "accel-run-static")]
    (final,) = found
    return final


def check_static(data: dict[str, Any], *words: str) -> None:
    assert WIDGET not in data
    assert "<script" not in data["text/html"] and "&lt;script&gt;careful" in data["text/html"]
    for word in words:
        assert word in data["text/html"] and word in data["text/plain"], word


def test_a_blocking_run_leaves_a_page(viewer: Kernel) -> None:
    cell = viewer.run("notebook_launcher(talk, num_processes=2)").ok()
    assert cell.value == "7" and live(cell) == 1
    (final,) = views(cell)
    check_static(final, "talk", "on 2 processes", "done", "hello 1", "loss 0.5")
    assert not cell.stdout and not cell.stderr, "the lines are in the view"
    assert not [data for data in cell.displays if WIDGET in data]


def test_a_failed_run_shows_its_failure_once(viewer: Kernel) -> None:
    cell = viewer.run("notebook_launcher(talk, (20, True), num_processes=2)")
    assert cell.error == ("ValueError", "bad batch")
    (final,) = views(cell)
    check_static(final, "failed", "ValueError: bad batch", "stopped")
    assert "Traceback" not in final["text/plain"] and "Traceback" in cell.traceback


def test_a_background_run_shows_its_traceback(viewer: Kernel) -> None:
    cell = viewer.run("run = notebook_launcher(talk, (20, True), num_processes=2, block=False)").ok()
    assert live(cell) == 1
    final = final_page(viewer, cell)
    check_static(final, "failed", "ValueError", "bad batch", "Traceback (most recent call last)")
    assert "raise ValueError" in final["text/plain"], "with the lines of the cell"
    again = viewer.run("run.show(); run.show()").ok()
    assert len(views(again)) == 2 and again.displays[0] == again.displays[1] == final
    assert viewer.run("run.result()").error == ("ValueError", "bad batch")


def test_an_awaited_run(viewer: Kernel) -> None:
    cell = viewer.run("run = notebook_launcher(talk, num_processes=2, block=False)\nawait run").ok()
    assert cell.value == "7"
    (final,) = views(cell)
    check_static(final, "done", "hello 0")


def test_a_restarted_run_goes_on_in_its_view(viewer: Kernel) -> None:
    """A worker is killed from another cell: metrics go on, each rank is what it is now, and nothing says killed."""
    code = """
        def restarts():
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            for step in range(3 * attempt, 3 * attempt + 3):
                print_metrics(loss=1.0 / (step + 1), step=step)
            if not attempt:
                time.sleep(600)
            while not os.path.exists("enough"):
                time.sleep(0.01)
            return attempt
        from notebook_accel.widgets.run.picture import make_picture
        run = notebook_launcher(restarts, num_processes=2, max_restarts=1, block=False)
    """
    viewer.run(code).ok()
    kill = """
        def until(condition):
            end = time.monotonic() + 100
            while not condition() and time.monotonic() < end:
                time.sleep(0.01)
        until(lambda: len(run.metrics) >= 3 and [s.status for s in make_picture(run).ranks] == ["running"] * 2)
        before = dict(run.record.phases)
        os.kill(before[1].pid, signal.SIGKILL)
        until(lambda: len(run.metrics) >= 6 and [s.status for s in make_picture(run).ranks] == ["running"] * 2)
        now = make_picture(run)
        print([state.status for state in now.ranks], [state.note for state in now.ranks], now.restarts, now.status)
        print(all(run.record.phases[rank].pid != before[rank].pid for rank in range(2)))
        open("enough", "w").close()
        run.result(), sorted(point.step for point in run.record.metrics["loss"])
    """
    cell = viewer.run(kill).ok()
    assert cell.lines == ["['running', 'running'] ['', ''] 1 running", "True"]
    assert cell.value == "(1, [0, 1, 2, 3, 4, 5])"
    (final,) = views(viewer.run("run.show()").ok())
    assert "restarted once" in final["text/html"] and "killed" not in final["text/html"]


SHOWN = """
run = notebook_launcher(talk_until, ("{0}",), num_processes=2, block=False, view="{1}")
run.show()
open("{0}", "w").close()
run.result()
"""


def test_every_copy_becomes_the_page(viewer: Kernel) -> None:
    cell = viewer.run(SHOWN.format("shown", "auto")).ok()
    assert live(cell) == 2 and len(views(cell)) == 2


def test_two_runs_at_a_time_keep_apart(viewer: Kernel) -> None:
    code = """
        def count(mine, other):
            rank = int(os.environ["RANK"])
            for number in range(30):
                print(mine, number)
                print_metrics(**{mine: number}, step=number)
                if number == 15:  # each waits for the other, so both are in the middle
                    open(f"{mine}{rank}", "w").close()
                    while not os.path.exists(f"{other}{rank}"):
                        time.sleep(0.01)
            dist.init_process_group("gloo")
            total = torch.tensor([len(mine)])
            dist.all_reduce(total)
            return mine, total.item()
        names = ("pear", "orange")
        both = [notebook_launcher(count, pair, num_processes=2, block=False) for pair in (names, names[::-1])]
        said = [{name for line in run.lines() for name in names if name in line} for run in both if run.result()]
        [(run.result(), words, set(run.record.metrics)) for run, words in zip(both, said)]
    """
    cell = viewer.run(code).ok()
    assert live(cell) == 2 and len(views(cell)) == 2
    for page, (mine, other) in zip(views(cell), [("pear", "orange"), ("orange", "pear")], strict=True):
        text = page["text/plain"]
        assert "done" in text and f"{mine} 29" in text and f"{other} 29" not in text
    assert eval(cell.value) == [(("pear", 8), {"pear"}, {"pear"}), (("orange", 12), {"orange"}, {"orange"})]


def test_a_view_that_has_ended_holds_few_widgets(viewer: Kernel) -> None:
    viewer.run("""
        import ipywidgets
        def held():
            known = getattr(ipywidgets.widgets.widget, "_instances", None)
            return len(ipywidgets.Widget.widgets if known is None else known)
        before = held()
    """).ok()
    viewer.run("notebook_launcher(talk, (0.3,), num_processes=2)").ok()
    assert int(viewer.run("held() - before").value) <= 6  # the page in its box, with their layouts and styles


def test_a_stopped_run(viewer: Kernel) -> None:
    cell = viewer.run(
        "run = notebook_launcher(talk, (60,), num_processes=2, block=False)\n"
        "while len(run.lines()) < 5: time.sleep(0.05)\nrun.stop(); run.status"
    ).ok()
    assert cell.value == "'stopped'"
    (final,) = views(cell)
    check_static(final, "stopped")
    assert not viewer.children()


def click(kernel: Kernel, code: str, icon: str) -> None:
    """Click the view's Stop as a front end does while a run in the background goes on, and wait for its end."""
    cell = kernel.run(code).ok()
    button = next(
        o["content"]["comm_id"]
        for o in cell.outputs
        if o["type"] == "comm_open" and o["content"]["data"]["state"].get("icon") == icon
    )
    assert wait_until(lambda: kernel.run("len(run.lines()) >= 4").value == "True", 60)
    content = {"comm_id": button, "data": {"method": "custom", "content": {"event": "click"}}}
    message = kernel.client.session.msg("comm_msg", content)
    kernel.client.shell_channel.send(message)
    assert wait_until(lambda: not kernel.children(), 60)


def test_a_click_stops_a_background_run(viewer: Kernel) -> None:
    click(viewer, "run = notebook_launcher(talk, (3600,), num_processes=2, block=False)", "stop")
    assert viewer.run("run.wait(60), run.status").ok().value == "(True, 'stopped')"


def test_displays_come_below_the_view_and_clear_only_themselves(viewer: Kernel) -> None:
    cell = viewer.run("notebook_launcher(draw, num_processes=2, output=[1])").ok()
    assert len(views(cell)) == 1 and len(cell.displays) == 2
    assert cell.displays[1]["text/html"] == "<i>picture 2</i>"
    assert not [o for o in cell.outputs if o["type"] == "clear_output"]


def test_displays_of_several_ranks_say_whose_they_are(viewer: Kernel) -> None:
    cell = viewer.run("notebook_launcher(draw, num_processes=2)").ok()
    texts = [re.sub("<[^>]*>", "", data["text/html"]) for data in cell.displays[1:]]
    assert sorted(zip(texts[::2], texts[1::2], strict=True)) == [
        ("rank 0", "picture 2"),
        ("rank 1", "picture 2"),
    ]
    gone = viewer.run("notebook_launcher(lambda: (draw(), clear_output()), num_processes=2)").ok()
    assert {data["text/plain"] for data in gone.displays[1:]} == {""}


def test_displays_of_a_background_run_are_in_its_page(viewer: Kernel) -> None:
    final = final_page(viewer, viewer.run("run = notebook_launcher(draw, num_processes=2, block=False)").ok())
    assert final["text/html"].count("<i>picture 2</i>") == 2
    assert "picture 1" not in final["text/html"]


def test_one_process_shows_a_view_once_it_tells_metrics(viewer: Kernel) -> None:
    cell = viewer.run("notebook_launcher(lambda: print('mine'), num_processes=1)").ok()
    assert not live(cell) and cell.lines == ["Launching <lambda> on 1 CPU process, this one.", "mine"][-1:]
    code = """
        def tell():
            for step in range(2):
                print_metrics(loss=0.5 + step, step=step)
            time.sleep(0.5)
        notebook_launcher(tell, num_processes=1)
    """
    cell = viewer.run(code).ok()
    assert live(cell) == 1 and "step 0: loss 0.5" in cell.stdout
    (final,) = views(cell)
    assert "<svg" not in final["text/html"] and "data:image/svg+xml" in final["text/html"]


def test_other_views(viewer: Kernel) -> None:
    cell = viewer.run("notebook_launcher(talk, num_processes=2, view='text')").ok()
    assert not cell.displays and "[0] hello 0" in cell.lines
    cell = viewer.run("notebook_launcher(talk, num_processes=2, view='none')").ok()
    assert not cell.displays and not cell.stdout and not cell.stderr
    cell = viewer.run("notebook_launcher(talk, (20, True), num_processes=2, view='none')")
    assert cell.error == ("ValueError", "bad batch")


def test_a_view_can_be_asked_for_later(viewer: Kernel) -> None:
    cell = viewer.run(SHOWN.format("asked for", "none")).ok()
    assert live(cell) == 1 and len(views(cell)) == 1
    over = viewer.run("run.show()").ok()
    assert over.displays == views(cell)
    viewer.run("notebook_launcher(talk, num_processes=2, view='none')").ok()
    assert len(views(viewer.run("runs()[-1].show()").ok())) == 1
    viewer.run("notebook_launcher(talk, num_processes=2, view='text')").ok()
    (shown,) = viewer.run("runs()[-1].show()").ok().displays
    assert list(shown) == ["text/plain"] and "[1] hello 1" in shown["text/plain"]


def test_a_background_run_as_text_is_one_display(viewer: Kernel) -> None:
    launch = "notebook_launcher(talk_until, ('seen', True), num_processes=2, block=False, view='text')"
    cell = viewer.run(f"run = {launch}").ok()
    assert len(cell.displays) == 1 and list(cell.displays[0]) == ["text/plain"]
    sent = [] if "[1] hello 1" in str(cell.displays) else sent_later(viewer, "[1] hello 1")
    (viewer.folder / "seen").touch()
    sent += sent_later(viewer, "raise ValueError")
    shown = [o["content"] for o in cell.outputs] + sent
    assert len(shown) >= 3 and len({content["transient"]["display_id"] for content in shown}) == 1
    text = sent[-1]["data"]["text/plain"]
    for word in (
        "[1] hello 1",
        "talk_until on 2 processes: failed",
        "raise ValueError",
        "ValueError: bad batch",
    ):
        assert word in text, word


def test_much_output_stays_small(viewer: Kernel, tmp_path: Path) -> None:
    code = f"""
        def flood():
            for number in range(20_000):
                print("line", number, "x" * 60, os.environ["RANK"] * (number % 2))
        notebook_launcher(flood, num_processes=2, log_dir={str(tmp_path)!r})
    """
    cell = viewer.run(code).ok()
    sent = sum(len(json.dumps(o["content"], default=str)) for o in cell.outputs)
    (final,) = views(cell)
    page = final["text/html"]
    for number, times in ((0, 1), (1, 2), (19998, 1), (19999, 2)):
        assert page.count(f"line {number} xx") == times, number
    assert "[all] line 0 xx" in page and page.count(" lines are left out here: ") == 2
    assert f"{tmp_path}" in page and "rank_0.log has all" in page
    assert 900_000 < len(page) < 1_200_000
    assert sent - len(json.dumps(page)) < 100_000 + 300_000 * cell.seconds


def test_a_saved_notebook_keeps_the_page(tmp_path: Path) -> None:
    launch = "run = notebook_launcher(talk, num_processes=2, block=False)"
    cells = [IMPORTS + TALK, "notebook_launcher(talk, num_processes=2)", launch, "run.result()"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    client = NotebookClient(
        book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    asyncio.run(_execute(client, {**os.environ, "PYTHONPATH": str(ROOT)}))
    nbformat.write(book, tmp_path / "saved.ipynb")
    saved = nbformat.read(tmp_path / "saved.ipynb", as_version=4)
    for number in (1, 2):
        (shown,) = [o for o in saved.cells[number].outputs if o.output_type == "display_data"]
        check_static(shown.data, "done", "hello 1")


async def _execute(client: NotebookClient, environment: dict[str, str]) -> None:
    await client.async_execute(env=environment)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise OSError('no such\\n library')", "OSError: no such library"),
        ("", "FOLDER/ipywidgets.py is another module of that name"),
    ],
    ids=["broken", "another module of that name"],
)
def test_widgets_that_cannot_be_imported(tmp_path: Path, source: str, why: str) -> None:
    (tmp_path / "ipywidgets.py").write_text(source)
    why = why.replace("FOLDER", str(tmp_path))
    kernel = Kernel(tmp_path, NOTEBOOK_ACCEL_VIEW="auto", is_copy=True)
    with prepare_kernel(kernel, "from notebook_accel import notebook_launcher", timeout=120):
        said = ""
        for count in (1, 2):
            launch = f"notebook_launcher(lambda: print('told'), num_processes={count}"
            cell = kernel.run(launch + ")").ok()
            assert "told" in cell.stdout
            said += cell.stderr
            asked = kernel.run(launch + ", view='widget')")
            assert asked.error is not None and asked.error[0] == "LaunchError" and "told" not in asked.stdout
            assert asked.error[1].startswith(f"view='widget': ipywidgets cannot be imported here ({why}")
    assert f"ipywidgets cannot be imported ({why}" in said and "runs are shown as text" in said
