"""Export of a model in another type, with normalized rewards, or as an adapter alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rm_optimizer.core.classifier.adapters import has_adapter
from rm_optimizer.core.classifier.attention import HALF
from rm_optimizer.core.classifier.pooling import pooling_head_of
from rm_optimizer.core.importing.layouts import save_for
from rm_optimizer.core.importing.publishing import require_hub, upload, use_of, write_card
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.storage.certificate import ParityCertificate, TurnedOrders
from rm_optimizer.core.storage.export import save_adapter
from rm_optimizer.core.storage.loading import parse_dtype
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.codec import NOT_STORED, JsonRecord
from rm_optimizer.records.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, repr=False)
class ExportedModel(JsonRecord, indent=2):
    """A reward model that was exported.

    Args:
        folder: folder of the export.
        dtype: type of its weights.
        turned: pairs that a half type orders otherwise than its source, after the normalization was taken back; None
            without pairs or in another type.
        num_pairs: pairs that the rewards were normalized on, or compared.
        mean: mean of the source's rewards on the pairs, which was subtracted; None without normalization.
        deviation: their standard deviation, by which rewards were divided.
        use: sentence on its use by the project that it was written for.
        uploaded: address of the repository on the hub that it was uploaded to.
        certificate: comparison of the folder with the model in memory.
    """

    folder: str
    dtype: str
    turned: TurnedOrders | None = None
    num_pairs: int = 0
    mean: float | None = None
    deviation: float | None = None
    use: str | None = None
    uploaded: str | None = None
    certificate: ParityCertificate | None = field(default=None, metadata=NOT_STORED)

    def facts(self) -> Iterator[tuple[str, str]]:
        """Names and values of what was done and measured."""
        yield "type of the weights", self.dtype
        if self.certificate is not None:
            yield "largest difference of a reward after a reload", f"{self.certificate.max_difference:.2g}"
        if self.mean is not None:
            normalized = f"by mean {self.mean:.4g} and deviation {self.deviation:.4g} of {2 * self.num_pairs:,} rewards"
            yield "normalized", normalized
        if self.turned is not None:
            yield f"order turned by {self.dtype}", str(self.turned)
        if self.use is not None:
            yield "use", self.use
        if self.uploaded is not None:
            yield "uploaded", self.uploaded


def export_reward_model(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    adapter_only: bool = False,
    pairs: Sequence[PreferencePair] = (),
    normalize: bool = False,
    project: str | None = None,
    push: str | None = None,
) -> ExportedModel:
    """Write a certified folder of a reward model: merged, in another type, normalized, or as an adapter alone.

    Args:
        source: hub id, model folder, run folder or `.ckpt`.
        folder: folder of the export.
        dtype: type of the backbone's weights; None is float32.
        adapter_only: write the LoRA factors and the head alone, which plain peft loads with the base.
        pairs: pairs on which the export is compared with its source in float32.
        normalize: shift and scale rewards so that the responses of the pairs have mean 0 and deviation 1.
        project: project whose layout is written: `trl`, `openrlhf`, `llama-factory`, `vllm` or `tei`.
        push: repository on the hub to upload the folder to, with its card; a new one is private.

    Raises:
        CheckpointError: if the source cannot be loaded, the folder cannot be written, or the export scores otherwise.
        ConfigError: if there are no pairs to normalize on, their rewards are all equal, an adapter would change, the
            project cannot read such a model, or the hub refuses or cannot be reached.
    """
    if adapter_only and project is not None:
        raise ConfigError(f"an adapter alone is no folder for {project}; leave --adapter or --for out")
    if push is not None:
        require_hub(push)
    if adapter_only and (best := RunFolder(Path(source).expanduser()).best_checkpoint).is_file():
        source = best  # the folder of the run's best model holds the merged weights
    exact = BradleyTerryRM.from_pretrained(source)
    model = exact if dtype in (None, "float32") else BradleyTerryRM.from_pretrained(source, dtype=dtype)
    before, mean, deviation = _rewards(exact, pairs), None, None
    if normalize:
        if has_adapter(model.model):
            raise ConfigError("rewards of an adapter cannot be normalized; export it merged first, then normalize that")
        if not pairs or bool((before == before.flatten()[0]).all()):
            raise ConfigError("normalize needs pairs whose rewards differ; give them as pairs (--data)")
        mean, deviation = float(before.double().mean()), float(before.double().std())
        rescale(model, 1 / deviation, -mean / deviation)
    after = before if model is exact and not normalize else _rewards(model, pairs)
    restored = after if mean is None or deviation is None else deviation * after + mean
    is_half = parse_dtype(dtype) in HALF
    use = None
    if project is not None:
        certificate, use = save_for(project, model, Path(folder))
    else:
        certificate = save_adapter(model, Path(folder)) if adapter_only else model.save_pretrained(Path(folder))
    made = ExportedModel(
        folder=str(folder),
        dtype=certificate.dtype,
        turned=TurnedOrders.of(certificate.dtype, before.numpy(), restored.numpy()) if pairs and is_half else None,
        num_pairs=len(pairs),
        mean=mean,
        deviation=deviation,
        use=use,
        certificate=certificate,
    )
    rows = {"weights": "LoRA factors and head alone" if adapter_only else "whole"} | dict(made.facts())
    described = use or use_of(Path(folder), model.max_length, pooling_head_of(model.model))
    write_card(Path(folder), str(source), rows, described)
    return made if push is None else replace(made, uploaded=upload(Path(folder), push))


def _rewards(model: BradleyTerryRM, pairs: Sequence[PreferencePair]) -> Float[Tensor, "2 pairs"]:
    prompts = [pair.prompt for pair in pairs]
    sides = ([pair.chosen for pair in pairs], [pair.rejected for pair in pairs])
    return torch.stack([model.score(prompts, side) if pairs else torch.zeros(0) for side in sides])


@torch.no_grad()
def rescale(model: BradleyTerryRM, factor: float, constant: float) -> None:
    """Fold `factor * reward + constant` into the head; a decoder's gets a bias, which its configuration describes."""
    head = model.reward_head
    weight, bias = head.weight.double(), 0.0 if head.bias is None else head.bias.double()
    head.weight.copy_(factor * weight)
    if head.bias is None:
        head.bias = nn.Parameter(head.weight.new_zeros(1))
        model.model.config.reward_head = {"sizes": [head.in_features, 1], "activation": "relu"}
    head.bias.copy_(torch.as_tensor(factor * bias + constant))
