"""Workers on vLLM's offline engine, in their own process: a plain classifier by reload, or an adapter by another one.

vLLM loads, schedules and caches prefixes. Its engine runs in this process, so that a stopped or killed process ends it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rm_optimizer.core.storage.adapter_files import WEIGHTS_FILE, stored_name
from rm_optimizer.errors import RMOptimizerError, WeightsRefused
from rm_optimizer.records.locations import ADAPTER_FILE
from rm_optimizer.serving.embedded.vllm_model import VllmModel, require_unchanged, shared_model
from rm_optimizer.serving.embedded.worker import Worker
from rm_optimizer.serving.engine import StagedWeights, check_rewards, checkpoint_revision, on_top, probe_sequences
from rm_optimizer.serving.options import WorkerOptions
from rm_optimizer.serving.weights.live_weights import checked_tensors
from rm_optimizer.serving.weights.weight_file import tensor_files

CPU_BLOCK_SIZE = 32
"""Tokens of a cached block on a CPU, vLLM's minimum there; its default of 128 shares only every 128th token."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as `max_lora_rank`."""
KEPT_ADAPTERS = 8
"""Adapters kept on disk, since vLLM reads an evicted one again when a batch needs it."""
DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "4"}
"""Environment of vLLM where the user sets nothing else."""
CHOSEN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
"""Environment that this worker needs: the engine in this process, and standard output for the access log alone."""
LOAD_ERRORS = (RuntimeError, ValueError, KeyError, AttributeError, AssertionError, OSError)


