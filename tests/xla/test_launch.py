"""Launches on XLA devices, from real kernels with the real runtime on the CPU."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from notebook_accel import probes
from tests.notebooks.kernel import Kernel

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(300)]

KAGGLE = {
    "ISTPUVM": "1",
    "TPU_PROCESS_ADDRESSES": "local",
    "CLOUD_TPU_TASK_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
TWO = """
from notebook_accel.launch.engines.xla import XlaEngine

class Two(XlaEngine):  # the runtime has one device in each process here
    def count(self, options, kind): return 2
    def problems(self, job): return []
"""
CHIP = """
from unittest import mock
from torch_xla import runtime
from torch_xla.core import xla_model
from notebook_accel.launch.checks import xla_runtime

def join():  # on chips that are not there
    os.environ["PJRT_DEVICE"] = "TPU"
    with (mock.patch.object(xla_model, "get_xla_supported_devices", lambda: ["xla:0"]),
          mock.patch.object(xla_model, "set_replication"), mock.patch.object(torch_xla, "device"),
          mock.patch.object(runtime, "addressable_device_count", lambda: 1)):
        xla_runtime.join()

class Four(Two):
    def count(self, options, kind): return 4
    def worker_setup(self, job): return join

def f(names):
    return {name: os.environ.get(name) for name in names}
"""


def run(kernel: Kernel, code: str, **options: Any) -> Any:
    return kernel.run(code, timeout=120, **options)


def test_a_model_of_the_notebook_is_used(kernel: Kernel) -> None:
    cell = run(
        kernel,
        """
        model = nn.Linear(4, 2)
        def f(model, data):
            state = PartialState()
            moved = model.to(state.device)
            loss = moved(data.to(state.device)).square().sum()
            loss.backward()
            print("on", loss.device, flush=True)
            return state.device.type, loss.detach(), moved.weight.grad, os.getpid()
        data = torch.ones(3, 4)
        device, loss, grad, pid = notebook_launcher(f, (model, data), engine="xla")
        print(device, loss.device.type, grad.device.type)
        model(data).square().sum().backward()
        print("alike:", torch.allclose(grad, model.weight.grad, atol=1e-4))
        pid != os.getpid(), torch_xla._XLAC._xla_runtime_is_initialized()
        """,
    ).ok()
    assert "on xla:0" in cell.stdout
    assert "xla cpu cpu\nalike: True" in cell.stdout
    assert "Launching f on 1 XLA device process (forked)." in cell.stdout
    assert cell.value == "(True, False)"


def test_an_error_has_its_lines(kernel: Kernel) -> None:
    cell = run(
        kernel,
        """
        def f():
            first = torch.ones(2, 3, device="xla")
            return first @ torch.ones(2, 3, device="xla")
        notebook_launcher(f, engine="xla")
        """,
    )
    assert cell.error is not None
    if probes.at_least("torch_xla", "2.9"):
        assert cell.error[0] == "RuntimeError"
        assert 'return first @ torch.ones(2, 3, device="xla")' in cell.traceback
    else:  # it aborts the process by itself
        assert cell.error[0] == "WorkerKilledError" and "SIGABRT" in cell.error[1]


def test_an_interrupt_ends_a_loop_on_the_device(kernel: Kernel) -> None:
    cell = run(
        kernel,
        """
        def f():
            x = torch.ones(100, 100, device="xla")
            print("go", flush=True)
            while True:
                x = x @ x / 100
                torch_xla.sync()
        notebook_launcher(f, engine="xla")
        """,
        during=kernel.interrupt,
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert kernel.children() == []
    assert run(kernel, "notebook_launcher(lambda: 'next', engine='xla')").ok().value == "'next'"


def test_each_process_has_its_place(kernel: Kernel) -> None:
    run(kernel, TWO).ok()
    cell = run(
        kernel,
        """
        def f():
            place = [int(os.environ[f"PJRT_LOCAL_PROCESS_{name}"]) for name in ("RANK", "COUNT")]
            return place, (torch.ones(1, device="xla") * place[0]).item()
        notebook_launcher(f, engine=Two(), returns="all")
        """,
    ).ok()
    assert ast.literal_eval(cell.value) == [([0, 2], 0.0), ([1, 2], 1.0)]
    cell = run(kernel, "notebook_launcher(f, engine=Two(), environment={'CPU_NUM_DEVICES': '2'})")
    assert cell.error is not None and cell.error[0] == "LaunchError"
    assert "has 2 XLA devices, and one process can use one: tpu_mode='spmd'" in cell.error[1]


def test_each_process_is_told_its_chip(kernel: Kernel) -> None:
    expected = [
        {
            "TPU_VISIBLE_CHIPS": str(rank),
            "TPU_PROCESS_BOUNDS": "2,2,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_PORT": str(8476 + rank),
            "TPU_PROCESS_ADDRESSES": "localhost:8476,localhost:8477,localhost:8478,localhost:8479",
            "CLOUD_TPU_TASK_ID": str(rank),
            "PJRT_LOCAL_PROCESS_RANK": str(rank),
            "PJRT_LOCAL_PROCESS_COUNT": "4",
        }
        for rank in range(4)
    ]
    names = tuple(expected[0])
    run(kernel, TWO + CHIP).ok()
    cell = run(
        kernel, f"notebook_launcher(f, ({names},), engine=Four(), environment={KAGGLE}, returns='all')"
    )
    assert ast.literal_eval(cell.ok().value) == expected


def test_a_kernel_that_has_used_xla_need_not_be_restarted(used_kernel: Kernel) -> None:
    cell = run(
        used_kernel,
        """
        def f(given):
            return given.device.type, (given * 2).cpu()
        kind, doubled = notebook_launcher(f, (mine,), engine="xla")
        kind, doubled.tolist()
        """,
    ).ok()
    assert (
        "the XLA runtime was initialised in this kernel, so fresh processes run the function" in cell.stdout
    )
    assert cell.value == "('xla', [4.0, 4.0, 4.0])"
    forced = run(used_kernel, "notebook_launcher(f, (mine,), engine='xla', start_method='fork')")
    assert forced.error is not None and "because the XLA runtime was initialised" in forced.error[1]


def test_one_process_shards(used_kernel: Kernel, kernel: Kernel) -> None:
    f = """
        def f():
            import torch_xla.runtime as xr
            said = os.environ.get("NOTEBOOK_ACCEL_TPU_MODE")
            return os.getpid(), xr.is_spmd(), said, str((torch.ones(2, device="xla") + 1).cpu().tolist())
        pid, *rest = notebook_launcher(f, tpu_mode="spmd")
        pid == os.getpid(), rest
    """
    # its runtime was started without SPMD, which cannot be changed
    assert ast.literal_eval(run(used_kernel, f).ok().value) == (False, [True, "spmd", "[2.0, 2.0]"])
    # this one's was not started
    assert ast.literal_eval(run(kernel, f).ok().value) == (True, [True, "spmd", "[2.0, 2.0]"])
    # and the next one's processes are their own
    cell = run(kernel, "pid, *rest = notebook_launcher(f, engine='xla'); pid == os.getpid(), rest").ok()
    assert ast.literal_eval(cell.value) == (False, [False, "process", "[2.0, 2.0]"])
