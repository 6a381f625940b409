"""Local folders of checkpoints named by a repository of the Hugging Face hub, or by a GGUF file.

A repository is `ORG/NAME` or `ORG/NAME@REVISION`; `ORG/NAME:PART` is the GGUF file in a repository whose path contains
PART, such as `Q4_K_M`. huggingface_hub downloads and caches; `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE`
have their usual meaning. Only the files that a server reads are downloaded, and weights only as safetensors or GGUF,
which cannot run code. A GGUF file is converted once, into vsched's cache.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import shutil
import struct
import sys
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vsched.errors import CheckpointError
from vsched.worker.memory import weights_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vsched.checkpoint_tools import CheckpointTools
    from vsched.config import Config
    from vsched.worker.contract import Progress

logger = logging.getLogger(__name__)

_CONVERSION = 5
"""Version of the conversion of GGUF files: one with other results converts earlier files again."""
_QUANTIZED_RATIO = 1.5
"""Ratio of a checkpoint's size to its GGUF file's, above which the file was quantized."""
_HUB_ID = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<part>[\w.-]+))?"
)
MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "model*.safetensors")
"""Files of a model. Some repositories have the same weights a second time, as `consolidated*.safetensors`."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
WEIGHTS = re.compile(r"(adapter_)?model[^/]*\.safetensors")
PROJECTOR = "mmproj"
"""In the name of a GGUF file with the vision part of a model, which stands next to that of the language model."""
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")
"""In the name of a part of a GGUF file."""
SPARE_BYTES = 256 << 20
"""Disk space that a download leaves free."""


def is_hub_id(name: str) -> bool:
    """Whether a name is that of a repository and not of an existing file or folder."""
    return _HUB_ID.fullmatch(name) is not None and not os.path.exists(name)


def with_local_checkpoints(config: Config, progress: Progress | None = None) -> Config:
    """Return a configuration with local folders for the model, the draft model and the adapters.

    Clients call the model by its hub id, unless `model.name` is set.

    Blocks: while files are downloaded or converted.

    Raises:
        CheckpointError: If a repository cannot be found, read or stored, or a GGUF file cannot be converted.
    """
    replace = msgspec.structs.replace
    model, generate, adapters = config.model, config.generate, config.adapters
    # These have no products of quantized weights.
    quantized = generate.attention != "exact" and model.dtype != "float16"
    path = local_checkpoint(model.path, progress, quantized=quantized)
    if path != model.path:
        name = model.path.partition("@")[0] if is_hub_id(model.path) else _stem(model.path)
        model = replace(model, path=path, name=model.name or name)
    draft = local_checkpoint(generate.draft_model, progress, quantized=quantized)
    generate = replace(generate, draft_model=draft)
    folders = {
        name: str(download(path, ADAPTER_FILES)) if is_hub_id(path) else path
        for name, path in adapters.load.items()
    }
    adapters = replace(adapters, load=folders)
    return replace(config, model=model, generate=generate, adapters=adapters)


def local_checkpoint(name: str, progress: Progress | None = None, *, quantized: bool = True) -> str:
    """Return the folder of a model named by a hub id or a GGUF file; a folder is returned unchanged.

    With `quantized`, layers of a GGUF file stay quantized.

    Raises:
        CheckpointError: As from `with_local_checkpoints`.
    """
    if is_hub_id(name):
        folder, part = download(name), name.partition(":")[2]
        if not part:
            return str(folder)
        # Parts that were downloaded before are in the same folder.
        file = folder / _one_of(name, part, _weights(_files_in(folder), part))
        return _converted(file, progress, quantized=quantized)
    if name.endswith(".gguf") and Path(name).is_file():
        return _converted(Path(name), progress, quantized=quantized)
    return name


def _converted(file: Path, progress: Progress | None, *, quantized: bool) -> str:
    """Return the cached folder of a converted GGUF file, by the conversion and the file's path, size and time."""
    from vsched.checkpoint_tools import load_tools

    plugin = load_tools("transformers", "check_conversion")
    files = [file.with_name(name).absolute() for name in parts_of(file.name)]
    if missing := [each.name for each in files if not each.is_file()]:
        raise CheckpointError(
            f"{file.name} is one of {len(files)} parts, and {missing[0]} is missing. Remedy: download all parts to one "
            "folder"
        )
    vision, dtype = vision_part(files[0], plugin), "auto" if quantized else "bfloat16"
    parts = [part.resolve() for part in (*files, vision) if part is not None]
    facts = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    identity = f"{_CONVERSION} {dtype} {facts}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "vsched" / "gguf" / f"{_stem(file.name)}-{key}"
    if not folder.is_dir():
        names = file.name if vision is None else f"{file.name} and {vision.name}"
        logger.info("converting %s once, to %s", names, folder)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{folder.parent}, for the converted {file.name}, cannot be written: {error.strerror}. Remedy: set "
                "XDG_CACHE_HOME to a writable folder, or convert it: vsched make-checkpoint --gguf FILE PATH"
            ) from error
        try:
            plugin.convert_gguf(
                str(files[0]),
                str(folder),
                dtype=dtype,
                progress=progress or (lambda *_: None),
                mmproj=str(vision or ""),
            )
        except CheckpointError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
        times = weights_bytes(str(folder)) / sum(size for _, size, _ in facts)
        config = (folder / "config.json").read_bytes()
        if times > _QUANTIZED_RATIO and b'"quantization_config"' not in config:
            logger.info(
                "%s takes %.1f times its size in bfloat16. Smaller, with faster decode steps: "
                "--set generate.weights=int8 (half of it), or int4 (a third)",
                *(file.name, times),
            )
    return str(folder)


