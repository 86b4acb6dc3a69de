"""Import of reward models in the forms of their projects: largest difference from their published rules.

Tiny models of random weights are written in each form of `tests/core/importing/published.py`, whose rewards are a few
lines of torch after the project's own code. They are imported, and scored in memory, by plain transformers from the
written folder, after another export, and through the server's embedded engine. Then come models that cannot be
imported, each of which must be refused by its true reason.

    python benchmarks/import_zoo.py
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from tokenizers import processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rm_optimizer import BradleyTerryRM, RMOptimizerError, export_reward_model, import_reward_model
from rm_optimizer.serving import RewardClient
from tests.core.importing import published
from tests.serving.engines import InProcessEngine, options_of
from tests.serving.running import engine_running


@torch.no_grad()
def difference(form: published.Published, work: Path) -> float:
    """Largest difference of a form's rewards in memory, in plain transformers and served from its published rule."""
    source, folder = work / "source", work / "imported"
    reward = form.write(source)
    imported = import_reward_model(source, folder, **form.options)
    model = BradleyTerryRM.from_pretrained(folder)
    prompts, responses = map(list, zip(*published.CONVERSATIONS, strict=True))
    own = model.score(prompts, responses).tolist()
    plain = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=form.needs_code)
    export_reward_model(folder, work / "exported")
    exported = BradleyTerryRM.from_pretrained(work / "exported").score(prompts, responses).tolist()
    engine = engine_running(lambda: InProcessEngine(options_of(folder, work / "scratch")))
    with engine as server, RewardClient(server.url) as client:
        served = client.score(prompts, responses).tolist()
    largest = 0.0
    for i, (prompt, response) in enumerate(published.CONVERSATIONS):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        expected = float(reward(turns)) - (0 if imported.is_constant_kept else imported.constant)
        ids = torch.tensor([model.encode([prompt], [response])[0].ids])
        found = (own[i], float(plain(input_ids=ids).logits), exported[i], served[i])
        largest = max(largest, *(abs(value - expected) for value in found))
    return largest


def others(work: Path) -> dict[str, tuple[str, str]]:
    """Folders that are no reward model that can be imported, with words of the true reason of each."""
    made = {
        "causal model": AutoModelForCausalLM.from_config(published.config_of("llama")),
        "five labels": AutoModelForSequenceClassification.from_config(published.config_of("llama", num_labels=5)),
        "encoder's token classification": AutoModelForTokenClassification.from_config(
            published.config_of("bert", num_labels=1)
        ),
        "pairs by other token types": AutoModelForSequenceClassification.from_config(
            published.config_of("bert", num_labels=1, type_vocab_size=2)
        ),
        "encoder-decoder": AutoModelForSequenceClassification.from_config(
            AutoConfig.for_model("t5", vocab_size=384, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
        ),
    }
    words = (
        "no stored tensor is a reward head",
        "no stored tensor is a reward head",
        "TokenClassification",
        "do not change after",
        "encoder-decoder",
    )
    for name, model in made.items():
        model.save_pretrained(work / name)
        tokenizer = published.tokenizer_of("bert" if "token" in name else "llama")
        if "pairs" in name:
            special = [("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)]
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="[CLS] $A [SEP]", pair="[CLS] $A:1 [SEP] $B:0 [SEP]", special_tokens=special
            )
        tokenizer.save_pretrained(work / name)
    return {name: (str(work / name), word) for name, word in zip(made, words, strict=True)}


def main() -> None:
    """Print one line a form, and the figures."""
    logging.getLogger("rm_optimizer").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    differences, wrong, refused = {}, 0, 0
    with tempfile.TemporaryDirectory() as name:
        names = [each.name for each in published.zoo(Path(name))]
        for i, form_name in enumerate(names):
            work = Path(name) / str(i)
            (form,) = (each for each in published.zoo(work) if each.name == form_name)
            differences[form_name] = difference(form, work)
            print(f"{form_name}: {differences[form_name]:.1e}", flush=True)
        for title, (folder, words) in others(Path(name)).items():
            try:
                import_reward_model(folder, Path(name) / "out", input_form="pair" if "pairs" in title else "plain")
                wrong += 1
                print(f"{title}: imported, which is wrong")
            except RMOptimizerError as error:
                refused += 1
                is_true = words in str(error)
                wrong += not is_true
                print(f"{title}: {'refused' if is_true else 'refused by another reason'}: {error}")
    wrong += sum(value > 1e-5 for value in differences.values())
    print(f"forms: {len(differences)}")
    print(f"largest_difference: {max(differences.values()):.2g}")
    print(f"refused: {refused}")
    print(f"wrong_without_a_word: {wrong}")


if __name__ == "__main__":
    main()
