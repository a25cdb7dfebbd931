"""`notebook-accel merge-weights`: ordinary weights of a sharded checkpoint."""

from __future__ import annotations

import rich_click as click

from ..checkpointing import merge
from .estimate_memory import size_text
from .progress import Progress
from .refusal import refuse_errors


@click.command("merge-weights")
@click.argument("checkpoint_directory")
@click.argument("output_path")
@click.option(
    "--unsafe_serialization",
    "--unsafe-serialization",
    is_flag=True,
    help="Write pytorch_model.bin instead of model.safetensors.",
)
@click.option(
    "--remove_checkpoint_dir",
    "--remove-checkpoint-dir",
    is_flag=True,
    help="Remove the checkpoint once the weights are written and compared.",
)
@click.option(
    "--max_shard_size",
    "--max-shard-size",
    metavar="SIZE",
    help="Files of at most this size, such as 5GB [default: one file]",
)
@click.option("--force", is_flag=True, help="Replace weights that the output folder has already.")
def merge_weights(
    checkpoint_directory: str,
    output_path: str,
    unsafe_serialization: bool,
    remove_checkpoint_dir: bool,
    max_shard_size: str | None,
    force: bool,
) -> None:
    """Make ordinary weights of a sharded checkpoint.

    CHECKPOINT_DIRECTORY is what FSDP saves as SHARDED_STATE_DICT (torch.distributed.checkpoint), such as
    pytorch_model_fsdp_0, or a folder of weights with an index. The weights go to the folder OUTPUT_PATH, whole or not
    at all. All of them are in memory at once. Merge checkpoints that you trust only: reading runs pickle.
    """
    with refuse_errors(), Progress(f"merging {checkpoint_directory}"):
        files = merge.merge_weights(
            checkpoint_directory,
            output_path,
            safe_serialization=not unsafe_serialization,
            remove_checkpoint_dir=remove_checkpoint_dir,
            max_shard_size=max_shard_size,
            overwrite=force,
        )
    for path in files:
        click.echo(f"{path}: {size_text(path.stat().st_size)}")
    if remove_checkpoint_dir:
        click.echo(f"{checkpoint_directory} was removed")
