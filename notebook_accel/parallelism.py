"""ParallelismConfig: the number of processes for each kind of parallelism, and their device mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from . import environ
from .checked import Checked
from .choices import Choice
from .combinations import refuse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ORDER: Final = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""The dimensions of the mesh, outermost first."""


class _Exchange(Choice):
    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"


@dataclass
class TorchTensorParallelConfig(Checked):
    """How torch splits layers over processes.

    Attributes:
        enable_async_tp: not supported.
        plan: a style for each pattern of module names, by default the model's own `tp_plan`. In a pattern such as
            `layers.*.up` the `*` stands for a part between dots. A style is a `ParallelStyle` of
            `torch.distributed.tensor.parallel`, or one of `colwise`, `colwise_rep` (or `colwise_gather_output`),
            `rowwise`, `rowwise_rep`, `embedding_rowwise`, `sequence_parallel`.

    Raises:
        ValueError: `enable_async_tp` is True.
        TypeError: `plan` is no dict.
    """

    enable_async_tp: bool = False
    plan: dict[str, Any] | None = None

    def _complete_fields(self) -> None:
        if self.enable_async_tp:
            raise ValueError("enable_async_tp=True is not supported by torch's tensor parallel: leave it out")
        if self.plan is not None and not isinstance(self.plan, dict):
            raise TypeError(f"plan {self.plan!r} is no dict of module names and styles")