def vision_part(file: Path, plugin: CheckpointTools) -> Path | None:
    """Return the vision part (`mmproj`) next to a GGUF file; None without one, or if the plug-in cannot convert it.

    Raises:
        CheckpointError: When the file is a vision part itself.
    """
    architecture = _architecture(file)
    if architecture == "clip":
        raise CheckpointError(
            f"{file.name} is the vision part of a model. Remedy: give the file of the model; a vision part next to it "
            "is read, too"
        )
    if not plugin.reads_mmproj(architecture):
        return None
    found = _vision_part(file.name, [each.name for each in file.parent.iterdir()])
    return None if found is None else file.parent / found


def _architecture(file: Path) -> str:
    """Return a GGUF file's architecture, which is its first setting; empty if it cannot be read."""
    head, key = struct.Struct("<4sIQQQ"), b"general.architecture"
    try:
        with file.open("rb") as content:
            magic, _, _, _, size = head.unpack(content.read(head.size))
            if (magic, size) != (b"GGUF", len(key)) or content.read(size) != key:
                return ""
            _, length = struct.unpack("<IQ", content.read(12))
            return content.read(min(length, 256)).decode()
    except (OSError, struct.error, UnicodeDecodeError):
        return ""  # the conversion reports the error


def _vision_part(model: str, files: Iterable[str]) -> str | None:
    """Return the vision part in a model's folder: the one with the most similar name, then one in 16 bits."""
    path = Path(model)

    def rank(name: str) -> tuple[int, bool, str]:
        rest = Path(name).name.lower().replace(PROJECTOR, "").lstrip("-_.")
        same = takewhile(
            lambda pair: pair[0] == pair[1], zip(rest, path.name.lower(), strict=False)
        )
        return -len([*same]), "16" not in rest, name

    found = [name for name in files if PROJECTOR in name.lower() and name.lower().endswith(".gguf")]
    beside = [name for name in found if Path(name).parent == path.parent and name != model]
    return min(beside, key=rank, default=None)


