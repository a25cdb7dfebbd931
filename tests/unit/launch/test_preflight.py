"""Arguments of a launch are checked before anything starts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accel import devices, environ, notebook_launcher, probes
from notebook_accel.diagnosis.environment import select_relevant
from notebook_accel.launch import preflight
from notebook_accel.launch.checks.addresses import find_listen_problem, listen
from notebook_accel.launch.engines import base
from notebook_accel.launch.engines.remote import pool
from notebook_accel.launch.job import Job
from notebook_accel.launch.request import LaunchRequest
from notebook_accel.launch.worker import environment


def _function(a: int = 0) -> int:
    return a


NEEDS_RAY = pytest.mark.skipif(not probes.is_available("ray"), reason="needs Ray")
GOOD = {"num_processes": 2, "start_method": "fresh"}


def check(function: Any = _function, args: Any = (), **options: Any) -> Job:
    request = LaunchRequest(function=function, args=args, options={**GOOD, **options})
    return preflight.check(request, "launcher")[0]


def _error(**changes: Any) -> Exception:
    with pytest.raises((ValueError, TypeError)) as caught:
        check(**changes)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"num_processes": "2"}, TypeError, "num_processes='2': an integer is needed, not str"),
        ({"num_processes": True}, TypeError, "num_processes=True: an integer is needed, not bool"),
        ({"num_processes": 2.0}, TypeError, "an integer is needed, not float"),
        ({"num_processes": -1}, ValueError, "num_processes=-1: at least 1 is needed"),
        ({"args": 5}, TypeError, "args=5: a tuple is needed, for one argument write args=(5,)"),
        ({"args": "text"}, TypeError, "args='text': a tuple is needed"),
        ({"args": (1, 2)}, TypeError, "args has 2 values, but the call would be _function"),
        ({"function": None}, TypeError, "pass the function itself, without calling it"),
        ({"mixed_precision": None}, ValueError, "mixed_precision=None: choose among"),
        ({"use_port": "abc"}, ValueError, "use_port='abc'"),
        ({"use_port": -1}, ValueError, "use_port=-1"),
        ({"num_nodes": 2}, ValueError, "the nodes must agree on a port"),
        ({"node_rank": 1}, ValueError, "node_rank=1 with num_nodes=1: choose from 0 to 0"),
        (
            {"hosts": ["a", "b"], "num_nodes": 2},
            ValueError,
            "num_nodes=2 with engine='ssh': hosts= says which",
        ),
        (
            {"hosts": ["a", "b"], "num_nodes": "1:2"},
            ValueError,
            "num_nodes='1:2' with engine='ssh': hosts= says",
        ),
        (
            {"hosts": ["a", "b"], "node_rank": 1},
            ValueError,
            "node_rank=1 with engine='ssh': hosts= says which",
        ),
        pytest.param(
            {"engine": "ray", "num_nodes": 2},
            ValueError,
            "num_nodes=2 with engine='ray': Ray chooses the nodes",
            marks=NEEDS_RAY,
        ),
        pytest.param(
            {"engine": "ray", "rdzv_conf": {"join_timeout": 3}},
            ValueError,
            "with engine='ray': Ray knows when its nodes are there",
            marks=NEEDS_RAY,
        ),
        (
            {"num_nodes": "4:1", "rdzv_backend": "c10d"},
            ValueError,
            "num_nodes='4:1': the first number is the smaller",
        ),
        (
            {"num_nodes": "0:2", "rdzv_backend": "c10d"},
            ValueError,
            "num_nodes='0:2': at least 1 node is needed",
        ),
        (
            {"num_nodes": "a:b"},
            ValueError,
            "num_nodes='a:b': an integer is needed, or 'min:max' such as '1:4'",
        ),
        ({"num_nodes": "2"}, ValueError, "num_nodes='2': an integer is needed, or 'min:max'"),
        (
            {"num_nodes": "1:2", "use_port": 29400},
            ValueError,
            "with rdzv_backend='static': nodes join and leave under",
        ),
        (
            {"num_nodes": "1:2", "rdzv_backend": "c10d"},
            ValueError,
            "num_nodes='1:2': the nodes must agree on a port",
        ),
        (
            {"num_nodes": "1:2", "rdzv_backend": "c10d", "use_port": 29400, "node_rank": 2},
            ValueError,
            "node_rank=2 with num_nodes='1:2': choose from 0 to 1, where 0 is the node that holds the store",
        ),
        (
            {
                "num_nodes": "1:2",
                "rdzv_backend": "c10d",
                "use_port": 29400,
                "rdzv_conf": {"store_type": "file"},
            },
            ValueError,
            "store_type is none of join_timeout",
        ),
        (
            {"num_nodes": "1:2", "rdzv_backend": "c10d", "use_port": 29400, "rdzv_id": ""},
            ValueError,
            "rdzv_id='' with num_nodes='1:2': give the run a name, or leave rdzv_id out",
        ),
        ({"master_addr": 7}, TypeError, "master_addr=7: a string is needed"),
        ({"rdzv_conf": [1]}, TypeError, "rdzv_conf=[1]: a dict is needed"),
        ({"monitor_interval": "1"}, TypeError, "monitor_interval='1': seconds are needed"),
        ({"monitor_interval": float("nan")}, ValueError, "more than 0 seconds"),
        ({"output": 1}, ValueError, "output=1: choose among"),
        ({"output": [-1]}, ValueError, "output=[-1]"),
        ({"output": ["0"]}, ValueError, "output=['0']"),
        ({"output": [2]}, ValueError, "the ranks of this run are 0 to 1"),
        ({"master_addr": "10.255.255.1"}, ValueError, "is not an address of this machine"),
        ({"rdzv_endpoint": "nowhere"}, ValueError, "rdzv_endpoint='nowhere': host:port is needed"),
        ({"monitor_interval": 1e10}, ValueError, "a day at most"),
        ({"log_line_prefix_template": 3}, TypeError, "log_line_prefix_template=3"),
        ({"log_line_prefix_template": "$"}, ValueError, "log_line_prefix_template='$'"),
        ({"environment": 3}, TypeError, "environment=3: a dict is needed"),
        ({"environment": {"A": 1}}, TypeError, "environment={'A': 1}: a dict is needed"),
        ({"environment": {"A=B": "1"}}, ValueError, "environment={'A=B': '1'}: no system takes"),
        ({"environment": {"A": "\0"}}, ValueError, "no system takes such a variable"),
        (
            {"environment": {"RANK": "1"}},
            ValueError,
            "{'RANK': '1'}: a launch sets this variable for each rank",
        ),
        ({"environment": {"WORLD_SIZE": "8"}}, ValueError, "give num_processes= in its place"),
        ({"log_dir": ""}, ValueError, "log_dir='': the path of a folder is needed"),
        ({"log_dir": "a\0b"}, ValueError, "the path of a folder is needed"),
    ],
)
def test_each_wrong_argument_is_named(changes: dict[str, Any], kind: type, text: str) -> None:
    error = _error(**changes)
    assert type(error) is kind
    assert text in str(error)
    assert str(error).startswith("launcher: ")


@pytest.mark.parametrize("number", [2, None])
def test_a_wrong_environment_does_not_reach_an_engine(number: int | None) -> None:
    """The engine for XLA devices looks into the environment to count chips."""
    assert "environment=3: a dict is needed" in str(_error(engine="xla", num_processes=number, environment=3))


@NEEDS_RAY
def test_hosts_are_waited_for_as_long_as_is_said() -> None:
    text = str(_error(hosts=["a"], rdzv_conf={"join_timeout": 3}, num_processes="x"))
    assert "num_processes='x'" in text and "rdzv_conf" not in text
    assert "rdzv_conf" in str(_error(engine="ray", rdzv_conf={"join_timeout": 3}, num_processes="x"))


def test_all_problems_come_at_once() -> None:
    text = str(_error(num_processes="x", max_restarts=-1, returns="?"))
    assert text.startswith("launcher: 3 problems\n")
    assert text.count("\n  - ") == 3


def test_a_generator_function_is_refused() -> None:
    def generate(a: int = 0) -> Iterator[int]:
        yield a

    for function in (generate, functools.partial(generate, 1)):
        assert "has a yield in it" in str(_error(function=function))


def test_an_async_function_is_refused() -> None:
    async def coroutine(a: int = 0) -> None: ...

    for function in (coroutine, functools.partial(coroutine, 1)):
        assert "is async" in str(_error(function=function))
        assert "engine='local'" in str(_error(function=function, num_processes=1)), (
            "as it works in a notebook"
        )


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    two = replace(devices.CUDA, counter=lambda: 2)
    monkeypatch.setattr(devices, "best", lambda use_cpu=None, *_: devices.CPU if use_cpu else two)
    text = str(_error(num_processes=3))
    assert "this machine has 2 CUDA GPUs, so at most 2 is possible" in text
    assert "ACCELERATE_USE_CPU=1" in text
    assert check(num_processes=None).local_world_size == 2
    on_cpu = {"num_processes": 3, "environment": {"ACCELERATE_USE_CPU": "true"}}
    assert check(**on_cpu).local_world_size == 3


def test_workers_are_told_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's processes without a GPU would each train alone otherwise."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    one, two = (check(num_processes=number) for number in (1, 2))
    assert "ACCELERATE_USE_CPU" not in one.environment and two.environment["ACCELERATE_USE_CPU"] == "true"
    denied = {"num_processes": 2, "environment": {"ACCELERATE_USE_CPU": "no"}}
    assert check(**denied).environment["ACCELERATE_USE_CPU"] == "true", "there is nothing else"


def test_the_workers_environment_decides_what_they_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert check(num_processes=None).local_world_size == 1
    on_gpus = {"num_processes": None, "environment": {"ACCELERATE_USE_CPU": "false"}}
    job = check(**on_gpus)
    assert (job.local_world_size, job.device_kind) == (2, devices.CUDA)
    assert job.environment["ACCELERATE_USE_CPU"] == "false"
    assert "at most 2 is possible" in str(_error(num_processes=3, environment={"ACCELERATE_USE_CPU": "0"}))
    nonsense = str(_error(environment={"ACCELERATE_USE_CPU": "maybe"}))
    assert "environment variable ACCELERATE_USE_CPU: 'maybe' is neither true" in nonsense


@pytest.mark.parametrize(
    ("kind", "asked", "present", "has"),
    [
        (devices.CUDA, "cuda", 0, "no CUDA GPU;"),
        (devices.CUDA, "cuda:3", 0, "no CUDA GPU;"),
        (devices.CUDA, "cuda:3", 2, "2 CUDA GPUs, counted from 0;"),
        (devices.XPU, "xpu", 0, "no Intel GPU;"),
        (devices.MPS, "mps", 0, "no Apple GPU;"),
        (devices.kind_of("hpu"), "hpu:1", 1, "1 Gaudi HPU, counted from 0;"),
    ],
)
def test_a_device_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: devices.DeviceKind, asked: str, present: int, has: str
) -> None:
    row = replace(kind, counter=lambda: present)
    monkeypatch.setattr(devices, "KINDS", tuple(row if each is kind else each for each in devices.KINDS))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    sentence = f"launcher: ACCELERATE_TORCH_DEVICE='{asked}': this machine has {has}"
    for number in (None, 1, 2):
        in_launch = {"ACCELERATE_TORCH_DEVICE": asked}
        assert str(_error(num_processes=number, environment=in_launch)).startswith(sentence)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", asked)
    assert str(_error(num_processes=None)).startswith(sentence)
    assert check(num_processes=None, environment={"ACCELERATE_TORCH_DEVICE": ""}).local_world_size > 0
    assert check(environment={"ACCELERATE_USE_CPU": "true"}).device_kind is devices.CPU


def test_a_device_that_is_here_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(devices.CUDA, counter=lambda: 2)
    monkeypatch.setattr(devices, "KINDS", (row, devices.CPU))
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    assert check(num_processes=1).device_kind.name == "cuda"
    assert (
        check(num_processes=None, environment={"ACCELERATE_TORCH_DEVICE": "cpu"}).device_kind is devices.CPU
    )


def test_one_device_that_is_named_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "KINDS", (replace(devices.CUDA, counter=lambda: 2), devices.CPU))
    named, any_of_them = {"ACCELERATE_TORCH_DEVICE": "cuda:1"}, {"ACCELERATE_TORCH_DEVICE": "cuda"}
    assert check(num_processes=None, environment=any_of_them).local_world_size == 2
    assert (
        "num_processes=2: ACCELERATE_TORCH_DEVICE='cuda:1' names one device, on which all of them would compute"
    ) in str(_error(num_processes=2, environment=named))
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    assert check(num_processes=None).local_world_size == 1
    assert check(num_processes=2, environment=any_of_them).local_world_size == 2


def test_hosts_may_have_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "KINDS", (replace(devices.CUDA, counter=lambda: 0), devices.CPU))
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")
    found: list[Exception] = []
    ssh = base.find("ssh")
    machine = preflight._look_at_machine(found, {"tpu_mode": "process"}, ssh, environ.snapshot(), {})
    assert (machine.kind.name, found) == ("cuda", [])


def test_a_good_job_is_resolved() -> None:
    job = check(num_processes=None, mixed_precision="BF16", args=[1])
    assert job.local_world_size == 1 and job.args == (1,) and not job.distributed
    assert job.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert check(use_port="0").rendezvous.port == 0


def test_inside_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "this process is rank 1 of a run of 4" in str(_error())


def test_a_node_among_several_is_not_forked() -> None:
    """Its store's thread answers other nodes, and may hold a lock at that moment."""
    nodes: dict[str, Any] = {"num_nodes": 2, "use_port": 0, "rdzv_endpoint": "localhost:29500"}
    assert check(**nodes, start_method="auto").start_method == "fresh"
    assert "serve other nodes" in str(_error(**nodes, start_method="fork"))


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_addresses_of_this_machine(address: str) -> None:
    with listen(address, 0) as server:
        port = server.getsockname()[1]
        assert "in use" in find_listen_problem(address, port)
    assert not find_listen_problem(address, port)
    assert find_listen_problem("198.51.100.77", 0) and find_listen_problem("no-such-name.invalid", 0)


