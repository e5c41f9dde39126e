"""Reading a checkpoint of `torch.distributed.checkpoint` that a stranger may have written: no code of it runs.

`.metadata` is a pickle, which torch's own reader loads as it is: such a file may call any function. Here it may name
the classes that torch writes there, and nothing else; what is not a tensor is loaded by
`torch.load(weights_only=True)`; and files lie in the folder itself.
"""
from __future__ import annotations

import io
import os
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from anyshape.base.errors import InputError
from anyshape.frontend.checkpoint.checksums import check_files

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),  # of a few names
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "WindowsPath"), "pathlib._local": ("PosixPath", "WindowsPath"),  # as a name alone
}


class MetadataUnpickler(pickle.Unpickler):
    """Loads what torch writes into `.metadata`; refuses every other class and function."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for a name that is not on the list."""
        if module.startswith("pathlib") and name in _CLASSES.get(module, ()):
            return PurePath
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's description")


class SafeReader(FileSystemReader):
    """torch's reader of folders, for files that strangers may have written."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What is stored.

        Raises:
            InputError: there is none, or it is none.
        """
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                found = MetadataUnpickler(file).load()
            if not isinstance(found, Metadata):
                raise pickle.UnpicklingError(f"it is a {type(found).__name__}")
            for one in (found.storage_data or {}).values():
                name = PurePath(one.relative_path)
                if len(name.parts) != 1 or name.name in ("", ".."):
                    raise pickle.UnpicklingError(f"it names the file {one.relative_path!r}, outside of the folder")
        except Exception as error:  # what a damaged pickle raises is of any kind
            if isinstance(error, FileNotFoundError):
                why = "it has no .metadata: it is another folder, or it was not written to the end"
            else:
                why = f"its .metadata cannot be read: {type(error).__name__}: {error}"
            raise InputError(f"{os.fspath(self.path)} is no checkpoint", why=why,
                             do="give a folder that torch.distributed.checkpoint has written") from None
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def has_checksums(self) -> bool:
        """Whether all files of it have checksums; they are compared.

        Raises:
            InputError: a file is damaged, or not there.
        """
        names = {one.relative_path for one in self.read_metadata().storage_data.values()}
        try:
            return check_files(Path(self.path) / name for name in sorted(names))
        except OSError as error:
            raise InputError(f"the checkpoint {os.fspath(self.path)} cannot be read",
                             why=f"{type(error).__name__}: {error}", do="load an earlier one") from error


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's planner; of what is no tensor, only plain data is loaded."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises UnpicklingError for data that is not plain."""
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class TrialPlanner(SafeLoadPlanner):
    """The same for a trial: tensors are read to their end, and let go."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """A place to read to, of one piece."""
        return torch.empty(read_item.lengths, dtype=self.state_dict[read_item.dest_index.fqn].dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is kept."""
