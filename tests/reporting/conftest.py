"""One small run of pairs with awkward names, for everything that is written from a run."""

import json
from pathlib import Path

import pytest

from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training.run import train_reward_model

SMALL = [
    *(
        "model=tiny",
        "model.vocab_size=300",
        "model.max_length=32",
        "model.architecture.hidden_size=16",
        "model.architecture.num_hidden_layers=1",
    ),
    *("training.max_steps=2", "training.num_bootstrap=100", "training.progress=false", "hardware=cpu"),
    "logger.tensorboard=false",
]
GROUPS = ("<script>alert(1)</script>", "code|math")


def _pair(number: int) -> dict[str, str]:
    """A pair; every third response is too long for the model."""
    longer = f"Yes, because {number} is a number." + " Indeed." * 40 * (number % 3 == 0)
    return {"prompt": f"Is {number}?", "chosen": longer, "rejected": "No.", "source": GROUPS[number % 2]}


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secret_place")
    for name, numbers in (("train", range(60)), ("val", range(60, 120))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(_pair(number)) + "\n" for number in numbers))
    files = [f"data.{name}={folder / name}.jsonl" for name in ("train", "val")]
    train_reward_model(typed(compose([*SMALL, *files, f"output_dir={folder / 'run'}"]), TrainConfig))
    return folder / "run"
