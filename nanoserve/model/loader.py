"""Streams a safetensors checkpoint into memory that the network already allocated.

Every name and shape is checked from the files' headers before the first weight is read, so a partly loaded model
cannot exist: either all slots are filled, or a :class:`CheckpointError` names the file and the tensor.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoserve.core.errors import CheckpointError
from nanoserve.model.slots import Slot

logger = logging.getLogger(__name__)

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PREFIX = "model."
_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers that older transformers releases saved


_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Projections of all experts as transformers 5 holds them in memory, [num_experts, out_features, in_features]."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where one tensor lies: under ``name``, whole or as the ``rows`` of one expert of a stack."""

    file: Path
    handle: Any
    name: str
    expert: int = 0
    rows: slice | None = None

    def shape(self) -> tuple[int, ...]:
        whole = tuple(self.handle.get_slice(self.name).get_shape())
        return whole if self.rows is None else (self.rows.stop - self.rows.start, *whole[2:])

    def read(self, where: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor, or the entries ``where``; the rest of the file is not read."""
        try:
            if self.rows is not None:
                rows, *others = where or (slice(0, self.rows.stop - self.rows.start),)
                rows = slice(self.rows.start + rows.start, self.rows.start + rows.stop)
                tensor: Tensor = self.handle.get_slice(self.name)[(self.expert, rows, *others)]
            elif where is not None:
                tensor = self.handle.get_slice(self.name)[where]
            else:
                tensor = self.handle.get_tensor(self.name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{self.file.name}: {self.name} cannot be read: {error}") from error
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{self.file.name}: {self.name} is stored as {tensor.dtype}, which is no floating type."
            )
        return tensor


def load_weights(folder: Path, slots: Mapping[str, Slot]) -> None:
    """Fills ``slots`` (by checkpoint name) from the safetensors files in ``folder``, converting dtypes.

    A tensor ``...experts.gate_up_proj`` or ``...experts.down_proj`` stands for those of its experts one by one.
    A stored ``lm_head.weight`` without a slot means tied embeddings: it is left out, with a warning if it differs.

    Raises:
        CheckpointError: a file is missing or broken, or a tensor is missing, unexpected or of a wrong shape.
    """
    with ExitStack() as stack:
        stored = _named_as(slots, _unstacked(_open_all(folder, stack)))
        _check(stored, slots, folder)
        for name, slot in slots.items():
            slot.memory.copy_(stored[name].read(slot.where))
        if _LM_HEAD in stored and _LM_HEAD not in slots and _EMBEDDING in slots:
            _warn_if_head_differs(stored, slots)


def tensor_names(folder: Path) -> frozenset[str]:
    """The names in the checkpoint's files.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    with ExitStack() as stack:
        return frozenset(_open_all(folder, stack))


def _named_as(slots: Mapping[str, Slot], stored: dict[str, _Stored]) -> dict[str, _Stored]:
    """A network without a head knows its tensors by their bare names; some exports keep the prefix all the same."""
    if _EMBEDDING in slots or _EMBEDDING not in stored:
        return stored
    return {name.removeprefix(_PREFIX): place for name, place in stored.items()}


def _open_all(folder: Path, stack: ExitStack) -> dict[str, _Stored]:
    """Tensor name -> where it lies, over all files of the checkpoint."""
    index = folder / _INDEX_FILE
    if not (folder / _SINGLE_FILE).is_file() and index.is_file():
        return _open_indexed(folder, index, stack)
    files = [folder / _SINGLE_FILE]
    if not files[0].is_file():
        files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not files:
        raise CheckpointError(f"{folder.name}: there is no .safetensors file in the model folder.")
    stored: dict[str, _Stored] = {}
    for file in files:
        handle = _open(file, stack)
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            if name in stored:
                raise CheckpointError(f"The tensor {name} lies in both {stored[name].file.name} and {file.name}.")
            stored[name] = _Stored(file, handle, name)
    return stored


def _open_indexed(folder: Path, index: Path, stack: ExitStack) -> dict[str, _Stored]:
    weight_map = _read_index(index)
    handles = {name: _open(folder / name, stack) for name in sorted(set(weight_map.values()))}
    names = {shard: set(handle.keys()) for shard, handle in handles.items()}
    for tensor, shard in weight_map.items():
        if tensor not in names[shard]:
            raise CheckpointError(f"{index.name} says that {tensor} lies in {shard}, but it does not.")
    for shard, held in names.items():
        unlisted = sorted(held - weight_map.keys())
        if unlisted:
            raise CheckpointError(f"{shard} holds {unlisted[0]}, which {index.name} does not list.")
    return {tensor: _Stored(folder / shard, handles[shard], tensor) for tensor, shard in weight_map.items()}


def _unstacked(stored: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """The tensors with every stack of experts taken apart; a stack's place is kept, so errors name its file."""
    tensors: dict[str, _Stored] = {}
    for name, place in stored.items():
        for part_name, part in _parts(name, place):
            if part_name in tensors:
                raise CheckpointError(f"The tensor {part_name} is stored twice: by itself and in a stack of experts.")
            tensors[part_name] = part
    return tensors


def _parts(name: str, place: _Stored) -> Iterator[tuple[str, _Stored]]:
    prefix, _, kind = name.rpartition(".")
    projections = _STACKED.get(kind, ()) if prefix.endswith(".experts") else ()
    if not projections:
        yield name, place
        return
    shape = place.shape()
    if len(shape) != 3 or shape[1] % len(projections):
        raise CheckpointError(
            f"{place.file.name}: {name} has shape {list(shape)}; a stack of experts is "
            f"[experts, {len(projections)} x features, features]."
        )
    size = shape[1] // len(projections)
    for expert in range(shape[0]):
        for i, projection in enumerate(projections):
            rows = slice(i * size, (i + 1) * size)
            yield f"{prefix}.{expert}.{projection}.weight", replace(place, expert=expert, rows=rows)


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index.name} is not a readable safetensors index.") from error
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise CheckpointError(f"{index.name} must map tensor names to file names beside it.")
    return dict(weight_map)


def _open(file: Path, stack: ExitStack) -> Any:
    if not file.is_file():
        raise CheckpointError(f"{file.name} is missing from the model folder.")
    _check_start(file)
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file.name} is cut short or not a safetensors file: {error}") from error


