"""The command `estimate-memory` for programs that call Accelerate's, which ask for models of the Hugging Face hub."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Final

import torch

from .. import probes
from ..big_modeling.init import init_empty_weights
from ..big_modeling.sizes import calculate_maximum_sizes
from ..estimation.sizes import BITS
from ..utils.other import convert_bytes
from .argument_parser import add_flag, make_parser
from .estimate_memory import HEADINGS, show_table

_DTYPES: Final = ("float32", "float16", "int8", "int4")
_LIBRARIES: Final = ("timm", "transformers")
_MIXED: Final = ("float16", "bfloat16", "fp8")


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `estimate-memory`.

    Args:
        subparsers: of another parser, to which the command is added.
    """
    text = "Show how much memory a model of the hub needs to be loaded and trained."
    parser = make_parser("estimate-memory", estimate_command, text, subparsers)
    parser.add_argument("model_name", help="Its id at the hub.")
    add_flag(parser, "library_name", choices=_LIBRARIES, help="Its library [default: what the hub says]")
    add_flag(parser, "dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES), help="Dtypes to show.")
    add_flag(
        parser,
        "trust_remote_code",
        action="store_true",
        help="Run code that comes with the model: only for models whose code you have read.",
    )
    return parser


def estimate_command(args: argparse.Namespace) -> None:
    """Print how much memory a model of the hub needs.

    Args:
        args: what a parser of `estimate_command_parser` read.

    Raises:
        OSError, ValueError, RuntimeError, ImportError: see `gather_data`.
    """
    print(f"{args.model_name}:")
    show_table(
        HEADINGS,
        [
            (dtype, convert_bytes(layer), convert_bytes(total), _describe_largest(training))
            for dtype, layer, total, training in gather_data(args)
        ],
    )


def _describe_largest(training: dict[str, int]) -> str:
    largest = max(training.values())
    return "-" if largest < 0 else convert_bytes(largest)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return for each dtype its name, the bytes of the largest layer and of the model, and those of a training.

    Args:
        args: what a parser of `estimate_command_parser` read.

    Raises:
        RuntimeError: the model's repository has nothing that the library can make a model of.
        OSError, ValueError, ImportError: see `create_empty_model`.
    """
    try:
        model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        library = check_has_model(error)
        if library == "unknown":
            raise
        text = f"{args.model_name}: {library} finds no model in its repository: {error}"
        raise RuntimeError(text) from error
    total, (layer, _) = calculate_maximum_sizes(model)
    shares = [(dtype, BITS["float32"] // BITS[dtype]) for dtype in args.dtypes]
    return [
        [dtype, layer / share, total / share, estimate_training_usage(total, dtype)]
        for dtype, share in shares
    ]


def estimate_training_usage(
    bytes: int,  # the name in Accelerate
    mixed_precision: str,
    msamp_config: str | None = None,
) -> dict[str, int]:
    """Return the bytes that Accelerate's estimate gives to each part of a training with Adam.

    `notebook-accel estimate-memory` counts in another way, see `estimation.sizes.estimate_training`.

    Args:
        bytes: of the model at float32.
        mixed_precision: float32, float16, bfloat16 or fp8; -1 is in place of all bytes for others.
        msamp_config: of MS-AMP, for which there is no estimate.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes, "step": 4 * bytes}
    if mixed_precision in _MIXED and (mixed_precision != "fp8" or msamp_config is None):
        gradients = bytes + bytes // 2
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": gradients, "step": 2 * bytes}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def create_empty_model(
    model_name: str,
    library_name: str | None,
    trust_remote_code: bool = False,
    access_token: str | None = None,
) -> torch.nn.Module:
    """Return a model of the hub at float32, on the meta device.

    Args:
        model_name: its id.
        library_name: transformers or timm; None for what the hub says.
        trust_remote_code: run code that comes with the model.
        access_token: for the hub.

    Raises:
        OSError: the hub has no such model, gives it to some users only, or cannot be asked.
        ValueError: nobody says which library the model is of, or it is another one.
        ImportError: the library is not installed.
        RuntimeError: the hub knows no config of the model.
    """
    found = verify_on_hub(model_name, access_token)
    if found == "repo":
        raise OSError(
            f"{model_name}: the hub has no such model; a private one needs a login, `hf auth login`"
        )
    if found == "gated":
        raise OSError(
            f"{model_name}: the hub cannot be asked, or gives it to some users only: `hf auth login` logs in"
        )
    library = library_name or getattr(found, "library_name", None)
    if not library:
        raise ValueError(
            f"{model_name}: the hub does not say which library it is of: give library_name, one of "
            f"{', '.join(_LIBRARIES)}"
        )
    if library not in _LIBRARIES:
        raise ValueError(f"{model_name} is of {library}, estimates are for {', '.join(_LIBRARIES)}")
    if not probes.is_available(library):
        raise ImportError(f"{model_name} needs {library}: pip install {library}")
    if library == "timm":
        with init_empty_weights():
            made = importlib.import_module("timm").create_model(
                add_timm_hub_prefix(model_name), pretrained=False
            )
    else:
        made = _make_of_transformers(model_name, found.config, trust_remote_code, access_token)
    model: torch.nn.Module = made
    return model


def _make_of_transformers(
    name: str, content: dict[str, Any] | None, trust_remote_code: bool, token: str | None
) -> Any:
    """Return a model of its config: by the class that comes with it for a task, where there is one."""
    if content is None:
        raise RuntimeError(f"{name}: the hub knows no config of it that transformers could read")
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, token=token)
    own = [key for key in content.get("auto_map") or () if key.startswith("AutoModelFor")]
    with init_empty_weights():
        auto = getattr(transformers, own[0] if own else "AutoModel")
        return auto.from_config(config, trust_remote_code=trust_remote_code).float()


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return what the hub knows of a model; "repo" where it has none, "gated" where it does not answer.

    Args:
        repo: its id.
        token: for the hub.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    errors: Any = importlib.import_module("huggingface_hub.utils")
    try:
        return hub.model_info(repo, token=token)
    except errors.GatedRepoError:
        return "gated"
    except errors.RepositoryNotFoundError:
        return "repo"
    except OSError:
        return "gated"


def check_has_model(error: Exception) -> str:
    """Return the library that raised an error because it finds no model: timm, transformers or unknown.

    Args:
        error: of `create_empty_model`.
    """
    text = str(error)
    if probes.is_available("timm"):
        missing: Any = importlib.import_module("huggingface_hub.utils").EntryNotFoundError
        signs = ((RuntimeError, "Unknown model"), (KeyError, "architecture"), (missing, ""))
        if any(isinstance(error, kind) and sign in text for kind, sign in signs):
            return "timm"
    signs_of_transformers = ("does not appear to have a file named", "Unrecognized model in")
    is_one = isinstance(error, (OSError, ValueError)) and any(sign in text for sign in signs_of_transformers)
    return "transformers" if is_one and probes.is_available("transformers") else "unknown"


def add_timm_hub_prefix(model_name: str) -> str:
    """Return the name by which timm finds a model: ids of the hub get a prefix.

    Args:
        model_name: a name in timm, an id, or a name that has a prefix.
    """
    is_id = "/" in model_name and ":" not in model_name
    return f"hf-hub:{model_name}" if is_id else model_name
