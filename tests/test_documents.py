"""Every command of the documents is run, as it stands or in the quicker form that the table below gives.

A command is a line after `$ ` in a console block, or a line of a bash block; a line that ends in a backslash goes on.
Links lead to files and headings that are there, and option tables are those of the schema.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.interfaces.cli import GROUPS as COMMANDS
from rm_optimizer.interfaces.cli import SETTINGS
from rm_optimizer.schema.composition import PACKAGE, compose
from rm_optimizer.schema.data import SyntheticConfig
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS
from tests.test_architecture import FLOORS, INNER, MODULES
from tools.describe import BEGIN, END, REFERENCES

ROOT = Path(__file__).resolve().parent.parent
PAGES = {f"docs/{path.name}": path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))}
DOCUMENTS = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "doc.md", "studies/README.md")
} | PAGES
BLOCK = re.compile(r"^```(console|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Run:
    """How a command is run here.

    Args:
        instead: command that runs in its place; None runs the command itself.
        in_checkout: run in the checkout instead of the shared scratch folder.
        prints: text that must be in its output.
        slow: True if it trains, loads a model or needs what such a command left: `make test-slow` runs it.
    """

    instead: str | None = None
    in_checkout: bool = False
    prints: str = ""
    slow: bool = False


STEPS = "training.max_steps=4 training.progress=false"
FEW = f"{STEPS} data.synthetic.num_train=64 data.synthetic.num_val=32"
PARQUET = (
    "python -c 'import pandas; "
    'rows = pandas.read_json("pairs.jsonl", lines=True).sort_values("prompt"); '
    "first = rows.prompt < rows.prompt.iloc[40]; "
    'rows[first].to_parquet("train.parquet"); rows[~first].to_parquet("val.parquet")\''
)
RESPONSES = (
    'printf \'%s\\n\' \'{"prompt": "Hi", "response": "Hello"}\' '
    '\'{"prompt": "Hi", "response": "No"}\' > responses.jsonl'
)
LISTS = '{"prompt": "Name a color", "chosen": ["red"], "rejected": ["cat", "dog", "sun"], "subset": "Focus", "id": "1"}'
SUITE = (
    "printf '%s\\n' 'source: here' 'sets: {help: {path: pairs.jsonl}}' 'score: overall' "
    "'average: {overall: {pool: [help]}}' > mine.yaml"
)
ASK = (
    "import json, sys, time, urllib.request as web; url, body = sys.argv[1:]; "
    "request = web.Request(url, body.encode(), {'content-type': 'application/json'})\n"
    "for _ in range(300):\n"
    "    try:\n        print(web.urlopen(request).read().decode()); break\n"
    "    except OSError:\n        time.sleep(1)\n"
)
EGG = '{"items": [{"prompt": "How do I boil an egg?", "responses": ["In water, seven minutes.", "No."]}]}'
WAYS: dict[str, Run] = {
    "pip install -e .": Run("python -c 'import rm_optimizer'"),
    "pip install 'rm-optimizer[serve]'": Run("python -c 'import fastapi, uvicorn, prometheus_client'"),
    "rm-opt train experiment=quickstart hydra.run.dir=outputs/first": Run(
        f"rm-opt train experiment=quickstart {FEW} hydra.run.dir=outputs/first", prints="gold reward", slow=True
    ),
    "export RM_OPT_API_KEY=change-me": Run(),
    # there is no Docker here
    "MODEL=$PWD/outputs/first docker compose -f deploy/compose.yaml --profile metrics up -d": Run(
        'python -c \'import yaml; print(yaml.safe_load(open("deploy/compose.yaml"))["services"].keys())\'',
        in_checkout=True,
        prints="grafana",
    ),
    # two replicas without Docker, on another port
    "rm-opt train experiment=quickstart hydra.run.dir=outputs/next publish.url=http://localhost:8000 "
    "publish.api_key_env=RM_OPT_API_KEY": Run(
        "export RM_OPT_API_KEY=change-me; "
        "rm-opt serve outputs/first --replicas 2 --port 8793 >served 2>&1 & server=$!; "
        "export RM_OPT_API_KEY=change-me; until curl -sf -H 'Authorization: Bearer change-me' localhost:8793/ready; "
        f"do sleep 0.5; done; rm-opt train experiment=quickstart {FEW} hydra.run.dir=outputs/next "
        "publish.url=http://localhost:8793 publish.api_key_env=RM_OPT_API_KEY; "
        "curl -s -H 'Authorization: Bearer change-me' localhost:8793/metrics; kill $server; wait $server",
        prints='rm_updates_total{outcome="committed"}',
        slow=True,
    ),
    "rm-opt serve outputs/run/best --port 8000": Run("rm-opt serve --help", prints="--api-key"),
    # a server on another port, asked until it answers, then stopped
    f"curl -s localhost:8000/rm/score -H 'content-type: application/json' -d '{EGG}'": Run(
        "rm-opt serve outputs/run/best --port 8791 >served 2>&1 & server=$!; "
        f"python -c '{ASK.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}' "
        f"http://127.0.0.1:8791/rm/score '{EGG}'; kill $server; wait $server",
        prints="rm_version",
        slow=True,
    ),
    "rm-opt analyze outputs/run": Run(
        "rm-opt analyze outputs/run --pairs 8 --top-k 2 && ls outputs/run/landscape/hessian",
        prints="hessian.json",
        slow=True,
    ),
    "rm-opt analyze outputs/run --type gauss_newton": Run(
        "rm-opt analyze outputs/run --type gauss_newton --pairs 8 && ls outputs/run/landscape/*",
        prints="gauss_newton.json",
        slow=True,
    ),
    "rm-opt analyze outputs/run --type slices landscape.directions=eigenvectors": Run(
        "rm-opt analyze outputs/run --type slices landscape.directions=eigenvectors --cfg job",
        prints="directions: eigenvectors",
    ),
    "rm-opt analyze outputs/run --type evolution": Run(
        "rm-opt analyze outputs/run --type evolution --cfg job", prints="type: evolution"
    ),
    "rm-opt analyze outputs/adamw --type between landscape.others=[outputs/sgd,outputs/muon]": Run(
        "rm-opt analyze outputs/run --type between landscape.others=[outputs/sgd,outputs/muon] --cfg job",
        prints="type: between",
    ),
    "rm-opt analyze outputs/run/best --data pairs.jsonl --params head --method full": Run(slow=True),
    # make installs and then starts what is run here with fewer steps; the whole suite cannot run inside itself
    "make quickstart": Run(
        f"rm-opt train experiment=quickstart {FEW} hydra.run.dir=quick", prints="gold reward", slow=True
    ),
    "make test": Run("make --dry-run test", in_checkout=True, prints="-m pytest"),
    "make check": Run("make --dry-run check", in_checkout=True, prints="mypy"),
    "rm-opt --help": Run(prints="Train and analyze:"),
    "rm-opt info": Run(prints="presets in"),
    "rm-opt estimate -m qwen -d pairs.jsonl hardware=h100": Run(prints="on one H100"),
    "rm-opt data check pairs.jsonl": Run(prints="longer wins"),
    # without a hub the presets that download one are composed, and the embedded one is trained
    "rm-opt train model=minilm data.train=pairs.jsonl hydra.run.dir=outputs/run": Run(
        f"rm-opt train model=minilm data.train=pairs.jsonl --cfg job && "
        f"rm-opt train data.train=pairs.jsonl {STEPS} hydra.run.dir=outputs/run",
        prints="sentence-transformers/all-MiniLM-L6-v2",
        slow=True,
    ),
    "rm-opt train -m qwen -o muon -d pairs.jsonl -e 1 -b 64 hardware=h100": Run(
        "rm-opt train -m qwen -o muon -d pairs.jsonl -e 1 -b 64 hardware=h100 --cfg job", prints="name: muon"
    ),
    "rm-opt train model.path=Qwen/Qwen3-0.6B data.train=org/preferences output_dir=outputs/run training.epochs=1 "
    "batching.batch_size=32 optimizer.lr=1e-5 model.max_length=1024 loss.center_rewards=0.01 logger=wandb": Run(
        "rm-opt train training.epochs=1 batching.batch_size=32 optimizer.lr=1e-5 model.max_length=1024 "
        "loss.center_rewards=0.01 logger=wandb --cfg job",
        prints="center_rewards: 0.01",
    ),
    "python -m rm_optimizer.train optimizer=muon hardware=h100 --cfg job": Run(prints="precision: bf16-mixed"),
    "rm-opt train data.train='big/*.parquet' data.val=val.parquet data.streaming=ray training.max_steps=1000": Run(
        "rm-opt train data.train='big/*.parquet' data.val=val.parquet data.streaming=ray training.max_steps=1000 "
        "--cfg job",
        prints="streaming: ray",
    ),
    "torchrun --standalone --nproc-per-node 2 --no-python rm-opt evaluate outputs/run --data pairs.jsonl": Run(
        prints="metrics, rewards and plots", slow=True
    ),
    "torchrun --standalone --nproc-per-node 2 -m rm_optimizer.train hardware=fsdp hardware.accelerator=cpu": Run(
        "python -m rm_optimizer.train hardware=fsdp hardware.accelerator=cpu --cfg job", prints="strategy: "
    ),
    "rm-opt train model=qwen hardware=h100 data.train=train.jsonl": Run(
        "rm-opt train model=qwen hardware=h100 data.train=train.jsonl --cfg job", prints="compile: true"
    ),
    "rm-opt train model=llama adapter=lora hardware=h100 data.train=train.jsonl": Run(
        "rm-opt train model=llama adapter=lora hardware=h100 data.train=train.jsonl --cfg job", prints="kind: lora"
    ),
    "rm-opt train profile_memory=true training.calibration.enabled=true training.hessian.every=20 "
    "training.hessian.num_pairs=32 training.max_steps=60": Run(
        "rm-opt train profile_memory=true training.calibration.enabled=true training.hessian.every=2 "
        f"training.hessian.num_pairs=8 {FEW} hydra.run.dir=watched && ls watched",
        prints="profile.json",
        slow=True,
    ),
    "rm-opt train experiment=ablation_a2 model=minilm data.train=pairs_train.parquet data.val=pairs_val.parquet "
    "seed=0": Run("rm-opt train experiment=ablation_a2 model=minilm --cfg job", prints="name: cosine"),
    "rm-opt train experiment=lora_r16 model=qwen hardware=h100 data.train=pairs_train.parquet "
    "data.val=pairs_val.parquet": Run(
        "rm-opt train experiment=lora_r16 model=qwen hardware=h100 --cfg job", prints="rank: 16"
    ),
    "rm-opt train --multirun experiment=sensitivity_lr model=minilm data.train=pairs_train.parquet "
    "data.val=pairs_val.parquet": Run(
        f"rm-opt train --multirun experiment=sensitivity_lr {FEW} hydra.sweep.dir=sweep && ls sweep",
        prints="4",
        slow=True,
    ),
    "rm-opt train --multirun optimizer=adamw,muon seed=0,1,2 data.train=pairs.jsonl hydra.sweep.dir=outputs/sweep": Run(
        f"rm-opt train --multirun optimizer=adamw,muon seed=0,1 {FEW} hydra.sweep.dir=outputs/sweep",
        prints="paired by prompt and seed",
        slow=True,
    ),
    "rm-opt compare plan outputs/study optimizer=adamw,muon,lion seed=0,1,2 data.train=pairs.jsonl": Run(
        f"rm-opt compare plan outputs/study optimizer=adamw,muon seed=0 {FEW}", prints="2 trials", slow=True
    ),
    "python studies/hypotheses.py outputs/hypotheses train.parquet val.parquet --seeds 5 model=minilm": Run(
        f"{PARQUET} && python {ROOT}/studies/hypotheses.py outputs/hypotheses train.parquet val.parquet --seeds 1 "
        "--num-train 16 --num-select 8 --num-test 8",
        prints="pair-aware batching",
        slow=True,
    ),
    "rm-opt compare run outputs/study": Run(
        "rm-opt compare run outputs/study --executor inline", prints="2 finished", slow=True
    ),
    "rm-opt compare status outputs/study": Run(prints="2 finished", slow=True),
    "rm-opt compare report outputs/study": Run(prints="paired by prompt and seed", slow=True),
    "rm-opt compare --optimizers adamw,muon,lion --seeds 5 --data pairs.jsonl --model minilm --plan": Run(
        "rm-opt compare --optimizers adamw,muon,lion --seeds 5 --data pairs.jsonl --plan "
        "--pairs 16 --val-pairs 8 --test-pairs 8 --output outputs/planned",
        prints="30 runs",
        slow=True,
    ),
    "rm-opt compare --optimizers adam,adamw,sgd,muon,lion --seeds 3 --data pairs.jsonl": Run(
        "COLUMNS=200 rm-opt compare --optimizers adamw,sgd --seeds 2 --data pairs.jsonl --budget smoke "
        "--executor inline --pairs 16 --val-pairs 8 --test-pairs 8 --curvature-pairs 0 --output outputs/compared",
        prints="NLL − reference",
        slow=True,
    ),
    "rm-opt compare outputs/sweep": Run(prints="paired by prompt and seed", slow=True),
    "rm-opt compare outputs/sweep/0 outputs/sweep/3 --output outputs/adamw-muon": Run(
        "rm-opt compare outputs/sweep/0 outputs/sweep/3 --output outputs/adamw-muon && ls outputs/adamw-muon",
        prints="comparison.parquet",
        slow=True,
    ),
    "rm-opt evaluate outputs/run/best --data pairs.jsonl": Run(prints="accuracy", slow=True),
    "rm-opt evaluate outputs/run/best --suite rewardbench2 --data rewardbench2.jsonl": Run(
        f"printf '%s\\n' '{LISTS}' > rewardbench2.jsonl && "
        "rm-opt evaluate outputs/run/best --suite rewardbench2 --data rewardbench2.jsonl",
        prints="incomplete: 1 of 1,865 rows",
        slow=True,
    ),
    "rm-opt evaluate first/best second/best --suite rmbench --data rmbench.json --output outputs/suites/rmbench": Run(
        "rm-opt evaluate --help", prints="--suite"
    ),
    "rm-opt train model=tiny data.train=pairs.jsonl 'training.suites={hhh: {honest: honest.jsonl}}'": Run(
        "rm-opt train model=tiny data.train=pairs.jsonl 'training.suites={hhh: {honest: honest.jsonl}}' --cfg job",
        prints="honest: honest.jsonl",
    ),
    "rm-opt evaluate outputs/run/best --suite mine.yaml": Run(
        f"{SUITE} && rm-opt evaluate outputs/run/best --suite mine.yaml", prints="overall is its official", slow=True
    ),
    "rm-opt leaderboard outputs/suites": Run(
        f"{SUITE} && rm-opt evaluate outputs/run/best --suite mine.yaml --output outputs/suites/mine && "
        "rm-opt leaderboard outputs/suites",
        prints="page: outputs/suites/report/index.html",
        slow=True,
    ),
    'rm-opt score outputs/run/best --prompt "Explain chess" --response "Start with pawns." --response "No."': Run(
        slow=True
    ),
    "rm-opt score outputs/run/best responses.jsonl scored.jsonl": Run(
        f"{RESPONSES} && rm-opt score outputs/run/best responses.jsonl scored.jsonl && grep -c reward scored.jsonl",
        prints="2",
        slow=True,
    ),
    "rm-opt bon outputs/run/best best.jsonl --policy world --gold world --n 64": Run(
        "rm-opt bon outputs/run/best best.jsonl --policy world --gold world --n 8 --num-prompts 8 && ls",
        prints="best.curve.png",
        slow=True,
    ),
    "rm-opt bon outputs/run/best ranked.jsonl --completions responses.jsonl": Run(
        f"{RESPONSES} && rm-opt bon outputs/run/best ranked.jsonl --completions responses.jsonl",
        prints="prompts: 1, each with 2 ranked responses",
        slow=True,
    ),
    "rm-opt readiness outputs/run --policy world --gold world --data pairs.jsonl": Run(
        # a model of four steps may fail the checks of its rewards, and says so with its exit code
        "rm-opt readiness outputs/run --policy world --gold world --data pairs.jsonl --n 8 --num-prompts 8 || "
        "test $? = 4 && ls outputs/run/readiness",
        prints="readiness.html",
        slow=True,
    ),
    "rm-opt readiness outputs/run --policy MODEL --ask questions.csv": Run(
        "rm-opt readiness outputs/run --policy world --n 8 --num-prompts 8 --data pairs.jsonl --ask questions.csv || "
        "test $? = 4 && head -n 1 questions.csv",
        prints="response_a",
        slow=True,
    ),
    "rm-opt label questions.csv": Run("rm-opt label --help", prints="--port"),
    "rm-opt readiness outputs/run --policy MODEL --comparisons questions.csv": Run(
        "rm-opt readiness --help", prints="--comparisons"
    ),
    "pip install 'rm-optimizer[rl]'": Run("python -c 'import trl'"),
    "rm-opt rlhf outputs/rlhf": Run("rm-opt rlhf --help", prints="--algorithm"),
    "rm-opt rlhf outputs/mine --policy MODEL --data pairs.jsonl model=minilm rlhf.algorithm=rloo": Run(
        "! rm-opt rlhf outputs/mine --policy ./MODEL --data pairs.jsonl model=minilm rlhf.algorithm=rloo 2>&1",
        prints="error: ./MODEL cannot be loaded as a policy",
        slow=True,
    ),
    "rm-opt rlhf outputs/served --policy MODEL --prompts prompts.jsonl --reward-model outputs/run/best "
    "--server http://127.0.0.1:8000": Run("rm-opt rlhf --help", prints="--server"),
    "rm-opt ensemble train --seeds 5 --output outputs/ensemble": Run(
        f"rm-opt ensemble train --seeds 2 --output outputs/ensemble --false-positive-rate 0.3 {FEW}",
        prints="2 members, standardized on 16 responses",
        slow=True,
    ),
    "rm-opt ensemble join outputs/ensemble/seed-0/best outputs/ensemble/seed-1/best --data pairs.jsonl "
    "--output outputs/joined": Run(prints="outputs/joined/ensemble.json", slow=True),
    'rm-opt score outputs/ensemble --ensemble mean --prompt "Explain chess" --response "Start with pawns." '
    '--response "No."': Run(prints=" ± ", slow=True),
    "rm-opt score outputs/ensemble responses.jsonl pessimistic.jsonl --ensemble uwo --penalty 1.0": Run(
        f"{RESPONSES} && rm-opt score outputs/ensemble responses.jsonl pessimistic.jsonl --ensemble uwo",
        prints="2 rows scored by 2 members",
        slow=True,
    ),
    "rm-opt select pool.jsonl --model outputs/run/best --k 100 --out to_label.csv": Run(
        'sed -e "s/\\"chosen\\"/\\"response_a\\"/; s/\\"rejected\\"/\\"response_b\\"/" pairs.jsonl > pool.jsonl && '
        "rm-opt select pool.jsonl --model outputs/run/best --k 6 --out to_label.csv",
        prints="6 of 80 unlabeled pairs",
        slow=True,
    ),
    "rm-opt train data.train=pairs.jsonl data.curriculum=margins.jsonl data.curriculum_quantiles=true": Run(
        "rm-opt train data.train=pairs.jsonl data.curriculum=margins.jsonl data.curriculum_quantiles=true --cfg job",
        prints="curriculum: margins.jsonl",
    ),
    "rm-opt label to_label.csv": Run("rm-opt label --help", prints="--port"),
    "rm-opt label-import to_label.csv --out labels.jsonl": Run(
        "sed -i -E '2,$s/,\\r?$/,A/' to_label.csv && rm-opt label-import to_label.csv --out labels.jsonl",
        prints="6 pairs of 6 answers",
        slow=True,
    ),
    "rm-opt blame outputs/run --edit length": Run(prints="results: outputs/run/blame/index.html", slow=True),
    "rm-opt blame outputs/run --pair surprising.jsonl --by annotator": Run(
        "head -3 pairs.jsonl > surprising.jsonl && rm-opt blame outputs/run --pair surprising.jsonl --by prompt",
        prints="margin of the pairs in surprising.jsonl",
        slow=True,
    ),
    "rm-opt data clean pairs.jsonl --out kept.jsonl --false-positive-rate 0.05": Run(prints="pairs stay: kept.jsonl"),
    "python studies/readiness.py readiness_study --worlds development": Run(
        f"python {ROOT}/studies/readiness.py --help", prints="--worlds"
    ),
    "python studies/readiness.py readiness_study --worlds test": Run(
        f"! python {ROOT}/studies/readiness.py readiness_study --worlds test --models 6 --steps 10 2>&1",
        prints="--worlds development",
    ),
    "rm-opt report outputs/run": Run(prints="page: outputs/run/report/index.html", slow=True),
    "rm-opt report outputs/sweep": Run(prints="page: outputs/sweep/report/index.html", slow=True),
    "rm-opt report outputs/optimizers": Run("rm-opt report --help", prints="--format"),
    "rm-opt report outputs/run --format md": Run(prints="## Known weaknesses", slow=True),
    "python studies/cleaning.py outputs/cleaning": Run(
        f"python {ROOT}/studies/cleaning.py outputs/cleaning --splits 2 --pairs 60", prints="AUROC: flipped labels"
    ),
    "python studies/labels.py outputs/labels --data pairs.jsonl --splits 100 --budget 512": Run(
        f"python {ROOT}/studies/labels.py outputs/labels --data pairs.jsonl --splits 2 --budget 16 --start 8 --batch 8",
        prints="labels saved at 16 labels",
        slow=True,
    ),
    "python studies/labels.py outputs/labels": Run(f"python {ROOT}/studies/labels.py --help", prints="--flips"),
    "rm-opt scaling outputs/scaling data.train=pairs.jsonl model=minilm --sizes 500,1000,2000,4000 --gain 2": Run(
        "rm-opt scaling --help", prints="--gain"
    ),
    "rm-opt import value-head-run outputs/imported": Run(
        "rm-opt import outputs/run/best outputs/imported", prints="imported: outputs/imported", slow=True
    ),
    "rm-opt evaluate outputs/imported --data pairs.jsonl": Run("rm-opt evaluate --help", prints="--data"),
    "rm-opt why outputs/imported value-head-run": Run("rm-opt why --help", prints="differ"),
    "rm-opt serve outputs/imported --check value-head-run": Run("rm-opt serve --help", prints="--check"),
    "rm-opt export outputs/imported outputs/half --dtype bfloat16 --data pairs.jsonl": Run(
        "rm-opt export outputs/run/best outputs/half --dtype bfloat16 --data pairs.jsonl",
        prints="type of the weights: bfloat16",
        slow=True,
    ),
    "rm-opt export outputs/run outputs/public --dtype bfloat16 --push owner/judge": Run(
        "rm-opt export --help", prints="--push"
    ),
    "rm-opt serve outputs/run/best --check outputs/run": Run("rm-opt serve --help", prints="--check"),
    "rm-opt why outputs/run/best scored.jsonl": Run(
        f"{RESPONSES} && rm-opt score outputs/run/best responses.jsonl same.jsonl && "
        "rm-opt why outputs/run/best same.jsonl",
        prints="agree",
        slow=True,
    ),
    "rm-opt why outputs/imported http://127.0.0.1:8000/classify": Run("rm-opt why --help", prints="/get_reward"),
    "rm-opt why outputs/run/best scored.jsonl --json why.json": Run("rm-opt why --help", prints="--json"),
    "rm-opt doctor outputs/run/best --data pairs.jsonl": Run(
        # a model of four steps may fail the checks of its rewards, and says so with its exit code
        "rm-opt doctor outputs/run/best --data pairs.jsonl || test $? = 4",
        prints="verdict:",
        slow=True,
    ),
}


def commands_in(text: str) -> list[str]:
    """Commands of the fenced blocks of a document, continuation lines joined."""
    found = []
    for kind, body in BLOCK.findall(text):
        for line in re.sub(r"\s*\\\n\s*(?:> )?", " ", body).splitlines():
            command = line.removeprefix("$ ") if kind == "bash" or line.startswith("$ ") else ""
            command = re.sub(r"\s+#.*$|^#.*$", "", command).strip()
            if command:
                found.append(command)
    return found


def documented() -> list[str]:
    return list(dict.fromkeys(command for text in DOCUMENTS.values() for command in commands_in(text)))


def anchors_in(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub names them."""
    counts: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return found


