"""What the hosts of a soak have defined; it is sent to them as a piece of code, so its functions are of `__main__`."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time

import notebook_accel
from notebook_accel import Accelerator, Session, notebook_launcher, runs  # noqa: F401 - pieces use them

ANSWER = ""


def answer(value):
    """Hand a value to the soak."""
    with open(ANSWER + ".part", "w") as file:
        json.dump(value, file)
    os.replace(ANSWER + ".part", ANSWER)


def digest(value):
    """Return a value as JSON has it: tensors and arrays by shape, type, sum and last element."""
    if hasattr(value, "dtype"):
        exact = value.double() if hasattr(value, "double") else value.astype("float64")
        return [list(value.shape), str(value.dtype), float(exact.sum()), float(exact.reshape(-1)[-1])]
    if isinstance(value, Point):
        return ["Point", value.rank, value.size]
    if isinstance(value, dict):
        return {key: digest(each) for key, each in value.items()}
    return [digest(each) for each in value] if isinstance(value, (list, tuple)) else value


class Point:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def make_value(kind, size, rank):
    import torch

    if kind == "text":
        return "é" * size + str(rank)
    if kind == "tensor":
        return torch.arange(size, dtype=torch.float64) + rank
    if kind == "array":
        return (torch.arange(size, dtype=torch.float32) * 2 + rank).numpy()
    if kind == "nested":
        return {"a": [torch.full((size,), rank), "x"], "b": (rank, None, b"".decode())}
    if kind == "object":
        return Point(rank, size)
    return size * 10 + rank


def own_rank():
    return int(os.environ.get("RANK", "0"))  # a single process may be this one


def give(kind, size):
    return make_value(kind, size, own_rank())


def add_up(size):
    """Return what an all-reduce gives."""
    import torch

    Accelerator()
    value = torch.full((size,), float(own_rank()) + 1)
    torch.distributed.all_reduce(value)
    return value.sum().item()


def train(folder, rows, epochs, workers):
    """Train a small model; go back to a checkpoint after the first epoch. Return weights, and what was gathered."""
    import torch

    accelerator = Accelerator()
    model, data = make_model(), make_data(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []

    def run_epoch():
        for x, y in loader:
            loss = ((model(x) - y) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(accelerator.gather(x.sum().reshape(1)).sum().item())

    run_epoch()
    accelerator.save_state(folder)
    run_epoch()  # thrown away
    accelerator.load_state(folder)
    del seen[len(seen) // 2 :]
    for _ in range(epochs - 1):
        run_epoch()
    return [p.detach().reshape(-1).tolist() for p in model.parameters()], sum(seen)


def make_model():
    import torch

    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, -0.2, 0.3]]))
        model.bias.zero_()
    return model


def make_data(rows):
    import torch

    x = torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3).sin()
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True) * 2 + 1)


def fail(how, rank, wait):
    """One rank ends badly; the others wait in a collective, or for some seconds, or return."""
    import torch

    if wait == "collective":
        Accelerator()
    if own_rank() == rank:
        if how == "raise":
            raise ValueError(f"rank {rank} fails")
        if how == "exit":
            os._exit(17)
        if how == "leave":
            subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])
            time.sleep(0.1)
            raise ValueError(f"rank {rank} fails")
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(600)
    if wait == "collective":
        torch.distributed.barrier()
    elif wait == "sleep":
        time.sleep(600)


def leave_children(how):
    """Return while what this rank started still runs."""
    rank = own_rank()
    if how == "shell":
        subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])
    elif how == "process":
        import multiprocessing

        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
    elif how == "semaphore":
        import multiprocessing

        multiprocessing.Lock(), multiprocessing.Queue().put(b"x" * 100)
    elif how == "loader":
        import torch

        iterator = iter(torch.utils.data.DataLoader(make_data(64), batch_size=2, num_workers=2))
        next(iterator)
        globals()["kept"] = iterator
    elif how == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return rank


def shout(how, count):
    """Write much, or in odd ways."""
    rank = own_rank()
    if how == "flood":
        for number in range(count):
            print("flood", rank, number)
    elif how == "bars":
        import tqdm

        for _ in tqdm.tqdm(range(count)):
            pass
    elif how == "unfinished":
        sys.stdout.write("begin " + "x" * count)
        sys.stdout.flush()
        time.sleep(0.3)
        sys.stdout.write(" end")
    elif how == "bytes":
        os.write(1, bytes(range(256)) * (count // 100))
        os.write(2, b"\xff\r\x1b[2K" * (count // 10))
    elif how == "long":
        print("y" * count * 100)
    return rank


def pause(seconds):
    time.sleep(seconds)
    return own_rank()


@contextlib.contextmanager
def stopping(session):
    """Stop the call that a session makes in the block, once it makes one.

    An interrupt in the methods of an event can leave its lock locked, so a list says that the block is over.
    """
    is_over = []

    def stop():
        while session.status == "idle" and not is_over:
            time.sleep(0.02)
        deadline = time.monotonic() + 0.2
        while not is_over and time.monotonic() < deadline:
            time.sleep(0.02)
        if not is_over:
            session.stop(1.0)

    thread = threading.Thread(target=stop)
    try:
        thread.start()
        yield
    finally:
        is_over.append(True)
        if thread.is_alive():  # not where an interrupt came before it ran: then it ends by itself
            thread.join()


def count_steps():
    """Go on until the notebook says to stop."""
    accelerator = Accelerator()
    steps = 0
    while not accelerator.should_stop:
        steps += 1
        accelerator.wait_for_everyone()
    return "stopped"


def aim(first, signum, second=0):
    """Send this process a signal at a line of the package that its main thread runs.

    Args:
        first: number of the line, counted from now on.
        signum: the signal.
        second: number of the call or return after the first signal at which it is sent again; 0 never.
    """
    owner, package = os.getpid(), os.path.dirname(notebook_accel.__file__)
    left = [first, second]

    def look_at_call(frame, event, argument):
        if os.getpid() != owner:
            sys.settrace(None)
            return None
        return look_at_line if frame.f_code.co_filename.startswith(package) else None

    def look_at_line(frame, event, argument):
        if event == "line" and os.getpid() == owner and left[0] > 0:
            left[0] -= 1
            if left[0] == 0:
                if left[1]:
                    sys.setprofile(count_calls)
                note_aim(frame)
                os.kill(owner, signum)
        return look_at_line

    def count_calls(frame, event, argument):
        if os.getpid() == owner and frame.f_code not in (look_at_line.__code__, note_aim.__code__):
            left[1] -= 1
            if left[1] == 0:
                sys.setprofile(None)
                note_aim(frame)
                os.kill(owner, signum)

    sys.settrace(look_at_call)
    if signum == signal.SIGKILL:
        threading.settrace(look_at_call)


def note_aim(frame):
    """Note where a signal is sent; the soak reads it."""
    with open(ANSWER + ".aim", "a") as file:
        file.write(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}\n")


def end_aim():
    """Aim no more."""
    sys.settrace(None)
    sys.setprofile(None)
    threading.settrace(None)


def forget_cells():
    """Drop what IPython keeps of all cells: their output, and the syntax tree of each file in a traceback."""
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
        getattr(shell.history_manager, "outputs", {}).clear()
    if "stack_data.core" in sys.modules:
        for name in ("__executing_cache", "__source_cache_with_lines"):
            sys.modules["stack_data.core"].Source._class_local(name, {}).clear()
        for module in ("executing.executing", "executing._position_node_finder"):
            found = vars(sys.modules[module])
            for one in [*found.values(), *vars(found["Source"]).values()]:
                if hasattr(one, "cache_clear"):
                    one.cache_clear()


def look():
    """Hand over what can be told of this process from inside only."""
    forget_cells()
    gc.collect()
    give_back_memory()
    from multiprocessing import active_children

    active_children()  # waits for those that have ended
    answer(
        {
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "runs": [run.status for run in runs()],
            "handler": repr(signal.getsignal(signal.SIGINT)),
            "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        }
    )


def give_back_memory():
    """Return what was freed to the system, so that memory tells what is kept, and not the most that ever was."""
    import ctypes

    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def check_session():
    """See that the session of this process can still be used, after a restart where it has lost a worker."""
    session = globals().get("session")
    if session is None or session.status == "closed":
        return answer("closed")
    before = session.status
    if before == "dead":
        session.restart()
    try:
        values = session.run(give, "number", 1, returns="all")
    except notebook_accel.WorkerError:  # it was killed as the last call ended
        assert before == "idle" and session.status == "dead", before
        session.restart()
        values = session.run(give, "number", 1, returns="all")
    assert values == [10 + rank for rank in range(session.num_processes)], (before, values)
    answer(before)


def end_all():
    """End runs and sessions that a disturbed piece has left, as a user does."""
    from notebook_accel.launch import registry

    for run in runs():
        if not run.is_over:
            run.stop(0.0)
    for session in registry.sessions():
        session.close()
