"""Config files under the names of Accelerate's classes give what they give there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config import config_args as reference

from notebook_accel import ConfigError, LaunchConfig
from notebook_accel.utils import cluster

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
VALUES: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "use_cpu": False,
    "debug": True,
    "num_processes": 4,
    "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_that_accelerate_reads(path: Path) -> None:
    theirs = reference.load_config_from_file(str(path))
    ours = cluster.load_config_from_file(path)
    assert vars(ours) == vars(theirs)  # whose `to_dict` changes them
    assert ours.to_dict() == theirs.to_dict() == cluster.ClusterConfig.from_yaml_file(path).to_dict()


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_files_go_both_ways(tmp_path: Path, form: str) -> None:
    ours, theirs = cluster.ClusterConfig(**VALUES), reference.ClusterConfig(**VALUES)
    ours.num_machines = theirs.num_machines = 2
    getattr(ours, f"to_{form}_file")(tmp_path / f"ours.{form}")
    getattr(theirs, f"to_{form}_file")(tmp_path / f"theirs.{form}")
    for name in ("ours", "theirs"):
        path = tmp_path / f"{name}.{form}"
        ours_read = getattr(cluster.ClusterConfig, f"from_{form}_file")(path)
        theirs_read = getattr(reference.ClusterConfig, f"from_{form}_file")(path)
        assert ours_read.to_dict() == theirs_read.to_dict() == theirs.to_dict()
        assert LaunchConfig.read(path).num_machines == 2


@pytest.mark.parametrize(
    "values",
    [
        {"distributed_type": "NO"},
        {"distributed_type": "MULTI_GPU", "fp16": True, "dynamo_backend": "INDUCTOR"},
        {"distributed_type": "NO", "dynamo_backend": "NO", "use_cpu": True, "num_processes": 3},
    ],
)
def test_what_older_files_say(values: dict[str, Any]) -> None:
    ours, theirs = (kind.process_config(dict(values)) for kind in (cluster.BaseConfig, reference.BaseConfig))
    assert ours == theirs


def test_words_without_quotes_are_truth_values(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: no\nsame_network: yes\n"
    )
    theirs = reference.load_config_from_file(str(path))
    assert vars(cluster.load_config_from_file(path)) == vars(theirs)
    assert theirs.use_cpu is False and theirs.same_network is True
    path.write_text("distributed_type: NO\nmixed_precision: no\n")
    assert cluster.load_config_from_file(path).mixed_precision == "no"  # there: False


def test_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: NO\nno_such_key: 1\n")
    with pytest.raises(ValueError, match="no_such_key"):
        cluster.ClusterConfig.from_yaml_file(path)
    path.write_text("num_processes: 2\n")
    with pytest.raises(ValueError, match="distributed_type"):
        cluster.ClusterConfig.from_yaml_file(path)
    path.write_text("distributed_type: NO\nnum_processes: many\n")
    with pytest.raises(ConfigError, match="many"):
        cluster.load_config_from_file(path)
    with pytest.raises(FileNotFoundError):
        cluster.load_config_from_file(tmp_path / "none.yaml")


def test_a_file_for_sagemaker_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\n"
        "ec2_instance_type: ml.p3\niam_role_name: me\nnum_machines: 2\nmixed_precision: fp16\n"
    )
    ours = cluster.load_config_from_file(path)
    theirs = reference.load_config_from_file(str(path))
    assert isinstance(ours, cluster.SageMakerConfig) and vars(ours) == vars(theirs)