def test_a_port_that_another_node_may_have_opened() -> None:
    """With c10d any node that the address belongs to opens it: two nodes of one machine both may."""
    with listen("", 0) as server:
        port = server.getsockname()[1]
        assert "the port cannot be opened (Address already in use);" in str(_error(use_port=port))
        assert str(_error(use_port=port, num_nodes=2)).endswith("in use); name another one on all nodes")
        nodes: dict[str, Any] = {"use_port": port, "num_nodes": 2, "rdzv_backend": "c10d"}
        assert check(**nodes).rendezvous.port == port


def test_numbers_of_numpy_are_numbers() -> None:
    good = check(num_processes=np.int64(2), max_restarts=np.int32(1), use_port=np.int64(0))
    assert (type(good.local_world_size), type(good.max_restarts), type(good.rendezvous.port)) == (
        int,
        int,
        int,
    )


def test_a_master_that_no_name_server_knows() -> None:
    place = {"num_nodes": 2, "use_port": 29400, "node_rank": 1, "master_addr": "no-such-host.invalid"}
    assert "master_addr='no-such-host.invalid': this machine finds no such host" in str(_error(**place))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"master_addr": ""}, "master_addr='': a host name or address is needed"),
        ({"master_addr": "a..b"}, "is not an address of this machine (no host has such a name)"),
        ({"master_addr": "a" * 70}, "(no host has such a name)"),
        ({"use_port": "9" * 5000}, "a port from 0 to 65535 is needed"),
        ({"rdzv_id": "a\0b"}, "printable characters are needed"),
        ({"rdzv_id": "\udc80"}, "printable characters are needed"),
        ({"rdzv_endpoint": "localhost:99999"}, "a port from 1 to 65535"),
        ({"rdzv_endpoint": "no-such-host.invalid:2000", "num_nodes": 2}, "this machine finds no such host"),
        ({"rdzv_conf": {1: "x"}}, "a dict is needed, its keys are names"),
        ({"rdzv_conf": {"backend": "x"}}, "backend is set by an argument of the launch"),
        ({"rdzv_conf": {"join_timeout": "soon"}}, "join_timeout is a number of seconds"),
        ({"max_restarts": 10**400}, "at most 1000000 is needed"),
        ({"output": b"all"}, "output=b'all': choose among"),
        ({"num_processes": np.int64(2), "output": [5]}, "the ranks of this run are 0 to 1"),
    ],
)
def test_odd_values_are_named(changes: dict[str, Any], text: str) -> None:
    assert text in str(_error(**changes))


