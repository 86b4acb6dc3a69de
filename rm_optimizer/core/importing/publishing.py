"""Card of an exported model, and its upload to the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx's, and httpx2's from 2.0 on
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
)
from huggingface_hub.utils._validators import validate_repo_id

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.files import write_text
from rm_optimizer.records.locations import CODE_FILE, EXPORT_FILE, SourceKind, resolve_source
from rm_optimizer.records.quoting import markdown_table

CARD_FILE = "README.md"
"""Model card in the folder of an exported model, which the hub shows."""
_EXPORT, _USE = "\n\n## This export\n\n", "\n\n## How to use\n\n"
_REPLACED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "adapter_config.json", CODE_FILE)
"""Files of an earlier model in a repository, which an upload removes if it does not replace them."""


@contextmanager
def uploading(name: str) -> Iterator[HfApi]:
    """Interface of the hub for an upload; its errors in the block become one sentence.

    Args:
        name: hub id of the repository, which is written with the token that the hub's library reads.

    Raises:
        ConfigError: if the name is no hub id, there is no token, or the hub refuses or cannot be reached.
    """
    api = HfApi()
    try:
        validate_repo_id(name)
        yield api
    except HFValidationError as error:
        raise ConfigError(f"--push expects a hub id such as owner/name, got {name!r}") from error
    except ValueError as error:
        raise ConfigError(f"the hub refuses to write {name}: {' '.join(str(error).split())}") from error
    except LocalTokenNotFoundError as error:
        raise ConfigError(f"no token to write {name} with; set HF_TOKEN, or run hf auth login") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "; set HF_TOKEN to a token that may write there" if status in (401, 403) else ""
        reason = error.server_message or error.response.reason_phrase
        raise ConfigError(f"{api.endpoint} refuses to write {name}: {status} {reason}{advice}") from error
    except (HTTPError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the hub at {api.endpoint} cannot be reached to write {name} ({reason})") from error


def write_card(folder: Path, source: str, rows: Mapping[str, str], use: str) -> None:
    """Write the card of an export: the source's own, if its folder has one, with the facts of the export.

    Args:
        folder: the export.
        source: hub id, folder or file of the exported model.
        rows: facts of the export by name.
        use: part on the use of the model, in Markdown.
    """
    found = resolve_source(source)
    earlier = Path(found.location) / CARD_FILE
    if found.kind is not SourceKind.HUB and earlier.is_file():
        text = earlier.read_text(encoding="utf-8").partition(_EXPORT)[0].partition(_USE)[0].rstrip()
    else:
        base = found.location if found.kind is SourceKind.HUB else None
        data = ModelCardData(
            base_model=base,
            library_name="transformers",
            pipeline_tag="text-classification",
            tags=["reward-model", "bradley-terry", "rlhf", "rm-optimizer"],
        )
        text = f"---\n{data.to_yaml()}\n---\n\n# Reward model\n\n" + (
            "It gives a response to a prompt one number. Rewards compare responses to one prompt; between prompts they "
            "say nothing."
        )
    table = markdown_table(("", ""), rows.items())
    write_text(folder / CARD_FILE, f"{text}{_EXPORT}{table}{_USE}{use}\n")


def use_of(folder: Path, max_length: int, pooling_head: str | None) -> str:
    """Part of a card on the use of the model in Markdown."""
    trusted = ", trust_remote_code=True" if (folder / CODE_FILE).is_file() else ""
    plain = f"""\
`AutoModelForSequenceClassification.from_pretrained("FOLDER"{trusted})` loads it too. Its logit is the reward of a text
that the tokenizer's chat template renders, at most {max_length} tokens;
`{EXPORT_FILE}` holds rewards to compare with. The tokenizer adds no special tokens to a text, since the template
writes them. verl takes a leading BOS off, so an engine that verl starts reads other tokens if the template writes BOS:
use `rm-opt serve`."""
    if pooling_head is not None:
        plain = f"Plain `transformers` reads other rewards: it does not have the pooling head `{pooling_head}`."
    return f"""\
```python
from rm_optimizer import BradleyTerryRM

model = BradleyTerryRM.from_pretrained("FOLDER")
print(model.score(["What is 2 + 2?"], ["It is 4."]))
```

```console
$ rm-opt score FOLDER --prompt "What is 2 + 2?" --response "It is 4."
$ rm-opt serve FOLDER
```

{plain}"""


def require_hub(repository: str) -> None:
    """Ask the hub for the account of the token, before an export that ends with an upload.

    Raises:
        ConfigError: if the repository is no hub id, there is no valid token, or the hub cannot be reached.
    """
    with uploading(repository) as api:
        api.whoami()


def upload(folder: Path, repository: str) -> str:
    """Upload a folder as one commit, and return the repository's address; a new repository is private.

    Raises:
        ConfigError: if the hub refuses or cannot be reached.
    """
    with uploading(repository) as api:
        made = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            commit_message="Upload reward model",
            delete_patterns=[*_REPLACED],
        )
    return str(made)
