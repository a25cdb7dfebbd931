"""PEFT: LoRA over models that are dispatched or offloaded, merged, saved and loaded; and in a training loop."""

from __future__ import annotations

import os
from typing import Any

from tests.libraries.small import list_files, make_llama, run, save_own, sum_weights


def make_adapter(**more: Any) -> Any:
    from peft import LoraConfig

    targets = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, **more)


def own_folder(name: str) -> str:
    """Return a folder of this process."""
    return f"{name}{os.environ.get('RANK', 0)}"


def offload_map() -> dict[str, Any]:
    return {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    }


def tell_hooks(model: Any) -> dict[str, str]:
    """Return the class of each module's hook, and whether it offloads."""
    hooks = {name: getattr(module, "_hf_hook", None) for name, module in model.named_modules()}
    return {
        name: f"{type(hook).__name__} {getattr(hook, 'offload', None)} {getattr(hook, 'execution_device', None)}"
        for name, hook in hooks.items()
        if hook is not None
    }


def offload() -> dict[str, Any]:
    """LoRA over a model whose other layers lie on the disk: forward, generate, save, merge."""
    import torch
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    words = torch.tensor([[1, 5, 6, 7]])
    torch.manual_seed(1)
    whole = get_peft_model(make_llama(), make_adapter(layers_to_transform=[0]))
    options = {"device_map": offload_map(), "offload_folder": own_folder("weights")}
    model = AutoModelForCausalLM.from_pretrained(save_own("base", make_llama()), **options)
    found: dict[str, Any] = {"plain": compute(model, words), "whole": compute(whole, words)}
    adapted = get_peft_model(model, make_adapter(layers_to_transform=[0]))
    set_peft_model_state_dict(adapted, get_peft_model_state_dict(whole))
    found |= {
        "adapted": compute(adapted, words),
        "generated": adapted.generate(input_ids=words, max_new_tokens=5, do_sample=False).tolist(),
        "map": {name: str(place) for name, place in adapted.hf_device_map.items()},
        "devices": {name: str(value.device) for name, value in adapted.named_parameters()},
        "hooks": tell_hooks(adapted),
    }
    with adapted.disable_adapter():
        found["disabled"] = compute(adapted, words)
    saved = own_folder("adapter")
    adapted.save_pretrained(saved)
    merged = adapted.merge_and_unload()
    found |= {
        "merged": compute(merged, words),
        "files": list_files(saved),
        "merged hooks": tell_hooks(merged),
    }
    again = save_own("merged", whole.merge_and_unload())
    loaded = AutoModelForCausalLM.from_pretrained(again, device_map="auto")
    return {**found, "loaded": compute(loaded, words), "weights": sum_weights(loaded)}


def merge() -> dict[str, Any]:
    """LoRA merged into weights that lie on the disk, and taken out again."""
    import torch
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    words = torch.tensor([[1, 5, 6, 7]])
    torch.manual_seed(1)
    whole = get_peft_model(make_llama(), make_adapter())
    saved = own_folder("merging")
    whole.save_pretrained(saved)
    options = {"device_map": offload_map(), "offload_folder": own_folder("merged_weights")}
    model = AutoModelForCausalLM.from_pretrained(save_own("merge_base", make_llama()), **options)
    del options["device_map"]
    limit = sum(value.nbytes for value in whole.parameters()) * 2 // 3
    adapted = PeftModel.from_pretrained(model, saved, max_memory={"cpu": limit}, **options)
    found: dict[str, Any] = {
        "map": {name: str(place) for name, place in adapted.hf_device_map.items()},
        "whole": round(compute(whole, words), 3),
        "adapted": round(compute(adapted, words), 3),
    }
    adapted.merge_adapter()
    found["merged"] = round(compute(adapted, words), 3)
    adapted.unmerge_adapter()
    found["unmerged"] = round(compute(adapted, words), 3)
    return {**found, "unloaded": round(compute(adapted.merge_and_unload(), words), 3)}


def compute(model: Any, words: Any) -> float:
    """Return the sum of a model's logits."""
    import torch

    with torch.no_grad():
        return float(model(words).logits.sum())


def dispatch() -> dict[str, Any]:
    """LoRA over a model that `dispatch_model` has put on devices: loaded, and loaded once more."""
    import torch
    from accelerate import cpu_offload, dispatch_model
    from accelerate.hooks import remove_hook_from_submodules
    from peft import PeftModel, get_peft_model

    words = torch.tensor([[1, 5, 6, 7]])
    torch.manual_seed(1)
    trained = get_peft_model(make_llama(), make_adapter())
    saved = own_folder("dispatched")
    trained.save_pretrained(saved)
    places = dict.fromkeys(offload_map(), "cpu")
    model = dispatch_model(make_llama(), device_map=places, main_device="cpu", force_hooks=True)
    before = tell_hooks(model)
    adapted = PeftModel.from_pretrained(model, saved)
    found: dict[str, Any] = {"trained": compute(trained, words), "adapted": compute(adapted, words)}
    adapted.load_adapter(saved, adapter_name="second")
    adapted.set_adapter("second")
    found |= {"second": compute(adapted, words), "hooks": tell_hooks(adapted), "before": before}
    torch.manual_seed(1)
    offloaded = cpu_offload(get_peft_model(make_llama(), make_adapter()), "cpu")
    found |= {"offloaded": compute(offloaded, words), "offloaded hooks": tell_hooks(offloaded)}
    offloaded.merge_adapter()
    found["merged"] = compute(offloaded, words)
    offloaded.unmerge_adapter()
    found["unmerged"] = round(compute(offloaded, words), 3)
    remove_hook_from_submodules(offloaded)
    return {**found, "left": tell_hooks(offloaded)}


def train() -> dict[str, Any]:
    """A training loop as PEFT's examples have it: accumulate, clip, gather, save the adapter, load it."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from peft import PeftModel, get_peft_model, get_peft_model_state_dict
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import get_linear_schedule_with_warmup

    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir="loop")
    model = get_peft_model(make_llama(), make_adapter())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.randint(4, 20, (26, 6))
    loader = DataLoader(TensorDataset(words), batch_size=2, shuffle=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, 8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, rates, norms = [], [], []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)).tolist())
        rates.append(scheduler.get_last_lr())
    accelerator.save_state("loop/state")
    unwrapped = accelerator.unwrap_model(model)
    state = get_peft_model_state_dict(unwrapped, state_dict=accelerator.get_state_dict(model))
    unwrapped.save_pretrained(
        "loop/adapter",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    accelerator.wait_for_everyone()
    loaded = PeftModel.from_pretrained(make_llama(), "loop/adapter")
    return {
        "losses": losses,
        "rates": rates,
        "norms": norms,
        "weights": sum_weights(loaded),
        "files": [name for name in list_files("loop") if "state/" not in name],
        "world": accelerator.num_processes,
    }


CASES = {"offload": offload, "merge": merge, "dispatch": dispatch, "train": train}
LIBRARIES = ("peft", "transformers:LlamaForCausalLM")
"""What a host imports before it forks; see `hosts.Job`."""

if __name__ == "__main__":
    run(CASES)
