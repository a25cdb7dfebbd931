"""A config file under the names of Accelerate's classes: its values as they stand there, to change and to write."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from ..choices import ComputeEnvironment, SageMakerDistributedType
from ..config import document, file
from ..errors import ConfigError, ConfigValueError
from ..state import DistributedType

_Config = TypeVar("_Config", bound="BaseConfig")
_NO: Final = {"mixed_precision": "no", "distributed_type": "NO"}  # what a word without quotes means there
_OFF: Final = ("use_cpu", "debug", "enable_cpu_affinity")

default_config_file: Final = str(file.default_path())


@dataclass
class BaseConfig:
    """What every config file says.

    Attributes:
        compute_environment: where the run takes place.
        distributed_type: how its processes work together.
        mixed_precision: of the training; None where the file does not say it.
        use_cpu: whether GPUs are left alone.
        debug: whether collectives are checked.
    """

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        is_ours = self.compute_environment != ComputeEnvironment.AMAZON_SAGEMAKER
        self.distributed_type = (DistributedType if is_ours else SageMakerDistributedType)(
            self.distributed_type
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the values that are not empty, as a file would hold them."""
        plain = {name: _simplify(value) for name, value in vars(self).items()}
        return {name: value for name, value in plain.items() if value is not None}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Fill in what a file leaves out, and put older names into today's; the dict is changed in place.

        Args:
            config_dict: values of a file.

        Raises:
            ValueError: `distributed_type` is missing.
        """
        if "distributed_type" not in config_dict:
            raise ValueError(
                "the config has no distributed_type: say it, for example distributed_type: MULTI_GPU"
            )
        config_dict.setdefault("compute_environment", ComputeEnvironment.LOCAL_MACHINE)
        if config_dict["distributed_type"] == DistributedType.NO:
            config_dict.setdefault("num_processes", 1)
        is_half = config_dict.pop("fp16", False)
        config_dict.setdefault("mixed_precision", "fp16" if is_half else None)
        if "dynamo_backend" in config_dict:
            backend = config_dict.pop("dynamo_backend")
            config_dict["dynamo_config"] = {} if backend == "NO" else {"dynamo_backend": backend}
        for name in _OFF:
            config_dict.setdefault(name, False)
        return config_dict

    @classmethod
    def from_json_file(cls: type[_Config], json_file: str | os.PathLike[str] | None = None) -> _Config:
        """Return the config in a JSON file.

        Args:
            json_file: by default the config file that all tools look for.

        Raises:
            ValueError: a key is unknown, or `distributed_type` is missing.
        """
        path = _path(json_file)
        return cls._of_values(path, json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def from_yaml_file(cls: type[_Config], yaml_file: str | os.PathLike[str] | None = None) -> _Config:
        """Return the config in a YAML file.

        Args:
            yaml_file: see `from_json_file`.

        Raises:
            ValueError: see `from_json_file`.
        """
        path = _path(yaml_file)
        return cls._of_values(path, read_values(path))

    @classmethod
    def _of_values(cls: type[_Config], path: Path, values: dict[str, Any]) -> _Config:
        values = cls.process_config(values)
        if unknown := sorted(values.keys() - {entry.name for entry in dataclasses.fields(cls)}):
            raise ValueError(f"{path} has unknown keys: {', '.join(unknown)}")
        return cls(**values)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write a JSON file, which is replaced.

        Args:
            json_file: its path.
        """
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        Path(json_file).write_text(f"{text}\n", encoding="utf-8")

    def to_yaml_file(self, yaml_file: str | os.PathLike[str]) -> None:
        """Write a YAML file, which is replaced.

        Args:
            yaml_file: its path.
        """
        text = document.as_yaml(dict(sorted(self.to_dict().items())))
        Path(yaml_file).write_text(text, encoding="utf-8")


@dataclass
class ClusterConfig(BaseConfig):
    """A config of a launch, with the keys that Accelerate's files have; `LaunchConfig` says what each means."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] = field(default_factory=dict)
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    fsdp_config: dict[str, Any] = field(default_factory=dict)
    parallelism_config: dict[str, Any] = field(default_factory=dict)
    megatron_lm_config: dict[str, Any] = field(default_factory=dict)
    mpirun_config: dict[str, Any] = field(default_factory=dict)
    downcast_bf16: bool | str = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for entry in dataclasses.fields(self):
            if entry.default_factory is dict and getattr(self, entry.name) is None:
                setattr(self, entry.name, {})


@dataclass
class SageMakerConfig(BaseConfig):
    """A config for Amazon SageMaker, to read, change and write: nothing of this package launches there.

    Attributes:
        ec2_instance_type: kind of the machines.
        iam_role_name: role in whose name they run.
        num_machines: how many there are.
    """

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = "1.10.2"
    transformers_version: str = "4.17.0"
    py_version: str = "py38"
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dynamo_config = self.dynamo_config or {}


def load_config_from_file(
    config_file: str | os.PathLike[str] | None = None,
) -> ClusterConfig | SageMakerConfig:
    """Return the config in a file, after it was checked as for a launch; what only this package knows is left out.

    Args:
        config_file: by default the one that all tools look for.

    Returns:
        The config, of SageMaker where the file's `compute_environment` says so.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigValueError: something in it is wrong.
    """
    path = _path(config_file)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    kind: type[ClusterConfig | SageMakerConfig] = ClusterConfig
    values: dict[str, Any] = {}
    if _is_for_sagemaker(path):
        kind = SageMakerConfig
    else:
        with raise_value_errors():
            checked = file.read(path).config
        values["distributed_type"] = checked.distributed_type or DistributedType.NO
    values = kind.process_config(values | read_values(path))
    known = {entry.name for entry in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


@contextlib.contextmanager
def raise_value_errors() -> Iterator[None]:
    """Raise a ConfigError of the block as a ValueError too, which callers of Accelerate's functions expect."""
    try:
        yield
    except ConfigError as error:
        raise ConfigValueError(error.problems) from None


def read_values(path: Path) -> dict[str, Any]:
    """Return the values in a file of YAML 1.1, in which `no` is False; JSON is a part of it.

    Args:
        path: of the file.
    """
    values = dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    return values | {name: word for name, word in _NO.items() if values.get(name) is False}


def _is_for_sagemaker(path: Path) -> bool:
    """Return True if a file says so; one that is no YAML says nothing."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return False
    name = values.get("compute_environment") if isinstance(values, dict) else None
    return name == ComputeEnvironment.AMAZON_SAGEMAKER.value


def _path(path: str | os.PathLike[str] | None) -> Path:
    return document.expand(default_config_file if path is None else path)


def _simplify(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _simplify(part) for key, part in value.items()} or None
    return value