def broken_links(name: str, text: str) -> list[str]:
    """Relative links of a document to a file or a heading that is not there."""
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        if "://" not in link and (
            not path.exists() or (anchor and anchor not in anchors_in(path.read_text(encoding="utf-8")))
        ):
            broken.append(link)
    return broken


def test_the_readme_gives_the_two_commands_of_a_fresh_clone():
    assert {"make quickstart", "make test"} <= set(commands_in(DOCUMENTS["README.md"]))


def test_the_front_page_of_the_manual_links_every_page():
    assert set(PAGES) <= {link.partition("#")[0] for link in LINK.findall(DOCUMENTS["doc.md"])}


def test_the_front_page_of_the_manual_names_every_command():
    names = {
        SETTINGS.get(command, {}).get("name", command.__name__.replace("_", "-"))
        for group in COMMANDS.values()
        for command in group
    }
    assert names <= set(re.findall(r"`rm-opt ([\w-]+)", DOCUMENTS["doc.md"]))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_to_a_file_and_a_heading(name):
    assert broken_links(name, DOCUMENTS[name]) == []


def test_a_broken_link_would_be_seen():
    text = "# One\n[a](#one) [b](#two) [c](gone.md) [d](doc.md#three) [e](https://example.org)\n```\n[f](#g)\n```\n"
    assert anchors_in("# A b\n## A `b`!\n") == {"a-b", "a-b-1"}
    assert broken_links("none.md", text.replace("#one", "doc.md")) == ["#two", "gone.md", "doc.md#three"]


