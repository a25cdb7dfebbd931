"""TRL's trainers with small models: supervised, by preferences, of rewards, and by reinforcement."""

from __future__ import annotations

import os
from typing import Any

from tests.libraries.small import (
    list_files,
    make_llama,
    make_llama_config,
    make_sentences,
    make_tokenizer,
    run,
    save_own,
    sum_weights,
    tell_log,
)

COMMON: dict[str, Any] = {
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 1,
    "bf16": False,
    "dataloader_pin_memory": False,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 2e-3,
    "logging_steps": 1,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 3,
}


def train(trainer: Any, folder: str) -> dict[str, Any]:
    """Train, and return what can be compared."""
    trainer.train()
    trainer.save_model(f"{folder}/last")
    trainer.accelerator.wait_for_everyone()
    return {
        "log": tell_log(trainer.state.log_history),
        "weights": sum_weights(trainer.accelerator.unwrap_model(trainer.model)),
        "files": list_files(folder),
        "world": trainer.accelerator.num_processes,
    }


def supervise() -> dict[str, Any]:
    """SFTTrainer, evaluated."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir="sft",
        max_length=16,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        **COMMON,
    )
    trainer = SFTTrainer(
        model=make_llama(),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": make_sentences(24)}),
        eval_dataset=Dataset.from_dict({"text": make_sentences(7, seed=1)}),
        processing_class=make_tokenizer(),
    )
    return train(trainer, "sft")


def supervise_adapter() -> dict[str, Any]:
    """SFTTrainer with packed sequences and LoRA."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir="lora",
        max_length=16,
        packing=True,
        packing_strategy="wrapped",
        eval_packing=False,
        **COMMON,
    )
    trainer = SFTTrainer(
        model=make_llama(),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": make_sentences(60)}),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    return train(trainer, "lora")


def make_preferences(number: int) -> Any:
    """Return prompts with a better and a worse answer, read from a folder that the first process writes."""
    from accelerate import PartialState
    from datasets import Dataset, load_from_disk

    folder = f"preferences{number}"
    with PartialState().main_process_first():
        if not os.path.exists(folder):
            prompts = [f"{text} " for text in make_sentences(number)]
            answers = {"chosen": make_sentences(number, seed=1), "rejected": make_sentences(number, seed=2)}
            Dataset.from_dict({"prompt": prompts, **answers}).save_to_disk(folder)
    return load_from_disk(folder)


def prefer() -> dict[str, Any]:
    """DPOTrainer, with the reference's log probabilities computed first."""
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=make_llama(),
        ref_model=make_llama(),
        args=DPOConfig(output_dir="dpo", max_length=16, precompute_ref_log_probs=True, **COMMON),
        train_dataset=make_preferences(12),
        processing_class=make_tokenizer(),
    )
    return train(trainer, "dpo")


def prefer_beside() -> dict[str, Any]:
    """DPOTrainer with a reference model beside that follows the trained one."""
    from trl import DPOConfig, DPOTrainer

    more = {**COMMON, "save_strategy": "no"}
    trainer = DPOTrainer(
        model=make_llama(),
        ref_model=make_llama(),
        args=DPOConfig(
            output_dir="beside", max_length=16, sync_ref_model=True, ref_model_sync_steps=2, **more
        ),
        train_dataset=make_preferences(12),
        eval_dataset=make_preferences(5),
        processing_class=make_tokenizer(),
    )
    found = train(trainer, "beside")
    return {**found, "evaluated": tell_log([trainer.evaluate()])}


def reward() -> dict[str, Any]:
    """RewardTrainer."""
    import torch
    from datasets import Dataset
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(0)
    trainer = RewardTrainer(
        model=LlamaForSequenceClassification(make_llama_config(num_labels=1)),
        args=RewardConfig(output_dir="reward", max_length=16, **COMMON),
        train_dataset=Dataset.from_dict(
            {"chosen": make_sentences(12, seed=1), "rejected": make_sentences(12, seed=2)}
        ),
        processing_class=make_tokenizer(),
    )
    return train(trainer, "reward")


def reinforce() -> dict[str, Any]:
    """GRPOTrainer with a function that rewards words, and a model that is held near a reference."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def count_cats(completions: list[str], **_: Any) -> list[float]:
        return [float(text.count("cat")) + len(text) / 50 for text in completions]

    start = save_own("start", make_llama())  # the reference is read from where the model came from
    more = {**COMMON, "max_steps": 2, "per_device_train_batch_size": 4}
    arguments = GRPOConfig(
        output_dir="grpo", num_generations=4, max_completion_length=6, beta=0.1, num_iterations=2, **more
    )
    trainer = GRPOTrainer(
        model=start,
        reward_funcs=count_cats,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": make_sentences(8)}),
        processing_class=make_tokenizer(),
    )
    return train(trainer, "grpo")


CASES = {
    "SFT": supervise,
    "SFT with LoRA": supervise_adapter,
    "DPO": prefer,
    "DPO beside a reference": prefer_beside,
    "reward": reward,
    "GRPO": reinforce,
}
LIBRARIES = (
    "datasets",
    "peft",
    "trl:DPOTrainer",
    "trl:GRPOTrainer",
    "trl:RewardTrainer",
    "trl:SFTTrainer",
    "transformers:LlamaForCausalLM",
)
"""What a host imports before it forks; see `hosts.Job`."""

if __name__ == "__main__":
    run(CASES)
