"""A quick request to the Hugging Face hub, before its libraries retry for half a minute."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, constants, errors
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils._validators import validate_repo_id

Kind = Literal["model", "dataset"]
_SECONDS = 5.0
_REFUSALS = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.DisabledRepoError)
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
    except errors.HFValidationError:
        return "there is nothing at that path"
    if constants.is_offline_mode():
        if kind == "dataset" or _is_cached(name, kind):
            return None
        return f"nothing of that name is here, and of the hub only its cache is used (HF_HUB_OFFLINE), without {name}"
    try:
        HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=_SECONDS)
    except _REFUSALS as error:
        if isinstance(error, errors.GatedRepoError):
            return f"the hub gives {name} only to accounts that asked for it; ask on its page, then run hf auth login"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"the hub has {name}, but no revision {revision!r} of it"
        return (
            f"nothing of that name is here, and the hub has no public {kind} {name}; check the spelling, or run "
            "hf auth login if it is private"
        )
    except errors.HfHubHTTPError:
        return None  # a mirror that does not answer this question may still have the files
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # httpx's, and httpx2's from 2.0 on
        if not _is_cached(name, kind):
            return f"nothing of that name is here, and the hub cannot be reached ({error or type(error).__name__})"
        _log.warning("the hub cannot be reached; %s is taken from the cache", name)
        constants.HF_HUB_OFFLINE = True
        if kind == "dataset":
            import datasets

            datasets.config.HF_HUB_OFFLINE = True
    return None


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