@dataclass
class TorchTensorParallelPlugin(Checked):
    """Tensor parallel in the spelling of older code; the same as `ParallelismConfig(tp_size=...)`.

    Attributes:
        tp_size: number of processes that share each layer.
        torch_device_mesh: a mesh with a dimension `tp` of this size; by default a new one.

    Raises:
        ValueError: `tp_size` is no whole number from 1 on.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def _complete_fields(self) -> None:
        _check_size("tp_size", self.tp_size)


@dataclass
class TorchContextParallelConfig(Checked):
    """How processes that share sequences exchange keys and values.

    Attributes:
        cp_comm_strategy: `allgather` (the default) or `alltoall`; PARALLELISM_CONFIG_CP_COMM_STRATEGY replaces a None.

    Raises:
        ValueError: the strategy is unknown.
    """

    cp_comm_strategy: str | None = None

    def _complete_fields(self) -> None:
        word = self.cp_comm_strategy or environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY") or "allgather"
        if word not in _Exchange:
            raise ValueError(f"cp_comm_strategy {word!r} is unknown, choose {' or '.join(_Exchange.list())}")
        self.cp_comm_strategy = word


@dataclass(repr=False)
class ParallelismConfig(Checked):
    """The number of processes for each kind of parallelism; their product is the world size.

    PARALLELISM_CONFIG_* variables replace a None, and without them a size is 1. Ranks that differ only in `tp` or `cp`
    see the same batches.

    Attributes:
        dp_replicate_size: number of copies of the model, which see different batches.
        dp_shard_size: number of processes over which FSDP shards a copy; they see different batches too.
        tp_size: number of processes that share each layer.
        cp_size: number of processes that share each sequence.
        cp_backend: `torch`.
        sp_size: number of processes that share each sequence by DeepSpeed; not supported.
        sp_backend: `deepspeed`.
        tp_handler: options of tensor parallel.
        cp_handler: options of context parallel.
        sp_handler: has no effect.
        device_mesh: what `get_device_mesh` returned; None before.

    Raises:
        ValueError: a size is less than 1, a backend is unknown, or sizes exclude each other.
        TypeError: a handler has another class.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: Any = None
    device_mesh: Any = field(default=None, init=False, compare=False)

    def _complete_fields(self) -> None:
        for name in _ORDER:
            size = getattr(self, f"{name}_size")
            if size is None:
                size = environ.integer(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1)
            _check_size(f"{name}_size", size)
            setattr(self, f"{name}_size", size)
        for name, legal in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            word = getattr(self, name) or environ.get(f"PARALLELISM_CONFIG_{name.upper()}") or legal
            if word != legal:
                raise ValueError(f"{name} {word!r} is unknown, the only one is {legal!r}")
            setattr(self, name, word)
        self._check_combination()
        if self.tp_enabled and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()
        for name, kind in (("tp", TorchTensorParallelConfig), ("cp", TorchContextParallelConfig)):
            handler = getattr(self, f"{name}_handler")
            if handler is not None and not isinstance(handler, kind):
                raise TypeError(f"{name}_handler must be a {kind.__name__}, not {handler!r}")
            if handler is not None and self.sizes[name] == 1:
                raise ValueError(
                    f"{name}_handler is given and {name}_size is 1: set {name}_size, or leave it out"
                )

    def _prepare_check(self, name: str, before: Any) -> None:
        if name.endswith("_size"):
            self.device_mesh = None
            for kind in ("tp", "cp"):  # a kind that is no longer there has no options
                if name == f"{kind}_size" and getattr(self, name) in (None, 1):
                    setattr(self, f"{kind}_handler", None)

    def _check_combination(self) -> None:
        if self.cp_enabled and self.sp_enabled:
            raise refuse("cp, sp", self.equation())
        if (self.tp_enabled or self.cp_enabled) and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise refuse("copies, split", self.equation())

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}_size={size}" for name, size in self.sizes.items())
        return f"ParallelismConfig({sizes})"

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each kind of parallelism, in the order of the mesh."""
        return {name: int(getattr(self, f"{name}_size")) for name in _ORDER}

    def equation(self) -> str:
        """Return the product of the sizes as text: `dp_shard 2 x tp 2`."""
        parts = [f"{name} {size}" for name, size in self.sizes.items() if size > 1]
        return " x ".join(parts) or "dp_shard 1"

    def check(self, world_size: int) -> None:
        """Check that the product of the sizes is the world size.

        Args:
            world_size: number of processes of the run.

        Raises:
            ValueError: it is not; the message shows the equation.
        """
        if self.total_size != world_size:
            raise ValueError(
                f"{self.equation()} != world {world_size}: the sizes of ParallelismConfig must have the number of "
                "processes as their product"
            )

    def to_json(self) -> dict[str, Any]:
        """Return all fields except the mesh; handlers are dicts."""
        return {
            item.name: vars(value).copy() if hasattr(value := getattr(self, item.name), "__dict__") else value
            for item in fields(self)
            if item.name != "device_mesh"
        }

    @property
    def total_size(self) -> int:
        """The product of all sizes."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of processes that see different batches."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that see the same batch."""
        return self.sizes["tp"] * self.sizes["cp"] * self.sizes["sp"]

    def _names(self, *names: str) -> list[str]:
        return [name for name in names if self.sizes[name] > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """Dimensions whose ranks see different batches."""
        return self._names("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Dimensions whose ranks see the same batch."""
        return self._names("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Dimensions over which FSDP shards; joined they are `dp_shard_cp`."""
        return self._names("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Dimensions over which losses are averaged."""
        return self._names("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Dimensions of the mesh for FSDP."""
        return [*self._names("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All dimensions of more than one process."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def dp_replicate_enabled(self) -> bool:
        """True if there are copies of the model."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """True if copies are sharded."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """True if layers are split."""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """True if sequences are split by torch."""
        return self.sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """True if sequences are split by DeepSpeed."""
        return self.sizes["sp"] > 1

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names and the sizes of the mesh's dimensions."""
        names = tuple(name for name in _ORDER if self.sizes[name] > 1)
        return names, tuple(self.sizes[name] for name in names)

    def build_device_mesh(self, device_type: str) -> Any:
        """Return a new mesh; all processes of the run call this.

        Args:
            device_type: torch's device type, such as `cuda`.

        Returns:
            A mesh with all dimensions of more than one process, and the joint dimensions `dp`, `dp_shard_cp` and
            `dp_cp`. None if there are no such dimensions.
        """
        names, shape = self._get_mesh()
        if not names or self.sp_enabled:
            return None
        from torch.distributed.device_mesh import init_device_mesh  # its import takes half a second

        mesh: Any = init_device_mesh(device_type, shape, mesh_dim_names=names)
        joint = {
            "dp": self.dp_dim_names,
            "dp_shard_cp": self.dp_shard_cp_dim_names,
            "dp_cp": self.dp_cp_dim_names,
        }
        for name, parts in joint.items():
            if parts:
                mesh[parts]._flatten(name)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the mesh; the first call builds it.

        Args:
            device_type: see `build_device_mesh`; later calls may leave it out.

        Raises:
            ValueError: the first call has no device type, or a later call has another.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError(
                    "there is no mesh yet: name the kind of device to make it of, such as 'cuda'"
                )
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type is not None and self.device_mesh.device_type != device_type:
            raise ValueError(
                f"the mesh is of {self.device_mesh.device_type!r} and not of {device_type!r}: "
                "make a new ParallelismConfig"
            )
        return self.device_mesh


def _check_size(name: str, size: Any) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name} {size!r} is no whole number from 1 on")


def check_variables(environment: Mapping[str, str], world_size: int) -> list[str]:
    """Return a sentence for each reason why variables do not fit a number of processes.

    Args:
        environment: the variables of a worker.
        world_size: number of processes of the run.
    """
    if not environ.flag_in(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return []
    own = {name: text for name, text in environment.items() if name.startswith("PARALLELISM_CONFIG_")}
    try:
        with environ.patch_environment(**own):
            config = ParallelismConfig()
        if config.sp_enabled:
            return [str(refuse("sequence parallel", config.equation()))]
        config.check(world_size)
    except ValueError as error:
        return [str(error)]
    return []
