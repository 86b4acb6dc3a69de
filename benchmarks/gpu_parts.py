"""Parts of gpu.sh: large models with random weights, attention kernels, compilation, and a transfer of weights.

    python benchmarks/gpu_parts.py adapter     # LoRA on Llama-3.1-8B's shape in bfloat16: memory, tokens a second, MFU
    python benchmarks/gpu_parts.py full        # every weight of Qwen2.5-0.5B's shape in bfloat16, and the largest ten
                                               # eigenvalues of the Hessian of what it trained
    python benchmarks/gpu_parts.py compile     # steps of that shape with compiled layers and without
    python benchmarks/gpu_parts.py attention   # rewards through FlexAttention and FlashAttention 2, and through SDPA
    python benchmarks/gpu_parts.py transfer    # bytes a second to a server: NCCL with two GPUs, else gloo
    python benchmarks/gpu_parts.py collect OUT --into docs/measured.md   # the lines of all parts as JSON and a table

`--small` takes a tiny shape, for machines without a GPU. Pairs are `--pairs FILE`, or the embedded world's, which are
short. Each prints `name: value` lines.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

import rm_optimizer.training.estimate
from rm_optimizer.core.classifier.building import compile_backbone
from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.padding import pad_sequences
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.records.accelerator import accelerators, fastest_device, synchronize
from rm_optimizer.records.files import write_text
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.data import SyntheticConfig
from rm_optimizer.schema.publish import Transport
from rm_optimizer.serving.weights.group_transfer import RECEIVER, SENDER, GroupLink, connect_store, open_store
from rm_optimizer.serving.weights.sending import manifest
from rm_optimizer.training import preparation
from rm_optimizer.training.callbacks.memory_profile import PROFILE_FILE
from rm_optimizer.training.run import run_training

SHAPES = json.loads(Path(rm_optimizer.training.estimate.__file__).with_name("published.json").read_text())
LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 2048}
TOKENS = 1024
STEPS = 8
MARK = "<!-- results of gpu.sh: {} -->"


def write_base(args: argparse.Namespace, name: str, folder: Path) -> tuple[Path, Path]:
    """A backbone of a published shape with random weights in bfloat16, and a file of pairs."""
    found = PreferenceDataset(args.pairs).subset(args.num_pairs, 0).pairs if args.pairs else ()
    pairs = found or synthetic_world(SyntheticConfig(num_train=args.num_pairs)).train
    tokenizer = train_tokenizer(rendered_texts(pairs), 2048)
    shape = SHAPES[name] | {"pad_token_id": tokenizer.pad_token_id} | (SMALL if args.small else {})
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with fastest_device():
        model = AutoModel.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rows = ({k: v for k, v in pair.to_dict().items() if k != "metadata"} for pair in pairs)
    write_text(folder / "pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folder / "base", folder / "pairs.jsonl"


def trained(base: tuple[Path, Path], folder: Path, *options: str) -> dict[str, float]:
    """Medians over the steps of a run, as `profile_memory` measures them."""
    hardware = ["hardware=h100", "hardware.compile=false"] if accelerators() else ["hardware=cpu"]
    words = ["model=custom", f"model.path={base[0]}", f"model.max_length={TOKENS}", f"data.train={base[1]}"]
    quiet = ["training.eval_at_start=false", "logger.tensorboard=false", "training.progress=false"]
    sizes = [f"training.max_steps={STEPS}", "batching.batch_size=16", "training.num_bootstrap=100"]
    chosen = [*words, *hardware, *quiet, *sizes, "profile_memory=true", f"output_dir={folder}", *options]
    run_training(typed(compose(chosen), TrainConfig))
    medians: dict[str, float] = json.loads((folder / PROFILE_FILE).read_text())["median"]
    return medians


def show(medians: dict[str, float], prefix: str = "") -> None:
    memory = "memory_allocated_peak_bytes" if "memory_allocated_peak_bytes" in medians else "rss_peak_bytes"
    for name in (memory, "tokens_per_second", "unique_tokens_per_second", "pairs_per_second", "mfu"):
        if name in medians:
            print(f"{prefix}{name}: {medians[name]:.4g}", flush=True)


def adapter(args: argparse.Namespace, folder: Path) -> None:
    base = write_base(args, LLAMA, folder)
    lora = ("adapter=lora", "model.dtype=bfloat16", "model.gradient_checkpointing=true")
    show(trained(base, folder / "run", *lora, "batching.micro_token_budget=32768"))


def full(args: argparse.Namespace, folder: Path) -> None:
    base = write_base(args, QWEN, folder)
    show(trained(base, folder / "run", "model.dtype=bfloat16", "batching.micro_token_budget=32768"))
    started = time.perf_counter()
    size = ["landscape.num_pairs=16", "landscape.top_k=10", f"landscape.params={'head' if args.small else 'all'}"]
    command = [sys.executable, "-m", "rm_optimizer.analyze", f"checkpoint={folder / 'run'}", "landscape=hessian", *size]
    command += ["progress=false", f"output_dir={folder / 'hessian'}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"hessian_wall_seconds: {time.perf_counter() - started:.1f}")
    values = json.loads((folder / "hessian" / "hessian.json").read_text())["eigenvalues"]
    print(f"hessian_eigenvalues: {' '.join(format(each, '.4g') for each in values[:10])}")


def compiled(args: argparse.Namespace, folder: Path) -> None:
    base, found = write_base(args, QWEN, folder), {}
    backend = "eager" if args.small else "inductor"  # whose kernels for a processor take a minute to build
    with mock.patch.object(preparation, "compile_backbone", partial(compile_backbone, backend=backend)):
        for way in ("false", "true"):
            found[way] = trained(base, folder / way, f"hardware.compile={way}", "batching.micro_token_budget=32768")
            show(found[way], {"false": "plain_", "true": "compiled_"}[way])
    print(f"speedup: {found['true']['tokens_per_second'] / found['false']['tokens_per_second']:.3f}")


def attention(args: argparse.Namespace, folder: Path) -> None:
    """Rewards by `auto`, which has the fast kernels on a GPU, beside those of SDPA; eager is tried on a CPU."""
    base, pairs = write_base(args, QWEN, folder)
    rows = PreferenceDataset(str(pairs)).pairs[:32]
    prompts = [pair.prompt for pair in rows for _ in range(2)]
    responses = [text for pair in rows for text in (pair.chosen, pair.rejected)]
    fast, rewards, seconds = "auto" if accelerators() else "eager", dict[str, Tensor](), dict[str, float]()
    for kernel in ("sdpa", fast):
        options: dict[str, Any] = {"new_head": True, "seed": 0, "max_length": TOKENS, "attn_implementation": kernel}
        model = BradleyTerryRM.from_pretrained(str(base), **options).to(fastest_device()).eval()
        ids = [each.ids for each in model.encode(prompts, responses)]
        padded = [each.to(fastest_device()) for each in pad_sequences(ids, model.renderer.pad_token_id)]

        def of_padded(model: BradleyTerryRM = model, padded: list[Tensor] = padded) -> Tensor:
            with torch.no_grad(), torch.autocast(padded[0].device.type, torch.bfloat16):
                return model(*padded)

        ways = {"shared": lambda model=model: model.score(prompts, responses), "padded": of_padded}
        for name, way in ways.items():
            rewards[f"{name}_{kernel}"], seconds[f"{name}_{kernel}"] = timed(way)
        print(f"{kernel}_kernel: {model.model.config._attn_implementation}")
    for name in ("shared", "padded"):
        one, other = (rewards[f"{name}_{kernel}"].double() for kernel in ("sdpa", fast))
        print(f"{name}_difference: {float((one - other).abs().max() / one.abs().max()):.2g}")
        print(f"{name}_speedup: {seconds[f'{name}_sdpa'] / seconds[f'{name}_{fast}']:.3f}")


def timed(compute: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result on the CPU, and the median seconds of five calls after the first."""
    seconds, result = [], compute()
    for _ in range(5):
        synchronize(result.device)
        started = time.perf_counter()
        result = compute()
        synchronize(result.device)
        seconds.append(time.perf_counter() - started)
    return result.cpu(), statistics.median(seconds)


