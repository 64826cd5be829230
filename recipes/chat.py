"""Conversations for language models: a file of messages, turned into tokens by the chat template of the tokenizer.

Each line of the file is one conversation: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}.
Only the tokens of the assistant are learned; all others have the label -100.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from recipes.hf_weights import local_folder
from recipes.tiny_hf import start_folder

__all__ = ["ChatData", "Conversation", "encode", "pack", "packed", "padded"]

_NOT_LEARNED = -100
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


@dataclass(frozen=True)
class Conversation:
    """The tokens of a conversation, and the labels: the same tokens where the assistant speaks."""

    tokens: list[int]
    labels: list[int]


def encode(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> Conversation:
    """The tokens and labels of a conversation, by the chat template of the tokenizer.

    A template that marks the words of the assistant (`{% generation %}`) is asked for them. With others, the words of an
    answer are what it adds to the tokens before it, which must not change when messages are added.
    """
    if _GENERATION.search(tokenizer.chat_template or ""):
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, learned = list(found["input_ids"]), list(found["assistant_masks"])
    else:
        tokens = _tokens(tokenizer, messages)
        learned = [0] * len(tokens)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = _tokens(tokenizer, messages[:number], add_generation_prompt=True)
                after = _tokens(tokenizer, messages[: number + 1])
                if after[: len(before)] != before or tokens[: len(after)] != after:
                    raise ValueError(
                        f"the chat template writes message {number} in another way when messages follow it, so the tokens of "
                        "the answer cannot be found. Use a template that marks them with {% generation %}, or conversations "
                        "with one answer at the end"
                    )
                learned[len(before) : len(after)] = [1] * (len(after) - len(before))
    labels = [token if flag else _NOT_LEARNED for token, flag in zip(tokens, learned)]
    return Conversation(tokens, labels)


def _tokens(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"])


def padded(conversations: Sequence[Conversation], fill: int, multiple: int = 1) -> dict[str, torch.Tensor]:
    """A batch of conversations, filled up on the right to the length of the longest."""
    longest = max(len(one.tokens) for one in conversations)
    length = -(-longest // multiple) * multiple
    tokens = torch.full((len(conversations), length), fill)
    labels = torch.full((len(conversations), length), _NOT_LEARNED)
    mask = torch.zeros(len(conversations), length, dtype=torch.long)
    for row, one in enumerate(conversations):
        count = len(one.tokens)
        tokens[row, :count], labels[row, :count] = torch.tensor(one.tokens), torch.tensor(one.labels)
        mask[row, :count] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def pack(conversations: Iterable[Conversation], length: int) -> list[list[Conversation]]:
    """Conversations in rows of at most `length` tokens: each into the first row with room for it, in their order."""
    rows: list[list[Conversation]] = []
    room: list[int] = []
    for one in conversations:
        size = len(one.tokens)
        place = next((number for number, left in enumerate(room) if left >= size), None)
        if place is None:
            rows.append([])
            room.append(length)
            place = len(rows) - 1
        rows[place].append(one)
        room[place] -= size
    return rows


def packed(rows: Sequence[Sequence[Conversation]], fill: int, length: int) -> dict[str, torch.Tensor]:
    """A batch of rows. Positions start at 0 with each conversation: the model finds the boundaries of attention by them."""
    tokens = torch.full((len(rows), length), fill)
    labels = torch.full((len(rows), length), _NOT_LEARNED)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    for row, conversations in enumerate(rows):
        start = 0
        for one in conversations:
            end = start + len(one.tokens)
            tokens[row, start:end], labels[row, start:end] = torch.tensor(one.tokens), torch.tensor(one.labels)
            labels[row, start] = _NOT_LEARNED  # the token before it belongs to another conversation
            positions[row, start:end] = torch.arange(end - start)
            start = end
        positions[row, start:] = torch.arange(length - start)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


class ChatData(L.LightningDataModule):
    """Conversations from a file, or the small set of examples beside this file; every tenth is for validation.

    `tokenizer` is a folder or a name, as `pretrained` of the model. Conversations of more than `length` tokens are cut, and
    those without a token to learn are left out; both are counted in a message.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        path: str | None = None,
        length: int = 128,
        batch_size: int = 16,
        packing: bool = False,
        pad_to_multiple_of: int = 1,
    ) -> None:
        super().__init__()
        if length < 2:
            raise ValueError(f"data.length={length}: a conversation needs at least 2 tokens")
        self.source, self.path, self.length, self.batch_size = tokenizer, path, length, batch_size
        self.packing, self.multiple = packing, pad_to_multiple_of
        self.tokenizer: Any = None

    def prepare_data(self) -> None:
        """Download the tokenizer, on one process of each host."""
        if self.source is not None:
            local_folder(self.source, download=True)

    def setup(self, stage: str) -> None:
        if self.tokenizer is not None:
            return
        folder = start_folder() if self.source is None else local_folder(self.source)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {folder} has no chat template. Put one into {folder}/chat_template.jinja"
            )
        pad = self.tokenizer.pad_token_id
        self.fill = self.tokenizer.eos_token_id if pad is None else pad
        found = list(self._read(Path(self.path) if self.path else Path(__file__).with_name("chat_examples.jsonl")))
        self.train = [one for number, one in enumerate(found) if number % 10 != 9]
        self.val = [one for number, one in enumerate(found) if number % 10 == 9]
        if not self.val:
            raise ValueError(f"{self.path} has {len(found)} usable conversations; expected at least 10")

    def _read(self, path: Path) -> Iterator[Conversation]:
        cut = empty = 0
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    one = encode(self.tokenizer, _messages(json.loads(line)))
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
                cut += len(one.tokens) > self.length
                one = Conversation(one.tokens[: self.length], one.labels[: self.length])
                if all(label == _NOT_LEARNED for label in one.labels[1:]):
                    empty += 1
                else:
                    yield one
        if (cut or empty) and (self.trainer is None or self.trainer.is_global_zero):
            print(
                f"{path}: {cut} conversations were cut to {self.length} tokens, {empty} without an answer were left out"
            )

    def _loader(self, conversations: list[Conversation], shuffle: bool) -> DataLoader:
        rows: Any = pack(conversations, self.length) if self.packing else conversations
        return DataLoader(rows, self.batch_size, shuffle=shuffle, collate_fn=self._batch)

    def _batch(self, rows: Any) -> dict[str, torch.Tensor]:
        return packed(rows, self.fill, self.length) if self.packing else padded(rows, self.fill, self.multiple)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val, shuffle=False)


def _messages(entry: Any) -> list[dict[str, Any]]:
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages) or not messages:
        raise ValueError('expected {"messages": [{"role": ..., "content": ...}, ...]}')
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("there is no message with the role assistant, so there is nothing to learn")
    return messages