def test_every_file_that_a_document_names_is_there():
    found = {path for text in DOCUMENTS.values() for path in re.findall(r"(?:\w+/)+\w+\.(?:py|yaml|sh)\b", text)}
    assert len(found) > 40
    missing = [path for path in sorted(found) if not any((home / path).exists() for home in (ROOT, PACKAGE))]
    assert missing == ["configs/optimizer/NAME.yaml"]


def test_every_name_on_the_page_of_extensions_is_in_the_code():
    code = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("rm_optimizer", "tests")
        for path in (ROOT / folder).rglob("*.py")
    )
    words = set(re.findall(r"\w+", code))
    named = set(re.findall(r"`(\w*_\w+|[A-Z]\w+)`", DOCUMENTS["docs/how-to-extend.md"]))
    assert len(named) > 15
    assert sorted(named - words) == []


@pytest.mark.parametrize("name", REFERENCES)
def test_the_tables_are_those_of_the_code(name):
    inside = DOCUMENTS[name].partition(BEGIN)[2].partition(END)[0]
    assert inside.strip() == REFERENCES[name]().strip(), "write them with python tools/describe.py"


def test_every_feature_has_a_test_that_exists_or_a_reason():
    lines = [line for line in DOCUMENTS["docs/features.md"].splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    features = {row[0]: row[1] for row in rows if len(row) == 7 and row[0] not in ("feature", "---")}
    peers = {cell for row in rows if row[0] in features and len(row) == 7 for cell in row[2:]}
    assert len(features) > 45
    assert peers == {"yes", "partly", "no", "not found"}
    shown = {row[0]: re.findall(r"`([\w/]+\.py)::(test_\w+)`", row[1]) for row in rows if len(row) == 2}
    bare = [name for name, here in features.items() if not (shown.get(name) or here.startswith("no: "))]
    assert bare == []
    named = {test for name in features for test in shown.get(name, [])}
    assert named - {(path, test) for path, _ in named for test in functions_in(ROOT / path)} == set()
    options = {option for here in features.values() for option in re.findall(r"`((?:\w+\.)+\w+)(?:=|`)", here)}
    assert options - options_of_a_run() == {"export.json"}


def functions_in(path: Path) -> set[str]:
    """Names of the functions of a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_floors_are_those_that_imports_are_held_to():
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", DOCUMENTS["docs/architecture.md"], re.MULTILINE)
    there = {name.partition(".")[0] for name in MODULES}
    expected = {floor: rooms & there for floor, rooms in enumerate(FLOORS) if rooms & there}
    assert {int(floor): set(re.findall("`(.+?)`", rooms)) for floor, rooms in rows} == expected
    inside = re.findall(r"^- `(\w+)`: (.+ < .+)$", DOCUMENTS["docs/architecture.md"], re.MULTILINE)
    shown = {name: tuple(set(re.findall("`(.+?)`", floor)) for floor in text.split(" < ")) for name, text in inside}
    assert shown == INNER


def test_every_option_of_a_run_and_of_an_analysis_is_in_a_table_with_a_meaning():
    rows = re.findall(
        r"^\| `(.+?)` \| .+? \| (.*) \|$", "".join(REFERENCES[name]() for name in REFERENCES), re.MULTILINE
    )
    assert [option for option, meaning in rows if not meaning] == []
    expected = {"split", "max_length", "checkpoint", "landscape.top_k"} | options_of_a_run()
    assert expected - {option for option, _ in rows} == set()


def options_of_a_run() -> set[str]:
    """Dotted names of the options of a training run, with those of every optimizer."""
    composed = set(leaves(OmegaConf.to_container(compose(["output_dir=."]))))
    return composed | {f"optimizer.{item.name}" for kind in OPTIMIZER_OPTIONS.values() for item in fields(kind)}


def leaves(options: dict[str, object], prefix: str = "") -> Iterator[str]:
    """Dotted names of the values of nested options."""
    for name, value in options.items():
        if isinstance(value, dict) and name != "architecture":
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_documented_command_is_run_by_this_file():
    missing = [command for command in documented() if command not in WAYS]
    assert missing == [], "give each a Run in WAYS"


def test_no_way_is_left_of_a_command_that_is_gone():
    assert set(WAYS) - set(documented()) == set()


def test_make_quickstart_trains_the_quickstart_experiment():
    command = ["make", "--no-print-directory", "--dry-run", "quickstart"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith("/rm-opt train experiment=quickstart")


@pytest.mark.slow
def test_make_site_writes_the_manual_and_finds_no_broken_link():
    done = subprocess.run(
        ["make", "--no-print-directory", "site"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Bradley-Terry" in (ROOT / "build" / "site" / "search" / "search_index.json").read_text(encoding="utf-8")


def test_continued_lines_comments_and_output_are_told_apart():
    text = (
        "```console\n$ rm-opt train \\\n    seed=1\n42\n$ rm-opt info  # all\n```\n```bash\n# first\nmake test\n```\n"
    )
    assert commands_in(text) == ["rm-opt train seed=1", "rm-opt info", "make test"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    """A folder with `pairs.jsonl`, in which slow commands find what earlier ones left; quick ones need nothing else."""
    folder = tmp_path_factory.mktemp("scratch")
    pairs = synthetic_world(SyntheticConfig(num_train=80, num_val=2)).train
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair.to_dict()) + "\n" for pair in pairs), encoding="utf-8")
    return folder


def parameters() -> list[object]:
    ways = [(command, WAYS[command]) for command in documented() if command in WAYS]
    return [pytest.param(command, way, id=command, marks=[pytest.mark.slow] * way.slow) for command, way in ways]


def python_blocks() -> list[str]:
    texts = [text for name, text in DOCUMENTS.items() if name != "docs/tutorial.md"]  # its blocks are one program
    found = [block for text in texts for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(("command", "way"), parameters())
def test_a_documented_command_works(command, way, scratch, python):
    path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    where = ROOT if way.in_checkout else scratch
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", way.instead or command],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert way.prints in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("block", python_blocks())
def test_a_documented_program_works(block, scratch, python):
    done = subprocess.run([python, "-c", block], cwd=scratch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_must_not_be_cut_is_guarded_by_tests_that_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    sources = (path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    written = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    assert len(named) > 30
    assert not named - written
