"""Pipelined inference: the layers of a model are split over the processes of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import detect, devices, nested
from .comm import ops
from .runtime import Runtime
from .takeover.names import complete_names


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] | None = "auto",
    no_split_module_classes: Sequence[str | type[nn.Module]] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Split a model over the processes, one stage each, and replace its forward by one that runs the pipeline.

    The forward takes its input from rank 0. Other ranks call it too, and may leave the input out. A batch of any size
    is split into chunks as large as the example; more than `num_chunks` chunks run in several rounds. The forward
    records no gradients.

    Args:
        model: on the CPU, equal in every process, and traceable by `torch.export`.
        split_points: names of the modules at which stages 1 and later begin, one for each. `auto` chooses stages with
            weights of about equal size.
        no_split_module_classes: classes, or their names, whose modules `auto` does not split.
        example_args: positional inputs of one chunk; dim 0 of each tensor counts samples.
        example_kwargs: keyword inputs of one chunk; each call has to use the same keywords.
        num_chunks: number of chunks that are in the pipeline at the same time; by default one for each process.
        gather_output: send the output to all processes; by default only the last rank gets it, the others get None.

    Returns:
        The model, changed in place.

    Raises:
        ValueError: there is one process, an argument is wrong, or the split points give another number of stages.
        RuntimeError: the model cannot be traced; the cause says where.
    """
    runtime = detect.ensure()
    world = runtime.topology.world_size
    example = Inputs.of(example_args or (), example_kwargs or {})
    chunks = world if num_chunks is None else num_chunks
    _check(model, world, example, chunks)
    if isinstance(split_points, str) and split_points != "auto":
        raise ValueError(f"split_points is 'auto' or a list of module names, not {split_points!r}")
    if split_points is None or isinstance(split_points, str):
        names = _balance_points(model, world, no_split_module_classes or ())
    else:
        names = _check_points(model, world, split_points)
    pipe, structure = _trace(model, names, example)
    from torch.distributed.pipelining import ScheduleGPipe

    stage = pipe.build_stage(runtime.topology.rank, device=runtime.device)
    _match_first_tensors(stage)
    schedule = ScheduleGPipe(stage, chunks)
    forward = PipelinedForward(model.forward, runtime, schedule, chunks, example, structure, gather_output)
    vars(model).update(
        _original_forward=model.forward, pippy_stage=schedule, hf_split_points=names, forward=forward
    )
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The inputs of one call, split into tensors and what is the same at every call.

    Attributes:
        tensors: the leaves that are tensors.
        constants: all leaves, with `...` in place of the tensors.
        structure: the containers.
    """

    tensors: tuple[torch.Tensor, ...]
    constants: tuple[Any, ...]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
        """Split the inputs of a call.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
        """
        leaves, structure = pytree.tree_flatten(
            (tuple(args), {name: kwargs[name] for name in sorted(kwargs)})
        )
        return cls(
            tensors=tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)),
            constants=tuple(... if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            structure=structure,
        )

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with other tensors.

        Args:
            tensors: as many as `self.tensors`.
        """
        rest = iter(tensors)
        leaves = [next(rest) if leaf is ... else leaf for leaf in self.constants]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def batch_size(self) -> int | None:
        """Return the length of dim 0 of the tensors, None where they differ."""
        sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in self.tensors}
        return int(sizes.pop()) if len(sizes) == 1 and 0 not in sizes else None

    def describe(self) -> str:
        """Return the shapes of the tensors as text for an error."""
        shapes = ", ".join(str(list(tensor.shape)) for tensor in self.tensors)
        return f"tensors of shapes {shapes}" if shapes else "no tensors"


