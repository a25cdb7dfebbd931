"""A program that saves checkpoints in forked children, kills them, and loads what they left; prints JSON.

python -m tests.unit.checkpointing.crashing_saves FOLDER random 60  # SIGKILL at random instants
python -m tests.unit.checkpointing.crashing_saves FOLDER sweep      # death before each system call in a folder
python -m tests.unit.checkpointing.crashing_saves FOLDER models     # the same for save_model over older weights
python -m tests.unit.checkpointing.crashing_saves FOLDER savers 20  # two save to one folder, which a third one reads
python -m tests.unit.checkpointing.crashing_saves FOLDER models-savers 20  # the same for save_model
Torch is imported once; each child is a fork that has its own accelerator.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from notebook_accel import Accelerator, load_checkpoint_in_model
from notebook_accel.checkpointing import folder

CALLS = ("rename", "replace", "fsync", "rmdir", "unlink", "link", "mkdir")
KINDS = [
    {"max_shard_size": size, "safe_serialization": is_safe}
    for size in ("1GB", 80)
    for is_safe in (True, False)
]


def build() -> tuple[Accelerator, torch.nn.Module, Any]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(64, 64)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    prepared(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return accelerator, prepared, optimizer


def stamp(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, generation: int) -> None:
    """Make every number of the run the generation, so that a mixture of two checkpoints shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(generation)
            for value in optimizer.state[parameter].values():
                value.fill_(generation)
    accelerator.step = generation


