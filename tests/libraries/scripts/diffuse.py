"""diffusers: a training loop as its examples have it, and pipelines whose parts are offloaded."""

from __future__ import annotations

import os
from typing import Any

from tests.libraries.small import list_files, run, save_own, sum_weights

OWN = ("logs/", "random_states", "notebook_accel.json", "sampler.bin")
"""Words in the names of files that differ: those with a time or a rank in them, and what our checkpoints have more."""


def make_unet() -> Any:
    import torch
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )


def make_loop(folder: str) -> dict[str, Any]:
    """Return what a training loop has: all is prepared, and hooks save and load models in diffusers' format."""
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import ProjectConfiguration, set_seed
    from diffusers import UNet2DModel
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel
    from torch.utils.data import DataLoader

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        mixed_precision="bf16",
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=f"{folder}/logs"),
        kwargs_handlers=[InitProcessGroupKwargs()],
    )
    set_seed(5)
    model = make_unet()
    ema = EMAModel(model.parameters(), use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            ema.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for one in models:
                accelerator.unwrap_model(one).save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load(models: list[Any], input_dir: str) -> None:
        stored = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel)
        ema.load_state_dict(stored.state_dict())
        for _ in range(len(models)):
            one = models.pop()
            stored_model = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            accelerator.unwrap_model(one).load_state_dict(stored_model.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(list(images), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    scheduler = get_scheduler(
        "cosine",
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=12 * accelerator.num_processes,
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if accelerator.is_main_process:
        accelerator.init_trackers("diffusion", config={"lr": 1e-3})
    return {
        "accelerator": accelerator,
        "model": model,
        "ema": ema,
        "optimizer": optimizer,
        "loader": loader,
        "scheduler": scheduler,
    }


def run_epoch(loop: dict[str, Any], skipped: int = 0) -> list[Any]:
    """Train for an epoch, and return losses and learning rates."""
    import torch
    from diffusers import DDPMScheduler

    accelerator, model = loop["accelerator"], loop["model"]
    noise_scheduler = DDPMScheduler(num_train_timesteps=20)
    found = []
    total = 0.0
    draw = torch.Generator().manual_seed(11 + accelerator.process_index)
    loader = accelerator.skip_first_batches(loop["loader"], skipped) if skipped else loop["loader"]
    for clean in loader:
        noise = torch.randn(clean.shape, generator=draw)
        steps = torch.randint(0, 20, (len(clean),), generator=draw)
        with accelerator.accumulate(model):
            predicted = model(noise_scheduler.add_noise(clean, noise, steps), steps).sample
            loss = torch.nn.functional.mse_loss(predicted.float(), noise)
            total += accelerator.gather(loss.repeat(2)).mean().item() / 2
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            loop["optimizer"].step()
            loop["scheduler"].step()
            loop["optimizer"].zero_grad()
        if accelerator.sync_gradients:
            loop["ema"].step(model.parameters())
            logs = {"loss": total, "lr": loop["scheduler"].get_last_lr()[0]}
            found.append(logs)
            accelerator.log(logs, step=len(found))
            total = 0.0
    accelerator.wait_for_everyone()
    return found


def train() -> dict[str, Any]:
    """Train, save, load into another loop, and go on."""
    folder = "diffusion"
    first = make_loop(folder)
    accelerator = first["accelerator"]
    losses = run_epoch(first)
    accelerator.save_state(f"{folder}/checkpoint-1")
    accelerator.wait_for_everyone()
    before = sum_weights(accelerator.unwrap_model(first["model"]))
    later = run_epoch(first, skipped=2)
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.free_memory()
    second = make_loop(folder)
    accelerator = second["accelerator"]
    accelerator.load_state(f"{folder}/checkpoint-1")
    loaded = sum_weights(accelerator.unwrap_model(second["model"]))
    second["ema"].store(second["model"].parameters())
    second["ema"].copy_to(second["model"].parameters())
    averaged = sum_weights(accelerator.unwrap_model(second["model"]))
    second["ema"].restore(second["model"].parameters())
    is_alike = run_epoch(second, skipped=2) == later
    for tracker in accelerator.trackers:
        tracker.finish()
    return {
        "losses": losses,
        "later": later,
        "own": {"is_alike": is_alike},
        "is_loaded": before == loaded,
        "averaged": averaged,
        "files": [name for name in list_files(folder) if not any(word in name for word in OWN)],
        "world": accelerator.num_processes,
    }


def make_pipeline() -> Any:
    """Return a small text-to-image pipeline with random weights."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    from tests.libraries.small import make_tokenizer

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 8
    unet = UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )
    vae = AutoencoderKL(
        block_out_channels=[8, 16],
        in_channels=3,
        out_channels=3,
        norm_num_groups=4,
        down_block_types=["DownEncoderBlock2D", "DownEncoderBlock2D"],
        up_block_types=["UpDecoderBlock2D", "UpDecoderBlock2D"],
        latent_channels=4,
    )
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=tokenizer,
        scheduler=DDIMScheduler(num_train_timesteps=20, steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def draw(pipeline: Any) -> float:
    """Return the sum of an image."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        "the cat sees",
        num_inference_steps=2,
        height=16,
        width=16,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    )
    return float(made.images.sum())


def tell_hooks(pipeline: Any) -> dict[str, Any]:
    """Return the hooks in each part."""
    found = {}
    for name, part in pipeline.components.items():
        if hasattr(part, "named_modules"):
            hooks = [type(m._hf_hook).__name__ for _, m in part.named_modules() if hasattr(m, "_hf_hook")]
            found[name] = [hooks[:3], len(hooks), str(part.device)]
    return found


def offload() -> dict[str, Any]:
    """Pipelines as they are, and with parts that come to the device one by one."""
    plain = make_pipeline()
    found: dict[str, Any] = {"plain": draw(plain)}
    pipeline = make_pipeline()
    pipeline.enable_model_cpu_offload(device="cpu")
    found["offloaded"] = [draw(pipeline), tell_hooks(pipeline), draw(pipeline)]
    pipeline.maybe_free_model_hooks()
    pipeline.remove_all_hooks()
    return {**found, "removed": [tell_hooks(pipeline), draw(pipeline)]}


def offload_weights() -> dict[str, Any]:
    """A pipeline whose weights come to the device one by one; with this torch, Accelerate cannot."""
    import accelerate

    if "notebook_accel" not in str(accelerate.__file__):
        return {}
    pipeline = make_pipeline()
    pipeline.enable_sequential_cpu_offload(device="cpu")
    found = {"plain": draw(make_pipeline()), "images": [draw(pipeline), draw(pipeline)]}
    places = {str(value.device) for value in pipeline.unet.parameters()}
    pipeline.remove_all_hooks()
    return {**found, "places": sorted(places), "removed": [tell_hooks(pipeline)["unet"], draw(pipeline)]}


def load_pipeline() -> dict[str, Any]:
    """A pipeline that is saved and loaded, spread by a device map; and a model that is read with one."""
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    folder = save_own("pipeline", make_pipeline(), max_shard_size="20KB")
    offload_folder = f"offload{os.environ.get('RANK', 0)}"
    options: dict[str, Any] = {"safety_checker": None}
    found: dict[str, Any] = {"files": list_files(folder)}
    for key, more in {
        "plain": {},
        "whole": {"low_cpu_mem_usage": False},
        "cpu": {"device_map": "cpu"},
    }.items():
        pipeline = StableDiffusionPipeline.from_pretrained(folder, **options, **more)
        found[key] = [draw(pipeline), str(getattr(pipeline, "hf_device_map", None))]
    where = {"": "cpu"}
    unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", device_map=where)
    found["unet"] = [sum_weights(unet), str(unet.hf_device_map)]
    offloaded = UNet2DConditionModel.from_pretrained(
        folder,
        subfolder="unet",
        device_map={"": "disk"},
        offload_folder=offload_folder,
        offload_state_dict=True,
    )
    found["disk"] = [str(offloaded.hf_device_map), list_files(offload_folder)]
    return found


CASES = {"train": train, "offload": offload, "offload weights": offload_weights, "load": load_pipeline}
LIBRARIES = (
    "diffusers:StableDiffusionPipeline",
    "diffusers:UNet2DModel",
    "torch.utils.tensorboard",
    "transformers:CLIPTextModel",
)
"""What a host imports before it forks; see `hosts.Job`."""

if __name__ == "__main__":
    run(CASES)
