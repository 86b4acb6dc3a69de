"""The options of sending weights to a reward server, and the enumerations that both sides share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rm_optimizer.schema.checks import Options, needing, require, within


class RewardModelTrainingMode(StrEnum):
    """Tensors sent to a reward server: the whole plain classifier, its final layer, or the LoRA adapter."""

    full = "full"
    head_only = "head_only"
    lora = "lora"


class Transport(StrEnum):
    """Channel of the transfer: one HTTP body, a file on one machine's disk, or a process group on CPUs or GPUs."""

    inline = "inline"
    path = "path"
    gloo = "gloo"
    nccl = "nccl"


class OnFailure(StrEnum):
    """Effect of weights that do not reach the server: the end of the run, or a warning."""

    error = "error"
    warn = "warn"


@dataclass(kw_only=True)
class PublishConfig(Options, group="publish"):
    """Publishing of weights to a running reward server while training, without an effect on the run."""

    url: str | None = None
    """Reward server, as http://127.0.0.1:8000, or several with commas between them; null sends nothing."""
    every_n_steps: int = within("[1, inf)", 100, needs="url")
    """Optimizer steps between two versions; the last step is always sent."""
    mode: RewardModelTrainingMode = needing("url", RewardModelTrainingMode.full)
    """Tensors to send: full, head_only or lora; the server must serve such a model."""
    transport: Transport = needing("url", Transport.inline)
    """inline; path below the server's weights root on this machine; gloo or nccl between machines."""
    host: str = needing("url", "127.0.0.1")
    """Address of this machine that the server reaches, for gloo and nccl."""
    api_key_env: str | None = needing("url", None)
    """Environment variable that holds the server's update key, else its API key."""
    timeout_seconds: float = within("(0, inf)", 120.0, needs="url")
    """Longest time, in seconds, until one version is served."""
    on_failure: OnFailure = needing("url", OnFailure.error)
    """End the run when the server refuses a version, or warn and continue."""

    def _check(self) -> None:
        is_http = all(url.strip().startswith(("http://", "https://")) for url in (self.url or "http://").split(","))
        require(is_http, "publish.url", "start with http:// or https://", self.url)