def latest_tensors(files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of safetensors files by name; a later file takes precedence."""
    holders = tensor_files(files)
    for file in dict.fromkeys(holders.values()):
        with safe_open(file, framework="pt") as stored:
            for name in (name for name, holder in holders.items() if holder == file):
                yield name, stored.get_tensor(name)


def engine_arguments(options: WorkerOptions, model: VllmModel) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a model."""
    arguments: dict[str, Any] = {
        "model": str(model.folder),
        "dtype": options.dtype,
        "max_model_len": model.description.max_length,
        "runner": "pooling",
        "pooler_config": {"use_activation": False},
        "hf_overrides": {"problem_type": "regression"},
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if options.token_budget is not None:
        arguments["max_num_batched_tokens"] = options.token_budget
    if model.description.device == "cpu":
        arguments |= {"block_size": CPU_BLOCK_SIZE, "enforce_eager": True}
    if model.adapter is not None:
        rank = next(rank for rank in LORA_RANKS if rank >= model.rank)
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 2}
    return arguments


def choose_device(options: WorkerOptions) -> None:
    """Set the threads or the GPU of this process, whose only one vLLM uses.

    Raises:
        RMOptimizerError: if there are fewer GPUs than replicas, since vLLM takes nearly all memory of one.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    count = torch.cuda.device_count()  # which does not initialize CUDA
    if not count:
        return
    if options.replicas > count:
        raise RMOptimizerError(
            f"--replicas must be at most {count} with vLLM, the number of GPUs, got {options.replicas}"
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    os.environ["CUDA_VISIBLE_DEVICES"] = named.split(",")[options.replica]


class VllmWorker(Worker):
    """Worker whose updates are loaded through vLLM's reload, or with an adapter as a further adapter.

    Args:
        options: checkpoint, folders and data types.
        committed: updates to apply to the checkpoint, oldest first.

    Raises:
        RMOptimizerError: if the model or an update cannot be loaded.
    """

    def __init__(self, options: WorkerOptions, committed: Sequence[StagedWeights]) -> None:
        os.environ |= {name: os.environ.get(name, value) for name, value in DEFAULTS.items()} | CHOSEN
        choose_device(options)
        self._model = shared_model(options)
        from vllm import LLM

        try:
            self._llm: Any = LLM(**engine_arguments(options, self._model))
        except LOAD_ERRORS as error:
            if not options.tokenizer_folder:  # it was loaded before, so another attempt may succeed
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RMOptimizerError(
                f"vLLM cannot load {options.checkpoint} ({reason}); its log above says more, and --engine transformers "
                "needs no vLLM"
            ) from error
        budget = self._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        super().__init__(replace(self._model.description, token_budget=budget))
        self._committed: tuple[StagedWeights, ...] = ()
        self._loaded: StagedWeights | None = None
        self._adapter: Any = None
        self._prepared: Any = None
        self._count = 0
        if self._model.adapter is None:
            require_unchanged(self._model)  # while vLLM loaded it
        else:
            self._adapters = Path(options.vllm_folder) / f"adapters-{options.replica}"
            shutil.rmtree(self._adapters, ignore_errors=True)  # of an earlier process
            self._adapter = self._added(self.version, self._model.adapter)
        for weights in committed:
            self.apply(weights)

    def expect(self, revision: int | None) -> None:
        """Discard the staged weights, and load the committed ones again if others are loaded; see `Worker.expect`."""
        super().expect(revision)
        if self._loaded is not None:
            self._take_back()
        if self._prepared is not None:
            self._llm.llm_engine.remove_lora(self._prepared.lora_int_id)
            self._prepared = None

    def rehearse(self, revision: int) -> None:
        """Check the probe with a further adapter; a plain classifier's is checked by `load`."""
        weights, tensors = self._staged(revision)
        if self._model.adapter is None:
            return
        self._prepared = self._added(weights.version, self._written(tensors))
        try:
            self._check(weights, self._prepared)
        except WeightsRefused:
            self.expect(revision)
            raise

    def load(self, revision: int) -> None:
        """Load the tensors of a plain classifier and check their probe, or load the old ones again.

        From here on answers carry the new revision.

        Raises:
            WeightsRefused: if nothing of this revision is staged, vLLM cannot load it, or its probe fails.
        """
        weights, tensors = self._staged(revision)
        if self._model.adapter is not None or self._loaded is not None:
            return
        self._loaded = weights
        try:
            self._reload(iter(tensors.items()))
            self._check(weights, None)
        except WeightsRefused:
            self.expect(revision)
            raise
        except LOAD_ERRORS as error:
            self.expect(revision)
            raise WeightsRefused(f"vLLM cannot load the new weights: {type(error).__name__}: {error}") from error
        self.version, self.revision = weights.version, revision

    def commit(self, revision: int) -> None:
        """Swap in the staged weights; see `Worker.commit`."""
        self.load(revision)
        weights, _ = self._staged(revision)
        self._committed = on_top(self._committed, weights)
        self.version, self.revision = weights.version, revision
        if self._prepared is not None:
            self._adapter = self._prepared
            for folder in self._adapters.iterdir():  # no batch can use these any more
                if int(folder.name) <= self._count - KEPT_ADAPTERS:
                    shutil.rmtree(folder, ignore_errors=True)
        self._loaded = self._prepared = self.staged = None

    def _rewards(self, sequences: Sequence[Sequence[int]]) -> Sequence[float]:
        return self._encoded(sequences, self._adapter)  # vLLM's cache finds common starts by itself

    def _encoded(self, sequences: Sequence[Sequence[int]], adapter: Any) -> Sequence[float]:
        """Raw rewards, no activation applied."""
        from vllm import PoolingParams

        answers = self._llm.encode(
            [{"prompt_token_ids": list(sequence)} for sequence in sequences],
            PoolingParams(task="classify", use_activation=False),
            use_tqdm=False,
            lora_request=adapter,
            pooling_task="classify",
        )
        return [float(answer.outputs.data.reshape(())) for answer in answers]

    def _read(self, weights: StagedWeights) -> Mapping[str, Tensor]:
        return dict(checked_tensors(weights.file, weights.tensors))

    def _check(self, weights: StagedWeights, adapter: Any) -> None:
        rows = probe_sequences(weights.probe, self.description.max_length)
        check_rewards(self._encoded(rows, adapter), weights.probe, self.description.dtype)

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load tensors into the model, and drop cached prefixes; after an error the model is a mixture."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        self._llm.reset_prefix_cache()

    def _take_back(self) -> None:
        """Load the checkpoint with its committed updates.

        Raises:
            CheckpointError: if the checkpoint was replaced; this process ends then.
        """
        files = sorted(str(file) for file in self._model.folder.glob("*.safetensors"))
        self._reload(latest_tensors([*files, *(str(weights.file) for weights in self._committed)]))
        require_unchanged(self._model)
        self._loaded, last = None, self._committed[-1:]
        self.version = last[0].version if last else self.description.version
        self.revision = last[0].revision if last else checkpoint_revision(self.version)

    def _added(self, version: str, folder: Path) -> Any:
        """Adapter of a folder, loaded in addition to the others.

        Its name is its version and a number, since vLLM looks up cached prefixes by the name.

        Raises:
            WeightsRefused: if vLLM cannot load it.
        """
        from vllm.exceptions import VLLMError
        from vllm.lora.request import LoRARequest

        self._count += 1
        request = LoRARequest(f"{version}#{self._count}", self._count, str(folder))
        try:
            self._llm.llm_engine.add_lora(request)
        except (*LOAD_ERRORS, VLLMError) as error:
            raise WeightsRefused(f"vLLM cannot load the adapter: {type(error).__name__}: {error}") from error
        return request

    def _written(self, tensors: Mapping[str, Tensor]) -> Path:
        """Folder of a new adapter: the served one with these tensors in it."""
        assert self._model.adapter is not None
        folder = self._adapters / str(self._count + 1)
        folder.mkdir(parents=True)
        shutil.copyfile(self._model.adapter / ADAPTER_FILE, folder / ADAPTER_FILE)
        renamed = {stored_name(name): tensor for name, tensor in tensors.items()}
        served = load_file(Path(self._adapter.lora_path) / WEIGHTS_FILE)
        save_file(served | renamed, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        return folder
