"""Where a model's folder comes from: the disk, or the Hugging Face hub by way of its cache."""

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from agentrl_jax.models.hf_config import PretrainedError

_FILES = ["*.json", "*.safetensors", "*.jinja"]


def model_folder(name: str) -> Path:
    """The folder `name` itself, or that of the hub's model `name` ("Qwen/Qwen3-0.6B"), downloaded unless the cache holds it.

    A cached model is used as it is, without asking the hub: a run that is resumed finds the weights it began with.

    Raises PretrainedError where there is neither.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise PretrainedError(f"{name}: no such folder, and no name of a model on the hub, which would be OWNER/MODEL") from error
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except GatedRepoError as error:
        raise PretrainedError(f"{name}: the hub wants its licence accepted first; do so on its page, then `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise PretrainedError(f"{name}: no such folder, and no such model on the hub; correct the name") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise PretrainedError(
            f"{name}: no such folder, not in the hub's cache ({constants.HF_HUB_CACHE}), and the hub cannot be reached; "
            "download it where there is a network, and name the folder"
        ) from error
