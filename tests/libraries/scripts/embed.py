"""sentence-transformers: its trainer with a small encoder, its samplers, evaluation and saving."""

from __future__ import annotations

from typing import Any

from tests.libraries.small import (
    SPECIAL,
    WORDS,
    list_files,
    make_sentences,
    make_tokenizer,
    run,
    save_own,
    sum_weights,
    tell_log,
)


def make_encoder() -> Any:
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(SPECIAL) + len(WORDS), max_position_embeddings=32, **sizes)
    folder = save_own("encoder", BertModel(config), make_tokenizer())
    words = models.Transformer(folder, max_seq_length=16)
    return SentenceTransformer(modules=[words, models.Pooling(32)], device="cpu")


def make_arguments(folder: str, **more: Any) -> Any:
    from sentence_transformers import SentenceTransformerTrainingArguments

    common: dict[str, Any] = {
        "output_dir": folder,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 2,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "max_steps": 5,
        "save_steps": 3,
    }
    return SentenceTransformerTrainingArguments(**{**common, **more})


def tell(trainer: Any, folder: str) -> dict[str, Any]:
    trainer.save_model(f"{folder}/last")
    trainer.accelerator.wait_for_everyone()
    return {
        "log": tell_log(trainer.state.log_history),
        "weights": sum_weights(trainer.accelerator.unwrap_model(trainer.model)),
        "files": list_files(folder),
        "world": trainer.accelerator.num_processes,
    }


def rank_pairs() -> dict[str, Any]:
    """In-batch negatives without duplicates, with an evaluator."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, losses
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.training_args import BatchSamplers

    model = make_encoder()
    data = Dataset.from_dict({"anchor": make_sentences(40), "positive": make_sentences(40, seed=1)})
    left, right = make_sentences(9, seed=3), make_sentences(9, seed=4)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=make_arguments(
            "pairs", batch_sampler=BatchSamplers.NO_DUPLICATES, eval_strategy="steps", eval_steps=2
        ),
        train_dataset=data,
        eval_dataset=data.select(range(11)),
        loss=losses.MultipleNegativesRankingLoss(model, gather_across_devices=True),
        evaluator=EmbeddingSimilarityEvaluator(left, right, [i / 9 for i in range(9)], write_csv=False),
    )
    trainer.train()
    return tell(trainer, "pairs")


def learn_two_sets() -> dict[str, Any]:
    """Two data sets in turns with losses of their own, accumulated, and resumed from a checkpoint."""
    from datasets import Dataset, DatasetDict
    from sentence_transformers import SentenceTransformerTrainer, losses
    from sentence_transformers.training_args import MultiDatasetBatchSamplers

    pairs = {"sentence1": make_sentences(30), "sentence2": make_sentences(30, seed=1)}
    scored = Dataset.from_dict({**pairs, "score": [i / 30 for i in range(30)]})
    triplets = {
        name: make_sentences(20, seed=seed) for seed, name in enumerate(("anchor", "positive", "negative"))
    }
    sets = DatasetDict({"scored": scored, "triplets": Dataset.from_dict(triplets)})

    def make_trainer() -> Any:
        model = make_encoder()
        return SentenceTransformerTrainer(
            model=model,
            args=make_arguments(
                "sets",
                gradient_accumulation_steps=2,
                multi_dataset_batch_sampler=MultiDatasetBatchSamplers.ROUND_ROBIN,
            ),
            train_dataset=sets,
            loss={
                "scored": losses.CoSENTLoss(model),
                "triplets": losses.MultipleNegativesRankingLoss(model),
            },
        )

    trainer = make_trainer()
    trainer.train()
    resumed = make_trainer()
    resumed.train(resume_from_checkpoint="sets/checkpoint-3")
    return {**tell(trainer, "sets"), "resumed": tell_log(resumed.state.log_history)}


CASES = {"pairs": rank_pairs, "two sets": learn_two_sets}
LIBRARIES = ("datasets", "sentence_transformers", "transformers:BertModel")
"""What a host imports before it forks; see `hosts.Job`."""

if __name__ == "__main__":
    run(CASES)
