"""One cell on several nodes: ranks, output and values, waits, disagreements and failures."""

from __future__ import annotations

import re
import socket
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.nodes import slow_wire
from tests.nodes.network import Nodes

pytestmark = [pytest.mark.notebook, pytest.mark.slow]


def test_ranks_are_numbered_over_all_nodes(nodes: Nodes) -> None:
    """Node 0 has two processes, node 1 one: the number may differ."""
    code = """
        def train():
            print("local", os.environ["LOCAL_RANK"], "of", total(), "by", os.environ["GLOO_SOCKET_IFNAME"])
            return f"from rank {os.environ['RANK']}"
        launch(train, num_processes=2 - node, log_line_prefix_template="<${rank}.${local_rank}> ")
    """
    cells = nodes.run(code)
    assert [cell.ok().value for cell in cells] == ["'from rank 0'"] * 2
    assert sorted(cells[0].lines) == ["<0.0> local 0 of 3 by eth0", "<1.1> local 1 of 3 by eth0"]
    assert cells[1].lines == ["<2.0> local 0 of 3 by eth0"]
    code = code.replace("log_line", "returns='all', log_line")
    assert [cell.ok().value for cell in nodes.run(code)] == [
        "['from rank 0', 'from rank 1']",
        "['from rank 2']",
    ]


def test_nodes_get_their_ranks_where_none_has_one(nodes: Nodes) -> None:
    code = """
        def train():
            return total(), os.environ["RANK"]
        place = dict(rdzv_backend="c10d", rdzv_endpoint=f"{master}:{port}", rdzv_id="one")
        launch(train, num_nodes=3, node_rank=0, returns="all", **place)
    """
    values = [cell.ok().value for cell in nodes.run(code, count=3)]
    assert sorted(values) == ["[(3, '0')]", "[(3, '1')]", "[(3, '2')]"]
    assert values[0] == "[(3, '0')]", "the node that has the address has rank 0"


def test_a_value_of_fifty_megabytes_comes_to_every_node(nodes: Nodes) -> None:
    code = """
        value = launch(lambda: torch.arange(12_500_000) % 7 if os.environ["RANK"] == "0" else None)
        tuple(value.shape), int(value.sum())
    """
    expected = f"((12500000,), {sum(range(7)) * (12_500_000 // 7) + sum(range(12_500_000 % 7))})"
    assert [cell.ok().value for cell in nodes.run(code)] == [expected] * 2


def test_a_node_that_waits_says_for_whom(nodes: Nodes, tmp_path: Path) -> None:
    late = f"while not os.path.exists({str(tmp_path / 'told')!r}): time.sleep(0.05)\nlaunch(total)"
    cells = nodes.run_each(["launch(total)", late], (tmp_path / "told").touch, at="waits for node 1")
    assert [cell.ok().value for cell in cells] == ["2", "2"]
    assert re.search(
        r"notebook_accel: node 0 of 2 waits for node 1 \(rank 1\), for \d+ s now", cells[0].stderr
    )
    assert re.search(r"notebook_accel: all 2 nodes are there, after \d+ s", cells[0].stderr)
    waits = re.findall(r"waits for .*, for (\d+) s now", cells[1].stderr)  # of a machine that stands still
    assert all(int(seconds) >= 3 for seconds in waits), cells[1].stderr


def test_a_node_that_finds_nobody_names_whom_it_missed(nodes: Nodes) -> None:
    """Node 1 has a wrong address: each of them waits alone."""
    patience = "rdzv_conf={'join_timeout': 4}"
    cells = nodes.run_each(
        [
            f"launch(total, num_processes=2, {patience})",
            "master = '10.213.0.99'\nlaunch(total, rdzv_conf={'join_timeout': 20})",  # it tells in time that it waits
            f"port += 1000\nlaunch(total, node_rank=0, master_addr='127.0.0.1', rdzv_backend='c10d', {patience})",
        ]
    )
    nodes.kernels[1].run(f"master = {nodes.network.addresses[0]!r}").ok()
    errors = [cell.error for cell in cells]
    for error, missed in zip(
        errors,
        [
            "node 0 of 2 waited 4 s for node 1 (ranks 2 to 3)",
            f"node 1 of 2 waited 20 s for node 0 at 10.213.0.99:{nodes.port}",
            "node 0 of 2 waited 4 s for 1 more node (1 of 2 there: ",
        ],
        strict=True,
    ):
        assert error is not None and error[0] == "LaunchError" and missed in error[1], errors
    assert f"waits for node 0 at 10.213.0.99:{nodes.port} (" in cells[1].stderr


