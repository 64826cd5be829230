"""A Llama of the transformers library, unchanged; it contains nothing about pipelines.

pip install "pipepart[zoo]"
pipepart train recipe=llama_hf
pipepart train recipe=llama_hf model.pretrained=my_llama_folder data=tokens data.path=train.bin trainer=gpu
"""

from __future__ import annotations

import lightning as L
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.optimizers import Make, decayed, optimized

__all__ = ["LlamaModule"]

Batch = tuple[torch.Tensor, torch.Tensor]


class LlamaModule(L.LightningModule):
    """A new small model, or one from your own folder (`pretrained`)."""

    def __init__(
        self,
        optimizer: Make,
        scheduler: Make | None = None,
        vocabulary: int = 256,
        context: int = 64,
        width: int = 96,
        depth: int = 4,
        heads: int = 4,
        key_value_heads: int = 2,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        self.model: LlamaForCausalLM
        if pretrained is not None:
            self.model = LlamaForCausalLM.from_pretrained(pretrained, local_files_only=True, use_safetensors=True)
        else:
            self.model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=vocabulary,
                    max_position_embeddings=context,
                    hidden_size=width,
                    intermediate_size=3 * width,
                    num_hidden_layers=depth,
                    num_attention_heads=heads,
                    num_key_value_heads=key_value_heads,
                    use_cache=False,
                )
            )
        self.optimizer, self.scheduler = optimizer, scheduler

    def step(self, batch: Batch) -> torch.Tensor:
        x, y = batch
        scores = self.model(input_ids=x, use_cache=False).logits
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.step(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/loss", self.step(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimized(decayed(self), self.optimizer, self.scheduler)
