"""Exceptions that no notebook expects: what cannot be pickled, printed or compared, huge ones, and those in circles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.scripts import run

ODD = """
class Fits(Exception): pass

class NoPickle(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
    def __reduce__(self): raise TypeError("not by me")

class EndsWhenPickled(Exception):
    def __reduce__(self): raise SystemExit(7)

class EndsWhenMade(Exception):
    def __reduce__(self): return os._exit, (9,)

class Unprintable(Exception):
    def __str__(self): raise ValueError("no text")
    def __repr__(self): raise ValueError("no text")

class EndlessText(Exception):
    def __str__(self): return str(self)

class TextIsNoText(Exception):
    def __str__(self): return 5

class Incomparable(Exception):
    def __eq__(self, other): raise ValueError("not comparable")
    def __hash__(self): raise ValueError("not hashable")
    def __bool__(self): raise ValueError("neither true nor false")

class NoAttributes(Exception):
    def __getattribute__(self, name): raise RuntimeError(name)

class Base(BaseException): pass

def ring(length):
    errors = [Fits(f"ring {number}") for number in range(length)]
    for number, error in enumerate(errors):
        error.__cause__ = errors[(number + 1) % length]
        error.__context__ = errors[number - 1]
    return errors[0]

def local():
    class Local(Exception): pass
    return Local("made in a function")

def many_arguments():
    return Fits(*range(100_000))

def not_utf8():
    return Fits("half \\ud800 a pair", b"\\xff\\xfe", "\\x00\\x1b[2J")

def noted():
    error = Fits("noted")
    error.__notes__ = ["n" * 1_000_000, object(), Unprintable()]
    return error

def cut():
    error = Fits("without a traceback")
    error.__traceback__ = None
    return error

def deep():
    def call(number):
        return call(number + 1)
    try:
        call(0)
    except RecursionError as error:
        return error

def wide_group():
    return ExceptionGroup("wide", [Fits(str(number)) for number in range(300)])

def deep_group():
    error = Fits("innermost")
    for _ in range(200):
        error = ExceptionGroup("deep", [error])
    return error

def ring_of_groups():
    parts = [Fits(str(number)) for number in range(30)]
    group = ExceptionGroup("group", parts)
    for part in parts:
        part.__cause__ = part.__context__ = group
    return group

MAKERS = {
    "pickle": lambda: NoPickle("text of it"),
    "ends when pickled": lambda: EndsWhenPickled("text of it"),
    "ends when made": lambda: EndsWhenMade("text of it"),
    "unprintable": Unprintable,
    "endless": EndlessText,
    "no text": TextIsNoText,
    "incomparable": lambda: Incomparable("text of it"),
    "no attributes": lambda: NoAttributes("text of it"),
    "huge": lambda: Fits("h" * 20_000_000),
    "arguments": many_arguments,
    "ring 1": lambda: ring(1),
    "ring 2": lambda: ring(2),
    "ring 50": lambda: ring(50),
    "local": local,
    "not utf-8": not_utf8,
    "noted": noted,
    "cut": cut,
    "recursion": deep,
    "base": lambda: Base("text of it"),
    "stop": lambda: StopIteration(5),
    "generator": GeneratorExit,
    "wide group": wide_group,
    "deep group": deep_group,
    "ring of groups": ring_of_groups,
}
if sys.version_info < (3, 11):
    MAKERS = {name: make for name, make in MAKERS.items() if "group" not in name}

def raise_one(name):
    if os.environ["RANK"] == "1":
        raise MAKERS[name]()

def told(name, start):
    import traceback
    began = time.monotonic()
    try:
        start(name)
    except BaseException as error:
        try:
            text = "".join(traceback.format_exception(error))
        except Exception as broken:  # Python itself cannot format all of them
            text = repr(type(broken))
        seconds = time.monotonic() - began
        print(f"{name}: {type(error).__name__} after {seconds:.0f} s, rank 1:", "rank 1" in text or text[:300])
    else:
        print(f"{name}: nothing was raised")
"""
EXPECTED = {
    "pickle": "NoPickle",
    "incomparable": "Incomparable",
    "huge": "Fits",
    "arguments": "Fits",
    "ring 1": "Fits",
    "ring 2": "Fits",
    "ring 50": "Fits",
    "local": "Local",
    "noted": "Fits",
    "cut": "Fits",
    "recursion": "RecursionError",
    "base": "Base",
    "stop": "StopIteration",
}
OTHERS = {"ends when pickled", "unprintable", "endless", "no text", "no attributes", "not utf-8", "generator"}
GROUPS = {"wide group", "deep group", "ring of groups"} if sys.version_info >= (3, 11) else set()


def check(out: str) -> None:
    told = dict(line.split(": ", 1) for line in out.splitlines() if " after " in line)
    missing = {*EXPECTED, *OTHERS, *GROUPS} - told.keys()
    assert not missing and "nothing was raised" not in out, out[-4000:]
    unnamed = {name for name, text in told.items() if not text.endswith("True")}
    assert unnamed == {"incomparable"}, told  # Python itself cannot format it
    for name, kind in EXPECTED.items():
        assert told[name].startswith(f"{kind} after"), (name, told[name])
    assert "went on [0, 1]" in out, out[-4000:]


def test_of_a_session(tmp_path: Path) -> None:
    """Every one of them leaves the session as it was."""
    out = run(
        ODD
        + """
be_patient()
with Session(2, start_method="fork") as session:
    for name in sorted(MAKERS.keys() - {"ends when made"}):  # which ends whoever makes it, here the worker
        told(name, lambda name: session.run(raise_one, name))
    print("went on", session.run(lambda: int(os.environ["RANK"]), returns="all"))
""",
        tmp_path,
    )
    check(out)


@pytest.mark.parametrize("name", ["huge", "ring 50", "ends when made", "no attributes"])
def test_of_a_launch(tmp_path: Path, name: str) -> None:
    out = run(
        ODD
        + f"""
for method in ("fork", "fresh"):
    told({name!r}, lambda name: notebook_launcher(raise_one, (name,), num_processes=2, start_method=method,
                                                  view="none", output="none"))
""",
        tmp_path,
    )
    assert out.count(f"{name}: ") == 2 and "nothing was raised" not in out, out[-4000:]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
@pytest.mark.parametrize("is_copy", [True, False], ids=["torch is imported", "torch is not imported"])
def test_parts_of_a_wide_group_come_along(tmp_path: Path, is_copy: bool) -> None:
    out = run(
        ODD
        + """
try:
    notebook_launcher(raise_one, ("wide group",), num_processes=2, view="none")
except ExceptionGroup as group:
    print(len(group.exceptions), {type(part).__name__ for part in group.exceptions})
""",
        tmp_path,
        is_copy=is_copy,
    )
    assert "300 {'Fits'}" in out, out[-4000:]
