"""Every public module and name of the installed Accelerate is served, or there is a reason why not."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_accel.takeover import paths

OTHER_PROGRAMS = (
    "external_deps",
    "test_cli",
    "test_ddp_comm_hook",
    "test_distributed_data_loop",
    "test_merge_weights",
    "test_notebook",
)
# modules that are left out, with all that is below them
LEFT_OUT = {
    **{f"test_utils.scripts.{name}": "scripts of Accelerate's own tests" for name in OTHER_PROGRAMS},
    "test_utils.examples": "comparison of Accelerate's own examples",
    "commands.config.cluster": "questions of the command line",
    "commands.config.config_utils": "questions of the command line",
    "commands.config.sagemaker": "runs on Amazon SageMaker are not launched from here",
    "commands.menu": "drawing of the questionnaire",
    "commands.utils": "classes of argparse, of which its own parsers are made",
}
PROGRAMS = "test_utils.scripts."  # ours are others of the same names, of which `main` is used
SETTINGS = "what its own command sets for processes, which is done in another way here"
PARTS = "a part of how it does its work, which is done in another way here"
OWN_SCRIPTS = "data of Accelerate's own examples and scripts"
MEGATRON = "Megatron-LM is not supported"
SAGEMAKER = "runs on Amazon SageMaker are not launched from here"
VENDOR = "a word of an argument's type, of a library that is not supported"
# names that are left out, by module; `*` stands for all modules
REASONS: dict[str, dict[str, str]] = {
    "*": {
        **dict.fromkeys(("logger", "FORMAT"), "its own logger"),
        "description": "a text of its command line",
    },
    "checkpointing": dict.fromkeys(
        ("save_accelerator_state", "load_accelerator_state", "save_custom_state", "load_custom_state"), PARTS
    ),
    "commands.config.config": {"get_user_input": "questions of the command line"},
    "commands.estimate": {"create_ascii_table": PARTS},
    "commands.to_fsdp2": dict.fromkeys(
        ("ARGUMENT_KEY_MAPPING", "ARGUMENT_VALUE_MAPPING", "ConversionStatus"), PARTS
    ),
    "commands.launch": dict.fromkeys(
        (
            "CustomHelpFormatter",
            "clean_option",
            "deepspeed_launcher",
            "multi_gpu_launcher",
            "options_to_group",
            "sagemaker_launcher",
            "simple_launcher",
            "tpu_launcher",
            "tpu_pod_launcher",
        ),
        PARTS,
    ),
    "data_loader": {"MpDeviceLoaderWrapper": PARTS},
    "inference": dict.fromkeys(
        ("build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward"), PARTS
    ),
    "launchers": {"test_launch": PARTS},
    "optimizer": {"patch_optimizer_step": PARTS},
    "state": dict.fromkeys(("SharedDict", "ThreadLocalSharedDict"), PARTS),
    "test_utils.training": dict.fromkeys(
        ("mocked_dataloaders", "mocked_dataloaders_for_autoregressive_models"), OWN_SCRIPTS
    ),
    "utils.bnb": dict.fromkeys(
        (
            "get_keys_to_not_convert",
            "get_quantized_model_device_map",
            "quantize_and_offload_8bit",
            "replace_with_bnb_layers",
        ),
        PARTS,
    ),
    "utils.constants": dict.fromkeys(
        (
            "SAGEMAKER_PARALLEL_EC2_INSTANCES",
            "SAGEMAKER_PYTHON_VERSION",
            "SAGEMAKER_PYTORCH_VERSION",
            "SAGEMAKER_TRANSFORMERS_VERSION",
        ),
        SAGEMAKER,
    ),
    "utils.dataclasses": {
        **dict.fromkeys(("AmaxComputeAlgorithm", "Backend", "FP8Format", "OptLevel"), VENDOR),
        **dict.fromkeys(
            (
                "MODEL_CONFIGS_TO_MEGATRON_PARSERS",
                "add_model_config_to_megatron_parser",
                "parse_bert_config",
                "parse_glm4_moe_config",
                "parse_gpt2_config",
                "parse_llama_config",
                "parse_t5_config",
            ),
            MEGATRON,
        ),
        "ProfilerActivity": "a word of an argument's type",
    },
    "utils.deepspeed": {"map_pytorch_optim_to_deepspeed": PARTS},
    "utils.fsdp_utils": dict.fromkeys(
        (
            "fsdp2_apply_ac",
            "fsdp2_prepare_auto_wrap_policy",
        ),
        PARTS,
    ),
    "utils.launch": dict.fromkeys(
        (
            "env_var_path_add",
            "prepare_deepspeed_cmd_env",
            "prepare_extend_env_parallelism_config",
            "prepare_sagemager_args_inputs",
            "prepare_tpu",
            "setup_fp8_env",
        ),
        SETTINGS,
    ),
    "utils.megatron_lm": dict.fromkeys(
        (
            "MegatronEngine",
            "MegatronLMOptimizerWrapper",
            "MegatronLMSchedulerWrapper",
            "finish_mpu_init",
            "gather_across_data_parallel_groups",
            "initialize",
            "model_provider_func",
            "prepare_model_optimizer_scheduler",
            "prepare_optimizer",
            "prepare_scheduler",
        ),
        MEGATRON,
    ),
    "utils.modeling": {"fallback_allocate": PARTS},
    "utils.operations": dict.fromkeys(
        (
            "ConvertOutputsToFp32",
            "chained_operation",
            "gather_tensor_shape",
            "verify_operation",
        ),
        PARTS,
    ),
    "utils.other": {
        **dict.fromkeys(("compile_regions_deepspeed", "compile_regions_fsdp2"), PARTS),
        "TORCH_SAFE_GLOBALS": PARTS,
        "np_core": PARTS,
    },
    "utils.versions": {"torch_version": PARTS},
}


def accelerate_folder() -> Path:
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.origin is None:
        pytest.skip("Accelerate is not installed")
    return Path(spec.origin).parent


def walk() -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield the path of each module of Accelerate, the names that it defines, and those that it imports from others."""
    folder = accelerate_folder()
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        path = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        defined: set[str] = set()
        imported: set[str] = set()
        if path.startswith(PROGRAMS):
            yield path, defined, imported
            continue
        read_names(ast.parse(file.read_text(encoding="utf-8")).body, defined, imported)
        yield path, {name for name in defined if not name.startswith("_")}, imported - defined