def download(hub_id: str, needed: Sequence[str] = MODEL_FILES) -> Path:
    """Return the folder with the needed files of a repository, after downloading those that are missing.

    Without a connection, or with `HF_HUB_OFFLINE`, the files of an earlier download are used.

    Raises:
        CheckpointError: If the repository cannot be found, read or stored, or has no weights of a safe format.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{hub_id!r} is not a folder, and hub ids need huggingface_hub. Remedy: pip install 'vsched[workers]', or "
            "give the path of a checkpoint's directory"
        ) from error
    found = _HUB_ID.fullmatch(hub_id)
    assert found is not None
    part = found["part"]
    fields: dict[str, Any] = {
        "repo_id": found["repository"],
        "revision": found["revision"],
        "allow_patterns": [f"*{part}*.gguf", f"*{PROJECTOR}*.gguf"] if part else list(needed),
        "tqdm_class": _progress_bar(),
    }
    try:
        _check_size(hub_id, fields, part)
        folder = Path(snapshot_download(**fields))
    except Exception as error:
        raise _in_a_sentence(hub_id, error) from error
    if not _weights(files := _files_in(folder), part):
        raise _no_weights(hub_id, files, part)
    return folder


def _weights(files: Sequence[str], part: str | None) -> list[str]:
    """Return the files with weights: the GGUF files with a part in their paths, without a part safetensors."""
    if part:
        return [file for file in files if part in file and file.endswith(".gguf")]
    return [file for file in files if WEIGHTS.fullmatch(file)]


def _files_in(folder: Path) -> list[str]:
    """Return the paths of all files in a folder and its subfolders."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def parts_of(name: str) -> list[str]:
    """Return the names of all parts of a GGUF file, in order, from the name of one; this name if it is whole."""
    split = _SPLIT.search(name)
    if split is None:
        return [name]
    start, count = name[: split.start()], int(split[1])
    return [f"{start}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def _stem(file: str) -> str:
    return _SPLIT.sub("", Path(file).name).removesuffix(".gguf")


def _one_of(hub_id: str, part: str, files: Sequence[str]) -> str:
    """Return the GGUF file that a part of its name stands for: the one that ends with it, or the only one.

    Of a file in several parts, it is the first one.
    """
    models = [file for file in files if PROJECTOR not in file] or files
    found = [file for file in models if _stem(file).endswith(part)] or list(models)
    firsts = sorted({parts_of(file)[0] for file in found})
    if len(firsts) > 1:
        raise CheckpointError(
            f"{hub_id}: {len(firsts)} files have {part!r} in their names: {', '.join(firsts[:8])}. "
            "Remedy: name more of one, such as the whole end of its name before .gguf"
        )
    return firsts[0]


def _check_size(hub_id: str, fields: dict[str, Any], part: str | None) -> None:
    """Compare the size of the missing files with the free disk space, and log it; choose the file of a part."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

    try:
        files = snapshot_download(**fields, dry_run=True)
    except (DryRunError, LocalEntryNotFoundError):
        return  # not connected: only an earlier download can serve
    names = [file.filename for file in files]
    if not _weights(names, part):
        raise _no_weights(hub_id, names, part)
    if part:
        only = _one_of(hub_id, part, names)
        vision = _vision_part(only, names)
        wanted = [*parts_of(only), *([] if vision is None else [vision])]
        fields["allow_patterns"] = wanted
        files = [file for file in files if file.filename in wanted]
    missing = [file.file_size or 0 for file in files if file.will_download]
    if not missing:
        return
    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if sum(missing) + SPARE_BYTES > free:
        raise CheckpointError.of_limit(
            f"{hub_id} does not fit on the disk of {cache}",
            value=f"{sum(missing):,} bytes to download",
            limit=f"{max(free - SPARE_BYTES, 0):,} bytes",
            remedy="free some, or set HF_HOME to a folder on another disk",
        )
    logger.info(
        "downloading %s: %d files, %s MB, to %s",
        hub_id,
        len(missing),
        f"{sum(missing) / 1e6:,.0f}",
        cache,
    )


def _progress_bar() -> type[Any]:
    """A class of progress bars that are shown on a terminal only."""
    base: Any = importlib.import_module("huggingface_hub.utils").tqdm

    class TerminalBar(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            shown = sys.stderr.isatty() and not options.get("disable")
            super().__init__(*arguments, **{**options, "disable": not shown})

    return TerminalBar


def _no_weights(hub_id: str, names: list[str], part: str | None) -> CheckpointError:
    what = f"GGUF file with {part!r} in its name" if part else "weights as safetensors"
    return CheckpointError(
        f"{hub_id} has no {what}, only {', '.join(names[:8]) or 'other files'}. Remedy: name a repository or a "
        "revision (ORG/NAME@REVISION) that has model.safetensors, or a GGUF file that it has (ORG/NAME:Q4_K_M)"
    )


def _in_a_sentence(hub_id: str, error: Exception) -> CheckpointError:
    """Return an error of huggingface_hub with its remedy."""
    from huggingface_hub import constants, errors

    if isinstance(error, CheckpointError):
        return error
    if isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__  # it answers, but not with the files
    host = constants.ENDPOINT.partition("://")[2]
    absent = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"no hub answers at {host}"
    offline = (
        f"{hub_id!r} is not a folder, {absent}, and no complete copy is in {constants.HF_HUB_CACHE}. Remedy: "
        "download it once while connected, or give the path of a checkpoint's directory"
    )
    texts: dict[type[Exception], str] = {  # the first is a subclass of the third
        errors.GatedRepoError: f"{hub_id}: only users who accepted its terms may read it. Remedy: accept them on its "
        f"page at {host}, and set HF_TOKEN",
        errors.RevisionNotFoundError: f"{hub_id}: {host} has no such revision. Remedy: name a branch, a tag or a "
        "commit after the @",
        errors.RepositoryNotFoundError: f"{hub_id!r} is neither a folder nor a repository at {host}. Remedy: check "
        "the name, or set HF_TOKEN for a private repository",
        errors.LocalEntryNotFoundError: offline,
        errors.IncompleteSnapshotError: offline,
    }
    for kind, text in texts.items():
        if isinstance(error, kind):
            return CheckpointError(text)
    if isinstance(error, OSError) and error.filename:
        return CheckpointError(
            f"{hub_id}: {error.filename} cannot be written: {error.strerror}. Remedy: set HF_HOME to a writable folder"
        )
    reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    remedy = {
        401: "set HF_TOKEN to a token that is valid, or unset it",
        429: "wait, or set HF_TOKEN: users who are known may send more requests",
    }.get(status, "run the same command again; it downloads only the files that are missing")
    return CheckpointError(f"{hub_id}: the download from {host} failed: {reason}. Remedy: {remedy}")
