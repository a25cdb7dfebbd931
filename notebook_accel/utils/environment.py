"""The names that users import from `accelerate.utils.environment`; they are defined in other modules."""

from typing import TYPE_CHECKING

from ..affinity import override_numa_affinity, set_numa_affinity
from ..environ import clear_environment, patch_environment, purge_accelerate_environment
from ..takeover.names import complete_names

if TYPE_CHECKING:  # each is imported when it is asked for, by `complete_names`
    from .machine import (
        CPUInformation,
        check_cuda_fp8_capability,
        check_cuda_p2p_ib_support,
        convert_dict_to_env_variables,
        get_cpu_distributed_information,
        get_current_device_type,
        get_driver_version,
        get_gpu_info,
    )
    from .other import (
        are_libraries_initialized,
        get_int_from_env,
        parse_choice_from_env,
        parse_flag_from_env,
        str_to_bool,
    )

__all__ = [
    "CPUInformation",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_driver_version",
    "get_gpu_info",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]


complete_names(__name__)
