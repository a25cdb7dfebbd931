"""House rules that a program can check: sizes, forbidden words, global state, what importing does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from tests.structure.source import ROOT, Module, modules

MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 60
FORBIDDEN_WORDS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# module.name: why this module may hold a slot that changes
SLOTS = {
    "notebook_accel.comm.gathers._of_groups": "what ends with a process group, whose objects take no attributes",
    "notebook_accel.runtime._slot": "the one global slot of the package",
    "notebook_accel.runtime._thread": "the same for threads that are ranks, as on some TPUs",
    "notebook_accel.runtime._reporter": "what a launch gives to the code that it calls",
}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MUTABLE_CALLS = {"dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict", "local", "WeakSet",
                 "WeakKeyDictionary", "WeakValueDictionary", "ContextVar"}  # fmt: skip

FILLING = {"add", "append", "appendleft", "extend", "insert", "set", "setdefault", "update"}


def test_only_environ_touches_the_environment() -> None:
    found = []
    for module in modules():
        if module.name == "notebook_accel.environ":
            continue
        for node in ast.walk(module.tree):
            by_attribute = (
                isinstance(node, ast.Attribute)
                and node.attr in ENVIRONMENT
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
            )
            by_name = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in ENVIRONMENT for alias in node.names)
            )
            if by_attribute or by_name:
                found.append(f"{module.where}:{node.lineno}")  # type: ignore[attr-defined]
    assert not found, f"use notebook_accel.environ instead of os: {found}"


def changing_globals(module: Module) -> Iterator[str]:
    """Yield the module-level names that code rebinds, and the empty containers that code fills."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield from node.names
    filled = set(_filled_names(module.tree))
    for node in module.tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_empty_container(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and target.id in filled:
                    yield target.id


def _filled_names(tree: ast.Module) -> Iterator[str]:
    """Yield `x` of `x[...] = y` and of calls that change a container, such as `x.append(y)`."""
    for node in ast.walk(tree):
        holder: ast.expr | None = None
        if (isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del))) or (
            isinstance(node, ast.Attribute) and (node.attr in FILLING or isinstance(node.ctx, ast.Store))
        ):
            holder = node.value
        if isinstance(holder, ast.Name):
            yield holder.id


def _is_empty_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    return name in MUTABLE_CALLS and not any(isinstance(a, ast.Constant) for a in value.args[1:])


def test_the_only_global_that_changes_is_the_runtime() -> None:
    found = sorted({f"{module.name}.{name}" for module in modules() for name in changing_globals(module)})
    extra = [name for name in found if name not in SLOTS]
    assert not extra, f"module globals that change: {extra}"
    assert not [name for name in SLOTS if name not in found], "SLOTS lists a global that is gone"


def test_files_are_short() -> None:
    long = {m.where: n for m in modules() if (n := len(m.text.splitlines())) > MAX_FILE_LINES}
    assert not long, f"more than {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short() -> None:
    long = []
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body
                if (
                    isinstance(body[0], ast.Expr)
                    and isinstance(body[0].value, ast.Constant)
                    and len(body) > 1
                ):
                    body = body[1:]  # a docstring is no code
                length = (node.end_lineno or 0) - body[0].lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long.append(f"{module.where}:{node.lineno} {node.name}: {length}")
    assert not long, f"functions of more than {MAX_FUNCTION_LINES} lines:\n" + "\n".join(long)


def test_every_module_says_what_it_is_for() -> None:
    assert not [m.where for m in modules() if m.text.strip() and not ast.get_docstring(m.tree)]


def test_no_unfinished_marks() -> None:
    found = []
    for module in modules():
        for number, line in enumerate(module.text.splitlines(), 1):
            if FORBIDDEN_WORDS.search(line):
                found.append(f"{module.where}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_importing_has_no_side_effects() -> None:
    """Torch goes first, so that what it does at import is not put down to us."""
    script = """
        import os, signal, sys, threading
        import torch

        def state():
            handlers = [signal.getsignal(s) for s in signal.valid_signals()]
            return dict(os.environ), threading.enumerate(), handlers, len(os.listdir("/proc/self/task")) \\
                if os.path.isdir("/proc/self/task") else 0, torch.get_num_threads(), torch.get_default_dtype()

        before = state()
        import notebook_accel
        after = state()
        names = ("environment", "Python threads", "signal handlers", "native threads", "torch threads", "dtype")
        wrong = [name for name, a, b in zip(names, before, after) if a != b]
        for device in ("cuda", "xpu", "mps"):
            module = getattr(torch, device, None)
            if module is not None and getattr(module, "is_initialized", lambda: False)():
                wrong.append(f"device {device}")
        heavy = ("pandas", "matplotlib", "ipywidgets", "IPython", "transformers", "torch_xla", "deepspeed")
        wrong += [f"import of {name}" for name in heavy if name in sys.modules]
        import multiprocessing.resource_tracker as tracker
        if tracker._resource_tracker._pid is not None:
            wrong.append("resource tracker")
        sys.exit(", ".join(wrong) or 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"importing notebook_accel changed: {done.stderr}"


@pytest.mark.parametrize(
    "asked", ["import notebook_accel", "from notebook_accel import notebook_launcher, runs"]
)
def test_the_launcher_waits_for_no_other_module_where_torch_is_there(asked: str) -> None:
    script = f"""
        import sys, torch
        before = set(sys.modules)
        {asked}
        wrong = ("notebook_accel.accelerator", "notebook_accel.session", "notebook_accel.launch.preflight", "torch.")
        new = [name for name in set(sys.modules) - before if name.startswith(wrong)]
        assert not new, new
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_an_import_on_windows_says_what_to_use() -> None:
    command = [sys.executable, "-c", "import sys; sys.platform = 'win32'; import notebook_accel"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    wanted = "ImportError: notebook_accel is for Linux and macOS; on Windows, use it in WSL 2"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == wanted


# Function names that begin with a participle and may: names of Accelerate or IPython, and adjectives of nouns.
PARTICIPLES = {
    "_deepspeed_plugins", "_drawn_batches", "_shared_memory", "chosen_names", "deepspeed_required",
    "deepspeed_config_process", "distributed", "found_inf", "gathered_shape", "installed_names", "mixed_precision",
    "deepspeed_ulysses_dl_adapter",
    "named_module_tensors", "reached", "shared_files", "sharded_model", "sharded_optimizer", "unused_stdin",
}  # fmt: skip
VERBS = {"embed", "feed", "need", "seed"}
PARTICIPLE = re.compile(
    r"[a-z]+ed|found|made|told|chosen|spoken|kept|said|given|left|sent|held|known|shown|built|begun|seen|heard|met|taken"
)


def test_functions_are_named_by_verbs() -> None:
    """`settled(job)` does not say whether it settles the job, or what is settled: `resolve(job)` does."""
    wrong = []
    for module in modules():
        for node in ast.walk(module.tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_property(node):
                continue
            first = node.name.strip("_").split("_")[0]
            if PARTICIPLE.fullmatch(first) and first not in VERBS and node.name not in PARTICIPLES:
                wrong.append(f"{module.where}:{node.lineno} {node.name}")
    assert not wrong, f"name these functions by a verb in the imperative: {wrong}"


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {
        part.id if isinstance(part, ast.Name) else getattr(part, "attr", "") for part in node.decorator_list
    }
    return bool(names & {"property", "cached_property", "setter"})
