"""Cells on the workers of a session: `%session`, `%%distributed` and `%%rank`."""

from __future__ import annotations

import re
import sys
import time

import IPython
import pytest

from tests.notebooks.kernel import Kernel

pytestmark = pytest.mark.notebook

CAN_ASSIGN = IPython.version_info >= (8,) or sys.version_info < (3, 12)
"""Whether IPython knows `x = !command` and `x = %magic`: its version 7 lost that with Python 3.12."""


@pytest.fixture(scope="module")
def magics(kernel: Kernel) -> Kernel:
    """The kernel with the magics and a session of two."""
    # on a busy machine a rank may stand still
    kernel.run("from notebook_accel.session import call\ncall._RELEASE_SECONDS = 60.0").ok()
    kernel.run("%load_ext notebook_accel\n%session 2 --hang-timeout 1").ok()
    kernel.run(
        "%%distributed\nimport os, time, torch, torch.distributed as dist\nrank = dist.get_rank()"
    ).ok()
    return kernel


def test_variables_stay_and_values_are_shown(magics: Kernel) -> None:
    magics.run("%%distributed\nx = rank + 1").ok()
    assert sorted(magics.run("%%distributed\nx").ok().lines) == ["[0] Out: 1", "[1] Out: 2"]
    assert magics.run("%%rank 1\nx").ok().lines == ["[1] Out: 2"]
    assert sorted(magics.run("%%rank 0,1\nx").ok().lines) == ["[0] Out: 1", "[1] Out: 2"]
    assert magics.run("%%distributed\nx;").ok().lines == []
    assert magics.run("%%distributed\nNone").ok().lines == []
    assert sorted(magics.run("%%distributed\ntorch.zeros(2, 2)").ok().lines)[:2] == [
        "[0]         [0., 0.]])",
        "[0] Out:",
    ]


def test_a_cell_starts_a_session_where_there_is_none(fresh_kernel: Kernel) -> None:
    kernel = fresh_kernel
    kernel.run("%load_ext notebook_accel").ok()
    assert "There is no session" in kernel.run("%session").ok().stdout
    cell = kernel.run("%%distributed\nimport torch.distributed as dist\ndist.get_rank() * 10").ok()
    assert cell.lines[0].startswith("Started a session of 2 processes")
    assert sorted(cell.lines[1:]) == ["[0] Out: 0", "[1] Out: 10"]
    assert "idle" in kernel.run("%session").ok().value
    assert "dict" not in kernel.run("%session close").ok().stdout
    assert kernel.children() == []
    kernel.run("%session 3").ok()
    assert len(kernel.children()) == 3


def test_the_session_of_the_magics_pushes_and_pulls(magics: Kernel) -> None:
    magics.run("from notebook_accel import current_session\ncurrent_session().push(given=5)").ok()
    assert magics.run("%%rank 0\ngiven").ok().lines == ["[0] Out: 5"]
    assert magics.run("current_session() is get_ipython().run_line_magic('session', '')").ok().value == "True"
    magics.run("%%distributed\nmine = [rank]").ok()
    assert magics.run("current_session().pull('mine', rank='all')").ok().value == "[[0], [1]]"


def test_an_error_of_a_repr_is_output_of_the_rank(magics: Kernel) -> None:
    cell = magics.run(
        "%%distributed\nclass Odd:\n    def __repr__(self): raise ValueError('from repr')\nOdd()"
    ).ok()
    told = re.sub(r"\x1b\[[0-9;]*m", "", cell.stderr)
    assert "[0] ValueError: from repr\n" in told and "[1] ValueError: from repr\n" in told


@pytest.mark.once
@pytest.mark.parametrize("loss", ["sys.{} = None", "sys.{}.close()", "del sys.{}", "sys.{}.detach()"])
def test_a_cell_has_its_output_again_after_one_that_lost_it(magics: Kernel, loss: str) -> None:
    lose = "\n".join(loss.format(name) for name in ("stdout", "stderr"))
    magics.run(f"%%rank 0\nimport sys\n{lose}\n!echo a command is of the cell").ok()
    cell = magics.run("%%rank 0\nprint('told', file=sys.stderr)\nprint('said')\n1 + 1").ok()
    assert cell.lines == ["[0] said", "[0] Out: 2"] and cell.stderr == "[0] told\n"


def test_rich_values_are_displays(magics: Kernel) -> None:
    cell = magics.run("%%rank 1\nfrom IPython.display import HTML\nHTML('<i>one</i>')").ok()
    assert cell.lines == ["[1] Out:"]
    assert cell.displays[0]["text/html"] == "<i>one</i>"
    pytest.importorskip("matplotlib")
    cell = magics.run("%%rank 0\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);").ok()
    assert ["image/png" in display for display in cell.displays] == [True]


