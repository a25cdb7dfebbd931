"""Workers have the settings that the notebook has at the launch; fresh ones have nothing else that cells changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel, wait_until

pytestmark = [pytest.mark.notebook, pytest.mark.once]

DEFINE = """
import logging, os, sys, warnings
import numpy, torch
import torch.nn.functional as F
from notebook_accel import Session, notebook_launcher
plain = F.mse_loss

def look():
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("of a cell", UserWarning)
        warnings.warn("of numpy", numpy.exceptions.VisibleDeprecationWarning)
    logging.getLogger("mine").info(f"detail of {os.environ['RANK']}")
    tiny = torch.tensor(1e-40, dtype=torch.float32, device="cpu")
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.ones(1).device),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "matmul": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "conv": torch.backends.mkldnn.conv.fp32_precision,
        "recursion": sys.getrecursionlimit(),
        "warnings": [str(one.message) for one in caught],
        "level": logging.getLogger("mine").getEffectiveLevel(),
        "loss": F.mse_loss.__module__,
        "flushes": float(tiny * 0.5) == 0,
    }

os.environ["RANK"] = "-"
before = look()
del os.environ["RANK"]
"""
SET = """
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.benchmark = True
torch.backends.mkldnn.conv.fp32_precision = "tf32"
sys.setrecursionlimit(4321)
logging.basicConfig(level=logging.INFO, format="heard %(message)s")
warnings.filterwarnings("ignore", "of a")
"""
IS_SET = {
    "dtype": "torch.float64",
    "device": "meta",
    "grad": False,
    "deterministic": 1,
    "matmul": "high",
    "benchmark": True,
    "conv": "tf32",
    "recursion": 4321,
    "warnings": ["of numpy"],
    "level": 20,
    "loss": "torch.nn.functional",
    "flushes": False,
}
REPLACE = "F.mse_loss = lambda *args: plain(*args) * 100"
PATCH = f"""
{REPLACE}
torch.set_flush_denormal(True)
"""
UNDO = """
torch.set_default_dtype(torch.float32)
torch.set_default_device("cpu")
torch.set_grad_enabled(True)
torch.use_deterministic_algorithms(False)
torch.set_float32_matmul_precision("highest")
torch.backends.cudnn.benchmark = False
torch.backends.mkldnn.conv.fp32_precision = "none"
sys.setrecursionlimit(before["recursion"])
logging.getLogger().handlers.clear()
logging.getLogger().setLevel(logging.WARNING)
del warnings.filters[0]
F.mse_loss = plain
torch.set_flush_denormal(False)
"""
USE = (
    "used = torch.randn(600, 600, device='cpu') @ torch.randn(600, 600, device='cpu')"  # no fork from here on
)
LAUNCH = "notebook_launcher(look, num_processes=2)"


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel in which nothing is set."""
    started = Kernel(tmp_path, OMP_NUM_THREADS="4")
    started.run(DEFINE).ok()
    yield started
    started.close()


@pytest.mark.parametrize("cells", [(SET,), (SET, USE), (USE, SET)], ids=["forked", "set, used", "used, set"])
def test_settings_reach_the_workers_whatever_the_order_of_cells(
    kernel: Kernel, cells: tuple[str, ...]
) -> None:
    for cell in cells:
        kernel.run(cell).ok()
    launched = kernel.run(LAUNCH, timeout=120).ok()
    assert eval(launched.value) == IS_SET
    assert {f"heard detail of {rank}" for rank in (0, 1)} <= {
        line.partition("] ")[2] for line in (launched.stdout + launched.stderr).splitlines()
    }
    with_session = "session = Session(2)\nfound = session.run(look)\nsession.close()\nfound"
    assert eval(kernel.run(with_session, timeout=120).ok().value) == IS_SET


def test_what_was_undone_before_the_launch_is_not_in_the_workers(kernel: Kernel) -> None:
    kernel.run(PATCH + SET).ok()
    kernel.run(UNDO).ok()
    kernel.run(USE).ok()
    assert kernel.run(f"{LAUNCH} == before", timeout=120).ok().value == "True"