def read_stamp(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> int:
    found = {float(n) for parameter in model.parameters() for n in parameter.detach().flatten()[:3]}
    found |= {float(v.flatten()[0]) for p in model.parameters() for v in optimizer.state[p].values()}
    assert found == {float(accelerator.step)}, f"a mixture: {found} and step {accelerator.step}"
    return accelerator.step


def in_child(work: Callable[[], None], delay: float | None) -> int:
    """Fork, kill the child after the delay where there is one, and return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(3)
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def die_before(number: int) -> None:
    """Let this process die before its call of this number to one of CALLS."""
    counted = [0]

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            counted[0] += 1
            if counted[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def save_some(parts: tuple[Any, ...], target: Path, generations: range, dies_before: int | None) -> None:
    if dies_before is not None:
        die_before(dies_before)
    for generation in generations:
        stamp(*parts, generation)
        parts[0].save_state(target, async_save=generation % 3 == 0)
    parts[0].end_training()
    os._exit(0)


def filled(value: float) -> torch.nn.Module:
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])  # three files of 80 bytes
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def load_value(where: Path) -> float:
    model = filled(0.0)
    load_checkpoint_in_model(model, where, strict=True)
    found = {float(x) for parameter in model.parameters() for x in parameter.detach().flatten()}
    assert len(found) == 1, f"a mixture: {found} in {sorted(os.listdir(where))}"
    return found.pop()


def save_and_die(accelerator: Accelerator, where: Path, kind: dict[str, Any], dies_before: int) -> None:
    model = filled(2.0)
    die_before(dies_before)
    accelerator.save_model(model, where, **kind)
    os._exit(0)


def sweep_models(where: Path) -> dict[str, Any]:
    """Save over older weights of each kind, and die before each system call in turn."""
    accelerator = Accelerator(cpu=True)
    deaths, loaded = 0, []
    several_safe = KINDS[2]
    for old, new in itertools.product(KINDS, KINDS):
        if several_safe not in (old, new):
            continue
        target = where / "kept"
        for number in itertools.count(1):
            accelerator.save_model(filled(1.0), target, **old)
            (target / "foreign.txt").write_text("not ours")
            status = in_child(functools.partial(save_and_die, accelerator, target, new, number), None)
            loaded.append(load_value(target))
            assert (target / "foreign.txt").read_text() == "not ours"
            assert status in (0, signal.SIGKILL), f"a child ended with status {status}"
            deaths += status == signal.SIGKILL
            accelerator.save_model(filled(3.0), target, **new)
            assert load_value(target) == 3.0, "what a killed process left is in the way"
            count = 1 if new["max_shard_size"] == "1GB" else 4
            assert len(os.listdir(target)) == count + 1, sorted(os.listdir(target))
            shutil.rmtree(target)
            if status == 0:
                assert loaded[-1] == 2.0
                break
    return {"deaths": deaths, "old": loaded.count(1.0), "new": loaded.count(2.0)}


def let_two_save(save: Callable[[int], None], load: Callable[[], float], kills: int) -> dict[str, Any]:
    """Let two children save to one folder, load meanwhile, and kill one after the other at random instants."""
    exchange = folder._exchange
    loaded: list[float] = []
    for number in range(kills):
        folder._exchange = (lambda one, other: False) if number % 2 else exchange  # type: ignore[assignment]
        children = []
        for seed in (1, 2):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    for value in itertools.count(seed, 2):
                        save(value)
                        time.sleep(random.uniform(0.0, 0.02))
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(3)
        try:
            while children:
                end = time.monotonic() + random.uniform(0.05, 0.3)
                while time.monotonic() < end:
                    loaded.append(load())
                os.kill(children[0], signal.SIGKILL)
                assert os.waitpid(children.pop(0), 0)[1] == signal.SIGKILL, "a child could not save"
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
        loaded.append(load())
    save(10**6)
    assert load() == 10**6
    return {"loads": len(loaded), "values": len(set(loaded))}


def let_two_save_states(parts: tuple[Any, ...], target: Path, kills: int) -> dict[str, Any]:
    def save(number: int) -> None:
        stamp(*parts, number)
        parts[0].save_state(target, async_save=number % 3 == 0)

    def load() -> float:
        stamp(*parts, 10**5)
        parts[0].load_state(target)
        return read_stamp(*parts)

    answer = let_two_save(save, load, kills)
    assert (target / "foreign.txt").read_text() == "not ours"
    return answer | {"left": sorted(os.listdir(target.parent))}


def let_two_save_models(target: Path, kills: int) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)

    def save(number: int) -> None:
        accelerator.save_model(filled(number), target, **random.choice(KINDS))

    save(0)
    answer = let_two_save(save, functools.partial(load_value, target), kills)
    accelerator.save_model(filled(1), target)
    return answer | {"left": sorted(os.listdir(target))}


def main(where: Path, mode: str, kills: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # what a killed process wrote to the system is not lost; only time is
    if mode == "models":
        return sweep_models(where)
    if mode == "models-savers":
        return let_two_save_models(where / "kept", kills)
    parts = build()
    accelerator = parts[0]
    stamp(*parts, 0)
    target = accelerator.save_state(where / "kept")
    longest = 0.1  # seconds until a kill; becomes what a few saves take here, however busy the machine is
    (target / "foreign.txt").write_text("not ours")
    if mode == "savers":
        return let_two_save_states(parts, target, kills)
    generation, loaded, deaths, number = 0, [], 0, 0
    exchange = folder._exchange
    while deaths < kills:
        number += 1
        folder._exchange = (lambda one, other: False) if number % 2 else exchange  # type: ignore[assignment]
        sweep = (number + 1) // 2 if mode == "sweep" else None
        ahead = range(generation + 1, generation + (2 if sweep else 1000))
        delay = None if sweep else random.uniform(0.0, longest)
        status = in_child(functools.partial(save_some, parts, target, ahead, sweep), delay)
        assert status in (0, signal.SIGKILL), f"a child ended with status {status}"
        deaths += status == signal.SIGKILL
        stamp(*parts, 10**6)
        accelerator.load_state(target)
        found = read_stamp(*parts)
        assert found >= generation, f"after {generation} came {found}"
        assert (target / "foreign.txt").read_text() == "not ours"
        longest *= 1.3 if found == generation else 0.8 if found > generation + 3 else 1.0
        loaded.append(found)
        generation = found
        if sweep and status == 0 and number % 2 == 0:
            break
    accelerator.save_state(target)
    return {"deaths": deaths, "generations": len(set(loaded)), "left": sorted(os.listdir(where))}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 10**6)))