def read_names(body: list[ast.stmt], defined: set[str], imported: set[str]) -> None:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").startswith("accelerate")
        ):
            imported.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.If):
            read_names(node.body + node.orelse, defined, imported)
        elif isinstance(node, ast.Try):
            read_names(node.body, defined, imported)


def reason(path: str, name: str) -> str | None:
    return REASONS.get(path, {}).get(name) or REASONS["*"].get(name)


def is_left_out(path: str) -> bool:
    return any(path == top or path.startswith(f"{top}.") for top in LEFT_OUT)


def test_every_module_is_served_or_left_out_for_a_reason() -> None:
    found = {path for path, _, _ in walk()}
    lacking = {path for path in found if not is_left_out(path)} - paths.PATHS.keys()
    assert not lacking, f"neither served nor left out: {sorted(lacking)}"
    assert not paths.PATHS.keys() - found, "PATHS serves what Accelerate does not have"
    assert not [top for top in LEFT_OUT if top not in found], "LEFT_OUT names what Accelerate does not have"
    assert not [path for path in paths.PATHS if is_left_out(path)]


def test_every_name_is_served_or_left_out_for_a_reason() -> None:
    lacking, stale = [], []
    for path, defined, _ in walk():
        if path not in paths.PATHS:
            continue
        lacking += [
            f"{path}.{name}"
            for name in defined
            if not (paths.find(path, name) or reason(path, name) or (name == "main" and path in paths.MAINS))
        ]
        stale += [f"{path}.{name}" for name in REASONS.get(path, {}) if name not in defined]
        stale += [f"{path}.{name}" for name in REASONS.get(path, {}) if paths.find(path, name)]
    assert not lacking, f"neither served nor left out: {sorted(lacking)}"
    assert not stale, f"reasons for what is served, or is no name of Accelerate: {sorted(stale)}"


def test_names_are_served_where_accelerate_imports_them_too() -> None:
    """Code takes `GradientAccumulationPlugin` from `accelerate.accelerator`, which only imports it."""
    owners: dict[str, set[str]] = {}
    for path, defined, _ in walk():
        for name in defined:
            owners.setdefault(name, set()).add(path)
    lacking = [
        f"{path}.{name}"
        for path, _, imported in walk()
        if path in paths.PATHS
        for name in imported
        if any(paths.is_path(owner) and paths.find(owner, name) for owner in owners.get(name, ()))
        and not paths.find(path, name)
    ]
    assert not lacking, f"Accelerate has these names in these modules too: {sorted(lacking)}"


def test_every_name_is_there() -> None:
    rows = [(path, name, paths.find(path, name)) for path in paths.PATHS for name in paths.names_of(path)]
    lacking = [
        f"{path}.{name}: {found}"
        for path, name, found in rows
        if found is None or not hasattr(importlib.import_module(f"notebook_accel.{found[0]}"), found[1])
    ]
    assert not lacking, lacking


def test_a_name_means_the_same_wherever_it_is_taken_from() -> None:
    objects: dict[str, set[int]] = {}
    for path in paths.PATHS:
        for name in set(paths.names_of(path)) - {"main"}:
            module, own = paths.find(path, name) or ("", "")
            home = importlib.import_module(f"notebook_accel.{module}")
            objects.setdefault(name, set()).add(id(getattr(home, own)))
    assert not [name for name, found in objects.items() if len(found) > 1]


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("", "Accelerator", ("accelerator", "Accelerator")),
        ("utils", "set_seed", ("utils", "set_seed")),
        ("utils.random", "set_seed", ("utils", "set_seed")),
        ("accelerator", "DataLoaderConfiguration", ("utils", "DataLoaderConfiguration")),
        ("data_loader", "DataLoaderStateMixin", ("data_loader.base", "PreparedLoader")),
        ("utils", "no_such_name", None),
        ("memory_utils", "find_executable_batch_size", ("utils.memory", "find_executable_batch_size")),
    ],
)
def test_where_a_name_is(path: str, name: str, found: tuple[str, str] | None) -> None:
    assert paths.find(path, name) == found
