"""Fine-tuning of a language model of the transformers library; it contains nothing about pipelines.

pip install "pipepart[finetune]"
pipepart train recipe=finetune_hf                                                    a small model with random weights
pipepart train recipe=finetune_hf model.pretrained=my_folder data.path=chats.jsonl model.lora_rank=16 trainer=gpu

The model is built without memory; each stage reads its own weights from the safetensors files of the folder, and writes them
to such a folder at the end. See docs/finetuning.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from pipepart.lightning import save_weights
from recipes.adapters import adapted, merged, save_adapter
from recipes.hf_weights import HuggingFaceWeights, local_folder
from recipes.optimizers import Make, optimized
from recipes.tiny_hf import start_folder

__all__ = ["PACKED", "FineTune"]

Batch = Mapping[str, torch.Tensor]


class FineTune(L.LightningModule):
    """Any causal language model, by its folder or by its name on the Hugging Face hub; all weights or LoRA adapters."""

    def __init__(
        self,
        optimizer: Make,
        scheduler: Make | None = None,
        pretrained: str | None = None,
        dtype: str = "float32",
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        lora_rank: int = 0,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        lora_targets: str | list[str] = "all-linear",
        packing: bool = False,
        length: int = 128,
        folder: str | None = None,
    ) -> None:
        super().__init__()
        if dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"model.dtype={dtype!r}: expected float32, bfloat16, float16 or float64")
        self.optimizer, self.scheduler = optimizer, scheduler
        self.pretrained, self.weights_dtype, self.attention = pretrained, getattr(torch, dtype), attention
        self.gradient_checkpointing = gradient_checkpointing
        self.lora = {
            "r": lora_rank,
            "lora_alpha": lora_alpha,
            "lora_dropout": lora_dropout,
            "target_modules": lora_targets,
        }
        self.packing, self.length, self.folder = packing, length, folder
        self.model: Any = None
        self.only_adapters = lora_rank > 0
        """Whether state dicts leave out the weights of the folder, which no step changes."""

    # ---- the model and its weights

    def prepare_data(self) -> None:
        """Download the model, on one process of each host."""
        if self.pretrained is not None:
            local_folder(self.pretrained, download=True)

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.source = start_folder() if self.pretrained is None else local_folder(self.pretrained)
        config = AutoConfig.from_pretrained(self.source, local_files_only=True)
        self._check(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=self.weights_dtype, attn_implementation=self.attention
            )
        if self.packing:
            _check_packing(model)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.weights = HuggingFaceWeights(self.source, model)
        base = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.model = adapted(model, self.lora) if self.lora["r"] else model
        self.model.train()
        self.weights.rename(self)
        tensors = (*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False))
        self.base_names = frozenset(name for name, tensor in tensors if id(tensor) in base)
        """The names of the tensors of the folder, without those of adapters."""

    def configure_weights(self) -> Mapping[str, torch.Tensor | None]:
        """The weights by name: pipepart asks for those of its stage only."""
        return self.weights

    def _check(self, config: Any) -> None:
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        if most is not None and self.length > most:
            raise ValueError(f"data.length={self.length}, but the model has {most} positions (max_position_embeddings)")
        precision = str(self.trainer.precision) if self._trainer is not None else ""
        if precision.endswith("-true") and not precision.startswith(("32", "64")):
            raise ValueError(
                f"trainer.precision={precision} would also round the rotary frequencies. Use model.dtype=bfloat16 for weights "
                "in bfloat16, or trainer.precision=bf16-mixed"
            )
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                "the weights are quantized, which is not supported: use the folder of the original weights"
            )

    # ---- steps

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean over the tokens to learn of the whole batch."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        scores = self.model(**inputs, use_cache=False).logits[:, :-1]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return optimized([group for group in groups if group["params"]], self.optimizer, self.scheduler)

    # ---- checkpoints: with LoRA only the adapters, since the folder has the rest

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        state = super().state_dict(*args, **kwargs)
        if self.only_adapters and self.model is not None:
            for name in self.base_names:
                state.pop(f"{kwargs.get('prefix', '')}{name}", None)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = [name for name in result.missing_keys if not (self.only_adapters and name in self.base_names)]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(f"the checkpoint lacks {missing[:5]} and has unknown {result.unexpected_keys[:5]}")
        return type(result)(missing, result.unexpected_keys)

    # ---- the folders of the result

    def on_train_end(self) -> None:
        if self.folder is not None:
            self.save(Path(self.folder))

    def save(self, folder: Path) -> None:
        """Write a folder for `from_pretrained`, and with LoRA also FOLDER-adapter for peft. All ranks must call it."""
        if not self.lora["r"]:
            save_weights(self.trainer, folder, self.weights.written, extras=self._write_others)
            return
        adapters = save_adapter(self.trainer, self, folder.with_name(f"{folder.name}-adapter"))
        self.only_adapters = False
        try:
            save_weights(
                self.trainer,
                folder,
                lambda part: self.weights.written(merged(self, part, adapters)),
                extras=self._write_others,
            )
        finally:
            self.only_adapters = True

    def _write_others(self, folder: Path) -> None:
        """The configuration of the model, and the tokenizer: that of the data, or that of the folder."""
        network: PreTrainedModel = self.model.get_base_model() if self.lora["r"] else self.model
        network.config.architectures = [type(network).__name__]
        network.config.save_pretrained(folder)
        if isinstance(getattr(network, "generation_config", None), GenerationConfig):
            network.generation_config.save_pretrained(folder)
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(self.source, local_files_only=True)
        tokenizer.save_pretrained(folder)


PACKED = frozenset(
    ("cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gptj", "granite", "llama",
     "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3",
     "stablelm", "starcoder2")
)  # fmt: skip
"""Types of models that end attention where positions start again; a test measures each. Some others ignore it silently."""


def _check_packing(model: PreTrainedModel) -> None:
    """Refuse models in which conversations of one row would see each other."""
    kind, attention = model.config.model_type, model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        reason = f"model.attention={attention} takes boundaries in another form. Use sdpa or eager"
    elif kind not in PACKED:
        reason = f"the type {kind} is not among those that were found to end attention where positions start again"
    else:
        return
    raise ValueError(
        f"data.packing=true cannot be used with {type(model).__name__}, since conversations of one row could see each other: "
        f"{reason}, or use data.packing=false"
    )