def test_seconds_and_ranks_of_numpy() -> None:
    job = {"monitor_interval": np.float32(0.5), "output": [np.int64(1)]}
    assert check(**job).monitor_interval == 0.5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"engine": "inprocess"},
            "detach=True with engine='inprocess': it is for engine='local' and engine='slurm' and engine='ssh'",
        ),
        (
            {"engine": "ray"},
            "detach=True with engine='ray': it is for engine='local' and engine='slurm' and engine='ssh'",
        ),
        ({"num_nodes": 2, "use_port": 29599}, "detach=True with a notebook on each node"),
        ({"start_method": "fork"}, "with detach=True the workers outlive this process"),
        (
            {"name": "12"},
            "name='12': 1 to 100 characters are needed, not digits alone, no space at the ends",
        ),
        (
            {"name": "  "},
            "name='  ': 1 to 100 characters are needed, not digits alone, no space at the ends",
        ),
        ({"name": "a\nb"}, "name='a\\nb': printable characters are needed"),
        ({"name": 5}, "name=5: a string is needed"),
    ],
)
def test_what_cannot_be_detached_or_named(changes: dict[str, Any], text: str) -> None:
    assert text in str(_error(**{"detach": True, "num_processes": 2, **changes}))


def test_a_detached_run_has_fresh_workers_and_a_name() -> None:
    job = check(detach=True, num_processes=1, name="nightly", start_method="auto")
    assert (job.engine, job.name, job.start_method) == ("local", "nightly", "fresh")


