"""Any range of a tensor is the same part of what is read as a whole."""

from hypothesis import strategies as st

from dare.inputs.sources import ArraySource, DeltaInfo, Source
from helpers import read_elements

PLACES = st.integers(0, 1 << 20)


class Ranged:
    """A source, and its tensors as they should be."""

    def __init__(self, source: Source, wholes: dict[str, bytes]) -> None:
        self.source = source
        self.wholes = wholes

    def __repr__(self) -> str:
        return "Ranged"  # hypothesis would print all the bytes, and fail on that

    def check(self, name: str, one: int, other: int) -> None:
        info = self.source.tensors[name]
        begin, end = sorted((one % (info.elements + 1), other % (info.elements + 1)))
        expected = self.wholes[name][begin * info.dtype.itemsize : end * info.dtype.itemsize]
        assert read_elements(self.source, name, begin, end - begin).tobytes() == expected


class DeltaArrays(ArraySource):
    """Arrays that are changes to the base."""

    is_partial = True

    def delta_of(self, name: str) -> DeltaInfo:
        return DeltaInfo(is_change=True)
