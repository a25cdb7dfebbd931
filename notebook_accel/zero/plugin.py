"""DeepSpeedPlugin: how DeepSpeed trains, said in Python, by environment variables or by DeepSpeed's own JSON file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch

from .. import environ, probes
from .config import AUTO, HfDeepSpeedConfig, leaves
from .library import load
from .settings import DEFAULTS, KEYS, problems_of, said_by_environment

_INIT: Final = "ACCELERATE_DEEPSPEED_ZERO3_INIT"
_BATCHES: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed trains; what is None is read from the environment variables of `notebook-accel launch`.

    Where DeepSpeed's own config is given, the other arguments fill its "auto" values and what it does not say; one that
    contradicts it is an error. Afterwards the attributes are what holds, and `deepspeed_config` is DeepSpeed's config.

    Args:
        hf_ds_config: DeepSpeed's own config: path of a JSON file, a dict or an `HfDeepSpeedConfig`.
        gradient_accumulation_steps: batches per optimizer step; by default the accelerator's.
        gradient_clipping: largest norm of the gradients in every step; by default the loop clips, or nobody.
        zero_stage: what ZeRO shards: 0 nothing, 1 optimizer state, 2 (the default) gradients too, 3 weights too.
        is_train_batch_min: of several loaders, the one with the smallest batches says what DeepSpeed takes for the
            batch size, which it only reports; False takes the largest.
        offload_optimizer_device: where optimizer state is kept instead of the device: `none`, `cpu` or `nvme`.
        offload_param_device: where weights are kept, for stage 3: `none`, `cpu` or `nvme`.
        offload_optimizer_nvme_path: folder for optimizer state on NVMe.
        offload_param_nvme_path: folder for weights on NVMe.
        zero3_init_flag: models of Transformers are sharded from the start; by default for stage 3.
        zero3_save_16bit_model: DeepSpeed's `save_16bit_model` gathers weights; ours does so anyway.
        transformer_moe_cls_names: class names of mixture-of-experts layers, separated by commas, which stage 3 takes
            as a whole.
        enable_msamp: not supported.
        msamp_opt_level: of MS-AMP.

    Raises:
        ValueError: values are wrong or contradict each other; all in one message.
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

    def __post_init__(self) -> None:
        said = said_by_environment() | {
            name: value for name in KEYS if (value := getattr(self, name)) is not None
        }
        source = self.hf_ds_config
        if source in (None, "", "none"):
            source = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") or "none"
        own = None if source == "none" else HfDeepSpeedConfig(source)
        asked_init = self.zero3_init_flag
        if asked_init is None and environ.get(_INIT):
            asked_init = environ.flag(_INIT)
        problems = problems_of(said, own)
        if asked_init not in (None, False, True):
            problems.append(f"zero3_init_flag {asked_init!r} is neither True nor False")
            asked_init = None
        if not isinstance(self.transformer_moe_cls_names, str | None):
            problems.append(
                f"transformer_moe_cls_names {self.transformer_moe_cls_names!r} is no text: separate names by commas"
            )
        if self.enable_msamp:
            problems.append("enable_msamp: MS-AMP is not supported, use mixed_precision='bf16'")
        stage = said.get("zero_stage", DEFAULTS["zero_stage"])
        if own is not None and isinstance(own.get_value(KEYS["zero_stage"]), int):
            stage = own.get_value(KEYS["zero_stage"])
        if asked_init and stage != 3:
            problems.append(f"zero3_init_flag is for zero_stage 3, not {stage}")
        if problems:
            raise ValueError("\n- ".join(["this DeepSpeedPlugin is wrong or contradicts itself:", *problems]))
        self.hf_ds_config = _filled(own, said)
        self.deepspeed_config = self.hf_ds_config.config
        for name, key in KEYS.items():
            value = self.hf_ds_config.get_value(key)
            setattr(self, name, said.get(name, DEFAULTS[name]) if value in (None, AUTO) else value)
        self.zero3_init_flag = self.hf_ds_config.is_zero3() if asked_init is None else bool(asked_init)
        self.enable_msamp = False
        self.msamp_opt_level = self.msamp_opt_level or "O1"
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = environ.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
        self._selected = False
        self._device = torch.device("cpu")
        self._for_transformers: HfDeepSpeedConfig | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_for_transformers": None}

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a key's value in DeepSpeed's config, such as that of `fp16.enabled`."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return True if a key of DeepSpeed's config is "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace a key's "auto" by its value in `kwargs`; another value that differs is added to `mismatches`.

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
        """Replace every "auto" of DeepSpeed's config, or of a part of it that `prefix` leads to.

        Raises:
            ValueError: a value differs from that in `kwargs` and has to match it, or a key stays "auto".
        """
        found = [] if mismatches is None else mismatches
        for key, _ in list(leaves(self.deepspeed_config if config is None else config, prefix)):
            self.fill_match(key, found, must_match=must_match, **kwargs)
        if found and not prefix:
            raise ValueError("\n- ".join(['values differ, and "auto" would take them over:', *found]))

    def mixed_precision(self) -> str | None:
        """Return the precision that DeepSpeed's config says, None where it leaves it open."""
        return next((name for name in ("fp16", "bf16") if self.get_value(f"{name}.enabled") is True), None)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Let DeepSpeed's config say the precision; ValueError if it says another."""
        own = self.mixed_precision()
        if mixed_precision not in ("no", "fp16", "bf16"):
            raise ValueError(f"mixed_precision={mixed_precision!r}: DeepSpeed knows no, fp16 and bf16")
        if own is not None and own != mixed_precision:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} contradicts {own}.enabled in DeepSpeed's config: "
                'leave one out, or let that be "auto"'
            )
        for name in ("fp16", "bf16"):
            if name == mixed_precision or self.get_value(f"{name}.enabled") == AUTO:
                self.hf_ds_config.set_value(f"{name}.enabled", name == mixed_precision)

    def set_deepspeed_weakref(self) -> None:
        """Let Transformers know of this plugin: with `zero3_init_flag` it makes models sharded from the start."""
        self._for_transformers = None
        if not probes.is_available("transformers"):
            return
        transformers: Any = importlib.import_module("transformers.integrations.deepspeed")
        transformers.unset_hf_deepspeed_config()
        if self.zero3_init_flag:
            self._for_transformers = HfDeepSpeedConfig(self._for_init())  # known weakly, kept here
            transformers.set_hf_deepspeed_config(self._for_transformers)

    def is_zero3_init_enabled(self) -> bool:
        """Return True if Transformers makes models sharded from the start."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Make all models of the block, also plain modules, sharded from the start, or with False none.

        Each layer is shared out when it is made: what a model's constructor does to the weights of its layers
        afterwards has to be within `deepspeed.zero.GatheredParameters`. ValueError if the ZeRO stage is not 3.
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
        init: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=self._for_init())
        with init:
            yield

    def _for_init(self) -> dict[str, Any]:
        """Return DeepSpeed's config for where neither batches nor what replaces "auto" are known."""
        config = HfDeepSpeedConfig(self.deepspeed_config)
        for key in [*_BATCHES, *(key for key, value in leaves(config.config) if value == AUTO)]:
            config.del_config_sub_tree(key)
        return {**config.config, "train_micro_batch_size_per_gpu": 1}

    def set_moe_leaf_modules(self, model: torch.nn.Module) -> None:
        """Let ZeRO 3 take the layers of `transformer_moe_cls_names` as a whole; ValueError names missing ones."""
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
        """Be the plugin that `prepare` uses; for `AcceleratorState.select_deepspeed_plugin`, which users call."""
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


def _filled(own: HfDeepSpeedConfig | None, said: Mapping[str, Any]) -> HfDeepSpeedConfig:
    """Return the config with what was said in its place; all of it where there is no config."""
    if own is None:
        own = HfDeepSpeedConfig({})
        said = {name: AUTO if name.startswith("gradient_") else DEFAULTS[name] for name in KEYS} | dict(said)
        said = {name: value for name, value in said.items() if value not in (None, "none")}
    for name, value in said.items():
        if own.get_value(KEYS[name]) in (None, AUTO):
            own.set_value(KEYS[name], value)
    own.set_stage_and_offload()
    return own
