"""What `hosts=` and `python=` may be."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel.config.hosts import Host, check_hosts, check_python, parse_hosts


def test_hosts_have_a_name_and_perhaps_a_number() -> None:
    texts = ["gpu1", "gpu2:4", "me@10.0.0.7", "me@[fe80::1]:2", "[::1]", "fe80::1"]
    assert parse_hosts(texts) == [
        Host(name="gpu1"),
        Host(name="gpu2", count=4),
        Host(name="me@10.0.0.7"),
        Host(name="me@fe80::1", count=2),
        Host(name="::1"),
        Host(name="fe80::1"),
    ]


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("gpu1", "hosts='gpu1': a list of hosts is needed, as in ['gpu1']"),
        ("gpu1,gpu2", "hosts='gpu1,gpu2': a list of hosts is needed, as in ['gpu1', 'gpu2']"),
        (["gpu1,gpu2"], "hosts has 'gpu1,gpu2', which is several hosts: a list of them is needed"),
        ([], "hosts=[]: at least one host is needed"),
        ([1], "hosts has 1: 'host', 'user@host'"),
        ([""], "hosts has '', which names no host"),
        (["a b"], "hosts has 'a b', which names no host"),
        (["a;b"], "hosts has 'a;b', which names no host"),
        (["u@"], "hosts has 'u@', which names no host"),
        (["@h"], "hosts has '@h', which names no host"),
        (["h\n"], "hosts has 'h\\n', which names no host"),
        (["gpu1:x"], "hosts has 'gpu1:x': 'x' is no number of ranks"),
        (["gpu1:0"], "hosts has 'gpu1:0': '0' is no number of ranks"),
        (["gpu1:"], "hosts has 'gpu1:': '' is no number of ranks"),
        (["[::1"], "hosts has '[::1': an address in brackets is needed"),
        (["ssh://gpu1:22"], "hosts has 'ssh://gpu1:22': 'host', 'user@host'"),
        (["-oProxyCommand=x"], "hosts has '-oProxyCommand=x', which would be an option of ssh"),
        (["u@-oProxyCommand=x"], "would be an option of ssh"),
        (
            ["gpu1", "gpu1:2"],
            "hosts has 'gpu1' 2 times: name it once, with the number of its ranks, 'gpu1:2'",
        ),
    ],
)
def test_wrong_hosts_are_named(hosts: Any, text: str) -> None:
    (problem,) = check_hosts("hosts", hosts)
    assert text in str(problem)


def test_all_wrong_hosts_are_named_at_once() -> None:
    assert len(list(check_hosts("hosts", ["a", "a", "b:0", "-c", 5]))) == 4
    assert not list(check_hosts("hosts", None)) and not list(check_hosts("hosts", ("a", "b:2")))


@pytest.mark.parametrize(
    ("python", "text"),
    [
        (3, "python=3: the path of a Python is needed"),
        ("", "python='': the path of a Python on the hosts is needed"),
        ("-c", "python='-c': the path of a Python on the hosts is needed"),
        ({"gpu1": 3}, "the path of a Python is needed, or a dict of them by host"),
        ({1: "python"}, "its keys are hosts"),
    ],
)
def test_a_wrong_python_is_named(python: Any, text: str) -> None:
    assert text in " ".join(map(str, check_python("python", python)))
    assert not list(check_python("python", {"gpu1": "/usr/bin/python3"}))
