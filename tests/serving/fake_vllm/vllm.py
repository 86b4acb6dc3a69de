"""As much of vLLM's offline engine as a worker uses, on a model of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rm_optimizer.core.classifier.scoring import SequenceScorer
from rm_optimizer.core.model.reward_model import BradleyTerryRM


class PoolingParams:
    def __init__(self, task: str, use_activation: bool) -> None:
        assert (task, use_activation) == ("classify", False)


class LLM:
    """Engine that loads a tensor at a time, as vLLM does, and keeps answers until its prefix cache is dropped."""

    def __init__(self, model: str, *, max_num_batched_tokens: int = 4096, **arguments: Any) -> None:
        assert arguments["runner"] == "pooling"
        if arguments["dtype"] == "bfloat16":
            raise ValueError("there is no bfloat16 here")
        self.model = BradleyTerryRM.from_pretrained(model)
        self.cached: dict[tuple[int, ...], float] = {}
        scheduler = SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(scheduler_config=scheduler))

    def encode(self, prompts: Sequence[dict[str, list[int]]], params: PoolingParams, **options: Any) -> list[Any]:
        rows = [tuple(prompt["prompt_token_ids"]) for prompt in prompts]
        new = [np.array(row, dtype=np.int32) for row in rows if row not in self.cached]
        if new:
            rewards = SequenceScorer(self.model, 512).rewards(new).tolist()
            self.cached |= {tuple(row.tolist()): reward for row, reward in zip(new, rewards, strict=True)}
        return [SimpleNamespace(outputs=SimpleNamespace(data=torch.tensor([self.cached[row]]))) for row in rows]

    def collective_rpc(self, method: str, kwargs: dict[str, Iterator[tuple[str, torch.Tensor]]]) -> None:
        assert method == "reload_weights"
        state = self.model.model.state_dict()
        for name, tensor in kwargs["weights_iterator"]:
            if float(tensor.flatten()[0]) == 13.0:
                raise ValueError("a tensor cannot be loaded")
            with torch.no_grad():
                state[name].copy_(tensor)

    def reset_prefix_cache(self) -> None:
        self.cached.clear()