def _check_start(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(24)
    if not start:
        raise CheckpointError(f"{file.name} is empty.")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file.name} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`.")


def _check(stored: Mapping[str, _Stored], slots: Mapping[str, Slot], folder: Path) -> None:
    for name, slot in slots.items():
        if name not in stored:
            raise CheckpointError(_missing(name, stored, folder))
        shape = stored[name].shape()
        if shape != slot.shape:
            raise CheckpointError(
                f"{stored[name].file.name}: {name} has shape {list(shape)}; config.json asks for {list(slot.shape)}."
            )
    for name, place in stored.items():
        if name not in slots and name != _LM_HEAD and not name.endswith(_IGNORED_SUFFIXES):
            raise CheckpointError(f"{place.file.name}: the tensor {name} is not part of this architecture.")


def _missing(name: str, stored: Mapping[str, _Stored], folder: Path) -> str:
    files = ", ".join(sorted({place.file.name for place in stored.values()})) or folder.name
    reason = " (config.json says that embeddings are not tied)" if name == _LM_HEAD else ""
    return f"The tensor {name} is missing from {files}{reason}."


def _warn_if_head_differs(stored: Mapping[str, _Stored], slots: Mapping[str, Slot]) -> None:
    embedding = slots[_EMBEDDING]
    head = stored[_LM_HEAD].read(embedding.where).to(embedding.memory.dtype)
    if not torch.equal(head, embedding.memory):
        logger.warning(
            "config.json ties the embeddings, so the different lm_head.weight that is stored is not used file=%s",
            stored[_LM_HEAD].file.name,
        )
