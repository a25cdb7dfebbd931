"""What the scripts share: small models and tokenizers with random weights, and the way from their cases to a file."""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

WORDS = [
    *("the", "a", "cat", "dog", "sees", "eats", "runs", "old", "new", "red", "and"),
    *("not", "very", ".", "?", "yes", "no", "who", "what", "here"),
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TEMPLATE = "{% for m in messages %}{{ '<s> ' + m['content'] + ' </s> ' }}{% endfor %}"


def run(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Run all cases in this program, or those that the command line names, and write what each gave for `sides`.

    Args:
        cases: by their names.
    """
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # no case needs it, and its import takes seconds
    run_cases({name: cases[name] for name in sys.argv[1:] or cases})


def run_module(name: str) -> None:
    """Run all cases of a module in this process; see `run`.

    Args:
        name: of a module of `scripts`.
    """
    run_cases(importlib.import_module(name).CASES)


def run_cases(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Run cases with the Accelerate that this process imports, and write what each gave.

    Args:
        cases: by their names.
    """
    import accelerate
    import torch
    from accelerate.state import AcceleratorState, GradientState

    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, case in cases.items():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        random.seed(0)
        torch.manual_seed(0)
        found[name] = case()
        gc.collect()
    text = json.dumps({"library": accelerate.__file__, "cases": found})
    Path(f"rank{os.environ.get('RANK', 0)}.json").write_text(text)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def make_tokenizer() -> Any:
    """Return a fast tokenizer of `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, begin, end, unknown = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=pad,
        bos_token=begin,
        eos_token=end,
        unk_token=unknown,
        chat_template=TEMPLATE,
    )


def make_llama_config(**more: Any) -> Any:
    """Return the config of a Llama with two small layers.

    Args:
        more: fields of it.
    """
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaConfig(**{**sizes, **ids, **more})


def make_llama(**more: Any) -> Any:
    """Return a small causal language model with random weights, the same in each process.

    Args:
        more: fields of its config.
    """
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(make_llama_config(**more))


def save_own(folder: str, *parts: Any, **options: Any) -> str:
    """Save models and tokenizers in a folder of this process alone, and return the folder.

    Processes do not wait for each other: without an Accelerator, Accelerate takes each of several on CPUs for the only
    one, and all would write the same files.

    Args:
        folder: where to; the rank follows.
        parts: have `save_pretrained`.
        options: its arguments.
    """
    own = f"{folder}{os.environ.get('RANK', 0)}"
    # Transformers would let only the first process save
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        for part in parts:
            part.save_pretrained(own, **options)
    return own


def make_sentences(number: int, length: int = 6, seed: int = 0) -> list[str]:
    """Return sentences of random words, the same in each process.

    Args:
        number: of sentences.
        length: the most words of one; it has half of them at least.
        seed: another gives other sentences.
    """
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(length // 2, length))) for _ in range(number)]


def tell_log(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of a trainer's log without what is measured in seconds.

    Args:
        entries: such as `trainer.state.log_history`.
    """
    timed = ("runtime", "per_second", "time", "flos", "tps", "mfu")
    return [{k: v for k, v in entry.items() if not any(word in k for word in timed)} for entry in entries]


def list_files(folder: str | Path) -> list[str]:
    """Return the names of all files below a folder, sorted.

    Args:
        folder: of a checkpoint.
    """
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def sum_weights(model: Any) -> dict[str, float]:
    """Return the sum of each weight of a model.

    Args:
        model: any module.
    """
    return {name: float(value.double().sum()) for name, value in model.state_dict().items()}
