"""The notes of a delta file: the JSON in its header. docs/delta-files.md specifies it."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dare.errors import InputError
from dare.tensors.digest import DIGEST_LENGTH
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.mask import MASK_VERSION

KEY = "dare.delta"  # the key of the notes in a header, by which a delta file is known
VERSION: Literal[1] = 1
INDEX = "index"
AS_IN_BASE = -1  # a count that says: the chunk is the base's
UNKNOWN = "0" * DIGEST_LENGTH
MAX_FILE_BYTES = 256_000_000
MAX_FOLDER_BYTES = 8 * MAX_FILE_BYTES  # of all together: a small file must not fill a disk
MAX_REASON_CHARACTERS = 300
MAX_NAME_BYTES = 255  # the limit for a part of a path, on every file system that people use

Digest = Annotated[str, Field(pattern=f"^[0-9a-f]{{{DIGEST_LENGTH}}}$")]
Rate = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[int, Field(ge=0, lt=1 << 48)]
Bits = Literal["native", 8, 4, 2, 1]


class _Notes(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StoredTensor(_Notes):
    """One tensor of the model. Digests are those of whole tensors."""

    shape: Annotated[tuple[Size, ...], Field(max_length=64, strict=False)]
    dtype: str
    model: Digest
    base: Digest | None = None  # the base's tensor that it is coded against, if any
    base_name: str | None = None
    drop_rate: Rate | None = None
    tied_to: str | None = None  # the tensor that this is another name of: nothing is stored for it

    @property
    def kind(self) -> StorageType:
        """The storage type."""
        return STORAGE_TYPES[self.dtype]

    @property
    def elements(self) -> int:
        """The number of its elements; of bytes, if elements share them."""
        return self.kind.stored_elements(self.shape)


class StoredFile(_Notes):
    """A file of the model with more in it than tensors."""

    kind: Literal["header", "whole", "base"]
    """Stored as far as its tensors begin, or all of it; or not, because the base has the same."""
    size: Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]
    digest: Digest
    coded: Digest | None = None


class DeltaNotes(_Notes):
    """All notes of a delta file."""

    version: Literal[1]
    mask: Literal[1] | None = None  # the version of the mask, if one decides what is kept
    scheme: Literal["random", "magnitude", "lossless"]
    bits: Bits = "native"
    seed: Annotated[int, Field(ge=0)] | None = None
    drop_rate: Rate | None = None  # the rate of most tensors; each has its own
    base: Digest
    model: Digest
    sample: Digest  # a digest of a few elements of the base, by which a wrong one is known at once
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile] = {}
    """The files of the model's folder: configuration, tokenizer; lossless also its weights."""
    index: Digest
    check: Digest  # the digest of the header while this is all zeros

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        is_random = self.scheme == "random"
        if is_random != (self.mask is not None) or is_random != (self.seed is not None):
            raise ValueError("a random choice needs mask and seed, and no other scheme has them")
        if self.scheme != "lossless" and self.drop_rate is None:
            raise ValueError("has no drop_rate")
        for name, tensor in self.tensors.items():
            if tensor.dtype not in STORAGE_TYPES:
                raise ValueError(f"{name}: unknown dtype {tensor.dtype!r}")
            if tensor.tied_to is not None:
                first = self.tensors.get(tensor.tied_to)
                if first is None or first.tied_to is not None:
                    raise ValueError(f"{name}: is tied to {tensor.tied_to!r}, which is missing")
                if (first.shape, first.dtype) != (tensor.shape, tensor.dtype):
                    raise ValueError(
                        f"{name}: is tied to {tensor.tied_to!r}, of another shape or type"
                    )
            if self.scheme != "lossless" and (tensor.drop_rate is None or tensor.base is None):
                raise ValueError(f"{name}: has no drop_rate or no base")
        for name, file in self.files.items():
            place = PurePosixPath(name)
            if not is_inside(name) or (file.kind == "header" and len(place.parts) > 1):
                raise ValueError(f"{name!r}: a file must be inside the model's folder")
            if not self.files.keys().isdisjoint(map(str, place.parents)):
                raise ValueError(f"{name!r}: is inside another file, not in a folder")
        if sum(file.size for file in self.files.values()) > MAX_FOLDER_BYTES:
            raise ValueError(f"the model's other files have more than {MAX_FOLDER_BYTES} bytes")
        return self

    def to_json(self) -> str:
        """Return the text that stands in the header."""
        return self.model_dump_json(exclude_defaults=True)


def is_inside(name: str) -> bool:
    """Return whether a name is that of a file in a folder or below it, on every system."""
    parts = PurePosixPath(name).parts
    return (
        parts != ()
        and "/".join(parts) == name
        and not {"..", "/"} & set(parts)
        and name.isprintable()
        and "\\" not in name
        and max(len(part.encode()) for part in parts) <= MAX_NAME_BYTES
    )


def read_notes(text: str, where: str) -> DeltaNotes:
    """Check the notes in a header; newer versions are named as such."""
    try:
        document = json.loads(text)
        for what, ours in (("version", VERSION), ("mask", MASK_VERSION)):
            theirs = document.get(what, ours)
            if type(theirs) is int and theirs > ours:
                raise InputError(f"{where}: has {what} {theirs}, not {ours}; install a newer dare")
        return DeltaNotes.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{place}: {first['msg']}" if place else first["msg"]
    except (ValueError, RecursionError, AttributeError) as error:
        reason = str(error)
    raise InputError(
        f"{where}: the notes of the delta file are damaged: {reason[:MAX_REASON_CHARACTERS]}"
    )
