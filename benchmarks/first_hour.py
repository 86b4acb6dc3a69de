"""Do the calls of a first hour work as typed? Natural calls that are right, refused in one sentence, or wrong.

Each call is typed as somebody who knows transformers, TRL and pandas types it: a text for a list, a frame for a file, a
result for a path, an option of another library, a misspelling. A call is right if its value is the expected one. It is
refused if it ends in a `TypeError`, a `ValueError` or an error of this package whose text is one line of at most 700
characters that says the expected word. Everything else is wrong, and so is a refusal of a call that should work.

    python benchmarks/first_hour.py
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import torch

import rm_optimizer as rm
from rm_optimizer.core.data_loader import create_dataloader
from rm_optimizer.data_efficiency import ActiveLearner, CurriculumSampler
from rm_optimizer.rl_coupling import BestOfNSampler

Call = tuple[str, Callable[[], Any], Callable[[Any], bool] | str]
"""What is typed, the call, and a test of its value or a word of the sentence that refuses it."""


def near(expected: Any) -> Callable[[Any], bool]:
    """True for a value that equals the expected one but for rounding."""
    return lambda found: bool(np.allclose(np.asarray(found, dtype=float), np.asarray(expected, dtype=float), atol=1e-5))


def data_calls(rows: list[dict[str, str]], path: Path, tokenizer: Any) -> list[Call]:
    """Calls that read pairs."""
    frame, fingerprint = pd.DataFrame(rows), rm.PreferenceDataset(rows).fingerprint

    def same(data: Any) -> bool:
        return bool(data.fingerprint == fingerprint)

    whole = rm.PreferenceDataset
    return [
        ("PreferenceDataset(frame)", lambda: whole(frame), same),
        ("PreferenceDataset(frame.sample(...))", lambda: len(whole(frame.sample(20, random_state=1))), near(20)),
        ("PreferenceDataset(datasets.Dataset)", lambda: whole(datasets.Dataset.from_list(rows)), same),
        ("PreferenceDataset(pa.Table)", lambda: whole(pa.Table.from_pylist(rows)), same),
        ("PreferenceDataset('FILE')", lambda: whole(str(path)), same),
        ("PreferenceDataset(Path)", lambda: whole(path), same),
        ("PreferenceDataset(rows)", lambda: whole(rows), same),
        ("PreferenceDataset(generator)", lambda: whole(row for row in rows), same),
        ("PreferenceDataset(columns)", lambda: whole(frame.to_dict("list")), same),
        ("PreferenceDataset('FILE' misspelt)", lambda: whole(str(path.with_suffix(".parqet"))), path.name),
        ("PreferenceDataset(frame without chosen)", lambda: whole(frame.drop(columns="chosen")), "chosen"),
        ("PreferenceDataset(7)", lambda: whole(7), "int"),
        ("PreferenceDataset(frame, 'tokenizer')", lambda: whole(frame, "gpt2"), "tokenizer"),
        (
            "PreferenceDataset(frame, tokenizer)[0]",
            lambda: set(whole(frame, tokenizer)[0]),
            lambda keys: {"chosen_input_ids", "rejected_attention_mask"} <= keys,
        ),
        ("len(create_dataloader(FILE, tokenizer))", lambda: len(create_dataloader(str(path), tokenizer)), near(2)),
        (
            "create_dataloader(frame, tokenizer, 4)",
            lambda: next(iter(create_dataloader(frame, tokenizer, 4)))["chosen_input_ids"].shape[0],
            near(4),
        ),
        ("create_dataloader(batch_size='4')", lambda: create_dataloader(frame, tokenizer, "4"), "batch_size"),
        ("create_dataloader(shuffel=True)", lambda: create_dataloader(frame, tokenizer, shuffel=True), "shuffel"),
    ]


def model_calls(model: Any, folder: Any) -> list[Call]:
    """Calls that load a model and score texts."""
    prompt, other = "What is chess?", "Explain rivers."
    one, two = model.score([prompt, prompt], ["A game.", "Water."]).tolist()
    messages = [{"role": "user", "content": prompt}]
    load = rm.BradleyTerryRM.from_pretrained

    def scores(found: Any) -> bool:
        return near(one)(found.score(prompt, "A game."))

    return [
        ("score(text, text)", lambda: model.score(prompt, "A game."), near(one)),
        ("score(text, texts)", lambda: model.score(prompt, ["A game.", "Water."]), near([one, two])),
        ("score(texts, texts)", lambda: model.score([prompt] * 2, ["A game.", "Water."]), near([one, two])),
        (
            "score(Series, Series)",
            lambda: model.score(*(pd.Series(each) for each in ([prompt], ["A game."]))),
            near([one]),
        ),
        ("score(array, tuple)", lambda: model.score(np.array([prompt]), ("A game.",)), near([one])),
        ("score(messages, text)", lambda: model.score(messages, "A game."), near(one)),
        ("score(text, bytes)", lambda: model.score(prompt, b"A game."), "bytes"),
        ("score(text, 3)", lambda: model.score(prompt, 3), "int"),
        ("score(text, None)", lambda: model.score(prompt, None), "NoneType"),
        ("score(texts, text)", lambda: model.score([prompt, other], "A game."), "list of responses"),
        ("score(2 texts, 1 text)", lambda: model.score([prompt, other], ["A game."]), "2 prompts"),
        ("score_pair", lambda: model.score_pair(prompt, "A game.", "Water."), near(one - two)),
        ("tokenize(text, text)", lambda: model(**model.tokenize(prompt, "A game.")).detach(), near([one])),
        ("from_pretrained(result)", lambda: load(folder), scores),
        ("from_pretrained(str(result))", lambda: load(str(folder)), scores),
        ("BradleyTerryRM(result)", lambda: rm.BradleyTerryRM(folder).score(prompt, "A game.").ndim, near(0)),
        ("from_pretrained('FOLDER' misspelt)", lambda: load(f"{folder}x"), "best"),
        ("from_pretrained(a frame)", lambda: load(pd.DataFrame({"a": [1]})), "DataFrame"),
    ]


def training_calls(rows: list[dict[str, str]], path: Path, folder: Path) -> list[Call]:
    """Calls that train a model."""
    numbers = iter(range(99))

    def train(*given: Any, **options: Any) -> Any:
        where = folder / f"run{next(numbers)}"
        options.setdefault("output_dir", where)
        options["options"] = {"training.max_steps": 2, **options.get("options", {})}
        return rm.train_reward_model(*given, **options)

    def trained(result: Any) -> bool:
        return (Path(result) / "model.safetensors").is_file() and len(repr(result).splitlines()) <= 12

    return [
        ("train(tiny, adamw, FILE)", lambda: train("tiny", "adamw", str(path)), trained),
        ("train(data_path=frame)", lambda: train(data_path=pd.DataFrame(rows)), trained),
        ("train(data_path=rows)", lambda: train("tiny", data_path=rows), trained),
        ("train(learning_rate=1e-3)", lambda: train(data_path=path, learning_rate=1e-3), trained),
        ("train(epoch=3)", lambda: train(data_path=path, epoch=3), "epochs"),
        ("train(num_train_epochs=3)", lambda: train(data_path=path, num_train_epochs=3), "epochs"),
        ("train(optimizer='adamW')", lambda: train(optimizer="adamW", data_path=path), "adamw"),
        ("train('tinny')", lambda: train("tinny", data_path=path), "tinny"),
        ("train(data_path missing)", lambda: train(data_path=str(path) + "x"), path.name),
        ("train(batch_size=0)", lambda: train(data_path=path, batch_size=0), "batch_size"),
        ("train(options={'optimizer.lrr': 1})", lambda: train(options={"optimizer.lrr": 1.0}), "lr"),
        ("train(data_path=7)", lambda: train(data_path=7), "int"),
    ]


def use_calls(model: Any, result: Any, rows: list[dict[str, str]], path: Path) -> list[Call]:
    """Calls that measure and use a model."""
    pairs = list(rm.PreferenceDataset(rows).pairs)
    analyzer, frame = rm.HessianAnalyzer(model), pd.DataFrame(rows)
    top = analyzer.compute_spectrum(pairs, top_k=2).eigenvalues
    both = rm.RewardModelEnsemble([model, model], uncertainty_threshold=0.5)
    reward = float(model.score("What is chess?", "A game."))

    class Fixed:
        identity = "fixed"

        def respond(self, prompt: Any, num_samples: int, seed: int) -> list[str]:
            return ["A game.", "Water."][:num_samples]

    sampler = BestOfNSampler(Fixed(), model, n_samples=2)
    best = max(model.score("What is chess?", ["A game.", "Water."]).tolist())
    loader = create_dataloader(str(path), model.tokenizer, shuffle=False)
    return [
        ("compute_spectrum(loader)", lambda: analyzer.compute_spectrum(loader, top_k=2).eigenvalues, near(top)),
        ("compute_spectrum(frame)", lambda: analyzer.compute_spectrum(frame, top_k=2).eigenvalues, near(top)),
        ("compute_spectrum('FILE')", lambda: analyzer.compute_spectrum(str(path), top_k=2).eigenvalues, near(top)),
        ("compute_spectrum(method='lanczoz')", lambda: analyzer.compute_spectrum(pairs, method="lanczoz"), "lanczos"),
        ("HessianAnalyzer('FOLDER')", lambda: rm.HessianAnalyzer(str(result)), "from_pretrained"),
        ("evaluate_model(model, frame)", lambda: rm.evaluate_model(model, frame).metrics.num_pairs, near(len(rows))),
        (
            "RewardModelEnsemble([result, result])",
            lambda: len(rm.RewardModelEnsemble([result, result]).models),
            near(2),
        ),
        ("RewardModelEnsemble(model)", lambda: rm.RewardModelEnsemble(model), "models"),
        ("ensemble.predict(text, text)", lambda: both.predict("What is chess?", "A game.").mean_reward, near(reward)),
        (
            "ensemble.detect_ood(text, text)",
            lambda: both.detect_ood("What is chess?", "A game."),
            lambda is_ood: is_ood is False,
        ),
        (
            "for text, reward in sample(prompts)",
            lambda: [r for _, r in sampler.sample(["What is chess?"])],
            near([best]),
        ),
        ("sampler.sample(text)", lambda: [r for _, r in sampler.sample("What is chess?")], near([best])),
        ("CurriculumSampler(Series)", lambda: len(CurriculumSampler(pd.Series([0.9, 0.1])).easy_idx), near(1)),
        ("CurriculumSampler('0.9')", lambda: CurriculumSampler("0.9"), "margins"),
        ("learner.select(pool, k=3)", lambda: len(ActiveLearner(both).select(pairs, k=3)), near(3)),
        (
            "learner.select(pool, k=999) gives all",
            lambda: len(ActiveLearner(both).select(pairs, k=999)),
            near(len(pairs)),
        ),
        (
            "compute_score(accuracy='0.8')",
            lambda: rm.RLReadinessScorer().compute_score("0.8", 0.05, 1.2, 150.0).accuracy_score,
            near(0.8),
        ),
        ("RLReadinessScorer({'acuracy': 1})", lambda: rm.RLReadinessScorer({"acuracy": 1.0}), "accuracy"),
    ]


def outcome(call: Callable[[], Any], expected: Callable[[Any], bool] | str) -> str:
    """`right`, `refused`, or `wrong` and why."""
    try:
        found = call()
    except (TypeError, ValueError, rm.RMOptimizerError) as error:
        text = str(error)
        if not isinstance(expected, str):
            return f"wrong: {type(error).__name__}: {text}"
        is_clear = "\n" not in text and len(text) <= 700 and expected in text
        return "refused" if is_clear else f"wrong: unclear: {text}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    if isinstance(expected, str):
        return f"wrong: taken, gives {str(found)[:80]}"
    return "right" if expected(found) else f"wrong: gives {str(found)[:80]}"


def main() -> None:
    """Print each wrong call, and the counts."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        folder = Path(name)
        pairs = rm.PreferenceWorld(0).pairs(48, 2).train
        rows = [{key: pair.to_dict()[key] for key in ("prompt", "chosen", "rejected")} for pair in pairs]
        pd.DataFrame(rows).to_parquet(path := folder / "pairs.parquet")
        with contextlib.redirect_stdout(io.StringIO()):
            result = rm.train_reward_model("tiny", "adamw", str(path), epochs=1, output_dir=folder / "first")
        model = rm.BradleyTerryRM.from_pretrained(result)
        calls = [*data_calls(rows, path, model.tokenizer), *model_calls(model, result)]
        calls += [*training_calls(rows, path, folder), *use_calls(model, result, rows, path)]
        for typed, call, expected in calls:
            with contextlib.redirect_stdout(io.StringIO()):
                found = outcome(call, expected)
            counts[found.split(":")[0]] += 1
            if found.startswith("wrong"):
                print(f"{typed}: {found}".replace(name, ""))
    for kind in ("right", "refused", "wrong"):
        print(f"{kind}: {counts[kind]}")
    print(f"calls: {counts.total()}")


if __name__ == "__main__":
    main()