def test_a_range_of_nodes() -> None:
    nodes = {"num_nodes": "1:4", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:29500"}
    ready = check(**nodes, start_method="auto", num_processes=1)
    assert (ready.rendezvous.min_nodes, ready.rendezvous.num_nodes) == (1, 4)
    assert ready.distributed and ready.start_method == "fresh"
    ready = check(**{**nodes, "num_nodes": "1:1"}, num_processes=1)
    assert ready.distributed, "this process cannot start itself again"


def test_a_range_of_nodes_implies_how_they_meet() -> None:
    wrong = {"num_processes": 0, "rdzv_endpoint": "localhost:29500"}
    with pytest.raises(ValueError, match="at least 1 is needed") as implied:
        notebook_launcher(_function, num_nodes="1:4", **wrong)  # type: ignore[arg-type]
    assert "rdzv_backend" not in str(implied.value)
    with pytest.raises(ValueError, match="num_nodes='1:4' with rdzv_backend='static'"):
        notebook_launcher(_function, num_nodes="1:4", rdzv_backend="static", **wrong)  # type: ignore[arg-type]


NODES = {"num_nodes": 2, "use_port": 29511, "num_processes": 1, "node_rank": 1}
SECRET = "correct horse battery staple"


def test_a_secret_is_in_nothing_that_may_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = check(**NODES, secret=SECRET)
    assert ready.rendezvous.trust.is_proven and SECRET not in repr(ready) and "secret" not in ready.options
    assert not check(**NODES).rendezvous.trust.is_proven
    monkeypatch.setenv("NOTEBOOK_ACCEL_SECRET", SECRET)
    ready = check(**NODES)
    assert ready.rendezvous.trust.is_proven
    variables = environment.make_environment(ready, environ.snapshot(), {}, is_alone=False)
    assert SECRET not in variables.values(), "workers prove nothing"
    assert SECRET not in str(select_relevant(environ.snapshot()))


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        ("hunter2", "secret: the secret has 7 characters, at least 16 are needed"),
        (b"hunter2 as bytes", "secret is of type bytes: a string is needed, or the Path of a file"),
        (Path("/nowhere"), "secret='/nowhere': the file cannot be read"),
    ],
)
def test_a_wrong_secret_is_named_without_showing_it(secret: Any, text: str) -> None:
    problem = str(_error(**NODES, secret=secret))
    assert text in problem and "hunter2" not in problem


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ({"master_addr": "8.8.8.8"}, "master_addr='8.8.8.8' is a public address"),
        ({"rdzv_endpoint": "[2001:4860:4860::8888]:29400", "rdzv_backend": "c10d"}, "rdzv_endpoint="),
    ],
)
def test_a_public_address_is_warned_of(place: dict[str, Any], name: str) -> None:
    with pytest.warns(UserWarning, match="torch's store, gloo and NCCL let everybody in") as caught:
        check(**NODES, **place)
    assert str(caught[0].message).startswith(name)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.1", "172.31.43.8", "169.254.1.1", "100.64.0.1", "fe80::1"]
)
def test_an_address_of_a_network_of_ones_own_is_not(address: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(**NODES, master_addr=address)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"secret": SECRET},
            "secret with engine='ssh': what is said between notebook and hosts goes through ssh",
        ),
        ({"address": "auto"}, "address='auto' with engine='ssh': hosts= says where the ranks run"),
        ({"tpu_mode": "spmd"}, "tpu_mode='spmd' with engine='ssh'"),
        (
            {"environment": {"TORCHELASTIC_RUN_ID": "mine"}},
            "a launch sets this variable for each rank; give rdzv_id= in its place",
        ),
    ],
)
def test_hosts_are_not_looked_at_for_a_launch_that_is_wrong_anyway(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], text: str
) -> None:
    def look(*args: Any) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(pool.Pool, "borrow", look)
    problem = str(_error(hosts=["gpu1"], num_processes=None, start_method="auto", **more))
    assert text in problem and SECRET not in problem


def test_an_interrupt_of_the_checks_says_that_nothing_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may wait for hosts. What is shown ends with the launch, not with what it waited in."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(preflight, "resolve", interrupt)
    with pytest.raises(KeyboardInterrupt, match="launcher: no worker was started yet") as raised:
        check()
    assert raised.traceback[-1].name == "check" and raised.value.__suppress_context__
