"""What takes over, and where: each case in a Python of its own, because it lasts as long as the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from notebook_accel.takeover import finder
from tests import forker

ROOT = Path(__file__).resolve().parents[3]
TAKE = "import notebook_accel; notebook_accel.take_over_accelerate()"


def run(
    code: str, *arguments: str, cwd: Path | None = None, has_torch: bool = False, **variables: str
) -> str:
    """Run code in a new Python and return what it printed; it has to end well."""
    done = try_run(code, *arguments, cwd=cwd, has_torch=has_torch, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def try_run(
    code: str, *arguments: str, cwd: Path | None = None, has_torch: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python.

    Args:
        code: it, indented or not.
        arguments: of Python.
        cwd: the working folder.
        has_torch: whether torch may be imported when the code starts, which spares the import.
        variables: what the environment has besides.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("NOTEBOOK_ACCEL_")}
    words = [sys.executable, *arguments, "-c", textwrap.dedent(code)]
    env = {**kept, "PYTHONPATH": str(ROOT), **variables}
    if has_torch:
        return forker.run(words, env=env, cwd=cwd, timeout=240)
    return subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def test_imports_and_metadata_are_ours() -> None:
    run(
        f"""
        import importlib, importlib.metadata, importlib.util, pickle, sys
        {TAKE}
        assert importlib.metadata.version("accelerate") == "1.15.0"
        assert importlib.metadata.metadata("Accelerate")["Name"] == "accelerate"
        assert "huggingface" in importlib.metadata.metadata("accelerate")["Home-page"], "sentence-transformers asks"
        assert set(importlib.metadata.packages_distributions()["accelerate"]) == {{"accelerate"}}
        spec = importlib.util.find_spec("accelerate")
        assert spec.origin and importlib.util.find_spec("accelerate.no_such_module") is None
        assert not list(importlib.metadata.distributions(path=[], name="accelerate")), "pip looks in folders"
        import accelerate, accelerate.utils.tqdm
        assert "torch" not in sys.modules, "nothing is imported before it is asked for"
        from accelerate.utils.tqdm import tqdm
        assert accelerate.__version__ == "1.15.0" and accelerate.__file__ == spec.origin
        import notebook_accel.utils
        from accelerate import Accelerator
        from accelerate.accelerator import GradientAccumulationPlugin
        assert accelerate.utils.set_seed is notebook_accel.utils.set_seed
        assert Accelerator is notebook_accel.Accelerator and accelerate.utils.tqdm is tqdm
        assert pickle.loads(pickle.dumps(Accelerator)) is Accelerator
        assert "set_seed" in dir(accelerate.utils) and hasattr(accelerate.state, "PartialState")
        names = {{}}
        exec("from accelerate.utils import *", names)
        assert names["is_peft_available"]() in (True, False)
        for name in ("accelerate.no_such_module", "accelerate.paths", "accelerate.finder"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                continue
            raise AssertionError(name)
        notebook_accel.take_over_accelerate()
        assert [type(finder).__name__ for finder in sys.meta_path].count("Finder") == 1
        """
    )


def test_a_name_that_is_set_counts_until_it_is_set_back() -> None:
    """Transformers leaves out the check of a map so, and tests replace functions by `mock.patch`."""
    run(
        f"""
        import unittest.mock
        import torch
        {TAKE}
        import accelerate.big_modeling, notebook_accel.big_modeling.dispatch
        from accelerate import dispatch_model

        def make():
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
            return model, {{"0": "cpu", "1": "disk"}}  # without the last one

        def is_refused(folder):
            try:
                model, places = make()
                dispatch_model(model, places, offload_dir=folder)
                return model(torch.ones(1, 2)).shape != (1, 2)
            except ValueError:
                return True

        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            own = notebook_accel.big_modeling.dispatch.check_device_map
            assert is_refused(folder)
            kept = accelerate.big_modeling.check_device_map
            accelerate.big_modeling.check_device_map = lambda *arguments: None
            assert not is_refused(folder)
            accelerate.big_modeling.check_device_map = kept
            assert is_refused(folder)
            with unittest.mock.patch("accelerate.big_modeling.check_device_map") as check:
                assert not is_refused(folder) and check.called
            assert is_refused(folder) and notebook_accel.big_modeling.dispatch.check_device_map is own
            for name in ("check_device_map", "dispatch_model"):
                with unittest.mock.patch(f"accelerate.utils.modeling.{{name}}"):
                    pass
        assert accelerate.utils.modeling.dispatch_model is dispatch_model
        assert accelerate.utils.modeling.check_device_map is own
        """
    )


def test_a_pickle_by_accelerates_names_is_opened() -> None:
    run(
        f"""
        import pickle
        {TAKE}
        found = pickle.loads(b"caccelerate.utils.dataclasses\\nDistributedType\\n(VNO\\ntR.")
        from notebook_accel import DistributedType
        assert found is DistributedType.NO
        """
    )


def test_who_came_before_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "__init__.py").write_text("class Accelerator:\n    pass\n")
    (tmp_path / "library.py").write_text("from accelerate import Accelerator\n")
    (tmp_path / "aproxy.py").write_text(
        "class Proxy:\n    def __call__(self): ...\n    def __getattr__(self, name): raise ImportError(name)\n"
        "proxy = Proxy()\n"
    )
    done = try_run(f"import aproxy, library\n{TAKE}", cwd=tmp_path)
    assert done.returncode == 1
    assert "RuntimeError: accelerate was imported already, from " in done.stderr
    assert f"by library ({tmp_path / 'library.py'}): restart the kernel" in done.stderr


CHILD = """
import importlib.metadata, os, sys
import accelerate
assert accelerate.__doc__.endswith("served by notebook_accel."), accelerate
assert importlib.metadata.version("accelerate") == "1.15.0"
"""


def test_a_process_that_is_started_takes_over_from_its_start() -> None:
    run(f"{TAKE}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}], check=True)")


def copy_package(folder: Path) -> Path:
    """Install the package once more, beside a module that has the name of one of the standard library."""
    copied = shutil.copytree(ROOT / "notebook_accel", folder / "notebook_accel")
    (folder / "pathlib.py").write_text("raise RuntimeError('the standard library has one')")
    return copied


def test_the_package_need_not_be_on_the_path_of_the_child(tmp_path: Path) -> None:
    copied = copy_package(tmp_path / "elsewhere")
    asks_no_site = "import sys; sys.exit('notebook_accel' in sys.modules)"
    child = (
        f"{CHILD}\nimport notebook_accel\nassert notebook_accel.__file__ == {str(copied / '__init__.py')!r}"
    )
    code = f"""
    import pathlib, subprocess, sys
    sys.path.insert(0, {str(copied.parent)!r})
    {TAKE}
    subprocess.run([sys.executable, "-S", "-c", {asks_no_site!r}], check=True)
    subprocess.run([sys.executable, "-c", {child!r}], check=True)
    """
    run(code, cwd=tmp_path, PYTHONPATH="")


def test_a_second_installation_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """A kernel that has taken over starts a program of another environment, which takes over by its own means."""
    copied = copy_package(tmp_path)
    folders = [str(package / "takeover" / "startup") for package in (copied, ROOT / "notebook_accel")]
    child = f"{CHILD}\nimport notebook_accel\nprint(notebook_accel.__file__)"
    assert run(child, NOTEBOOK_ACCEL_AS_ACCELERATE="1", PYTHONPATH=os.pathsep.join(folders)) == str(
        copied / "__init__.py"
    )
    made = finder.list_variables({"PYTHONPATH": os.pathsep.join(folders)})
    assert made["PYTHONPATH"] == folders[1]


def test_a_broken_sitecustomize_of_the_users_does_not_stop_the_take_over(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import no_such_thing\n")
    variables = finder.list_variables({"PYTHONPATH": str(tmp_path)})
    done = try_run(CHILD, **variables)
    assert done.returncode == 0, done.stderr
    assert "No module named 'no_such_thing'" in done.stderr


def test_a_sitecustomize_of_the_users_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.of_the_user = __name__\n")
    child = f"{CHILD}\nassert of_the_user == 'sitecustomize', of_the_user\nprint(sys.modules['sitecustomize'].__file__)"
    code = f"{TAKE}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    assert run(code, PYTHONPATH=path) == str(tmp_path / "sitecustomize.py")


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_processes_of_multiprocessing_take_over(method: str, tmp_path: Path) -> None:
    """The script imports Accelerate at its top, so each child does, before anything else is called."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            f"""
            import multiprocessing
            import accelerate

            def work():
                exec({CHILD!r})

            if __name__ == "__main__":
                multiprocessing.set_start_method({method!r})
                process = multiprocessing.Process(target=work)
                process.start()
                process.join()
                raise SystemExit(process.exitcode)
            """
        )
    )
    run(
        f"{TAKE}\nimport subprocess, sys\nsubprocess.run([sys.executable, 'script.py'], check=True)",
        cwd=tmp_path,
    )


def test_the_variable_alone_takes_over_where_the_package_is_imported() -> None:
    assert run("import notebook_accel\n" + CHILD, NOTEBOOK_ACCEL_AS_ACCELERATE="1") == ""
    for text in ("0", ""):
        code = "import notebook_accel\nfrom notebook_accel.takeover import finder\nassert not finder.is_installed()"
        run(code, NOTEBOOK_ACCEL_AS_ACCELERATE=text)


def test_variables_are_complete_once() -> None:
    made = finder.list_variables({"PYTHONPATH": os.pathsep.join(["a", "b"])})
    folder, *rest = made["PYTHONPATH"].split(os.pathsep)
    assert Path(folder, "sitecustomize.py").is_file() and rest == ["a", "b"]
    assert finder.list_variables(made) == made
    here = finder.list_variables({"PYTHONPATH": os.pathsep.join(["", "a"])})["PYTHONPATH"]
    assert here.split(os.pathsep)[1:] == ["", "a"], "an empty entry is the current folder"
    assert finder.complete_variables({"HOME": "x"}) == {"HOME": "x"}
    asked = finder.complete_variables({"NOTEBOOK_ACCEL_AS_ACCELERATE": "1"})
    assert asked == finder.list_variables({})


COMMANDS = {"launch": "launch", "config": "config", "env": "env", "estimate": "estimate-memory"}
COMMANDS |= {"merge": "merge-weights", "test": "test", "tpu": "tpu-config", "config.config": "config"}


@pytest.mark.parametrize("module", COMMANDS)
def test_the_commands_of_accelerate_are_ours(module: str) -> None:
    code = f"""
    import sys
    {TAKE}
    from accelerate.commands.{module} import main
    from notebook_accel.cli import main as ours
    ours.cli.main = lambda args, **options: print(args)
    sys.argv = ["accelerate-{module}", "--option", "a"]
    main()
    """
    assert run(code) == str([COMMANDS[module], "--option", "a"])


def test_a_name_that_is_patched_is_patched_where_it_is_used() -> None:
    code = f"""
    {TAKE}
    from types import SimpleNamespace
    from unittest.mock import patch
    from accelerate.commands.env import env_command
    from accelerate.commands.estimate import create_empty_model
    with patch("accelerate.commands.estimate.verify_on_hub", return_value="gated"):
        try:
            create_empty_model("a", None)
        except OSError:
            print("gated")
    with patch("accelerate.commands.env.which", return_value=None):
        print(env_command(SimpleNamespace(config_file=None))["`accelerate` bash location"])
    """
    lines = run(code).splitlines()
    assert (lines[0], lines[-1]) == ("gated", "Not found")


def start(words: list[str], folder: Path) -> str:
    """Run a command that takes over from its start, and return what it printed."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("NOTEBOOK_ACCEL_")}
    done = subprocess.run(
        words,
        env={**variables, **finder.list_variables({"PYTHONPATH": str(ROOT)})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def console_script(folder: Path) -> list[str]:
    """Return the command that an installed Accelerate puts beside Python; pip writes it so."""
    path = folder / "accelerate"
    path.write_text("import sys\nfrom accelerate.commands.accelerate_cli import main\nsys.exit(main())\n")
    return [sys.executable, str(path)]


@pytest.mark.parametrize("way", ["script", "accelerate_cli", "launch"])
def test_a_launch_by_the_names_of_accelerate_is_ours(way: str, tmp_path: Path) -> None:
    words = {
        "script": [*console_script(tmp_path), "launch"],
        "accelerate_cli": [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"],
        "launch": [sys.executable, "-m", "accelerate.commands.launch"],
    }[way]
    (tmp_path / "train.py").write_text(
        "import sys, accelerate\nprint(sys.argv[1:], accelerate.PartialState().num_processes)\n"
        "assert 'notebook_accel' in accelerate.__file__\n"
    )
    found = start([*words, "--cpu", "--num_processes", "2", "train.py", "--lr", "1"], tmp_path)
    assert found.count("['--lr', '1'] 2") == 2


def test_other_modules_of_accelerate_run_too(tmp_path: Path) -> None:
    assert start([sys.executable, "-m", "accelerate.utils.random"], tmp_path) == ""
    assert "estimate-memory" in start([*console_script(tmp_path), "--help"], tmp_path)
    words = ["tpu-config", "--tpu_name", "pod", "--tpu_zone", "a", "--command", "ls", "--debug"]
    assert start([*console_script(tmp_path), *words], tmp_path).startswith("Running gcloud")