class PipelinedForward:
    """The forward that runs the pipeline; it has the signature of the model's own forward.

    Args:
        forward: the model's own.
        runtime: of this process.
        schedule: torch's schedule of this stage.
        chunks: number of chunks in a round.
        example: inputs of one chunk.
        structure: containers of the model's output.
        gather_output: whether all ranks get the output.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        runtime: Runtime,
        schedule: Any,
        chunks: int,
        example: Inputs,
        structure: pytree.TreeSpec,
        gather_output: bool,
    ) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._runtime = runtime
        self._schedule = schedule
        self._capacity = chunks * int(example.batch_size() or 0)
        self._example = example
        self._structure = structure
        self._gather_output = gather_output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan: int | str | None = None
        inputs = Inputs.of(args, kwargs)
        if self._runtime.topology.is_main:
            plan = self._plan(inputs)
        plan = self._runtime.comm.broadcast_object(plan, 0)  # so that all ranks raise, and none waits
        if isinstance(plan, str):
            raise ValueError(plan)
        assert plan is not None
        with torch.no_grad():
            output = self._rounds(plan, inputs.tensors)
        return self._share(output) if self._gather_output else output

    def _plan(self, inputs: Inputs) -> int | str:
        """Return the number of samples, or a message that says what is wrong."""
        if (inputs.structure, inputs.constants) != (self._example.structure, self._example.constants):
            return (
                "the model must be called like the example that it was prepared with, tensors apart: "
                f"{self._example.rebuild(self._example.tensors)!r}"
            )
        size = inputs.batch_size()
        if size is None:
            return f"dim 0 of all inputs must count samples, the same number; rank 0 got {inputs.describe()}"
        return size

    def _rounds(self, batch_size: int, tensors: tuple[torch.Tensor, ...]) -> Any:
        topology, capacity = self._runtime.topology, self._capacity
        parts = []
        for start in range(0, batch_size, capacity):
            if topology.is_main:
                rows = [_pad_rows(tensor[start : start + capacity], capacity) for tensor in tensors]
                part = self._schedule.step(*nested.send_to_device(rows, self._runtime.device))
            else:
                part = self._schedule.step()
            if topology.is_last:
                kept = min(capacity, batch_size - start)
                leaves = [_drop_padding(leaf, capacity, kept) for leaf in pytree.tree_leaves(part)]
                parts.append(pytree.tree_unflatten(leaves, self._structure))
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else nested.concatenate(parts)

    def _share(self, output: Any) -> Any:
        """Return the last rank's output in every rank."""
        comm, last = self._runtime.comm, self._runtime.topology.world_size - 1
        layout = nested.recursively_apply(lambda tensor: tensor.to("meta"), output)
        layout = comm.broadcast_object(layout, last)
        if not self._runtime.topology.is_last:
            output = nested.recursively_apply(
                lambda tensor: torch.empty_like(tensor, device=self._runtime.device), layout
            )
        return ops.broadcast(comm, output, last)


def _pad_rows(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return the rows with the last one repeated, `length` in all."""
    missing = length - rows.shape[0]
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


def _drop_padding(leaf: Any, capacity: int, length: int) -> Any:
    """Return an output without the rows that come from repeated inputs."""
    counts = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == capacity
    return leaf[:length] if counts else leaf


class _Entry(nn.Module):
    """A model with its tensors as positional inputs. The first stage takes all of them and passes them on as results.

    A later stage has no access to the inputs of the whole model.
    """

    def __init__(self, model: nn.Module, example: Inputs) -> None:
        super().__init__()
        self.model = model
        self._example = example

    def forward(self, *tensors: torch.Tensor) -> Any:
        args, kwargs = self._example.rebuild(tensor.clone() for tensor in tensors)
        return self.model(*args, **kwargs)


def _check(model: Any, world: int, example: Inputs, chunks: Any) -> None:
    """Raise ValueError or TypeError for wrong arguments."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare_pippy takes a torch.nn.Module, not {model!r}")
    if world == 1:
        raise ValueError(
            "a pipeline needs at least 2 processes, and this run has 1: start it with notebook_launcher(..., "
            "num_processes=2) or more, or call the model as it is"
        )
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"num_chunks is an int of at least 1, not {chunks!r}")
    if example.batch_size() is None:
        raise ValueError(
            "example_args and example_kwargs must hold tensors whose dim 0 counts the samples of one chunk, the same "
            f"number in all; they have {example.describe()}"
        )


