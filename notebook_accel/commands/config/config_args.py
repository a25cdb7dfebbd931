"""The names that users import from `accelerate.commands.config.config_args`; they are defined in other modules."""

from ...takeover.names import complete_names
from ...utils.cluster import BaseConfig, ClusterConfig, default_config_file, load_config_from_file
from ...utils.cluster import default_config_file as default_json_config_file
from ...utils.cluster import default_config_file as default_yaml_config_file
from ...utils.registry import cache_dir, hf_cache_home

__all__ = [
    "BaseConfig",
    "ClusterConfig",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "hf_cache_home",
    "load_config_from_file",
]

complete_names(__name__)