def test_classes_functions_and_pickles_of_a_cell_work(magics: Kernel) -> None:
    magics.run(
        "%%distributed\nclass Net(torch.nn.Linear): pass\nnet = Net(1, 1)\ndef double(v): return 2 * v"
    ).ok()
    cell = magics.run(
        "%%distributed\nimport pickle\ntype(pickle.loads(pickle.dumps(net))) is Net, double(rank)"
    ).ok()
    assert sorted(cell.lines) == ["[0] Out: (True, 0)", "[1] Out: (True, 2)"]


def test_data_loaders_with_workers_read_a_dataset_of_a_cell(magics: Kernel) -> None:
    cell = magics.run(
        """\
        %%distributed
        class Squares(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return i * i
        loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
        [batch.tolist() for batch in loader]
        """
    ).ok()
    assert sorted(cell.lines) == ["[0] Out: [[0, 1], [4, 9]]", "[1] Out: [[0, 1], [4, 9]]"]


def test_an_error_shows_the_cells_lines_once(magics: Kernel) -> None:
    half = "def half(v):\n    return v / 0\n\nif rank == 1:\n    half(1)\n"
    code = f"%%distributed\ndist.barrier()\n{half}dist.barrier()"
    cell = magics.run(code)
    assert cell.error == ("ZeroDivisionError", "division by zero")
    assert "----> 7     half(1)" in cell.traceback and "----> 4     return v / 0" in cell.traceback
    assert "3 def half(v):" in cell.traceback
    numbers = set(re.findall(r"Cell In\[(\d+)\]", cell.traceback))  # old versions of IPython show none
    assert len(numbers) <= 1
    assert cell.traceback.count("ZeroDivisionError: division by zero") == 1
    assert "rank 0" in cell.told and "dist.barrier()" in cell.told
    assert sorted(magics.run("%%distributed\ndist.barrier()\nrank").ok().lines) == [
        "[0] Out: 0",
        "[1] Out: 1",
    ]


def test_an_error_on_all_ranks_leaves_the_group(magics: Kernel) -> None:
    magics.run("%%distributed\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))").ok()
    grace = "from notebook_accel import current_session\ncurrent_session().grace = {}"
    magics.run(grace.format(60.0)).ok()  # one of them may fail later
    cell = magics.run("%%distributed\nno_such_name")
    magics.run(grace.format(1.0)).ok()
    assert cell.error is not None and cell.error[0] == "NameError" and "made anew" not in cell.told
    magics.run("%%distributed\nmodel(torch.ones(1, 1)).sum().backward()").ok()


def test_a_syntax_error_is_nobodys(magics: Kernel) -> None:
    cell = magics.run("%%distributed\nx = = 1")
    assert cell.error is not None and cell.error[0] == "SyntaxError"
    assert "rank 0" not in cell.traceback and "x = = 1" in cell.traceback


def test_syntax_of_a_notebook_works(magics: Kernel) -> None:
    assert magics.run("%%rank 0\nawait __import__('asyncio').sleep(0, 'slept')").ok().lines == [
        "[0] Out: 'slept'"
    ]
    assert magics.run("%%rank 1\n!echo from $rank").ok().lines == ["[1] from 1"]
    if CAN_ASSIGN:
        cell = magics.run("%%rank 1\nlines = !echo one; echo two\nlines").ok()
        assert cell.lines == ["[1] Out: ['one', 'two']"]
        assert magics.run("%%rank 0\ny = 3\nz = %time y + 1\nz").ok().lines[-1] == "[0] Out: 4"
    lines = magics.run("%%rank 0\n%time y = 3").ok().lines
    assert len(lines) == 1 and "wall time" in lines[0]
    assert "a loop" in magics.run("%%rank 0\n%timeit y + 1").ok().stdout
    assert "wall time" in magics.run("%%distributed\n%%time\ny = 1").ok().stdout
    assert "----> 4 1 / 0" in magics.run("%%distributed\n%%time\ny = 1\n1 / 0").traceback
    cell = magics.run("%%distributed\n%who")
    assert (
        cell.error is not None and cell.error[0] == "NotImplementedError" and "%who works in" in cell.error[1]
    )


def test_wrong_lines_are_one_sentence(magics: Kernel) -> None:
    for code, text in {
        "%%rank\n1": "needs a rank",
        "%%rank two\n1": "ranks are numbers",
        "%%rank 5\n1": "the ranks of the session are 0 to 1",
        "%%distributed now\n1": "takes no 'now'",
        "%session 3": "%session close",
        "%session many": "a number of processes",
        "%session 'many": "No closing quotation",
        "%session 3 --mixed-precision half": "invalid choice: 'half'",
    }.items():
        cell = magics.run(code)
        assert cell.stderr.startswith("UsageError: ") and text in cell.stderr, (code, cell.stderr)
    assert "--mixed-precision" in magics.run("%session --help").ok().stdout