@pytest.mark.not_on("darwin", "kernels are not forked")
def test_what_cells_set_in_a_library_is_named_where_workers_lack_it(kernel: Kernel) -> None:
    kernel.run(REPLACE).ok()
    forked = kernel.run(LAUNCH, timeout=120).ok()
    assert "(forked)." in forked.stdout and eval(forked.value)["loss"] == "__main__"
    kernel.run("torch.nn.Linear(600, 600)(torch.randn(600, 600)).sum().backward()").ok()
    fresh = kernel.run(LAUNCH, timeout=120).ok()
    assert "torch.nn.functional.mse_loss was set in this process, which fresh workers" in fresh.stderr
    assert eval(fresh.value)["loss"] == "torch.nn.functional"
    kernel.run("F.mse_loss = plain").ok()
    assert "mse_loss" not in kernel.run(LAUNCH, timeout=120).ok().stderr


IMPORTS = """
import builtins, copyreg, decimal, gc, json, locale, logging, multiprocessing, os, resource, signal, socket, sys
import tempfile, threading, time, warnings
import matplotlib, numpy, torch
class Mine:
    def find_spec(self, *given): return None
"""
CHANGES = {
    # what is looked at, how a cell changes it, and how another one undoes that
    "hasattr(torch.nn.Linear, 'mine')": ("torch.nn.Linear.mine = 1", "del torch.nn.Linear.mine"),
    "json.dumps.__module__": ("kept = [json.dumps]; json.dumps = repr", "json.dumps = kept.pop()"),
    "len(torch.nn.modules.module._global_forward_hooks)": (
        "hook = torch.nn.modules.module.register_module_forward_hook(repr)",
        "hook.remove()",
    ),
    "'mine' in sys.modules": ("sys.modules['mine'] = sys", "del sys.modules['mine']"),
    "any(type(finder).__name__ == 'Mine' for finder in sys.meta_path)": (
        "sys.meta_path.insert(0, Mine())",
        "del sys.meta_path[0]",
    ),
    "len(sys.path_hooks)": ("sys.path_hooks.append(repr)", "del sys.path_hooks[-1]"),
    "threading.excepthook.__module__": (
        "kept.append(threading.excepthook); threading.excepthook = repr",
        "threading.excepthook = kept.pop()",
    ),
    "sys.getswitchinterval()": ("sys.setswitchinterval(0.5)", "sys.setswitchinterval(0.005)"),
    "hasattr(builtins, 'mine')": ("builtins.mine = 1", "del builtins.mine"),
    "gc.isenabled()": ("gc.disable()", "gc.enable()"),
    "complex in copyreg.dispatch_table": (
        "kept.append(copyreg.dispatch_table.pop(complex))",
        "copyreg.pickle(complex, kept.pop())",
    ),
    "decimal.getcontext().prec": ("decimal.getcontext().prec = 5", "decimal.getcontext().prec = 28"),
    "locale.setlocale(locale.LC_NUMERIC)": (
        "kept.append(locale.setlocale(locale.LC_NUMERIC)); locale.setlocale(locale.LC_NUMERIC, 'C.UTF-8')",
        "locale.setlocale(locale.LC_NUMERIC, kept.pop())",
    ),
    "logging.getLogger('mine').handlers": (
        "logging.getLogger('mine').addHandler(logging.NullHandler())",
        "logging.getLogger('mine').handlers.clear()",
    ),
    "signal.getsignal(signal.SIGUSR1)": (
        "signal.signal(signal.SIGUSR1, repr)",
        "signal.signal(signal.SIGUSR1, signal.SIG_DFL)",
    ),
    "socket.getdefaulttimeout()": ("socket.setdefaulttimeout(9)", "socket.setdefaulttimeout(None)"),
    "threading.stack_size()": ("threading.stack_size(1 << 20)", "threading.stack_size(0)"),
    "warnings.showwarning.__module__": (
        "kept.append(warnings.showwarning); warnings.showwarning = repr",
        "warnings.showwarning = kept.pop()",
    ),
    "matplotlib.rcParams['lines.linewidth']": (
        "matplotlib.rcParams['lines.linewidth'] = 9",
        "matplotlib.rcdefaults()",
    ),
    "numpy.geterr()": ("kept.append(numpy.seterr(all='raise'))", "numpy.seterr(**kept.pop())"),
    "numpy.get_printoptions()": (
        "numpy.set_printoptions(precision=2)",
        "numpy.set_printoptions(precision=8)",
    ),
    "torch._tensor_str.PRINT_OPTS": (
        "torch.set_printoptions(precision=2)",
        "torch.set_printoptions(profile='default')",
    ),
    "torch.is_anomaly_enabled()": (
        "torch.autograd.set_detect_anomaly(True)",
        "torch.autograd.set_detect_anomaly(False)",
    ),
    "torch.multiprocessing.get_sharing_strategy()": (
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        "torch.multiprocessing.set_sharing_strategy('file_descriptor')",
    ),
}
INHERITED = {
    # likewise, of what a program gets from the process that starts it
    "os.environ.get('MINE')": ("os.environ['MINE'] = '1'", "del os.environ['MINE']"),
    "tempfile.gettempdir()": ("os.environ['TMPDIR'] = os.getcwd()", "del os.environ['TMPDIR']"),
    "time.tzname": ("os.environ['TZ'] = 'Asia/Tokyo'", "del os.environ['TZ']"),
    "os.getcwd()": ("kept.append(os.getcwd()); os.chdir(os.sep)", "os.chdir(kept.pop())"),
    "[line for line in open('/proc/self/status') if line.startswith('Umask:')]": (
        "kept.append(os.umask(0o57))",
        "os.umask(kept.pop())",
    ),
    "os.nice(0)": ("os.nice(3)", "None"),  # for ever, unless one is root
    "sorted(os.sched_getaffinity(0))": (
        "kept.append(os.sched_getaffinity(0)); os.sched_setaffinity(0, {min(kept[-1])})",
        "os.sched_setaffinity(0, kept.pop())",
    ),
    "resource.getrlimit(resource.RLIMIT_STACK)[0]": (
        "kept.append(resource.getrlimit(resource.RLIMIT_STACK)); "
        "resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, kept[-1][1]))",
        "resource.setrlimit(resource.RLIMIT_STACK, kept.pop())",
    ),
}
LOOKS = [*CHANGES, *INHERITED]
LOOK_AT_ALL = f"""
def look():
    scope = {{}}
    exec({IMPORTS!r}, scope)
    return [repr(eval(text, scope)) for text in {LOOKS!r}]
"""
COMPARE = """
bare = subprocess.run([sys.executable, "-c", LOOK + "print(look())"], stdout=subprocess.PIPE, text=True).stdout
fresh = notebook_launcher(look, num_processes=2, start_method="fresh")
[(text, one, other) for text, one, other in zip(texts, fresh, eval(bare)) if one != other]
"""


@pytest.mark.not_on("darwin", "no agent is forked")
def test_a_fresh_worker_has_what_a_new_process_of_the_notebook_has(tmp_path: Path) -> None:
    with contextlib.closing(Kernel(tmp_path)) as kernel:
        kernel.run(
            f"import subprocess\nfrom notebook_accel import notebook_launcher, runtime\nkept = []\n{IMPORTS}\n"
            f"texts, LOOK = {LOOKS!r}, {LOOK_AT_ALL!r}\nexec(LOOK)\nfirst = look()"
        ).ok()
        cells = [*CHANGES.values(), *INHERITED.values()]
        for change, _ in cells:
            kernel.run(change).ok()
        changed = kernel.run("[text for text, one, other in zip(texts, first, look()) if one != other]").ok()
        assert eval(changed.value)[: len(CHANGES)] == list(CHANGES)
        assert wait_until(lambda: kernel.run("runtime.agents()[0].is_ready").ok().value == "True", 60)
        assert kernel.run(COMPARE).ok().value == "[]", "they are as the cells have left them"
        for _, undo in reversed(cells):
            kernel.run(undo).ok()
        assert kernel.run(COMPARE).ok().value == "[]", "they are as they were"
