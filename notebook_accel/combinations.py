"""What cannot be combined: one table, of which the errors are made.

Each row is checked before a weight is moved, or when what it names is asked for.
`python -m notebook_accel.combinations docs/combinations.md` writes the table of that page.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BEGIN: Final = (
    "<!-- combinations: written by python -m notebook_accel.combinations docs/combinations.md -->\n"
)
END: Final = "<!-- end of combinations -->\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Two things that cannot be had together.

    Attributes:
        what: the first of them, as users name it.
        beside: the second.
        reason: why not, as a clause.
        instead: what to do, as an imperative.
        kind: class of the error.
    """

    what: str
    beside: str
    reason: str
    instead: str
    kind: type[Exception] = ValueError

    def error(self, given: str = "") -> Exception:
        """Return the error to raise.

        Args:
            given: the values of this run, where the names do not say them.
        """
        shown = f" ({given})" if given else ""
        return self.kind(f"{self.what} with {self.beside}{shown}: {self.reason}. {self.instead}")


TABLE: Final[Mapping[str, Combination]] = {
    "deepspeed, fsdp": Combination(
        what="DeepSpeed",
        beside="FSDP",
        reason="each spreads a model over the processes",
        instead="Leave one of them out",
    ),
    "deepspeed, parallelism": Combination(
        what="DeepSpeed",
        beside="ParallelismConfig",
        reason="each spreads a model over the processes",
        instead="Leave one of them out",
    ),
    "deepspeed, compiler": Combination(
        what="DeepSpeed",
        beside="dynamo_backend",
        reason="its engine is no model that can be compiled from outside",
        instead="Call compile() of the prepared model",
    ),
    "deepspeed, fp8": Combination(
        what="DeepSpeed",
        beside="mixed_precision='fp8'",
        reason="DeepSpeed knows 'no', 'fp16' and 'bf16' only",
        instead="Choose 'bf16', or FSDP",
    ),
    "deepspeed, fp16 of the device": Combination(
        what="DeepSpeed",
        beside="mixed_precision='fp16' on this device",
        reason="DeepSpeed cannot train in it there",
        instead="Choose 'bf16' or 'no'",
    ),
    "deepspeed, losses": Combination(
        what="DeepSpeed with several models",
        beside="losses that are scaled (fp16), or zero_stage=0",
        reason="DeepSpeed cannot tell which model a loss belongs to",
        instead="Choose 'bf16' or 'no', and zero_stage 1, 2 or 3",
    ),
    "deepspeed, join": Combination(
        what="DeepSpeed",
        beside="join_uneven_inputs",
        reason="it cannot go on with fewer processes",
        instead="Leave join_uneven_inputs out, and even_batches as it is",
    ),
    "deepspeed, clip_grad_value_": Combination(
        what="DeepSpeed",
        beside="clip_grad_value_",
        reason="it does not clip single elements of gradients",
        instead="Call clip_grad_norm_",
    ),
    "deepspeed, norm": Combination(
        what="DeepSpeed",
        beside="another norm_type than 2",
        reason="DeepSpeed clips by the 2-norm only",
        instead="Leave norm_type out",
    ),
    "deepspeed, closure": Combination(
        what="DeepSpeed",
        beside="a closure for step()",
        reason="its optimizers take none",
        instead="Call step() after backward()",
    ),
    "dummies": Combination(
        what="DummyOptim or DummyScheduler",
        beside="training without DeepSpeed",
        reason="it stands for what DeepSpeed's config has",
        instead="Give Accelerator a deepspeed_plugin, or prepare an optimizer of torch",
    ),
    "no shard, options": Combination(
        what="NO_SHARD",
        beside="options of sharding",
        reason="it is DistributedDataParallel, which has none of them",
        instead="Leave them out, or choose FULL_SHARD",
    ),
    "no shard, dp_shard": Combination(
        what="NO_SHARD",
        beside="dp_shard_size above 1",
        reason="the one shards and the other does not",
        instead="Choose FULL_SHARD",
    ),
    "recompute, no blocks": Combination(
        what="activation_checkpointing",
        beside="auto_wrap_policy NO_WRAP",
        reason="blocks are computed again, and this policy makes none",
        instead="Choose TRANSFORMER_BASED_WRAP or SIZE_BASED_WRAP",
    ),
    "first loads, own weights": Combination(
        what="cpu_ram_efficient_loading=True",
        beside="sync_module_states=False",
        reason="the one leaves the weights to rank 0, the other keeps them there",
        instead="Leave one of them out",
    ),
    "local state": Combination(
        what="state_dict_type LOCAL_STATE_DICT",
        beside="any checkpoint",
        reason="another number of processes could not load it",
        instead="Choose SHARDED_STATE_DICT or FULL_STATE_DICT",
    ),
    "precision, policy": Combination(
        what="mixed_precision",
        beside="a mixed_precision_policy of another half precision",
        reason="they contradict each other",
        instead="Leave one out",
    ),
    "shards, join": Combination(
        what="FSDP or tensor parallel",
        beside="join_uneven_inputs",
        reason="processes that share weights cannot go on with fewer of them",
        instead="Leave join_uneven_inputs out, and even_batches as it is",
    ),
    "shards, optimizer": Combination(
        kind=NotImplementedError,
        what="FSDP or tensor parallel",
        beside="Adafactor, LBFGS or Rprop of torch.optim",
        reason="their steps, or going on from a checkpoint, fail on weights of which each process has a part",
        instead="Choose another optimizer, such as AdamW, or DistributedDataParallel",
    ),
    "local sgd, no whole model": Combination(
        kind=NotImplementedError,
        what="LocalSGD",
        beside="FSDP, tensor parallel or DeepSpeed",
        reason="it needs the whole model in every process",
        instead="Train with DistributedDataParallel",
    ),
    "empty weights, split": Combination(
        what="a model on the meta device",
        beside="tensor parallel, ignored_modules, or weights of other classes than torch's",
        reason="each process needs values of its own for them",
        instead="Build it on the CPU",
    ),
    "copies, split": Combination(
        what="dp_replicate_size above 1",
        beside="tp_size or cp_size without dp_shard_size",
        reason="copies with tensor or context parallel need sharding too",
        instead="Set dp_shard_size above 1, or dp_replicate_size to 1",
    ),
    "copies, fsdp": Combination(
        what="dp_replicate_size for all processes",
        beside="FSDP",
        reason="it leaves no processes to shard over",
        instead="Set dp_shard_size above 1",
    ),
    "tp plugin, parallelism": Combination(
        what="torch_tp_plugin",
        beside="parallelism_config",
        reason="both were given, and both say how layers are split",
        instead="Set tp_size in the latter",
    ),
    "sequence parallel": Combination(
        kind=NotImplementedError,
        what="sp_size above 1",
        beside="any strategy",
        reason="DeepSpeed's sequence parallel (Ulysses, ALST) is not supported",
        instead="Leave sp_size out; cp_size with FSDP splits sequences, on GPUs",
    ),
    "cp, sp": Combination(
        what="cp_size above 1",
        beside="sp_size above 1",
        reason="both split the sequences, and exclude each other",
        instead="Set one of them to 1",
    ),
    "cp, cpu": Combination(
        kind=NotImplementedError,
        what="cp_size above 1",
        beside="CPUs",
        reason="torch's context parallel has no attention for CPUs",
        instead="Run it on GPUs",
    ),
    "cp, recurrent": Combination(
        what="cp_size above 1",
        beside="layers with a state that goes from token to token",
        reason="each process would begin that state anew in its part of a sequence, which no loss shows",
        instead="Leave cp_size out, and use FSDP",
    ),
    "cp, windows": Combination(
        what="cp_size above 1",
        beside="layers that see less than all earlier tokens",
        reason="context parallel knows full causal attention only",
        instead="Leave cp_size out, and use tensor parallel or FSDP",
    ),
    "fp8 recipe, precision": Combination(
        what="AORecipeKwargs",
        beside="another mixed_precision than 'fp8'",
        reason="it says how layers are converted to float8",
        instead="Set mixed_precision='fp8', or leave it out",
    ),
    "fp8, sharded": Combination(
        what="mixed_precision='fp8'",
        beside="weights that are sharded already",
        reason="layers have to be converted before that",
        instead="Let prepare shard the model, or call convert_to_float8_training first",
    ),
    "fp8, device": Combination(
        what="mixed_precision='fp8'",
        beside="other devices than CUDA GPUs and CPUs",
        reason="torchao has no float8 layers for them",
        instead="Choose bf16",
    ),
    "lomo, processes": Combination(
        what="a LOMO optimizer",
        beside="several processes",
        reason="it changes weights before gradients are averaged",
        instead="Run 1 process, or choose another optimizer",
    ),
    "lomo, fp16": Combination(
        what="a LOMO optimizer",
        beside="mixed_precision='fp16'",
        reason="it knows no loss scale",
        instead="Choose bf16",
    ),
    "closure, fp16": Combination(
        what="a closure for step()",
        beside="mixed_precision='fp16'",
        reason="an overflow would have to skip a part of the step",
        instead="Choose bf16, or call step() after backward()",
    ),
    "device map, processes": Combination(
        what="a model that a device map spread over devices",
        beside="several processes",
        reason="each of them would need all these devices",
        instead="Load it without device_map, or run one process",
    ),
    "xla, sharded": Combination(
        what="XLA devices",
        beside="FSDP or ParallelismConfig",
        reason="torch's fully_shard does not work there",
        instead="Leave them out",
    ),
    "xla, fp16": Combination(
        what="XLA devices",
        beside="mixed_precision='fp16'",
        reason="they do not compute in it",
        instead="Choose bf16",
    ),
    "xla, join": Combination(
        what="XLA devices",
        beside="join_uneven_inputs",
        reason="their processes cannot go on with fewer of them",
        instead="Leave join_uneven_inputs out, and even_batches as it is",
    ),
    "downcast, precision": Combination(
        what="downcast_bf16",
        beside="another mixed_precision than 'bf16'",
        reason="it stores float32 as bfloat16",
        instead="Leave it out, or set mixed_precision='bf16'",
    ),
    "dispatch, not placed": Combination(
        what="dispatch_batches=True",
        beside="put_on_device=False",
        reason="batches that rank 0 hands out are put on the device",
        instead="Set put_on_device=True",
    ),
    "dispatch, sharded": Combination(
        what="dispatch_batches=True",
        beside="a data loader that is shared out already",
        reason="rank 0 would hand out its own share, and nobody reads the others",
        instead="Set dispatch_batches=False, or give all processes the same loader",
    ),
    "stateful, own iteration": Combination(
        what="use_stateful_dataloader",
        beside="a data loader whose class iterates in its own way",
        reason="torchdata's loader iterates in its place",
        instead="Prepare it without use_stateful_dataloader, or derive from DataLoader without an __iter__ of your own",
        kind=TypeError,
    ),
    "stateful, other processes": Combination(
        what="use_stateful_dataloader",
        beside="the middle of an epoch of another number of processes, or of another batch size",
        reason="a stateful loader counts its own batches",
        instead="Prepare it without use_stateful_dataloader, or start a new epoch",
    ),
    "own shards, other processes": Combination(
        what="a data loader whose readers have parts of their own",
        beside="the middle of an epoch of other readers",
        reason="the samples that were read are not known",
        instead="Go on with as many processes and num_workers as before, or start a new epoch",
    ),
}
"""By a short name; those that meet in a strategy are together."""


def refuse(name: str, given: str = "") -> Exception:
    """Return the error of a row.

    Args:
        name: of the row.
        given: the values of this run, where the row does not say them.
    """
    return TABLE[name].error(given)


def as_markdown() -> str:
    """Return the table of the page, a line for each row."""
    lines = [f"| {row.what} | {row.beside} | {row.reason} | {row.instead} |\n" for row in TABLE.values()]
    return "| what | with | why not | instead |\n|---|---|---|---|\n" + "".join(lines)


def write_into(text: str) -> str:
    """Return a text with the table in place of the one that it has between its two marks.

    Args:
        text: of docs/combinations.md.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no {((begin and END) or BEGIN).strip()}")
    return f"{before}{BEGIN}\n{as_markdown()}\n{END}{after}"


def main(path: str) -> None:
    """Write the table into a file."""
    file = Path(path)
    file.write_text(write_into(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