def test_nodes_that_disagree_are_told_on_all_of_them(nodes: Nodes) -> None:
    codes = [
        "launch(lambda: total() + 1, mixed_precision='bf16')",
        "launch(lambda: total() + 2, max_restarts=2, returns='all')",
    ]
    for cell in nodes.run_each(codes):
        kind, text = cell.error or ("", cell.stdout)
        assert kind == "LaunchError"
        assert "mixed_precision: bf16 on node 0" in text and "; no on node 1" in text
        assert "max_restarts: 0 on node 0" in text and "; 2 on node 1" in text
        assert "the function: <lambda>, code " in text and "returns: first on node 0" in text
        assert "torch" not in text


def test_nodes_of_other_numbers_do_not_wait_for_each_other(nodes: Nodes) -> None:
    for cell in nodes.run_each(["launch(total)", "launch(total, num_nodes=3)"]):
        kind, text = cell.error or ("", cell.stdout)
        assert kind == "LaunchError" and "num_nodes: 2 on node 0" in text and "; 3 on node 1" in text


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 1)], ids=str)
def test_a_rank_given_twice_is_told_on_both(nodes: Nodes, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """The first node is there before the others: a second node 0 does not look for it for long."""
    told = tmp_path / "told"
    first, *others = (f"launch(total, node_rank={rank}, num_nodes=3)" for rank in ranks)
    late = f"while not os.path.exists({str(told)!r}): time.sleep(0.05)\n"
    cells = nodes.run_each([first, *(late + other for other in others)], told.touch, at="waits for")
    for rank, cell in zip(ranks, cells, strict=True):
        kind, text = cell.error or ("", cell.stdout)
        if rank == ranks[-1]:
            assert kind == "LaunchError" and f"node_rank={rank} was given 2 times" in text


def test_a_port_that_is_taken(nodes: Nodes) -> None:
    """Node 0 says so before anything starts; on node 1 it is no node that answers."""
    taken = "import socket\ntaken = socket.create_server(('', port))\n"
    cells = nodes.run_each([taken + "launch(total)", "launch(total)"])
    nodes.kernels[0].run("taken.close()").ok()
    (kind, text), other = cells[0].error or ("", ""), cells[1].error
    assert kind == "ValueError" and f"use_port={nodes.port}: the port cannot be opened" in text
    assert (
        other is not None and other[0] == "LaunchError" and "does not answer as a node of a run" in other[1]
    )


def test_a_failure_is_the_same_on_every_node(nodes: Nodes) -> None:
    """The rank of node 0 would work for long, and hears nothing of the other one."""
    code = """
        def train():
            total()
            if os.environ["RANK"] == "1":
                raise ValueError("the cause")  # line 5 of the cell
            time.sleep(3600)
        launch(train)
    """
    cells = nodes.run(code)
    assert [cell.error for cell in cells] == [("ValueError", "the cause")] * 2
    assert "on node 1 (" in cells[0].told and "on node 1 (" not in cells[1].told
    assert 'raise ValueError("the cause")  # line 5' in cells[0].traceback, (
        "the other kernel's cell is this one's too"
    )


@pytest.mark.parametrize("is_elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("others", ["wait", "lose their peer"])
def test_all_nodes_are_told_why_the_workers_start_again(nodes: Nodes, is_elastic: bool, others: str) -> None:
    """Each has a rank; that of the second node fails."""
    code = f"""
        def train():
            total()
            if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
                return total()
            if node == 1:
                raise ValueError("the cause")
            if {others == "wait"}:
                time.sleep(3600)
            total()
        more = dict(num_nodes=3, max_restarts=1)
        if {is_elastic}:
            more |= dict(num_nodes="3:3", node_rank=min(node, 1), rdzv_endpoint=f"{{master}}:{{port}}")
            more |= dict(rdzv_conf={{"keep_alive_interval": 10}})
        launch(train, **more)
    """
    cells = nodes.run(code, count=3)
    assert [cell.ok().value for cell in cells] == ["3"] * 3
    for node, cell in enumerate(cells):
        cause = r"rank \d \(process \d+\) raised ValueError: the cause; restart 1 of 1\n"
        told = cause if node == 1 else r"node \d \(.*\): " + cause
        assert re.search(f"notebook_accel: {told}", cell.stderr), (node, [each.stderr for each in cells])


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_an_interrupt_of_one_node_ends_the_others(nodes: Nodes, max_restarts: int) -> None:
    code = f"""
        def train():
            total()
            print("go", flush=True)
            time.sleep(90)
        launch(train, max_restarts={max_restarts})
    """
    cells = nodes.run(code, during=lambda: nodes.kernels[1].interrupt())
    assert cells[1].error is not None and cells[1].error[0] == "KeyboardInterrupt"
    kind, text = cells[0].error or ("", "")
    assert kind == "RunStoppedError" and text.startswith("node 1 (") and text.endswith("was stopped")


def test_a_stop_of_the_node_that_holds_the_store_ends_those_who_wait(nodes: Nodes) -> None:
    stopped = """
        run = launch(total, num_nodes=3, block=False)
        while not any("waits for node 2 (" in str(getattr(event, "text", "")) for event in run.record.since(0)):
            time.sleep(0.05)
        run.stop()
        print(run.status)
    """
    cells = nodes.run_each([stopped, "launch(total, num_nodes=3)"])
    assert cells[0].ok().lines == ["stopped"]
    kind, text = cells[1].error or ("", "")
    assert kind == "LaunchError" and text.startswith("node 0 (") and "was stopped, which holds" in text


def test_a_stop_of_one_node_lets_all_return(nodes: Nodes) -> None:
    """Rank 0, of the other node, takes a while to save: the node that stops waits for it, and gets its value."""
    code = """
        from notebook_accel import Accelerator
        def train():
            accelerator, steps = Accelerator(cpu=True), 0
            while not accelerator.should_stop and steps < 6000:
                steps += 1
                if steps == 1:
                    total()  # a rank that has never asked would be ended at once
                    print("step", flush=True)
                time.sleep(0.01)
            if accelerator.is_main_process:
                time.sleep(0.7)
            return steps
        run = launch(train, block=False)
        while "step" not in run.lines():
            time.sleep(0.01)
        if node:
            run.stop()
        print(run.result(), run.status)
    """
    ends = [cell.ok().lines[-1].split() for cell in nodes.run(code)]
    assert ends[0][0] == ends[1][0] != "6000" and ends[1][1] == "stopped"


def test_ranks_that_ask_unequally_often(nodes: Nodes) -> None:
    """Nobody waits for the questions of others: where nobody stops the run, and where one does."""
    code = """
        from notebook_accel import Accelerator
        def train(is_endless):
            accelerator, steps = Accelerator(cpu=True), 0
            total()
            while not accelerator.should_stop and (is_endless or steps < 20):
                steps += 1
                for _ in range(3 * accelerator.process_index):
                    assert accelerator.should_stop in (is_endless, False)
                if not is_endless or steps == 1:  # a rank that has never asked would be ended at once
                    assert total() == 2
                time.sleep(0.01)
                print("step", flush=True) if steps == 1 else None
            return steps
        print(launch(train, args=(False,), returns="all"))
        run = launch(train, args=(True,), block=False, returns="all")
        while "step" not in run.lines():
            time.sleep(0.01)
        if node:
            run.stop()
        print(len(run.result()), run.status)
    """
    first, second = (cell.ok().lines for cell in nodes.run(code))
    assert "[20]" in first and "[20]" in second
    assert first[-1] == "1 done" and second[-1] == "1 stopped"


def test_nodes_that_come_and_go_find_each_other(nodes: Nodes, tmp_path: Path) -> None:
    """One that is made otherwise is turned away. The next launch follows at once; its failure is the same on both."""
    code = """
        def train(fails):
            count = total()
            open(BEGAN, "w").close()
            while not fails and not os.path.exists(TOLD):
                time.sleep(0.05)
            if fails and dist.get_rank() == 1:
                raise ValueError("the cause")
            total()
            return dist.get_rank(), count, os.environ["GLOO_SOCKET_IFNAME"]
        place = dict(num_nodes="2:2", rdzv_endpoint=f"{{master}}:{{port}}", returns="all", max_restarts={restarts})
        place["rdzv_conf"] = {{"keep_alive_interval": 10}}  # no node is lost here
        place["node_rank"] = min(node, 1)
        print(launch(train, args=(False,), **place))
        launch(train, args=(True,), **place)
    """
    began, told = tmp_path / "began", tmp_path / "told"
    head = f"BEGAN, TOLD = {str(began)!r}, {str(told)!r}\n"
    good, other = (head + textwrap.dedent(code.format(restarts=restarts)) for restarts in (0, 3))
    late = f"while not os.path.exists({str(began)!r}): time.sleep(0.05)\n{other}"
    first, second, third = nodes.run_each([good, good, late], told.touch, at="was not let into the run")
    assert [cell.error for cell in (first, second)] == [("ValueError", "the cause")] * 2
    assert [cell.lines[-1] for cell in (first, second)] == ["[(0, 2, 'eth0')]", "[(1, 2, 'eth0')]"]
    assert third.error is not None and third.error[0] == "LaunchError"
    host = socket.gethostname()
    assert third.error[1].endswith(f"- max_restarts: 0 on node 0 ({host}); 3 on a new node ({host})")
    assert "was not let into the run" in first.stderr
    assert "are needed" not in first.stderr + second.stderr, "the run has ended, nobody waits"


def test_a_hang_is_one_of_all_nodes(nodes: Nodes) -> None:
    """While rank 1 prints, rank 0 of the other node waits longer than the limit; then both are shown on both."""
    code = """
        from unittest import mock
        from notebook_accel.launch.engines.nodes import coordinator, meeting
        from notebook_accel.launch.supervise import hang_watch
        def train():
            total()
            if os.environ["RANK"] == "1":
                for _ in range(56):
                    time.sleep(0.4)
                    print("works", flush=True)
                time.sleep(600)
            total()
        with (mock.patch.object(hang_watch, "_ANSWER_SECONDS", 60.0),
              mock.patch.object(coordinator, "_SETTLE_SECONDS", 60.0),
              mock.patch.object(meeting, "_VERDICT_SECONDS", 60.0)):  # a busy machine answers late
            launch(train, hang_timeout=20, on_hang="raise")
    """
    cells = nodes.run(code)
    assert cells[1].lines.count("works") == 56
    for cell in cells:
        kind, text = cell.error or ("", cell.stdout)
        assert kind == "HangError" and "in all_reduce" in text and "time.sleep(600)" in text, text
        assert "node 0 (" in text and "node 1 (" in text


def test_a_link_that_is_down_for_ten_seconds(nodes: Nodes, tmp_path: Path) -> None:
    is_cut = tmp_path / "is cut"
    code = f"""
        def train():
            for step in range(40):
                count = total()
                if step == 3:
                    print("go", flush=True)
                    while not os.path.exists({str(is_cut)!r}):
                        time.sleep(0.05)
                time.sleep(0.05)
            return count
        launch(train, hang_timeout=8)  # so that there is news, which has to wait
    """

    def cut() -> None:
        nodes.network.cut(1, up=False)
        is_cut.touch()
        mended = threading.Timer(10.0, nodes.network.cut, (1,), {"up": True})
        mended.start()

    began = time.monotonic()
    cells = nodes.run(code, during=cut)
    assert [cell.ok().value for cell in cells] == ["2", "2"]
    assert time.monotonic() - began > 10


@pytest.mark.parametrize("is_busy", [False, True], ids=["quiet", "in a collective"])
def test_a_cable_that_is_cut_is_told_on_both_sides(nodes: Nodes, is_busy: bool) -> None:
    """Packets are lost without a word. The promise is 15 s; ten more are for a machine that stands still meanwhile."""
    code = f"""
        def train():
            total()
            print("go", flush=True)
            if {is_busy} and dist.get_rank() == 0:
                total()
            time.sleep(3600)
        try:
            launch(train, hang_timeout=8)  # so that there is news, which nobody gets any more
        finally:
            print("told at", time.monotonic())
    """
    cuts: list[float] = []

    def cut() -> None:
        nodes.network.take_out(1)
        cuts.append(time.monotonic())  # of the machine, in every namespace the same

    try:
        cells = nodes.run(code, during=cut)
    finally:
        nodes.network.put_in(1)
    for node, cell in enumerate(cells):
        kind, text = cell.error or ("", cell.stdout)
        assert kind == "WorkerError" and f"node {1 - node} (" in text and "cut off the network" in text, text
        told = re.search(r"told at ([\d.]+)", cell.stdout)
        assert told is not None and float(told[1]) - cuts[0] < 15 + 10, (told, cuts)


def test_nodes_that_come_and_go_lose_one_by_a_cut_cable(nodes: Nodes) -> None:
    """Its ranks are in a collective with those of the others, which start again without it."""
    code = """
        def train():
            count = total()
            print("go" if count == 2 else "alone", flush=True)
            while count == 2:
                total()
                time.sleep(0.05)
            return count
        place = dict(num_nodes="1:2", rdzv_endpoint=f"{master}:{port}", node_rank=node)
        launch(train, rdzv_conf={"last_call_timeout": 20}, **place)
    """
    try:
        cells = nodes.run(code, during=lambda: nodes.network.take_out(1))
    finally:
        nodes.network.put_in(1)
    assert cells[0].ok().value == "1" and "node lost: 1 node, 1 rank; workers start again" in cells[0].stderr
    kind, text = cells[1].error or ("", cells[1].stdout)
    assert kind in ("WorkerError", "LaunchError") and "node 0 (" in text and "cut off the network" in text, (
        text
    )


@pytest.mark.skipif(not slow_wire.can_be(), reason="needs /dev/net/tun, of which slow cables are made")
def test_a_slow_link_that_loses_packets(nodes: Nodes) -> None:
    with nodes.network.slow(1, delay=0.1, loss=0.02) as wire:
        cells = nodes.run("launch(lambda: [total() for _ in range(5)])")
    assert [cell.ok().value for cell in cells] == ["[2, 2, 2, 2, 2]"] * 2
    assert wire.carried > 50 and wire.lost > 0
    assert min(cell.seconds for cell in cells) > 1, "each collective and each word crosses it"


def test_a_node_that_is_killed_is_named(nodes: Nodes) -> None:
    """First the one that holds the run together, here the third kernel, then another; the first one survives both."""
    code = """
        port = {port}
        def train():
            total()
            print("go", flush=True)
            time.sleep(3600)
        launch(train, node_rank={rank}, master_addr={address!r})
    """
    for killed, host in ((2, 2), (1, 0)):
        place = {"address": nodes.network.addresses[host], "port": nodes.port + 1}
        doomed = nodes.kernels[killed]
        doomed.client.execute(textwrap.dedent(code.format(rank=int(killed != host), **place)))
        mine = code.format(rank=int(killed == host), **place)
        (survivor,) = nodes.run_each([mine], during=doomed.kill)
        nodes.forget(killed)
        kind, text = survivor.error or ("", survivor.stdout)
        assert kind == "WorkerError" and f"node {int(killed != host)} (" in text and "is gone" in text, text
