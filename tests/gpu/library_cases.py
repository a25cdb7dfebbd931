"""What libraries that import Accelerate do on one GPU; a program, run with Accelerate and with the take-over."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.libraries import small

STEPS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
ON_CPU = bool(os.environ.get("GPU_TESTS_ON_CPU"))
DEVICE = "cpu" if ON_CPU else "cuda"
_PRECISIONS: dict[str, dict[str, Any]] = {
    "full precision": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "sharded": {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]},
    },
}


def train(**options: Any) -> dict[str, Any]:
    """Train with Trainer, and from its checkpoint once more."""
    from tests.libraries.trainer import parts

    options = {**STEPS, "use_cpu": ON_CPU, "dataloader_pin_memory": not ON_CPU, **options}
    folder = Path("-".join(map(str, options)))
    found: dict[str, Any] = {}
    for name, resumed in (("whole", None), ("again", str(folder / "checkpoint-3"))):
        trainer = parts.make_trainer(folder, parts.make_bert(attention_probs_dropout_prob=0.0), **options)
        trainer.train(resume_from_checkpoint=resumed)
        found[name] = {
            "log": parts.without_times(trainer.state.log_history),
            "devices": sorted({str(value.device) for value in trainer.model.parameters()}),
            "types": sorted({str(value.dtype) for value in trainer.model.parameters()}),
            "sharded": "FSDP"
            in type(trainer.model_wrapped).__name__,  # torch's launcher makes the others DDP
            "predicted": float(abs(trainer.predict(trainer.eval_dataset).predictions).sum()),
        }
    return found


def adapt() -> dict[str, Any]:
    """TRL's SFTTrainer trains an adapter of PEFT in bf16."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir="adapted",
        report_to="none",
        disable_tqdm=True,
        bf16=not ON_CPU,
        use_cpu=ON_CPU,
        max_length=16,
        max_steps=4,
        logging_steps=1,
        learning_rate=2e-3,
        per_device_train_batch_size=2,
    )
    trainer = SFTTrainer(
        model=small.make_llama(),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": small.make_sentences(24)}),
        processing_class=small.make_tokenizer(),
        peft_config=LoraConfig(r=4, lora_dropout=0.0),
    )
    trainer.train()
    log = small.tell_log(trainer.state.log_history)
    for (
        entry
    ) in log:  # an untrained model has nearly equal logits: which is the largest, the order of sums decides
        entry.pop("mean_token_accuracy", None)
    return {"log": log, "devices": sorted({str(value.device) for value in trainer.model.parameters()})}


def load() -> dict[str, Any]:
    """Transformers spreads a model over the GPU, the CPU and the disk, and generates."""
    import torch
    from transformers import AutoModelForCausalLM

    small.make_llama(num_hidden_layers=6, tie_word_embeddings=False).save_pretrained(
        "saved", max_shard_size="12KB"
    )
    words = torch.tensor([[1, 5, 6, 7], [1, 8, 9, 4]], device=DEVICE)
    found: dict[str, Any] = {}
    room: dict[Any, str] = {"cpu": "40KB"} if ON_CPU else {0: "60KB", "cpu": "60KB"}
    for name, limits in {"auto": None, "limited": room}.items():
        model = AutoModelForCausalLM.from_pretrained(
            "saved", device_map="auto", max_memory=limits, offload_folder="off"
        )
        with torch.no_grad():
            logits = model(words).logits
        found[name] = {
            "map": {key: str(place) for key, place in getattr(model, "hf_device_map", {}).items()},
            "out": str(logits.device),
            "logits": float(logits.double().sum()),
            "words": model.generate(words, max_new_tokens=6, do_sample=False).tolist(),
        }
    return found


CASES: dict[str, Callable[[], Any]] = {
    **{
        name: partial(train, **options)
        for name, options in _PRECISIONS.items()
        if not (ON_CPU and name == "sharded")  # Accelerate shards on GPUs alone
    },
    "adapter": adapt,
    "device map": load,
}

if __name__ == "__main__":
    small.run(CASES)