def test_a_wait_for_absent_ranks_names_the_cell_lines(magics: Kernel) -> None:
    code = """\
        %%distributed
        if rank == 0:
            dist.barrier()
        else:
            while not os.path.exists('told'): time.sleep(0.1)
            dist.barrier()
    """
    cell = magics.run(code, during=(magics.folder / "told").touch, at="time.sleep(0.1)").ok()
    where = r"rank 0 \(process \d+\), in barrier:\n.*    (cell In\[\d+\]|a cell), line 3: dist.barrier\(\)"
    assert re.search(where, cell.stderr)


def test_an_interrupt_stops_the_cell_not_the_session(magics: Kernel) -> None:
    for body in ("time.sleep(3600)", "dist.barrier() if rank else time.sleep(3600)"):
        cell = magics.run(
            f"%%distributed\nprint() if rank else print('go')\n{body}".replace("'go'", "' go'"),
            during=magics.interrupt,
        )
        assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
        assert sorted(magics.run("%%distributed\ndist.barrier()\nrank").ok().lines) == [
            "[0] Out: 0",
            "[1] Out: 1",
        ]


@pytest.mark.may_leak("children", reason="the new workers of the session that the module shares")
def test_who_interrupts_again_does_not_wait_for_code_that_swallows_interrupts(magics: Kernel) -> None:
    def interrupt_twice() -> None:
        magics.interrupt()
        time.sleep(1.5)
        magics.interrupt()

    cell = magics.run(
        """\
        %%distributed
        print(' go')
        while True:
            try:
                time.sleep(100)
            except KeyboardInterrupt:
                pass
        """,
        during=interrupt_twice,
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert "stopped on all ranks, and rank 0, rank 1 with it: session.restart()" in cell.error[1]
    assert cell.seconds < 30  # alone it would take `_RELEASE_SECONDS`
    magics.run("%session restart").ok()
    magics.run(
        "%%distributed\nimport os, time, torch, torch.distributed as dist\nrank = dist.get_rank()"
    ).ok()


@pytest.mark.may_leak("children", reason="the new workers of the session that the module shares")
def test_restart_loses_the_variables_and_says_so(magics: Kernel) -> None:
    magics.run("%%distributed\nkept = 1").ok()
    assert "without variables" in magics.run("%session restart").ok().stdout
    cell = magics.run("%%distributed\nkept")
    assert cell.error is not None and cell.error[0] == "NameError"
    magics.run(
        "%%distributed\nimport os, time, torch, torch.distributed as dist\nrank = dist.get_rank()"
    ).ok()


def test_completion_in_cells_of_workers_is_not_broken(magics: Kernel) -> None:
    code = "%%distributed\nimport os\nos.pat"
    reply = magics.client.complete(code, len(code), reply=True, timeout=120)
    assert reply["content"]["status"] == "ok"
    reply = magics.client.complete("%%distr", 7, reply=True, timeout=120)
    assert "%%distributed" in reply["content"]["matches"]
    reply = magics.client.complete("%sess", 5, reply=True, timeout=120)
    assert "%session" in reply["content"]["matches"]


def test_cells_train_with_a_prepared_model(magics: Kernel) -> None:
    magics.run(
        """\
        %%distributed
        from notebook_accel import Accelerator
        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        """
    ).ok()
    for _ in range(2):
        cell = magics.run(
            """\
            %%distributed
            torch.manual_seed(rank)
            loss = model(torch.rand(8, 4)).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            round(accelerator.gather(next(model.parameters()).detach().sum().reshape(1)).std().item(), 6)
            """,
            timeout=240,
        ).ok()
        assert sorted(cell.lines) == ["[0] Out: 0.0", "[1] Out: 0.0"]


@pytest.mark.once
def test_what_a_cell_prints_last_without_a_newline_is_below_its_lines(magics: Kernel) -> None:
    code = "for i in range(3):\n    time.sleep({})\n    print('loss', i)\nprint('done', end='')"
    for seconds in (0.0, 0.2):
        cell = magics.run("%%distributed\nimport time\n" + code.format(seconds)).ok()
        for rank in "01":
            own = [line for line in cell.lines if line.startswith(f"[{rank}]")]
            assert own == [f"[{rank}] {text}" for text in ("loss 0", "loss 1", "loss 2", "done")]
    failing = "%%distributed\nprint('first')\nprint('about to fail', end='')\nraise ValueError(rank)"
    failed = magics.run(failing)
    assert failed.error is not None
    for rank in "01":
        own = [line for line in failed.lines if line.startswith(f"[{rank}]")]
        assert own[:2] == [f"[{rank}] first", f"[{rank}] about to fail"]
