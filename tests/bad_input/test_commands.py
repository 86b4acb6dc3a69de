"""Bad command lines: each ends within seconds with one sentence, its exit code, and nothing half-written.

A row is a command as typed in the folder of `world.build`, what its sentence must hold, and its exit code. A new option
adds its rows here.
"""

from __future__ import annotations

import importlib
import logging
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NoReturn

import pytest
from hydra.core.global_hydra import GlobalHydra
from typer.testing import CliRunner

from rm_optimizer.interfaces.cli import app
from rm_optimizer.interfaces.commands import train
from tests.bad_input import world

SECONDS = 30.0
"""Processor time that an answer may take, the imports of the first row aside."""
HANGS = 60
"""Wall seconds, on a machine that does other work, after which an answer is not waited for."""
TRAIN = "train model=tiny hardware=cpu training.progress=false logger.tensorboard=false training.max_steps=1"
EVALUATE = "evaluate best --data"
CHECK = "data check"

ROWS: list[tuple[str, str]] = [
    # the command itself
    ("trian", "unknown command 'trian'; did you mean 'train'"),
    ("data chek pairs.jsonl", "unknown command 'chek'; did you mean 'check'"),
    ("--verbose", "no such option: --verbose"),
    ("score", "missing argument 'checkpoint'"),
    ("evaluate best", "missing option '--data'"),
    ("evaluate best --data pairs.jsonl --bootstrap -1", "--bootstrap"),
    ("evaluate best --data pairs.jsonl --bootstrap many", "--bootstrap"),
    ("evaluate best --data pairs.jsonl --token-budget 0", "--token-budget"),
    ("evaluate best --data pairs.jsonl --max-length 1", "--max-length"),
    ("evaluate best --data pairs.jsonl --max-length 100000000", "--max-length must be at most 2048"),
    ("evaluate best --data pairs.jsonl --seed -1", "--seed"),
    ("evaluate best --data pairs.jsonl --colums a=b", "no such option: --colums"),
    ("evaluate best pairs.jsonl", "missing option '--data'"),
    ("doctor best --data pairs.jsonl --max-pairs 0", "--max-pairs"),
    ("doctor best --data pairs.jsonl --data pairs.jsonl", "--data must name each source once"),
    ("label nowhere.csv", "nowhere.csv: no such file"),
    ("label pairs.jsonl", "expected the columns of rm-opt select, but response_a is missing"),
    ("label pairs.jsonl --port 70000", "--port"),
    ("label-import pairs.jsonl --out labels.jsonl", "expected the columns of rm-opt select"),
    ("compare side-by-side", "missing argument 'runs'"),
    ("compare plan study", "missing argument 'overrides"),
    ("compare plan study optimizer=adamv,muon", "unknown optimizer 'adamv'"),
    ("compare run nowhere", "nowhere holds no study"),
    ("compare status best", "best holds no study"),
    ("compare retry nowhere --retries -1", "--retries"),
    ("compare best", "runs must be folders that rm-opt train wrote, got 'best'"),
    ("compare nowhere elsewhere", "runs must be folders of runs, got 'nowhere'"),
    ("compare pairs.jsonl best", "got 'pairs.jsonl', which is no folder"),
    ("compare best --bootstrap -1", "--bootstrap"),
    ("compare --optimizers adamw --data pairs.jsonl", "--optimizers must name at least 2 optimizers, got adamw"),
    ("compare --optimizers adamw,moun --data pairs.jsonl", "unknown optimizer 'moun'; did you mean 'muon'?"),
    (
        "compare --optimizers adamw,adamw --data pairs.jsonl",
        "--optimizers must name each optimizer once, got 'adamw' twice; differing seeds are --seeds",
    ),
    ("compare --optimizers adamw,prodigy --data pairs.jsonl", "prodigy estimates its own learning rate"),
    (
        "compare --optimizers muon,sgd --reference adamw --data pairs.jsonl",
        "--reference must be one of --optimizers (muon, sgd), got",
    ),
    ("compare --optimizers adamw,sgd --rates 4 --data pairs.jsonl", "--rates must be odd and at least 3"),
    ("compare --optimizers adamw,sgd --seeds 0 --data pairs.jsonl", "--seeds must be at least 1, got 0"),
    ("compare --optimizers adamw,sgd --budget large --data pairs.jsonl", "unknown --budget 'large'"),
    (
        "compare --optimizers adamw,sgd optimizer.lr=1 --data pairs.jsonl",
        "sets optimizer itself: learning rates are tuned",
    ),
    ("compare --optimizers adamw,sgd schedule=constant --data pairs.jsonl", "sets schedule itself"),
    (
        "compare --optimizers adamw,sgd training.early_stopping.enabled=true --data pairs.jsonl",
        "judged by its last weights",
    ),
    (
        "compare --optimizers adamw,sgd hardware.devices=2 --data pairs.jsonl",
        "a comparison runs each trial on one device",
    ),
    (
        "compare --optimizers adamw,sgd hardware.precision=bf16-true --data pairs.jsonl",
        "hardware.precision must be 32-true or bf16-mixed",
    ),
    (
        "compare --optimizers adamw,sgd seed --data pairs.jsonl",
        "a comparison of optimizers sets seed itself: tuning and final runs have different seeds; leave out seed",
    ),
    ("compare --optimizers adamw,sgd ~adapter --data pairs.jsonl", "adapter must be given"),
    ("compare --optimizers adamw,sgd batching.batch_size=8,16 --data pairs.jsonl", "are the same in every run"),
    (
        "compare --optimizers adam,adamw adapter=lora --data pairs.jsonl",
        "adam and adamw are the same optimizer without weight decay",
    ),
    ("compare --optimizers adamw,sgd", "missing option '--data'"),
    ("compare --optimizers adamw,sgd --data nowhere.jsonl", "nowhere.jsonl"),
    ("data check pairs.jsonl pairs.jsonl", "PATHS must name each source once"),
    ("serve best --port 99999", "--port"),
    ("serve best --engine vlm", "unknown --engine 'vlm'; did you mean 'vllm'"),
    ("serve best --dtype float8", "unknown --dtype 'float8'"),
    ("serve best --api-key ' '", "--api-key"),
    ("serve best --weights-root nowhere", "--weights-root must be a folder that exists"),
    ("serve best --token-budget 0", "--token-budget"),
    ("serve best --threads 0", "--threads"),
    ("serve best --max-queued-tokens 0", "--max-queued-tokens"),
    ("params tinny", "unknown model 'tinny'; did you mean 'tiny'"),
    ("params tiny -o moun", "unknown optimizer 'moun'; did you mean 'muon'"),
    ("info extra", "extra"),
    # options of train
    ("train optimiser=adamw", "unknown option 'optimiser'; did you mean 'optimizer'"),
    ("train optimizer=adamv", "unknown optimizer 'adamv'; did you mean 'adam"),
    ("train optimizer.lrr=1", "unknown option 'optimizer.lrr'; did you mean 'optimizer.lr'"),
    ("train model=tinny", "unknown model 'tinny'; did you mean 'tiny'"),
    ("train experiment=ablation_a9", "unknown experiment 'ablation_a9'; did you mean 'ablation_a"),
    ("train -m broken", "model takes the name of a preset, got 'broken'; for the path write model.path=./broken"),
    ("train data.columns={prompt: question}", "put the whole option in quotes, 'data.columns={prompt: question}'"),
    ("train data.train=a,[b].jsonl seed=1", "cannot read 'data.train=a,[b].jsonl': close its brackets, or put the"),
    ("train data.train=pairs.jsonl model.path=./nowhere", "no model at ./nowhere"),
    ("train data.train=pairs.jsonl data.val=nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("train +experiment=quickstrat", "quickstrat"),
    ("train hardware=gpu", "unknown hardware 'gpu'"),
    ("train optimizer.lr=fast", "optimizer.lr must be a number, got 'fast'"),
    ("train optimizer.lr=-1", "optimizer.lr must"),
    ("train optimizer.lr=nan", "optimizer.lr must"),
    ("train optimizer.lr=inf", "optimizer.lr must"),
    ("train optimizer.lr=0", "optimizer.lr must"),
    ("train loss.beta=inf", "loss.beta must"),
    ("train loss.beta=0", "loss.beta must"),
    ("train data.curriculum=margin data.streaming=ray", "data.curriculum must be null with data.streaming"),
    ("train data.curriculum=margin data.curriculum_hard=0.9", "data.curriculum_hard must not exceed"),
    (f"{TRAIN} data.train=pairs.jsonl data.curriculum=margin", "a margin for every training pair"),
    (f"{TRAIN} data.train=pairs.jsonl data.curriculum=nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("train loss.label_smoothing=0.5", "loss.label_smoothing must lie in"),
    ("train loss.label_smoothing=nan", "loss.label_smoothing must"),
    ("train training.epochs=-1", "training.epochs must"),
    ("train training.epochs=nan", "training.epochs must"),
    ("train training.epochs=inf", "training.epochs must"),
    ("train training.max_steps=0", "training.max_steps must"),
    ("train training.max_steps=0.5", "training.max_steps must be an integer"),
    ("train training.evals_per_epoch=0", "training.evals_per_epoch must"),
    ("train training.keep_checkpoints=0", "training.keep_checkpoints must"),
    ("train training.checkpoint_every=0", "training.checkpoint_every must"),
    ("train training.num_bootstrap=-1", "training.num_bootstrap must"),
    ("train training.gradient_clip_norm=-1", "training.gradient_clip_norm must"),
    ("train training.monitor=val/f1", "training.monitor"),
    ("train training.monitor=accuracy", "training.monitor"),
    ("train training.monitor=val/accuracy training.mode=min", "training.mode"),
    ("train training.monitor=val/nll training.mode=max", "training.mode"),
    ("train training.mode=least", "training.mode"),
    ("train training.early_stopping.min_delta=5", "min_delta has an effect only with training.early_stopping.enabled"),
    ("train training.hessian.num_pairs=8", "num_pairs has an effect only with training.hessian.enabled or training.h"),
    ("train training.calibration.every=2", "every has an effect only with training.calibration.enabled"),
    ("train data.curriculum_easy=0.9", "data.curriculum_easy has an effect only with data.curriculum"),
    ("train publish.every_n_steps=5", "publish.every_n_steps has an effect only with publish.url"),
    ("train data.val_fraction=0.5", "data.val_fraction has an effect only with data.train"),
    (
        "train data.train=a.jsonl data.val=b.jsonl data.val_fraction=0.5",
        "only while data.val is null",
    ),
    (
        "train data.train=a.jsonl data.synthetic.noise=2",
        "only while data.train is null",
    ),
    ("train logger.tags=[a]", "logger.tags has an effect only with logger.wandb, got logger.wandb=False"),
    ("train schedule.warmup_steps=9 schedule.warmup_ratio=0.1", "only while schedule.warmup_steps is null"),
    ("train data.max_bad_share=0.5", "data.max_bad_share has an effect only with data.on_bad_row=drop"),
    ("train training.early_stopping.patience=0", "training.early_stopping.patience must"),
    ("train training.early_stopping.min_delta=-1", "training.early_stopping.min_delta must"),
    ("train training.hessian.every=0", "training.hessian.every must"),
    ("train batching.batch_size=0", "batching.batch_size must"),
    ("train batching.batch_size=many", "batching.batch_size must be an integer"),
    ("train batching.micro_token_budget=0", "batching.micro_token_budget must"),
    ("train data.val_fraction=1.5", "data.val_fraction must"),
    ("train data.val_fraction=0", "data.val_fraction must"),
    ("train data.max_pairs=0", "data.max_pairs must"),
    ("train data.on_bad_row=skip", "unknown data.on_bad_row 'skip'"),
    ("train data.columns=prompt", "data.columns must"),
    ("train data.num_workers=-1", "data.num_workers must"),
    ("train data.fetch_timeout=0", "data.fetch_timeout must"),
    ("train data.streaming=maybe", "unknown data.streaming 'maybe'"),
    ("train data.synthetic.num_train=0", "data.synthetic.num_train must"),
    ("train data.synthetic.noise=-1", "data.synthetic.noise must"),
    ("train model.max_length=4", "model.max_length must"),
    ("train model.vocab_size=10", "model.vocab_size must"),
    ("train model.dropout=2", "model.dropout must"),
    ("train model.attn_implementation=flash", "unknown model.attn_implementation 'flash'"),
    ("train seed=-5", "seed must lie in [0, 2**32)"),
    ("train seed=4294967296", "seed must lie in [0, 2**32)"),
    ("train data.split_seed=-1", "data.split_seed must lie in"),
    ("train seed=1e99", "seed must"),
    ("train seed=zero", "seed must be an integer"),
    ("train resume=yes", "unknown resume 'yes'"),
    ("train hardware.precision=fp8", "hardware.precision must"),
    ("train hardware.devices=0", "hardware.devices must"),
    ("train hardware.devices=64", "hardware.devices"),
    ("train hardware.accelerator=gpu", "hardware.accelerator"),
    ("train hardware=h100", "hardware"),
    ("train hardware.num_nodes=0", "hardware.num_nodes must"),
    ("train adapter.rank=8", "adapter=lora"),
    ("train adapter=lora adapter.rank=0", "adapter.rank must"),
    ("train adapter=lora adapter.dropout=1", "adapter.dropout must"),
    ("train adapter=qlora", "qlora"),
    ("train model=tiny model.path=best", "model.path"),
    ("train schedule=cosin", "unknown schedule 'cosin'; did you mean 'cosine'"),
    ("train schedule.warmup_fraction=2", "schedule.warmup"),
    ("train logger.wandb_mode=upload", "logger.wandb_mode"),
    ("train \"logger.tags=['']\"", "logger.tags"),
    ("train publish.url=localhost", "publish.url must"),
    ("train publish.url=ftp://x", "publish.url must"),
    ("train publish.url=http://127.0.0.1:9 publish.api_key_env=NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE"),
    ("train 'optimizer.lr=[1,'", "cannot read 'optimizer.lr=[1,'"),
    ("train pairs.jsonl", "expected option=value, got 'pairs.jsonl'"),
    ("train data=../pairs.jsonl", "data.train=../pairs.jsonl"),
    ("train model=./best", "model.path=./best"),
    ("train -m optimizer=adamw,muon", "--multirun optimizer=adamw,muon"),
    ("train -m tinny", "unknown model 'tinny'"),
    ("train -e many", "training.epochs must be a number"),
    ("train -b 0", "batching.batch_size must"),
    ("train --lr 1e-3", "optimizer.lr=VALUE"),
    ("train --lr=1e-3", "optimizer.lr=VALUE"),
    ("train --config-dir nowhere", "--config-dir must name an existing folder"),
    ("train --cfg jub", "jub"),
    ("train --multirun --cfg job seed=0,1", "--cfg prints one configuration"),
    ("train seed=0,1", "add --multirun"),
    ("train --multirun seed=0,x", "seed must be an integer, got 'x'"),
    ("train --multirun optimizer=adamw,moun", "unknown optimizer 'moun'"),
    ("train --multirun hardware.devices=2", "hardware.devices"),
    ("train --multirun optimizer=adamw,schedulefree schedule=cosine", "optimizer=schedulefree does not go with"),
    ("train experiment=sensitivity_lr", "--multirun"),
    ("train seed=1 seed=2", "seed is given twice"),
    ("train s\u0435ed=1", "U+0435"),
    ("train optimizer=schedulefree schedule=cosine", "schedule"),
    ("train optimizer=sam hardware.precision=16", "hardware.precision must"),
    ("train hydra.run.dir=pairs.jsonl/run", "hydra.run.dir must be a folder that can be written"),
    ("train output_dir=pairs.jsonl", "output_dir must be a folder that can be written"),
    # data that cannot be used, through train, check, evaluate
    (f"{TRAIN} data.train=nowhere.jsonl", "nowhere.jsonl: no such file"),
    (f"{TRAIN} data.train=files/folder", "files/folder"),
    (f"{TRAIN} data.train=files/empty.jsonl", "empty"),
    (f"{TRAIN} data.train=rows/one_pair.jsonl", "at least 2 different prompts"),
    (f"{TRAIN} data.train=rows/one_prompt.jsonl", "prompts"),
    (f"{TRAIN} data.train=pairs.jsonl data.val=pairs.jsonl", "overlap"),
    (f"{TRAIN} data.train=rows/null_chosen.jsonl", "line 6"),
    (f"{TRAIN} data.train=rows/surrogate.jsonl", "line 6"),
    (f"{TRAIN} data.train=other.jsonl data.val=rows/no_chosen.jsonl", "no_chosen.jsonl, line 6"),
    (f"{TRAIN} data.train=rows/label_one_two.jsonl data.on_bad_row=drop", "label"),
    (f"{TRAIN} data.train=other.csv", "data.columns="),
    (f"{TRAIN} data.train=pairs.jsonl 'data.columns={{prompt: nope}}'", "nope"),
    (f"{TRAIN} data.train=rows/winners.jsonl", "winner"),
    (f"{CHECK} nowhere.jsonl", "nowhere.jsonl: no such file"),
    (f"{CHECK} files/folder", "files/folder"),
    (f"{CHECK} files/empty.jsonl", "empty"),
    (f"{CHECK} files/blank.jsonl", "no rows"),
    (f"{CHECK} files/torn.jsonl", "line 12"),
    (f"{CHECK} files/deep.jsonl", "line 13"),
    (f"{CHECK} files/digits.jsonl", "line 13"),
    (f"{CHECK} files/binary.jsonl", "binary.jsonl"),
    (f"{CHECK} files/utf16.jsonl", "UTF-8"),
    (f"{CHECK} files/latin.csv", "UTF-8"),
    (f"{CHECK} files/ragged.csv", "ragged.csv"),
    (f"{CHECK} files/twice.csv", "chosen"),
    (f"{CHECK} files/quote.csv", "quote.csv"),
    (f"{CHECK} files/headless.csv", "headless.csv"),
    (f"{CHECK} files/semicolons.csv", "semicolons.csv"),
    (f"{CHECK} files/pairs.psv", "pairs.psv"),
    (f"{CHECK} files/pairs.xlsx", "pairs.xlsx"),
    (f"{CHECK} files/torn.parquet", "torn.parquet"),
    (f"{CHECK} files/twice.parquet", "chosen"),
    (f"{CHECK} files/torn.jsonl.gz", "torn.jsonl.gz"),
    (f"{CHECK} files/binary.jsonl.gz", "binary.jsonl.gz"),
    (f"{CHECK} rows/no_chosen.jsonl", "line 6"),
    (f"{CHECK} rows/empty_chosen.jsonl", "line 6"),
    (f"{CHECK} rows/number_chosen.jsonl", "line 6"),
    (f"{CHECK} rows/empty_turn.jsonl", "line 6: prompt: a message of role user must not be empty"),
    (f"{CHECK} pairs.jsonl --label 2", "--label"),
    (f"{CHECK} pairs.jsonl --kwise-rule worst", "unknown --kwise-rule 'worst'"),
    (f"{CHECK} rows/label_two.jsonl", "line 6"),
    (f"{CHECK} rows/label_word.jsonl", "line 6"),
    (f"{CHECK} rows/weight_negative.jsonl", "line 6"),
    (f"{CHECK} rows/not_a_row.jsonl", "line 13"),
    (f"{CHECK} rows/surrogate.jsonl", "line 6"),
    (f"{CHECK} rows/surrogate.jsonl --on-bad-row skip", "unknown --on-bad-row 'skip'"),
    (f"{CHECK} rows/unlike.jsonl", "unlike.jsonl"),
    (f"{CHECK} rows/winners.jsonl", "winner"),
    (f"{CHECK} rows/label_one_two.jsonl", "label"),
    (f"{CHECK} rows/label_one_two.jsonl --on-bad-row drop", "label"),
    (f"{CHECK} rows/lengths_differ.jsonl", "line 1"),
    (f"{CHECK} rows/alpaca.jsonl", "--columns"),
    (f"{CHECK} responses.jsonl", "responses.jsonl"),
    (f"{CHECK} pairs.jsonl --columns nonsense", "--columns takes OURS=THEIRS"),
    (f"{CHECK} pairs.jsonl --columns chosen=nope", "nope"),
    (f"{CHECK} pairs.jsonl --columns chozen=chosen", "chozen"),
    (f"{CHECK} pairs.jsonl --format alpaca", "alpaca"),
    (f"{CHECK} pairs.jsonl --format hh", "transcript"),
    (f"{CHECK} pairs.jsonl data.on_bad_row=drop", "data.on_bad_row=drop"),
    (f"{CHECK} pairs.jsonl --tokenizer ./nowhere", "no tokenizer at './nowhere'"),
    (f"{CHECK} pairs.jsonl --max-length 2", "--max-length"),
    (f"{CHECK} pairs.jsonl --json pairs.jsonl/audit.json", "--json"),
    (f"{CHECK} pairs.jsonl --json best", "--json"),
    (f"{EVALUATE} nowhere.jsonl", "nowhere.jsonl: no such file"),
    (f"{EVALUATE} rows/label_one_two.jsonl --on-bad-row drop", "label"),
    (f"{EVALUATE} rows/ranks.jsonl --columns scores=ranks", "ranks"),
    (f"{CHECK} rows/ranks.jsonl --columns scores=ranks", "ranks"),
    (f"{CHECK} rows/winners.jsonl --winner model_b,model_c", "winner"),
    (f"{EVALUATE} pairs.jsonl --output pairs.jsonl", "--output must be a folder"),
    (f"{EVALUATE} pairs.jsonl --format kwise", "kwise"),
    # models that are none, or torn
    ("score causal --prompt a --response b", "head"),
    ("score encoder --prompt a --response b", "head"),
    ("score broken/headless --prompt a --response b", "head"),
    ("evaluate causal --data pairs.jsonl", "head"),
    ("evaluate broken/headless --data pairs.jsonl", "head"),
    ("doctor causal --data pairs.jsonl", "head"),
    ("serve causal --port 18765", "saved as LlamaForCausalLM, and none of its weights is a layer with one output"),
    ("serve encoder --port 18765", "head"),
    ("serve two_labels --port 18765", "head"),
    ("serve broken/headless --port 18765", "head"),
    ("serve broken/torn_weights --port 18765", "truncated"),
    ("serve broken/empty_weights --port 18765", "model.safetensors is empty"),
    ("serve broken/no_weights --port 18765", "no weights"),
    ("serve broken/no_config --port 18765", "config.json"),
    ("serve broken/torn_config --port 18765", "config.json is damaged"),
    ("serve broken/torn_export --port 18765", "export.json is damaged"),
    ("serve broken/garbage.ckpt --port 18765", "garbage.ckpt"),
    ("serve broken/empty --port 18765", "broken/empty"),
    ("serve pairs.jsonl --port 18765", "pairs.jsonl"),
    ("serve ./nowhere --port 18765", "nowhere"),
    ("serve nowhere/model --port 18765", "nowhere/model"),
    ("analyze --checkpoint causal --data pairs.jsonl", "head"),
    ("score broken/changed --prompt a --response b", "changed"),
    ("evaluate broken/changed --data pairs.jsonl", "changed"),
    ("doctor broken/changed --data pairs.jsonl", "changed"),
    ("analyze --checkpoint broken/changed --data pairs.jsonl", "changed"),
    ("score two_labels --prompt a --response b", "label"),
    ("score broken/nan --prompt a --response b", "broken/nan"),
    ("score broken/torn_weights --prompt a --response b", "truncated"),
    ("score broken/empty_weights --prompt a --response b", "empty_weights"),
    ("score broken/no_weights --prompt a --response b", "no_weights"),
    ("score broken/no_config --prompt a --response b", "no_config"),
    ("score broken/torn_config --prompt a --response b", "torn_config"),
    ("score broken/torn_export --prompt a --response b", "torn_export"),
    ("score broken/no_tokenizer --prompt a --response b", "tokenizer"),
    ("score broken/empty --prompt a --response b", "broken/empty"),
    ("score broken/garbage.ckpt --prompt a --response b", "garbage.ckpt"),
    ("score broken/torn.ckpt --prompt a --response b", "torn.ckpt"),
    ("score broken/text.ckpt --prompt a --response b", "text.ckpt"),
    ("score pairs.jsonl --prompt a --response b", "pairs.jsonl"),
    ("score ./nowhere --prompt a --response b", "nowhere"),
    ("score nowhere --prompt a --response b", "nowhere"),
    ("evaluate nowhere/model --data pairs.jsonl", "nowhere/model"),
    (f"{TRAIN.replace('model=tiny', '')} model=custom model.path=./nowhere data.train=pairs.jsonl", "nowhere"),
    (f"{TRAIN.replace('model=tiny', '')} model=custom model.path=nowhere/x data.train=pairs.jsonl", "nowhere/x"),
    (f"{TRAIN.replace('model=tiny', '')} model=custom model.path=two_labels data.train=pairs.jsonl", "label"),
    # scoring
    ("score best", "give either --prompt"),
    ("score best responses.jsonl", "give either --prompt"),
    ("score best --prompt a", "give either --prompt"),
    ("score best --prompt ' ' --response b", "--prompt must not be empty"),
    ("score best --prompt a --response ' '", "--response must not be empty"),
    ("score best --prompt a --response b --input-form pair", "--input-form pair is for reward models of others"),
    ("evaluate best --data pairs.jsonl --input-form pair", "--input-form pair is for reward models of others"),
    ("doctor best --data pairs.jsonl --input-form pairs", "--input-form pairs is for reward models of others"),
    ("score best rows/empty_response.jsonl out.jsonl", "line 2: response must not be empty"),
    ("score best --prompt a --response b responses.jsonl", "give either --prompt"),
    ("score best responses.jsonl scored.jsonl", "scored.jsonl"),
    ("score best nowhere.jsonl out.jsonl", "nowhere.jsonl"),
    ("score best responses.jsonl out.csv", "out.csv"),
    ("score best responses.jsonl out.txt", "out.txt"),
    ("score best responses.jsonl responses.jsonl", "responses.jsonl"),
    ("score best responses.jsonl pairs.jsonl/out.jsonl", "pairs.jsonl/out.jsonl"),
    (f"evaluate best --data pairs.jsonl --output {'a' * 300}", f"'{'a' * 300}' (File name too long)"),
    ("score best scored.jsonl out.jsonl", "reward"),
    ("score best pairs.jsonl out.jsonl", "response"),
    ("score best rows/no_response.jsonl out.jsonl", "line 2"),
    ("score best rows/null_response.jsonl out.jsonl", "line 1"),
    ("score best rows/number_response.jsonl out.jsonl", "line 1"),
    ("score best files/empty.jsonl out.jsonl", "empty"),
    ("score best files/torn.jsonl out.jsonl", "torn.jsonl"),
    # ensembles
    ("score best --prompt a --response b --ensemble mean", "best holds no ensemble.json"),
    ("score best --prompt a --response b --ensemble men", "unknown --ensemble 'men'; did you mean 'mean'"),
    ("score best --prompt a --response b --ensemble uwo --penalty -1", "--penalty"),
    ("score twins --prompt a --response b", "twins is an ensemble; add --ensemble"),
    ("score torn_twins --prompt a --response b --ensemble mean", "ensemble.json is damaged"),
    ("ensemble trian", "unknown command 'trian'; did you mean 'train'"),
    ("ensemble join best --data pairs.jsonl --output e", "MODELS must name at least 2 models, got 1"),
    ("ensemble join best best --data pairs.jsonl --output e", "MODELS must name each model once"),
    ("ensemble join best causal --data pairs.jsonl --output e", "head"),
    ("ensemble join best ./nowhere --data pairs.jsonl --output e", "nowhere"),
    ("ensemble join best broken/no_weights --data pairs.jsonl --output e", "no_weights"),
    ("ensemble join best best/. --data pairs.jsonl --output e", "needs at least 38 reference responses"),
    ("ensemble join best best/. --data nowhere.jsonl --output e", "nowhere.jsonl: no such file"),
    ("ensemble join best best/. --data pairs.jsonl --output e --false-positive-rate 0", "--false-positive-rate"),
    ("ensemble train --output e --seeds 1", "--seeds"),
    ("ensemble train --output e seed=1", "sets seed itself: members differ in it; leave out seed=1"),
    ("ensemble train --output e ~seed", "sets seed itself: members differ in it; leave out ~seed"),
    ("ensemble train --output e ~adapter", "adapter must be given; set it with adapter=VALUE"),
    (
        "ensemble train --output e pairs.jsonl",
        "expected option=value, got 'pairs.jsonl'; write for example data.train=",
    ),
    ("ensemble train --output e data.train=a,b", "give one value, or write a list as name=[a,b]"),
    ("ensemble train --output e --multirun", "rm-opt ensemble train takes options as name=value, got --multirun;"),
    ("ensemble train --output e optimiser=adamw", "unknown option 'optimiser'; did you mean 'optimizer'"),
    ("ensemble train --output pairs.jsonl/e", "hydra.run.dir must be a folder that can be written"),
    # best of n
    ("bon best out.jsonl", "give either --policy MODEL, or --completions FILE"),
    ("bon best out.jsonl --policy world --completions responses.jsonl", "give either --policy MODEL"),
    ("bon best out.jsonl --completions responses.jsonl --prompts pairs.jsonl", "--prompts has no effect with --comple"),
    ("bon best out.jsonl --completions responses.jsonl --n 16", "--n has no effect with --completions"),
    ("bon best out.jsonl --completions responses.jsonl --temperature 1", "--temperature has no effect with --compl"),
    ("bon best out.jsonl --policy world --top-p 0.5", "--top-p has no effect with --policy world; leave it out"),
    ("bon best out.jsonl --policy world --gold best", "--gold is the model in question"),
    ("readiness best --data pairs.jsonl --n 8", "--n has no effect without --policy"),
    ("readiness best --data pairs.jsonl --labels 8", "--labels has no effect without an oracle or --ask"),
    ("bon best out.jsonl --policy causal", "--policy MODEL needs --prompts FILE"),
    (
        "bon best out.jsonl --policy best --prompts pairs.jsonl",
        "best is a reward model (LlamaForSequenceClassification)",
    ),
    ("bon best out.jsonl --policy broken/empty --prompts pairs.jsonl", "holds no config.json"),
    ("bon best out.jsonl --policy ./nowhere --prompts pairs.jsonl", "nowhere"),
    ("bon best out.jsonl --policy causal --prompts nowhere.jsonl", "nowhere.jsonl"),
    ("bon best out.jsonl --policy causal --prompts files/empty.jsonl", "empty"),
    ("bon best out.jsonl --policy causal --prompts other.csv", "expected the column prompt"),
    ("bon best out.jsonl --policy causal --prompts pairs.jsonl --n 0", "--n"),
    ("bon best out.jsonl --policy causal --prompts pairs.jsonl --temperature 0", "--temperature must be positive"),
    ("bon best out.jsonl --policy causal --prompts pairs.jsonl --top-p 2", "--top-p must lie in (0, 1]"),
    (
        "bon best out.jsonl --policy causal --prompts pairs.jsonl --backend vlm",
        "unknown --backend 'vlm'; did you mean 'vllm'? Known: transformers, vllm",
    ),
    ("bon best out.jsonl --policy causal --prompts pairs.jsonl --backend vllm", "rm-optimizer[vllm]"),
    ("bon best out.jsonl --policy world --prompts pairs.jsonl", "topics"),
    ("bon best out.jsonl --policy world --num-prompts 1 --n 2 --gold causal", "head"),
    ("bon best out.jsonl --completions responses.jsonl --gold world", "topics"),
    ("bon best out.jsonl --completions nowhere.jsonl", "nowhere.jsonl"),
    ("bon best out.jsonl --completions rows/null_response.jsonl", "line 1"),
    ("bon best out.txt --completions responses.jsonl", "expected a file name ending in .jsonl"),
    ("bon best scored.jsonl --completions responses.jsonl", "scored.jsonl: is there already"),
    ("bon best nowhere/out.jsonl --completions responses.jsonl", "its folder does not exist"),
    ("bon causal out.jsonl --completions responses.jsonl", "head"),
    ("bon best out.jsonl --completions responses.jsonl --server http://127.0.0.1:9", "127.0.0.1:9"),
    # rlhf
    ("rlhf r --policy best --prompts pairs.jsonl", "best is a reward model (LlamaForSequenceClassification)"),
    ("rlhf r --policy broken/empty --prompts pairs.jsonl", "holds no config.json"),
    ("rlhf r --policy causal", "rlhf.prompts must name a file, or data.train pairs"),
    ("rlhf r --policy causal --prompts nowhere.jsonl", "nowhere.jsonl"),
    ("rlhf r --policy causal --prompts pairs.jsonl", "must leave prompts to train on, got 256 of the 12"),
    ("rlhf r --prompts pairs.jsonl rlhf.measured_prompts=4", "topics"),
    ("rlhf r rlhf.num_generations=1", "rlhf.num_generations must be at least 2, got 1"),
    ("rlhf r --steps 0", "rlhf.steps must be at least 1, got 0"),
    ("rlhf r --algorithm ppo", "unknown rlhf.algorithm 'ppo'"),
    ("rlhf r rlhf.micro_batch=7", "rlhf.micro_batch must divide the 64 responses of a step, got 7"),
    ("rlhf r rlhf.members=1 rlhf.stop_disagreement=2", "rlhf.stop_disagreement must be null for a single reward model"),
    ("rlhf r --server http://127.0.0.1:9", "rlhf.reward_models must name the one model"),
    ("rlhf r --server http://127.0.0.1:9 --reward-model best", "127.0.0.1:9"),
    ("rlhf r --reward-model causal", "head"),
    ("rlhf r --reward-model ./nowhere", "nowhere"),
    ("rlhf r --gold causal", "head"),
    ("rlhf r rlhf.stepz=2", "unknown option 'rlhf.stepz'; did you mean 'rlhf.steps'"),
    ("rlhf r output_dir=x", "sets output_dir itself: OUTPUT is the folder; leave out output_dir=x"),
    ("rlhf r --step 3", "rm-opt rlhf takes options as name=value, got --step; write name=value"),
    ("rlhf pairs.jsonl", "hydra.run.dir must be a folder that can be written"),
    ("rlhf best", "must not be the folder of a run or a model"),
    # analyze
    ("analyze", "--checkpoint RUN"),
    ("analyze --checkpoint best", "data"),
    ("analyze --checkpoint ./nowhere --data pairs.jsonl", "nowhere"),
    ("analyze --checkpoint best --data nowhere.jsonl", "nowhere.jsonl"),
    ("analyze --checkpoint best --data pairs.jsonl --type gaus", "unknown landscape 'gaus'"),
    ("analyze --checkpoint best --data pairs.jsonl --top-k 0", "landscape.top_k must"),
    ("analyze --checkpoint best --data pairs.jsonl --top-k 1000000", "top_k"),
    ("analyze --checkpoint best --data pairs.jsonl --pairs 0", "landscape.num_pairs must"),
    ("analyze --checkpoint best --data pairs.jsonl --pairs 1", "landscape.num_pairs must"),
    ("analyze --checkpoint best --data pairs.jsonl --params 'nope.*'", "nope.*"),
    ("analyze --checkpoint best --data pairs.jsonl --method lanzos", "lanzos"),
    ("analyze --checkpoint best --data pairs.jsonl landscape.num_points=4", "landscape.num_points must be odd"),
    ("analyze --checkpoint best --type trajectory --data pairs.jsonl", "run folder"),
    ("analyze --checkpoint best --multirun seed=1,2", "--multirun"),
]


class Hangs(Exception):
    """A command that gave no answer."""


def _stop(number: int, frame: object) -> NoReturn:
    raise Hangs


def _become(module: str, arguments: list[str]) -> NoReturn:
    """The command that this one would become, in this process."""
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
    raise SystemExit(0)


def _files() -> dict[str, tuple[int, int]]:
    """Size and time of every file; what a run records of itself below `outputs` is no result."""
    found = (path for path in Path().rglob("*") if path.is_file() and path.parts[0] != "outputs")
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def _start_nothing(*arguments: object, **options: object) -> NoReturn:
    raise AssertionError(f"a bad command starts a process: {arguments}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    world.build(root)
    return root


@pytest.fixture(autouse=True)
def in_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train, "become", _become)
    monkeypatch.setattr(sys, "argv", ["rm-opt"])
    monkeypatch.setattr(subprocess, "Popen", _start_nothing)
    monkeypatch.setattr(SpawnProcess, "start", _start_nothing)
    loggers = (logging.root, logging.getLogger("rm_optimizer"))
    kept = [(list(logger.handlers), logger.level) for logger in loggers]
    before = signal.signal(signal.SIGALRM, _stop)
    signal.alarm(HANGS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    for logger, (handlers, level) in zip(loggers, kept, strict=True):  # the command's own write to its standard error
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:] = handlers
        logger.setLevel(level)
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(("command", "says"), ROWS, ids=[command for command, _ in ROWS])
def test_a_bad_command_is_one_sentence(command: str, says: str):
    before, started = _files(), time.process_time()
    done = CliRunner().invoke(app, shlex.split(command))
    taken = time.process_time() - started
    assert not done.exception or isinstance(done.exception, SystemExit), repr(done.exception)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert re.search(re.escape(says), errors[0]), errors[0]
    assert "Traceback" not in done.stderr
    assert done.exit_code == 2
    assert _files() == before
    assert not [path for path in Path("outputs").rglob("*") if path.name in ("run.json", "model.safetensors")]
    assert taken < SECONDS
