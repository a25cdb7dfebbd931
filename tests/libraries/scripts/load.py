"""Transformers' loading: device maps that it chooses or gets, limits, offloading, quantized weights, and generating."""

from __future__ import annotations

from typing import Any

from tests.libraries.small import list_files, make_llama, run, sum_weights

PROMPT = [[1, 5, 6, 7], [1, 8, 9, 4]]


def save_model(folder: str, **more: Any) -> str:
    make_llama(**more).save_pretrained(folder, max_shard_size="12KB")
    return folder


def tell(model: Any) -> dict[str, Any]:
    """Return where a model lies, what it computes, and what it generates."""
    import torch

    words = torch.tensor(PROMPT)
    hooks = {name: getattr(module, "_hf_hook", None) for name, module in model.named_modules()}
    with torch.no_grad():
        return {
            "map": {key: str(place) for key, place in getattr(model, "hf_device_map", {}).items()},
            "devices": {name: str(value.device) for name, value in model.named_parameters()},
            "hooks": {
                name: [
                    type(hook).__name__,
                    getattr(hook, "offload", None),
                    getattr(hook, "io_same_device", None),
                ]
                for name, hook in hooks.items()
                if hook is not None
            },
            "logits": model(words).logits.float().sum().item(),
            "greedy": model.generate(words, max_new_tokens=6, do_sample=False).tolist(),
            "beams": model.generate(words, max_new_tokens=4, num_beams=2, do_sample=False).tolist(),
        }


def choose() -> dict[str, Any]:
    """`device_map="auto"` and others, with limits, in one type and another."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = save_model("plain")
    found: dict[str, Any] = {}
    asked: dict[str, dict[str, Any]] = {
        "auto": {"device_map": "auto"},
        "sequential": {"device_map": "sequential"},
        "cpu": {"device_map": "cpu", "dtype": torch.bfloat16},
        "one": {"device_map": {"": "cpu"}},
        "limited": {"device_map": "auto", "max_memory": {"cpu": "30KB"}, "offload_folder": "limited"},
        "limited, buffers": {
            "device_map": "auto",
            "max_memory": {"cpu": 40000},
            "offload_folder": "buffers",
            "offload_buffers": True,
        },
        "balanced": {
            "device_map": "balanced_low_0",
            "max_memory": {"cpu": "20KB"},
            "offload_folder": "balanced",
        },
    }
    for name, options in asked.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        found[name] = tell(model)
        if "offload_folder" in options:
            found[f"{name}: files"] = list_files(options["offload_folder"])
    found["no folder"] = refuse(
        lambda: AutoModelForCausalLM.from_pretrained(folder, **{**asked["limited"], "offload_folder": None})
    )
    found["moved"] = refuse(lambda: model.to("cpu"))
    return found


def refuse(call: Any) -> str:
    """Return the type of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing raised"


def offload_tied() -> dict[str, Any]:
    """A model with tied weights, partly on the disk: saved again, loaded whole, and without its hooks."""
    import torch
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import align_module_device
    from transformers import AutoModelForCausalLM

    folder = save_model("tied", tie_word_embeddings=True)
    where = {
        "model.embed_tokens": "cpu",
        "model.layers": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
    }
    where |= {"lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=where, offload_folder="tied_weights")
    found = tell(model)
    with align_module_device(model.model.layers[0].mlp.up_proj):
        found["aligned"] = model.model.layers[0].mlp.up_proj.weight.sum().item()
    model.save_pretrained("tied_again", max_shard_size="12KB")
    again = AutoModelForCausalLM.from_pretrained("tied_again")
    found |= {"again": sum_weights(again), "files": list_files("tied_again")}
    whole = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.float16)
    remove_hook_from_module(whole, recurse=True)
    return {**found, "whole": sum_weights(whole), "left": hasattr(whole, "_hf_hook")}


def quantize() -> dict[str, Any]:
    """Weights of 4 and 8 bits by bitsandbytes on the CPU, with a map, saved and loaded."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = save_model("wide", hidden_size=64, intermediate_size=64)
    found: dict[str, Any] = {}
    small = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_type="nf4"
    )
    for name, config in {"4 bits": small, "8 bits": BitsAndBytesConfig(load_in_8bit=True)}.items():
        for key, where in {"auto": "auto", "one": {"": "cpu"}}.items():
            model = AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=config, device_map=where, dtype=torch.float32
            )
            found[f"{name}, {key}"] = {
                **tell(model),
                "kinds": sorted({type(module).__name__ for module in model.modules()}),
                "bytes": model.get_memory_footprint(),
            }
        model.save_pretrained(f"small {name}")
        again = AutoModelForCausalLM.from_pretrained(f"small {name}", device_map="cpu")
        found[f"{name}, again"] = tell(again)
    return found


CASES = {"choose": choose, "tied": offload_tied, "quantize": quantize}
LIBRARIES = ("bitsandbytes", "transformers:LlamaForCausalLM")
"""What a host imports before it forks; see `hosts.Job`."""

if __name__ == "__main__":
    run(CASES)
