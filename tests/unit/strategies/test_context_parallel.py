"""Attention without masks, as torch's context parallel needs it; that itself has no attention for CPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from notebook_accel.strategies.context_parallel import use_causal_attention

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
}


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def test_attention_is_causal_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = make(), make()
    use_causal_attention(model)
    masks = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def note(*args: Any, **kwargs: Any) -> torch.Tensor:
        masks.append((kwargs.get("attn_mask"), kwargs["is_causal"]))
        return attend(*args, **kwargs)

    tokens = torch.arange(12).reshape(2, 6)
    padding = torch.ones(2, 6, dtype=torch.long)
    padding[1, 4:] = 0
    expected = plain(tokens, attention_mask=padding).logits
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    found = model(tokens, attention_mask=padding).logits
    assert masks == [(None, True)] * 2
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1, :4], expected[1, :4], msg="tokens before the padding see none of it")


def test_a_mask_that_means_more_is_refused() -> None:
    gemma = transformers.Gemma2Config(
        **SIZES | {"attn_implementation": "eager"}, head_dim=8, sliding_window=4
    )
    with pytest.raises(
        ValueError,
        match=r"has layers with sliding_attention\): context parallel knows full causal attention only",
    ):
        use_causal_attention(transformers.Gemma2ForCausalLM(gemma))
    mistral = transformers.MistralConfig(**SIZES, sliding_window=4)
    with pytest.raises(ValueError, match="MistralForCausalLM has layers with sliding_attention"):
        use_causal_attention(transformers.MistralForCausalLM(mistral))


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "hybrid_mamba", "conv"])
def test_layers_with_a_state_are_refused(kind: str) -> None:
    """Each process would begin the state anew in its part of a sequence, and no loss shows that."""
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(layer_types=["full_attention", kind])  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=rf"Linear has layers with {kind}\): each process would begin that state anew"
    ):
        use_causal_attention(model)
    model.config = SimpleNamespace(layer_types=["full_attention"])  # type: ignore[assignment]
    use_causal_attention(model)