def transfer(args: argparse.Namespace, folder: Path) -> None:
    transport = Transport.nccl if torch.cuda.device_count() > 1 else Transport.gloo  # NCCL wants a GPU for each end
    sent = {"weights": torch.randn((1 if args.small else 64) * 2**22)}
    specs, store, got = manifest(sent), open_store("127.0.0.1", 60.0), list[bytes]()

    def receive() -> None:
        if transport is Transport.nccl:
            torch.cuda.set_device(1)
        link = GroupLink(connect_store(f"127.0.0.1:{store.port}", 60.0), RECEIVER, transport, 60.0)
        got.extend(bytes(data) for _, data in link.receive(specs))

    receiver = threading.Thread(target=receive)
    receiver.start()
    link = GroupLink(store, SENDER, transport, 60.0)
    started = time.perf_counter()
    link.send((spec.name, sent[spec.name]) for spec in specs)
    receiver.join()
    print(f"transport: {transport.value}")
    print(f"bytes_per_second: {len(got[0]) / (time.perf_counter() - started):.4g}")
    print(f"equal: {got[0] == sent['weights'].numpy().tobytes()}")


def collect(out: Path, into: Path | None) -> None:
    """Write the lines of every part to results.json and results.txt, and to a table between two marks of a page."""
    files = sorted({*out.glob("*.txt"), *out.glob("*.log")} - {out / "results.txt"})  # a log is of a part that failed
    found = {
        file.stem: dict(re.findall(r"^([a-z0-9_]+): (.*\S)\s*$", file.read_text(errors="replace"), re.M))
        for file in files
    }
    write_text(out / "results.json", json.dumps(found, indent=1) + "\n")
    lines = [(f"{part}_{name}", value) for part, values in found.items() for name, value in values.items()]
    write_text(out / "results.txt", "".join(f"{name}: {value}\n" for name, value in lines))
    if into is None:
        return
    start, end = MARK.format("start"), MARK.format("end")
    before, _, rest = into.read_text(encoding="utf-8").partition(start)
    _, mark, after = rest.partition(end)
    if not mark:
        raise SystemExit(f"{into} must hold the lines {start} and {end}, between which the table goes")
    about = dict(line.split(": ", 1) for line in (out / "about").read_text().splitlines())
    head = f"On {about['device']}, commit `{about['commit']}`:\n\n| part | figure | value |\n| --- | --- | --- |\n"
    table = "".join(f"| {part} | {n} | {v} |\n" for part, values in found.items() for n, v in values.items())
    write_text(into, f"{before}{start}\n{head}{table}{end}{after}")


PARTS = {"adapter": adapter, "full": full, "compile": compiled, "attention": attention, "transfer": transfer}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "collect"])
    parser.add_argument("out", type=Path, nargs="?", help="folder of gpu.sh, for collect")
    parser.add_argument("--into", type=Path, help="page that takes the table in")
    parser.add_argument("--pairs", help="preference pairs, HH-RLHF say")
    parser.add_argument("--num-pairs", type=int, default=160)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    args = parser.parse_args(argv)
    logging.getLogger("rm_optimizer").setLevel(logging.ERROR)
    if args.part == "collect":
        if args.out is None:
            parser.error("collect needs the folder of gpu.sh")
        collect(args.out, args.into)
        return
    with tempfile.TemporaryDirectory() as folder:
        PARTS[args.part](args, Path(folder))


if __name__ == "__main__":
    main()
