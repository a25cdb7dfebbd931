"""FullyShardedDataParallelPlugin: how FSDP shards a model; takes the options of FSDP 1 and FSDP 2."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

from . import environ
from .caller import warn
from .checked import Checked
from .combinations import refuse

STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""In the order of their numbers, which start at 1."""
_KEEPING: Final = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD")
_PREFETCHES: Final = ("BACKWARD_PRE", "BACKWARD_POST")
_STATE_DICTS: Final = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_POLICIES: Final = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_DTYPES: Final = {
    "fp8": torch.bfloat16,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
_FLAGS: Final = (
    "limit_all_gathers",
    "use_orig_params",
    "sync_module_states",
    "forward_prefetch",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "cpu_ram_efficient_loading",
)
_OPTIONAL_FLAGS: Final = ("sync_module_states", "use_orig_params")
"""Flags that may stay None."""


@dataclass
class FullyShardedDataParallelPlugin(Checked):
    """How FSDP shards models; FSDP_* variables, which a config writes, replace a None.

    torch's `fully_shard` does it with the options of either version. `sharding_strategy` is the spelling of version 1,
    `reshard_after_forward` that of version 2.

    Attributes:
        fsdp_version: 1 (the default) or 2; decides types and defaults of the other fields.
        sharding_strategy: a name, a number, or a member of torch's `ShardingStrategy`. FULL_SHARD shards weights,
            gradients and optimizer state. SHARD_GRAD_OP keeps weights whole from forward to backward. HYBRID_SHARD and
            HYBRID_SHARD_ZERO2 do the same within a node, or over `dp_shard_size`. NO_SHARD is
            DistributedDataParallel.
        reshard_after_forward: True for FULL_SHARD, False for SHARD_GRAD_OP, or the name of a strategy.
        backward_prefetch: BACKWARD_PRE (the default) gathers the next weights before the backward of a block,
            BACKWARD_POST and NO_PREFETCH after it. Memory is at its peak in backward: besides its share of weights,
            gradients and optimizer state, a process then needs about 4.3 times the weights of a block with
            BACKWARD_PRE, and 3.5 times with the others (measured on CPUs).
        mixed_precision_policy: torch's `MixedPrecisionPolicy` or `MixedPrecision`, a dict of its arguments, or fp16,
            bf16 or fp32 for all of them; by default the `mixed_precision` of the accelerator.
        auto_wrap_policy: which modules are sharded on their own: transformer_based_wrap, size_based_wrap, no_wrap (the
            default), a policy of `torch.distributed.fsdp.wrap`, or a function of a module.
        cpu_offload: keep weights, gradients and optimizer state in the CPU's memory; True, or torch's policy.
        ignored_modules: modules that stay whole and whose gradients are not reduced, or a pattern of their full names.
        state_dict_type: FULL_STATE_DICT writes one whole file, SHARDED_STATE_DICT a part for each rank.
        state_dict_config: torch's; only its type counts.
        optim_state_dict_config: torch's; only its type counts.
        limit_all_gathers: has no effect: `fully_shard` always limits them.
        use_orig_params: has no effect: `fully_shard` always uses them.
        param_init_fn: called with each module of a model that is on the meta device in all ranks, after its parameters
            got memory.
        sync_module_states: False lets each rank start with its own weights; by default all start with those of rank 0.
        forward_prefetch: gather the next block's weights during a block's forward.
        activation_checkpointing: compute the activations of a block again in backward.
        activation_checkpointing_offload: keep the blocks' inputs in the CPU's memory.
        cpu_ram_efficient_loading: transformers loads pretrained weights in rank 0 only; by default False. A model
            on the meta device in the other ranks gets rank 0's weights in any case.
        transformer_cls_names_to_wrap: class names for transformer_based_wrap; by default the model's
            `_no_split_modules`.
        min_num_params: for size_based_wrap: the fewest parameters of a module that is sharded on its own.

    Raises:
        ValueError: a value is unknown, or two contradict each other.
    """

    __slots__ = ("_prefetches",)  # None may stand for the default, and for NO_PREFETCH

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[torch.nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def _complete_fields(self) -> None:
        if self.fsdp_version is None:
            self.fsdp_version = environ.integer("FSDP_VERSION", 1)
        if self.fsdp_version not in (1, 2):
            raise ValueError(f"fsdp_version {self.fsdp_version!r} is unknown, choose 1 or 2")
        self._resolve_flags()
        self._resolve_strategy()
        self._resolve_prefetch()
        self.set_cpu_offload()
        self.set_state_dict_type()
        self._resolve_policy()
        self._resolve_modules()
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError("activation_checkpointing_offload=True needs activation_checkpointing=True")
        if self.activation_checkpointing and self.auto_wrap_policy is None:
            raise refuse("recompute, no blocks")
        if self.cpu_ram_efficient_loading and self.sync_module_states is False:
            raise refuse("first loads, own weights")
        if isinstance(self.mixed_precision_policy, (str, dict)):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        self.validate_mixed_precision_policy()

    def _prepare_check(self, name: str, before: Any) -> None:
        if name == "state_dict_type" and self._name_state_dict(self.state_dict_type) != before.name:
            self.state_dict_config = self.optim_state_dict_config = None
        elif name in ("sharding_strategy", "reshard_after_forward") and self._contradicts_itself():
            other = "reshard_after_forward" if name == "sharding_strategy" else "sharding_strategy"
            setattr(self, other, None)

    def _resolve_flags(self) -> None:
        for name in _FLAGS:
            value = getattr(self, name)
            variable = f"FSDP_{name.upper()}"
            if isinstance(value, str):
                try:
                    value = environ.parse_bool(value)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            elif (
                value is None and (name not in _OPTIONAL_FLAGS or environ.get(variable)) and self._fills(name)
            ):
                value = environ.flag(variable)
            if value not in (None, False, True):  # transformers passes 0 and 1
                raise ValueError(f"{name} {value!r} is neither True nor False")
            setattr(self, name, None if value is None else bool(value))

    def _resolve_modules(self) -> None:
        ignored = self.ignored_modules
        if ignored is None and self._fills("ignored_modules"):
            ignored = environ.get("FSDP_IGNORED_MODULES") or None
        if isinstance(ignored, str):
            try:
                re.compile(ignored)
            except re.error as error:
                raise ValueError(f"ignored_modules {ignored!r} is no regular expression: {error}") from None
        elif ignored is not None:
            if isinstance(ignored, torch.nn.Module) or not isinstance(ignored, Iterable):
                raise ValueError(
                    f"ignored_modules of type {type(ignored).__name__} is neither a list of modules nor a pattern of "
                    "their names"
                )
            ignored = list(ignored)
            if wrong := [item for item in ignored if not isinstance(item, torch.nn.Module)]:
                raise ValueError(
                    f"ignored_modules holds {wrong[0]!r}, which is no module: give modules, or one pattern of names"
                )
        self.ignored_modules = ignored
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise ValueError(f"param_init_fn {self.param_init_fn!r} is no function of a module")

    def _resolve_strategy(self) -> None:
        if self.sharding_strategy is None and self.reshard_after_forward is None:
            if self.fsdp_version == 1:
                self.sharding_strategy = environ.get("FSDP_SHARDING_STRATEGY") or "FULL_SHARD"
            else:
                self.reshard_after_forward = environ.get("FSDP_RESHARD_AFTER_FORWARD") or "true"
        own, reshard = self._parse_strategies()
        if self._contradicts_itself():
            raise ValueError(
                f"sharding_strategy={own} and reshard_after_forward={reshard} contradict each other: give one"
            )
        if own is not None:
            self.sharding_strategy = _strategies()[own]
        if reshard is not None:
            self.reshard_after_forward = _strategies()[reshard] if isinstance(reshard, str) else reshard

    def _parse_strategies(self) -> tuple[str | None, bool | str | None]:
        """Return the name of the strategy, and the other spelling as a flag or a name."""
        own = parse_name("sharding_strategy", self.sharding_strategy, STRATEGIES)
        reshard = self.reshard_after_forward
        if isinstance(reshard, str) and reshard.lower() in ("true", "false"):
            reshard = reshard.lower() == "true"
        if isinstance(reshard, bool):
            return own, reshard
        return own, parse_name("reshard_after_forward", reshard, STRATEGIES)

    def _contradicts_itself(self) -> bool:
        """Return whether the two spellings of the strategy contradict each other."""
        own, reshard = self._parse_strategies()
        if isinstance(reshard, bool):
            return own is not None and reshard is (own in _KEEPING)
        return None not in (own, reshard) and own != reshard

    @property
    def strategy(self) -> str:
        """The name of the sharding strategy, for either spelling."""
        own, reshard = self._parse_strategies()
        if own is None and isinstance(reshard, bool):
            return "FULL_SHARD" if reshard else "SHARD_GRAD_OP"
        return own or str(reshard)

    def _resolve_prefetch(self) -> None:
        from torch.distributed.fsdp import BackwardPrefetch

        word = self.backward_prefetch
        if word is None and not self._fills("backward_prefetch"):
            return
        word = word or environ.get("FSDP_BACKWARD_PREFETCH")
        if isinstance(word, str) and word.upper() == "NO_PREFETCH":
            self.backward_prefetch, self._prefetches = None, False
            return
        name = parse_name("backward_prefetch", word, _PREFETCHES, "NO_PREFETCH")
        self.backward_prefetch = None if name is None else BackwardPrefetch[name]
        self._prefetches = name != "BACKWARD_POST"

    @property
    def prefetches_backward(self) -> bool:
        """True if the next weights are gathered before the backward of a block."""
        return getattr(self, "_prefetches", True)

    def _resolve_policy(self) -> None:
        from torch.distributed.fsdp import wrap

        policy = self.auto_wrap_policy
        if policy is None and self._fills("auto_wrap_policy"):
            policy = environ.get("FSDP_AUTO_WRAP_POLICY") or "NO_WRAP"
        if isinstance(policy, str):
            name = parse_name("auto_wrap_policy", policy, _POLICIES)
            policy = {
                "TRANSFORMER_BASED_WRAP": wrap.transformer_auto_wrap_policy,
                "SIZE_BASED_WRAP": wrap.size_based_auto_wrap_policy,
                "NO_WRAP": None,
            }[str(name)]
        elif policy is not None and (not callable(policy) or isinstance(policy, type)):
            raise ValueError(
                f"auto_wrap_policy {policy!r} is neither a function nor one of {', '.join(_POLICIES)}"
            )
        self.auto_wrap_policy = policy
        names = self.transformer_cls_names_to_wrap
        if (
            names is None
            and policy is wrap.transformer_auto_wrap_policy
            and self._fills("transformer_cls_names_to_wrap", "auto_wrap_policy")
        ):
            names = environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP") or None
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        if names is not None and not (
            isinstance(names, list | tuple | set | frozenset) and all(isinstance(name, str) for name in names)
        ):
            raise ValueError(
                f"transformer_cls_names_to_wrap {names!r} is no list of class names, such as ['LlamaDecoderLayer']"
            )
        self.transformer_cls_names_to_wrap = None if names is None else list(names)
        if self.min_num_params is None and policy is wrap.size_based_auto_wrap_policy:
            self.min_num_params = environ.integer("FSDP_MIN_NUM_PARAMS", 100_000_000)
        least: Any = self.min_num_params
        if least is not None and (not isinstance(least, int) or isinstance(least, bool) or least < 0):
            raise ValueError(f"min_num_params {least!r} is no whole number")
        if policy is None and (names or least):
            what = "transformer_cls_names_to_wrap" if names else "min_num_params"
            warn(
                f"{what} is not looked at: auto_wrap_policy is NO_WRAP, and all weights are gathered at once. Choose "
                f"{'TRANSFORMER' if names else 'SIZE'}_BASED_WRAP",
            )

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set how checkpoints are written.

        Args:
            state_dict_type: replaces the field; by default the field stays, or gets its default.

        Raises:
            ValueError: it is unknown or not supported.
        """
        from torch.distributed import fsdp

        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
            self.state_dict_config = self.optim_state_dict_config = None
        name = self._name_state_dict(self.state_dict_type)
        if name == "LOCAL_STATE_DICT":
            raise refuse("local state")
        self.state_dict_type = fsdp.StateDictType[name]
        if name == "FULL_STATE_DICT":
            kinds: Any = fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig
            options = {"offload_to_cpu": True, "rank0_only": True}
        else:
            kinds = fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig
            options = {"offload_to_cpu": True}
        self.state_dict_config = self.state_dict_config or kinds[0](**options)
        self.optim_state_dict_config = self.optim_state_dict_config or kinds[1](**options)

    def _name_state_dict(self, kind: Any) -> str:
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        word = kind or environ.get("FSDP_STATE_DICT_TYPE") or default
        return str(parse_name("state_dict_type", word, _STATE_DICTS))

    @property
    def saves_shards(self) -> bool:
        """True if each rank writes its part of a checkpoint."""
        return bool(self.state_dict_type.name == "SHARDED_STATE_DICT")

    def wrap_policy(self, model: torch.nn.Module) -> Any:
        """Return the policy for a model, with its classes or the number of parameters filled in.

        Args:
            model: the user's.

        Returns:
            None if no module is sharded on its own.

        Raises:
            ValueError: no module has one of the classes.
        """
        from torch.distributed.fsdp import wrap

        if self.auto_wrap_policy is wrap.size_based_auto_wrap_policy:
            if not self.min_num_params:
                return None
            return functools.partial(self.auto_wrap_policy, min_num_params=self.min_num_params)
        if self.auto_wrap_policy is not wrap.transformer_auto_wrap_policy:
            return self.auto_wrap_policy
        wanted = self.transformer_cls_names_to_wrap
        if wanted is None:
            wanted = list(getattr(model, "_no_split_modules", None) or ())
        kinds = {type(part).__name__: type(part) for part in model.modules()}
        if missing := [name for name in wanted if name not in kinds]:
            raise ValueError(
                f"{type(model).__name__} has no module of class {', '.join(missing)} to shard on its own: it has "
                f"{', '.join(sorted(kinds))}"
            )
        return functools.partial(
            self.auto_wrap_policy, transformer_layer_cls={kinds[name] for name in wanted}
        )

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Set `auto_wrap_policy` to the policy for a model, see `wrap_policy`.

        Args:
            model: the user's.
        """
        vars(self)["auto_wrap_policy"] = self.wrap_policy(model)

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set `mixed_precision_policy`.

        Args:
            mixed_precision: fp16, bf16, fp8 (which sums in bfloat16), fp32, a dtype, or a dict of the policy's dtypes.
            buffer_autocast: with version 1, keep buffers in float32.
            override: replace an existing policy; by default that stays.

        Raises:
            ValueError: the precision is unknown.
        """
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        if isinstance(self.mixed_precision_policy, dict):
            mixed_precision, override = self.mixed_precision_policy, True
        if self.mixed_precision_policy is not None and not override:
            return
        first = self.fsdp_version == 1
        last = "buffer_dtype" if first else "output_dtype"
        if isinstance(mixed_precision, dict):
            known = {"param_dtype", "reduce_dtype", last, "cast_forward_inputs"}
            if unknown := sorted(mixed_precision.keys() - known):
                raise ValueError(
                    f"mixed_precision_policy has {', '.join(unknown)}, with fsdp_version {self.fsdp_version} it knows "
                    f"{', '.join(sorted(known))}"
                )
            options = {
                key: value if isinstance(value, bool) else _dtype(value)
                for key, value in mixed_precision.items()
            }
        else:
            dtype = _dtype(mixed_precision)
            options = {"param_dtype": dtype, "reduce_dtype": dtype, last: dtype}
            if first and buffer_autocast:
                options[last] = torch.float32
        kind: Any = MixedPrecision if first else MixedPrecisionPolicy
        self.mixed_precision_policy = kind(**options)

    def validate_mixed_precision_policy(self) -> None:
        """Raise ValueError if there is a policy that is not one of torch's."""
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        policy = self.mixed_precision_policy
        if policy is not None and not isinstance(policy, (MixedPrecision, MixedPrecisionPolicy)):
            raise ValueError(
                f"mixed_precision_policy {policy!r} is neither a MixedPrecisionPolicy, a dict of its arguments, nor "
                f"one of {', '.join(_DTYPES)}"
            )

    def set_cpu_offload(self) -> None:
        """Set `cpu_offload` to torch's policy of this version; a None becomes FSDP_OFFLOAD_PARAMS."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        if self.cpu_offload is None:
            self.cpu_offload = environ.flag("FSDP_OFFLOAD_PARAMS")
        if isinstance(self.cpu_offload, bool):
            if self.fsdp_version == 1:
                self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)
            else:
                self.cpu_offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        self.validate_cpu_offload()

    def validate_cpu_offload(self) -> None:
        """Raise ValueError unless `cpu_offload` is one of torch's."""
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        if not isinstance(self.cpu_offload, (CPUOffload, OffloadPolicy)):
            raise ValueError(
                f"cpu_offload {self.cpu_offload!r} is neither True, False nor one of torch's policies"
            )

    @property
    def offloads(self) -> bool:
        """True if weights are kept in the CPU's memory."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

        if isinstance(self.cpu_offload, CPUOffload):
            return bool(self.cpu_offload.offload_params)
        return isinstance(self.cpu_offload, CPUOffloadPolicy)


def parse_name(what: str, value: Any, legal: tuple[str, ...], *others: str) -> str | None:
    """Return the legal name that a value stands for; None stays None.

    Args:
        what: name of the argument, for the message.
        value: a name in any case, a number from 1 on, or a member of an enum.
        legal: the names, in the order of their numbers.
        others: further values for the message.

    Raises:
        ValueError: the value is unknown; the message lists the legal names.
    """
    if value is None:
        return None
    word = str(getattr(value, "name", value)).upper().lstrip("_")
    if word.isdigit() and 1 <= int(word) <= len(legal):
        return legal[int(word) - 1]
    if word not in legal:
        raise ValueError(f"{what} {value!r} is unknown, choose among {', '.join((*legal, *others))}")
    return word


def _strategies() -> dict[str, Any]:
    """Return the members of torch's `ShardingStrategy` by name."""
    from torch.distributed.fsdp import ShardingStrategy

    return {item.name.lstrip("_"): item for item in ShardingStrategy}


def _dtype(value: Any) -> torch.dtype | None:
    if value is None or value in _DTYPES.values():
        found: torch.dtype | None = value
        return found
    word = str(value).removeprefix("torch.")
    found = _DTYPES.get(word) or getattr(torch, word, None)
    if found not in _DTYPES.values():
        raise ValueError(f"mixed precision {value!r} is unknown, choose among {', '.join(_DTYPES)}")
    return found


def enable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load pretrained weights in rank 0 only, if this process is one of several."""
    variables = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    if environ.get("ACCELERATE_USE_FSDP") is None:
        variables["ACCELERATE_USE_FSDP"] = "true"
    environ.put(variables)


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load pretrained weights in every process."""
    environ.put({"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"})
