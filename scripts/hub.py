"""Fetches hf:ORG/REPO/FILE.gguf through huggingface-hub, into that library's own cache.
Owns the address form and turning the library's errors into one line; knows nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from martlet.quant.errors import NoSpace
from martlet.scripts.errors import PullError
from martlet.scripts.models import check_cache_space

ADDRESS = re.compile(r"hf:(?P<repo>[^/\s]+/[^/\s]+)/(?P<file>[^\s]+\.gguf)")
ABOVE = frozenset({"", ".", ".."})
"""Parts of a path that lead out of it, or nowhere."""
SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


def parse_address(spec: str) -> tuple[str, list[str]]:
    """(repository, files): one file, or every shard of the set the named shard belongs to."""
    match = ADDRESS.fullmatch(spec)
    if not match or not ABOVE.isdisjoint(spec.removeprefix("hf:").split("/")):
        raise PullError(f"{spec!r} is not hf:ORG/REPO/FILE.gguf; write for example hf:me/m/m.gguf")
    shard = SHARD.fullmatch(match["file"])
    if not shard:
        return match["repo"], [match["file"]]
    stem, count = shard["stem"], shard["count"]
    files = [f"{stem}-{i:05}-of-{count}.gguf" for i in range(1, int(count) + 1)]
    return match["repo"], files


def fetch_from_hub(spec: str) -> Path:
    """The file's path; for a shard set the path of its first shard."""
    repo, files = parse_address(spec)
    paths = [fetch_file(repo, name) for name in files]
    return paths[0]


def fetch_file(repo: str, name: str) -> Path:
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        return Path(hf_hub_download(repo, name, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        pass  # not here yet
    except errors.HFValidationError as error:
        raise PullError(f"hf:{repo}/{name}: {first_line(error)}") from None
    try:
        n_bytes = get_hf_file_metadata(hf_hub_url(repo, name)).size or 0
        folder = Path(constants.HF_HUB_CACHE)
        folder.mkdir(parents=True, exist_ok=True)
        check_cache_space(folder, n_bytes)
        return Path(hf_hub_download(repo, name))
    except errors.GatedRepoError:
        raise PullError(
            f"{repo} asks for a licence agreement; accept it on its page, then `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise PullError(
            f"{repo} does not exist or is private; check the spelling or `hf auth login`"
        ) from None
    except NoSpace:
        raise
    except Exception as error:  # the library's HTTP client, and so its errors, vary by version
        raise PullError(
            f"hf:{repo}/{name}: {first_line(error)}; check the spelling and the network"
        ) from None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
