"""Requests to the Hugging Face hub: a quick one before its libraries retry for half a minute, and an upload."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx's, and httpx2's from 2.0 on
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils._validators import validate_repo_id

from rm_optimizer.errors import ConfigError

Kind = Literal["model", "dataset"]
_SECONDS = 5.0
_REFUSALS = (RepositoryNotFoundError, GatedRepoError, RevisionNotFoundError, DisabledRepoError)
_log = logging.getLogger("rm_optimizer")


def hub_obstacle(name: str, kind: Kind, revision: str | None = None) -> str | None:
    """Reason why a name cannot be loaded from the hub, in words; None if its libraries may try.

    If the hub cannot be reached and the name is in the cache, this is logged and its libraries go offline, until the
    end of the block of `restored_hub` around the call and the load.

    Args:
        name: hub id, such as `owner/name`.
        kind: expected kind of its content.
        revision: branch, tag or commit; None is the default branch.
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        return "there is nothing at that path"
    if constants.is_offline_mode():
        if kind == "dataset" or _is_cached(name, kind):
            return None
        return f"nothing of that name is here, and of the hub only its cache is used (HF_HUB_OFFLINE), without {name}"
    try:
        HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=_SECONDS)
    except _REFUSALS as error:
        if isinstance(error, GatedRepoError):
            return f"the hub gives {name} only to accounts that asked for it; ask on its page, then run hf auth login"
        if isinstance(error, RevisionNotFoundError):
            return f"the hub has {name}, but no revision {revision!r} of it"
        return (
            f"nothing of that name is here, and the hub has no public {kind} {name}; check the spelling, or run "
            "hf auth login if it is private"
        )
    except HfHubHTTPError:
        return None  # a mirror that does not answer this question may still have the files
    except (HTTPError, OSError) as error:
        if not _is_cached(name, kind):
            return f"nothing of that name is here, and the hub cannot be reached ({error or type(error).__name__})"
        _log.warning("the hub cannot be reached; %s is taken from the cache", name)
        constants.HF_HUB_OFFLINE = True
        if kind == "dataset":
            import datasets

            datasets.config.HF_HUB_OFFLINE = True
    return None


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


@contextmanager
def restored_hub() -> Iterator[None]:
    """Restore the offline switches of the hub's libraries after the block, in which `hub_obstacle` may set them."""
    datasets = sys.modules.get("datasets")
    before = constants.HF_HUB_OFFLINE, datasets and datasets.config.HF_HUB_OFFLINE
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before[0]
        if (datasets := sys.modules.get("datasets")) is not None:
            datasets.config.HF_HUB_OFFLINE = before[0] if before[1] is None else before[1]


def _is_cached(name: str, kind: Kind) -> bool:
    if kind == "dataset":
        import datasets

        prepared = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___").lower()
        if prepared.is_dir():
            return True
    return (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind) / "snapshots").is_dir()