def _check_points(model: nn.Module, world: int, split_points: Sequence[str]) -> list[str]:
    names = list(split_points)
    known = dict(model.named_modules())
    unknown = [name for name in names if not name or name not in known]
    if unknown:
        raise ValueError(f"split_points {unknown} are no modules of {type(model).__name__}")
    if len(set(names)) != world - 1 or len(names) != world - 1:
        raise ValueError(
            f"split_points has {len(names)} names, and {world} processes need {world - 1} different ones"
        )
    return names


def _balance_points(model: nn.Module, world: int, whole: Sequence[str | type[nn.Module]]) -> list[str]:
    """Return the names of the modules at which stages 1 to world - 1 begin."""
    names = {item if isinstance(item, str) else item.__name__ for item in whole}
    parts = [(name, size) for name, size in _parts(model, "", names) if name]
    total = sum(size for _, size in parts)
    if len(parts) < world:
        raise ValueError(
            f"{type(model).__name__} has {len(parts)} parts to split between, too few for {world} processes"
        )
    points: list[str] = []
    before, position = parts[0][1], 1
    for stage in range(1, world):
        goal = total * stage / world
        last = len(parts) - (world - stage)  # one part stays for each later stage
        # this stage takes another part while that brings its end nearer to the goal
        while position < last and abs(before + parts[position][1] - goal) <= abs(before - goal):
            before += parts[position][1]
            position += 1
        points.append(parts[position][0])
        before += parts[position][1]
        position += 1
    return points


def _parts(module: nn.Module, name: str, whole: set[str]) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of each module at which a stage may begin, in the order of definition."""
    children = list(module.named_children())
    if not children or type(module).__name__ in whole:
        yield name, sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
        return
    for child_name, child in children:
        yield from _parts(child, f"{name}.{child_name}" if name else child_name, whole)


def _trace(model: nn.Module, names: list[str], example: Inputs) -> tuple[Any, pytree.TreeSpec]:
    """Return torch's pipeline of the model, whose output is a flat tuple, and the containers of the model's output.

    The modules lose the attributes that tracing sets on them.
    """
    from torch.distributed.pipelining import SplitPoint, pipeline

    device = next((tensor.device for tensor in model.parameters()), torch.device(devices.CPU.name))
    tensors = tuple(tensor.to(device) for tensor in example.tensors)
    structures: list[pytree.TreeSpec] = []
    with _restore_forwards(model, names):
        watch = model.register_forward_hook(lambda _, __, out: structures.append(pytree.tree_structure(out)))
        try:
            spec = {f"model.{name}": SplitPoint.BEGINNING for name in names}
            pipe = pipeline(_Entry(model, example), mb_args=tensors, split_spec=spec)
        except Exception as error:
            raise RuntimeError(
                f"{type(model).__name__} cannot be traced by torch.export, which a pipeline needs: "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            ) from error
        finally:
            watch.remove()
    if pipe.num_stages != len(names) + 1:
        raise ValueError(
            f"split_points {names} give {pipe.num_stages} stages for {len(names) + 1} processes: "
            "each must be a module that the forward calls exactly once, and not as its first"
        )
    return pipe, structures[-1]


@contextmanager
def _restore_forwards(model: nn.Module, names: list[str]) -> Iterator[None]:
    modules = [model.get_submodule(name) for name in names]
    before = [vars(module).get("forward") for module in modules]
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            vars(module).pop("_orig_forward", None)
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward


complete_names(__name__)


def _match_first_tensors(stage: Any) -> None:
    """Let neighbours greet each other by numbers of one type.

    torch 2.9 sends a whole number of 8 bytes where 4 are expected, at which gloo ends the process.
    """
    find: Callable[[], list[Any]] | None = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if find is None:
        return

    def find_alike() -> list[Any]:
        found = find()
        for each in found:
            each.tensor = each.tensor.reshape(1).float()
        return found

    stage._get_init_p2p_neighbors_ops = find_alike
