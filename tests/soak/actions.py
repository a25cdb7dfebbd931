"""What a soak lets hosts do, drawn at random: pieces of code, and what each has to give, raise and show."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METHODS = ("auto", "fork", "fresh")
KINDS = {"number": 1, "text": 3000, "tensor": 400_000, "array": 100_000, "nested": 50, "object": 5}
_RAISE_FAILURE = "if run.status == 'failed': run.result()\n"
"""A run that failed before it was asked to stop: its error is that of what happened to it."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of code.

    Attributes:
        code: Python source; it calls `answer`.
        expected: what it gives to `answer`; several values where any of `choices` will do.
        error: type and a part of the text of what it raises instead.
        shows: a text, and how often the output has it.
        choices: further answers that are right.
        may_be_stopped: whether it waits for a run of an earlier piece: an interrupt of an idle kernel stops that.
    """

    code: str
    expected: Any = None
    error: tuple[str, str] | None = None
    shows: tuple[str, int] | None = None
    choices: tuple[Any, ...] = ()
    may_be_stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class Action:
    """What a host does in a step.

    Attributes:
        title: in words.
        pieces: one after the other.
        has_session: whether a session is to be usable in the end.
    """

    title: str
    pieces: list[Piece] = field(default_factory=list)
    has_session: bool = False


def digest(kind: str, size: int, rank: int) -> Any:
    """Return what `digest` of `cells.py` makes of a value of a rank."""
    if kind == "text":
        return "é" * size + str(rank)
    if kind == "tensor":
        return [[size], "torch.float64", size * (size - 1) / 2 + rank * size, float(size - 1 + rank)]
    if kind == "array":
        total = sum(2.0 * number + rank for number in range(size))
        return [[size], "float32", total, float(2 * (size - 1) + rank)]
    if kind == "nested":
        return {"a": [[[size], "torch.int64", float(size * rank), float(rank)], "x"], "b": [rank, None, ""]}
    if kind == "object":
        return ["Point", rank, size]
    return size * 10 + rank


def expect_training(rows: int, world: int, epochs: int) -> tuple[list[list[float]], float]:
    """Return the weights after the epochs, and the sum of all that was gathered, computed by one process."""
    import torch

    from tests.soak import cells

    model, (x, y) = cells.make_model(), cells.make_data(rows).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for at in range(0, rows, 2 * world):
            loss = ((model(x[at : at + 2 * world]) - y[at : at + 2 * world]) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().reshape(-1).tolist() for p in model.parameters()], x.sum().item() * epochs


def _call(function: str, args: str, ranks: int, method: str, **options: Any) -> str:
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    return (
        f"notebook_launcher({function}, {args}, num_processes={ranks}, "
        f"start_method={method!r}, returns='all'{more})"
    )


def _draw_method(rng: random.Random) -> str:
    return rng.choice(METHODS)


def launch(rng: random.Random, folder: Path) -> Action:
    """Return values of a function."""
    kind, ranks, method = rng.choice(sorted(KINDS)), rng.randint(1, 4), _draw_method(rng)
    size = rng.randint(1, KINDS[kind]) if rng.random() < 0.9 else KINDS[kind] * 10
    options: dict[str, Any] = {"output": rng.choice(["all", "first", "none"])}
    if rng.random() < 0.2:
        options["log_dir"] = str(folder / "logs")
    if ranks == 1:
        options.pop("log_dir", None)
    call = _call("give", f"({kind!r}, {size})", ranks, method, **options)
    values = [digest(kind, size, rank) for rank in range(ranks)]
    title = f"{ranks} ranks by {method} return {kind} of size {size}"
    return Action(title=title, pieces=[Piece(code=f"answer(digest({call}))", expected=values)])


def train(rng: random.Random, folder: Path) -> Action:
    """Train, save, load, and compare the weights."""
    ranks, method = rng.randint(1, 4), rng.choice(METHODS)
    epochs, workers = rng.randint(1, 3), rng.choice([0, 0, 0, 2])
    rows = ranks * 2 * rng.randint(2, 6)
    checkpoint = folder / f"checkpoint-{rng.randrange(1 << 30)}"
    call = _call("train", f"({str(checkpoint)!r}, {rows}, {epochs}, {workers})", ranks, method)
    weights, seen = expect_training(rows, ranks, epochs)
    code = f"""
        import shutil
        try:
            values = {call}
        finally:
            shutil.rmtree({str(checkpoint)!r}, ignore_errors=True)
        assert all(value == values[0] for value in values), values
        def is_near(mine, right):
            return all(abs(a - b) < 1e-9 for a, b in zip(mine, right, strict=True))
        (mine, seen), right = values[0], {weights!r}
        same = all(is_near(*pair) for pair in zip(mine, right, strict=True)) and abs(seen - {seen!r}) < 1e-6
        answer(True if same else values)
    """
    title = f"{ranks} ranks by {method} train {epochs} epochs, {workers} loader workers"
    return Action(title=title, pieces=[Piece(code=code, expected=True)])


FAILURES = {
    "raise": ("ValueError", "rank {rank} fails"),
    "leave": ("ValueError", "rank {rank} fails"),
    "exit": ("WorkerExitedError", "exit code 17"),
    "SIGKILL": ("WorkerKilledError", "SIGKILL"),
    "SIGTERM": ("WorkerKilledError", "SIGTERM"),
    "SIGSEGV": ("WorkerKilledError", "SIGSEGV"),
    "SIGABRT": ("WorkerKilledError", "SIGABRT"),
}


def fail(rng: random.Random, folder: Path) -> Action:
    """Let a rank fail while the others wait."""
    how, ranks, method = rng.choice(sorted(FAILURES)), rng.randint(2, 4), _draw_method(rng)
    rank, wait = rng.randrange(ranks), rng.choice(["collective", "sleep", "return"])
    name, words = FAILURES[how]
    call = _call("fail", f"({how!r}, {rank}, {wait!r})", ranks, method)
    title = f"rank {rank} of {ranks} by {method} fails by {how}, the others: {wait}"
    return Action(title=title, pieces=[Piece(code=call, error=(name, words.format(rank=rank)))])


def leave(rng: random.Random, folder: Path) -> Action:
    """Return while children still run.

    Shared memory that a function leaves is not among these: Python keeps it until the program ends that launches.
    """
    how = rng.choice(["shell", "process", "semaphore", "loader", "thread"])
    ranks, method = rng.randint(2, 3), _draw_method(rng)
    call = _call("leave_children", f"({how!r},)", ranks, method)
    return Action(
        title=f"{ranks} ranks by {method} leave a {how}",
        pieces=[Piece(code=f"answer({call})", expected=list(range(ranks)))],
    )


def shout(rng: random.Random, folder: Path) -> Action:
    """Write much."""
    how = rng.choice(["flood", "bars", "unfinished", "bytes", "long"])
    ranks, method = rng.randint(2, 4), _draw_method(rng)
    count = rng.choice([1, 100, 20_000])
    if how == "bars":
        count = min(count, 5000)
    call = _call("shout", f"({how!r}, {count})", ranks, method)
    shows = ("flood ", ranks * count) if how == "flood" else None
    return Action(
        title=f"{ranks} ranks by {method} write {how}, {count}",
        pieces=[Piece(code=f"answer({call})", expected=list(range(ranks)), shows=shows)],
    )


def background(rng: random.Random, folder: Path) -> Action:
    """Run in the background, and wait or stop from another piece."""
    ranks, method = rng.randint(1, 3), rng.choice(["auto", "fresh"])
    how = rng.choice(["result", "stop", "stop now", "two", "agree", "fail"])
    title = f"{ranks} ranks by {method} in the background, {how}"
    begin = "run = " + _call("pause", "(0.3,)", ranks, method, block=False)
    ranks_list = list(range(ranks))
    if how == "result":
        after = Piece(code="answer(run.result())", expected=ranks_list, may_be_stopped=True)
    elif how == "two":
        begin += "\nother = " + _call("give", "('tensor', 1000)", ranks, method, block=False)
        values = [digest("tensor", 1000, rank) for rank in ranks_list]
        code = "answer([run.result(), digest(other.result())])"
        after = Piece(code=code, expected=[ranks_list, values], may_be_stopped=True)
    elif how == "fail":
        begin = "run = " + _call("fail", "('raise', 0, 'sleep')", ranks, method, block=False)
        after = Piece(code="run.result()", error=("ValueError", "rank 0 fails"), may_be_stopped=True)
    elif how == "agree":
        begin = "run = " + _call("count_steps", "()", ranks, method, block=False)
        code = f"while run.status == 'starting': time.sleep(0.01)\nrun.stop(20.0)\n{_RAISE_FAILURE}"
        code += "answer([run.status, None if run.failure else run.result()])"
        after = Piece(code=code, expected=["stopped", ["stopped"] * ranks], choices=(["stopped", None],))
    else:
        begin = "run = " + _call("pause", "(600,)", ranks, method, block=False)
        wait = "while run.status == 'starting': time.sleep(0.01)\n" if how == "stop" else ""
        code = f"{wait}run.stop({rng.choice([0.0, 0.5])})\n{_RAISE_FAILURE}answer(run.status)"
        after = Piece(code=code, expected="stopped")
    return Action(title=title, pieces=[Piece(code=f"{begin}\nanswer('begun')", expected="begun"), after])


def session(rng: random.Random, folder: Path) -> Action:
    """Make a session and several calls."""
    ranks, method = rng.randint(1, 3), _draw_method(rng)
    kinds = rng.choices(
        ["give", "reduce", "execute", "flood", "fail", "push", "restart", "stop"], k=rng.randint(1, 5)
    )
    if rng.random() < 0.3:
        kinds.append("lose")
    start = f"session = None\nsession = Session({ranks}, start_method={method!r})\nanswer(session.status)"
    pieces = [Piece(code=start, expected="idle"), *(_make_call(kind, ranks, rng) for kind in kinds)]
    title = f"session of {ranks} by {method}: {', '.join(kinds)}"
    return Action(title=title, pieces=pieces, has_session=True)


def _make_call(kind: str, ranks: int, rng: random.Random) -> Piece:
    everyone = list(range(ranks))
    if kind == "reduce":
        size = rng.choice([1, 1000])
        total = float(sum(rank + 1 for rank in everyone) * size)
        if ranks == 1:
            return Piece(code="answer(session.run(own_rank, returns='all'))", expected=[0])
        return Piece(code=f"answer(session.run(add_up, {size}, returns='all'))", expected=[total] * ranks)
    if kind == "execute":
        return Piece(
            code="session.execute('x = 6\\nx * 7')\nanswer(session.pull('x', 'all'))", expected=[6] * ranks
        )
    if kind == "flood":
        code = "answer(session.run(shout, 'flood', 5000, returns='all'))"
        return Piece(code=code, expected=everyone, shows=("flood ", 5000 * ranks))
    if kind == "fail":
        how = rng.choice(["collective", "sleep", "return"]) if ranks > 1 else "return"
        rank = rng.randrange(ranks)
        return Piece(
            code=f"session.run(fail, 'raise', {rank}, {how!r})", error=("ValueError", f"rank {rank} fails")
        )
    if kind == "lose":
        how = rng.choice(["exit", "SIGKILL", "SIGSEGV"])
        rank, wait = rng.randrange(ranks), "collective" if ranks > 1 else "return"
        return Piece(code=f"session.run(fail, {how!r}, {rank}, {wait!r})", error=FAILURES[how])
    if kind == "push":
        return Piece(
            code="session.push(y=[1] * 100_000)\nanswer(session.run(lambda: len(y)))", expected=100_000
        )
    if kind == "restart":
        return Piece(code="session.restart()\nanswer(session.status)", expected="idle")
    if kind == "stop":
        code = "with stopping(session):\n    session.run(pause, 600)"
        return Piece(code=code, error=("RunStoppedError", "the session goes on"))
    number = rng.randint(1, 1000)
    values = [number * 10 + rank for rank in everyone]
    return Piece(code=f"answer(session.run(give, 'number', {number}, returns='all'))", expected=values)


ACTIONS: dict[Callable[[random.Random, Path], Action], int] = {
    launch: 4,
    train: 3,
    fail: 4,
    leave: 3,
    shout: 2,
    background: 4,
    session: 5,
}


def draw(rng: random.Random, folder: Path) -> Action:
    """Return an action, drawn by its weight."""
    return rng.choices(list(ACTIONS), list(ACTIONS.values()))[0](rng, folder)
