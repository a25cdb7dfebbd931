"""DeepSpeedPlugin: how DeepSpeed trains, from arguments, environment variables or DeepSpeed's own JSON file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch

from .. import environ, probes
from ..caller import warn
from ..checked import Checked
from ..combinations import refuse
from .config import AUTO, HfDeepSpeedConfig, leaves
from .library import load
from .settings import DEFAULTS, KEYS, SECTIONS, check_arguments, check_value, read_environment

_INIT: Final = "ACCELERATE_DEEPSPEED_ZERO3_INIT"
_BATCHES: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass
class DeepSpeedPlugin(Checked):
    """How DeepSpeed trains.

    An argument that is None is read from the environment variables of `notebook-accel launch`. With a config of
    DeepSpeed's own, the other arguments replace its "auto" values and add what it lacks; one that contradicts it is an
    error. Afterwards the attributes hold the final values, and `deepspeed_config` is DeepSpeed's config. A value that
    is set later is checked by itself, and does not change that config: libraries set several one after the other.

    Args:
        hf_ds_config: DeepSpeed's own config: path of a JSON file, a dict, which is copied, or an
            `HfDeepSpeedConfig`, which is filled, because Transformers goes on filling its own.
        gradient_accumulation_steps: batches per optimizer step; by default the accelerator's.
        gradient_clipping: largest norm of the gradients in every step; by default only the loop clips.
        zero_stage: what ZeRO shards: 0 nothing, 1 optimizer state, 2 (the default) gradients too, 3 weights too.
        is_train_batch_min: DeepSpeed reports a batch size. Of several loaders it is the smallest, with False the
            largest.
        offload_optimizer_device: where optimizer state is kept: `none` (on the device), `cpu` or `nvme`.
        offload_param_device: where stage 3 keeps weights: `none` (on the device), `cpu` or `nvme`.
        offload_optimizer_nvme_path: folder for optimizer state on NVMe.
        offload_param_nvme_path: folder for weights on NVMe.
        zero3_init_flag: Transformers creates models sharded; by default True for stage 3.
        zero3_save_16bit_model: let DeepSpeed's `save_16bit_model` gather weights; `save_model` always does.
        transformer_moe_cls_names: class names of mixture-of-experts layers, separated by commas; stage 3 gathers
            each of them as a whole.
        enable_msamp: not supported.
        msamp_opt_level: level of MS-AMP; has no effect.

    Raises:
        ValueError: values are wrong or contradict each other; one message names all problems.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: Any = None
    is_train_batch_min: bool = True
    offload_optimizer_device: Any = None
    offload_param_device: Any = None
    offload_optimizer_nvme_path: Any = None
    offload_param_nvme_path: Any = None
    zero3_init_flag: Any = None
    zero3_save_16bit_model: Any = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    deepspeed_config: dict[str, Any] = field(init=False, repr=False, compare=False)

    def _complete_fields(self) -> None:
        given = read_environment() | {
            name: value for name in KEYS if (value := getattr(self, name)) is not None
        }
        source = self.hf_ds_config
        if source in (None, "", "none"):
            source = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") or "none"
        own = _read_config(source)
        asked_init = self.zero3_init_flag
        if asked_init is None and environ.get(_INIT):
            asked_init = environ.flag(_INIT)
        problems = check_arguments(given, own)
        for name in ("zero3_init_flag", "is_train_batch_min", "transformer_moe_cls_names", "enable_msamp"):
            problems += check_value(name, getattr(self, name))
        stage = given.get("zero_stage", DEFAULTS["zero_stage"])
        if own is not None and isinstance(own.get_value(KEYS["zero_stage"]), int):
            stage = own.get_value(KEYS["zero_stage"])
        if problems:
            raise ValueError("\n- ".join(["this DeepSpeedPlugin is wrong or contradicts itself:", *problems]))
        if asked_init == 1 and stage != 3:
            warn(f"zero3_init_flag is for zero_stage 3, not {stage}: models are created whole")
            asked_init = False
        self.hf_ds_config = _fill(own, given)
        self.deepspeed_config = self.hf_ds_config.config
        for name, key in KEYS.items():
            value = self.hf_ds_config.get_value(key)
            setattr(self, name, given.get(name, DEFAULTS[name]) if value in (None, AUTO) else value)
        self.zero3_init_flag = self.hf_ds_config.is_zero3() if asked_init is None else bool(asked_init)
        self.enable_msamp = False
        self.msamp_opt_level = self.msamp_opt_level or "O1"
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = environ.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
        self._selected = False
        self._device = torch.device("cpu")
        self._for_transformers: HfDeepSpeedConfig | None = None

    def _check(self, name: str, value: Any) -> dict[str, Any]:
        if problems := check_value(name, value):
            raise ValueError(problems[0])
        return {name: value}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_for_transformers": None}

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key in DeepSpeed's config.

        Args:
            ds_key_long: the path to a value, its parts joined by dots: `fp16.enabled`.
            default: returned where the key has no value.
        """
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return True if a key of DeepSpeed's config is "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace a key's "auto" by its value in `kwargs`, or compare its own value with that.

        Args:
            ds_key_long: see `get_value`.
            mismatches: gets a sentence where the values differ.
            must_match: compare values; False replaces "auto" only.
            kwargs: values by key.

        Raises:
            ValueError: the key is "auto" and `kwargs` has no value for it.
        """
        node, last = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        found = node.get(last)
        if found == AUTO:
            if ds_key_long not in kwargs:
                raise ValueError(
                    f'{ds_key_long} is "auto" and nothing says what it is: give it a value in DeepSpeed\'s config'
                )
            node[last] = kwargs[ds_key_long]
        elif must_match and found is not None and kwargs.get(ds_key_long, found) != found:
            text = f"{ds_key_long} is {found!r} in DeepSpeed's config and {kwargs[ds_key_long]!r} here"
            (mismatches if mismatches is not None else []).append(text)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Replace every "auto" in DeepSpeed's config, or in a part of it, and compare the other values.

        Args:
            prefix: leads to the part, and ends with a dot.
            mismatches: gets a sentence for each value that differs; without a prefix they are raised too.
            config: the part; by default the whole config.
            must_match: see `fill_match`.
            kwargs: values by key.

        Raises:
            ValueError: a value differs from that in `kwargs`, or a key is still "auto".
        """
        found = [] if mismatches is None else mismatches
        for key, _ in list(leaves(self.deepspeed_config if config is None else config, prefix)):
            self.fill_match(key, found, must_match=must_match, **kwargs)
        if found and not prefix:
            raise ValueError("\n- ".join(['values differ, and "auto" would take them over:', *found]))

    def mixed_precision(self) -> str | None:
        """Return the precision in DeepSpeed's config, None where it names none."""
        return next((name for name in ("fp16", "bf16") if self.get_value(f"{name}.enabled") is True), None)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write the precision into DeepSpeed's config.

        Args:
            mixed_precision: `no`, `fp16` or `bf16`.

        Raises:
            ValueError: the config names another, or DeepSpeed does not know it.
        """
        own = self.mixed_precision()
        if mixed_precision not in ("no", "fp16", "bf16"):
            raise refuse("deepspeed, fp8")
        if own is not None and own != mixed_precision:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} contradicts {own}.enabled in DeepSpeed's config: "
                'leave one out, or let that be "auto"'
            )
        for name in ("fp16", "bf16"):
            if name == mixed_precision or self.get_value(f"{name}.enabled") == AUTO:
                self.hf_ds_config.set_value(f"{name}.enabled", name == mixed_precision)

    def set_deepspeed_weakref(self) -> None:
        """Register the config with Transformers, which creates sharded models from it if `zero3_init_flag` is set."""
        self._for_transformers = None
        if not probes.is_available("transformers"):
            return
        transformers: Any = importlib.import_module("transformers.integrations.deepspeed")
        transformers.unset_hf_deepspeed_config()
        if self.zero3_init_flag:
            self._for_transformers = HfDeepSpeedConfig(
                self._init_config()
            )  # Transformers keeps a weak reference
            transformers.set_hf_deepspeed_config(self._for_transformers)

    def is_zero3_init_enabled(self) -> bool:
        """Return True if Transformers creates sharded models."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Create all models of the block sharded, plain modules too; with False create none sharded.

        Each layer is sharded as soon as its constructor returns. A model whose constructor changes the weights of
        its layers later has to do so within `deepspeed.zero.GatheredParameters`.

        Args:
            enable: whether models are sharded.

        Raises:
            ValueError: the ZeRO stage is not 3.
        """
        if enable and not self.hf_ds_config.is_zero3():
            raise ValueError(
                f"models are sharded from the start under zero_stage 3, not {self.get_value(KEYS['zero_stage'])}"
            )
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            with self._sharding() if enable else nullcontext():
                yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    @contextmanager
    def _sharding(self) -> Iterator[None]:
        deepspeed = load(self._device)
        init: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=self._init_config())
        with init:
            yield

    def _init_config(self) -> dict[str, Any]:
        """Return DeepSpeed's config without batch sizes and "auto" values, which are unknown before `prepare`."""
        config = HfDeepSpeedConfig(self.deepspeed_config)
        for key in [*_BATCHES, *(key for key, value in leaves(config.config) if value == AUTO)]:
            config.del_config_sub_tree(key)
        return {**config.config, "train_micro_batch_size_per_gpu": 1}

    def set_moe_leaf_modules(self, model: torch.nn.Module) -> None:
        """Let ZeRO 3 gather each layer of the classes `transformer_moe_cls_names` as a whole.

        Args:
            model: the user's.

        Raises:
            ValueError: the model has no layer of such a class.
        """
        if not self.transformer_moe_cls_names:
            return
        from deepspeed.utils import set_z3_leaf_modules

        kinds = {type(part).__name__: type(part) for part in model.modules()}
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        missing = [name for name in names if name not in kinds]
        if missing:
            raise ValueError(
                f"transformer_moe_cls_names: the model has no layer of class {', '.join(missing)}, only of "
                f"{', '.join(sorted(kinds))}"
            )
        set_z3_leaf_modules(model, [kinds[name] for name in names])

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Become the plugin that `prepare` uses; users call `AcceleratorState.select_deepspeed_plugin`."""
        if not _from_accelerator_state:
            raise ValueError("a plugin is selected by AcceleratorState().select_deepspeed_plugin(name)")
        self._selected = True
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False

    @property
    def selected(self) -> bool:
        """True if `prepare` uses this plugin."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> NoReturn:
        raise NotImplementedError("a plugin is selected by AcceleratorState().select_deepspeed_plugin(name)")


def _read_config(source: Any) -> HfDeepSpeedConfig | None:
    if isinstance(source, HfDeepSpeedConfig):
        return source
    return None if source == "none" else HfDeepSpeedConfig(source)


def _fill(own: HfDeepSpeedConfig | None, given: Mapping[str, Any]) -> HfDeepSpeedConfig:
    """Return the config with the arguments that it lacks; without a config, one with arguments and defaults."""
    if own is None:
        own = HfDeepSpeedConfig({})
        given = {name: AUTO if name.startswith("gradient_") else DEFAULTS[name] for name in KEYS} | dict(
            given
        )
        given = {name: value for name, value in given.items() if value not in (None, "none")}
    for key in SECTIONS:
        if own.get_value(key) is None:  # DeepSpeed takes no null
            own.del_config_sub_tree(key)
    for name, value in given.items():
        if own.get_value(KEYS[name]) in (None, AUTO):
            own.set_value(KEYS[name], value)
    if own.get_value(KEYS["zero_stage"]) == AUTO:
        own.set_value(KEYS["zero_stage"], DEFAULTS["zero_stage"])
    own.set_stage_and_offload()
    return own
