"""Workers of every start method, scripts, sessions and the reports know that Accelerate is taken over."""

from __future__ import annotations

import functools
import json
import textwrap
from pathlib import Path

import pytest

from tests.unit.launching import drop_gloo
from tests.unit.takeover import test_finder

pytestmark = pytest.mark.slow
run = functools.partial(test_finder.run, has_torch=True)
try_run = functools.partial(test_finder.try_run, has_torch=True)

LAUNCHES = """
import json, multiprocessing, sys

def tell(_=None):
    import importlib.metadata
    import accelerate
    return accelerate.__file__.endswith("paths.py") and importlib.metadata.version("accelerate") == "1.15.0"

def work():
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:  # has only the names of functions of modules
        below = pool.apply(eval, ("__import__('accelerate').__file__.endswith('paths.py')",))
    return tell() and below

if __name__ == "__main__":
    import notebook_accel
    from notebook_accel import Session, notebook_launcher
    {take}
    options = dict(returns="all", view="none")
    cpu = {{"ACCELERATE_USE_CPU": "true"}}
    found = {{
        method: notebook_launcher(work, num_processes=2, start_method=method, environment=cpu, {config} **options)
        for method in ("fresh", "fork")
    }}
    if {session}:
        with Session(2, environment=cpu) as session:
            found["session"] = session.run(tell, returns="all")
    else:
        found["inprocess"] = notebook_launcher(tell, num_processes=1, engine="inprocess", {config} **options)
    json.dump(found, sys.stdout)
"""


def launch(folder: Path, **parts: object) -> dict[str, object]:
    (folder / "launches.py").write_text(LAUNCHES.format(**parts))
    found = json.loads(
        run("import runpy; runpy.run_path('launches.py', run_name='__main__')", cwd=folder).splitlines()[-1]
    )
    assert isinstance(found, dict)
    return found


def test_workers_take_over_with_the_kernel(tmp_path: Path) -> None:
    found = launch(tmp_path, take="notebook_accel.take_over_accelerate()", config="", session=True)
    assert found == {key: [True, True] for key in ("fresh", "fork", "session")}


def test_workers_take_over_by_the_config_alone(tmp_path: Path) -> None:
    config = "config=notebook_accel.LaunchConfig(as_accelerate=True),"
    found = launch(tmp_path, take="", config=config, session=False)
    assert found == {**{key: [True, True] for key in ("fresh", "fork")}, "inprocess": [True]}


SCRIPT = """
import json, sys
import accelerate
from accelerate import Accelerator
from accelerate.utils import set_seed
set_seed(1)
state = Accelerator(cpu=True)
print(json.dumps([accelerate.__file__.endswith("paths.py"), state.num_processes]))
"""


@pytest.mark.parametrize("number", [1, 2])
def test_a_script_is_launched_unchanged(number: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["launch", "--cpu", "--num_processes", str(number), "--as-accelerate", "script.py"]
    code = f"import sys; sys.argv[1:] = {words!r}\nfrom notebook_accel.__main__ import main\nmain()"
    lines = drop_gloo(run(code, cwd=tmp_path, HF_HOME=str(tmp_path))).splitlines()
    assert [json.loads(line[line.index("[true") :]) for line in lines] == [[True, number]] * number


def test_the_reports_say_so() -> None:
    code = """
    from notebook_accel.diagnosis import check, checks, environment
    print(environment.as_text(environment.collect()))
    print(*map(check.as_line, checks._accelerate("accelerate")))
    """
    older = "from notebook_accel.takeover import tried; tried.TRIED = {'numpy': '0.1'}"
    newer = "is newer than 0.1, the newest version that was tried"
    told = "imports of accelerate give notebook_accel"
    shown = run(older + textwrap.dedent(code), NOTEBOOK_ACCEL_AS_ACCELERATE="1")
    assert shown.count(told) == shown.count(newer) == 2
    assert told not in run(code)


def test_a_worker_that_has_accelerate_already_says_who_imported_it(tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text("")
    (tmp_path / "library.py").write_text("import accelerate\n")
    code = """
    import library
    from notebook_accel import LaunchConfig, notebook_launcher
    options = dict(environment={"ACCELERATE_USE_CPU": "true"}, config=LaunchConfig(as_accelerate=True), view="none")
    notebook_launcher(print, num_processes=2, start_method="fork", **options)
    """
    done = try_run(code, cwd=tmp_path)
    assert done.returncode != 0 and "accelerate was imported already" in done.stderr
    assert f"by library ({tmp_path / 'library.py'})" in done.stderr


EARLIER_SESSION = """
import sys
from notebook_accel import Session, notebook_launcher, take_over_accelerate

def import_it():
    import accelerate, subprocess
    code = "import accelerate; print(accelerate.__file__)"
    below = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    return [place.strip().endswith("takeover/paths.py") for place in (accelerate.__file__, below)]

def pass_by():
    pass

if __name__ == "__main__":
    method = sys.argv[1]
    with Session(2, start_method=method) as session:
        session.execute("import accelerate", ranks=1)
        take_over_accelerate()
        print(session.run(import_it, returns="all"))
        session.run(pass_by)
        session.restart()
        print(session.run(import_it, returns="all"))
"""


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_a_session_that_was_started_before_takes_over(method: str, tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text("")
    (tmp_path / "sessions.py").write_text(EARLIER_SESSION)
    code = f"import sys; sys.argv[1:] = [{method!r}]\nimport runpy; runpy.run_path('sessions.py', run_name='__main__')"
    done = try_run(code, cwd=tmp_path)
    # a child process of the worker that keeps the other one has its variables
    assert done.stdout.splitlines() == [str([[True, True], [False, False]]), str([[True, True]] * 2)], done
    told = [line for line in done.stderr.splitlines() if "had imported accelerate before" in line]
    assert len(told) == 2 and all(line.startswith("[1] notebook_accel: ") for line in told)
    assert "`%session restart`" in done.stderr
