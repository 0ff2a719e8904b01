"""MD5, of several streams side by side where the processor can: eight by one core, in little more time than one.

The ETag of a part is its MD5, and an MD5 is a chain of steps that leaves most of a core idle. So threads that hash at
the same moment have one of them do it for all, in a library in C (`md5_lanes.c`). Where it was not built, or the
processor has no AVX2, hashlib gives the same digests.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Protocol

from gateway.md5_lanes.build import LIBRARY

Buffer = bytes | memoryview

_STREAM_BYTES = 88
_PyBUF_SIMPLE = 0


class Md5(Protocol):
    """As hashlib has it; `update` waits for no more than its bytes take, and lets other threads run meanwhile."""

    def update(self, data: Buffer, /) -> None: ...

    def digest(self) -> bytes: ...


class _PyBuffer(ctypes.Structure):
    """`Py_buffer`, of Python's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


class Md5Library:
    """The library at a path. OSError where it cannot be loaded, or the processor cannot do it."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))  # lets other threads run while it works
        self.lanes: int = library.md5_lanes()
        if not self.lanes:
            raise OSError("the processor has no AVX2")
        self.begin, self.update, self.digest = library.md5_begin, library.md5_update, library.md5_digest
        self.begin.argtypes = (ctypes.c_char_p,)
        self.update.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
        self.digest.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
        for function in (self.begin, self.update, self.digest):
            function.restype = None

    def new(self) -> Md5:
        """Return a new MD5. Only one thread at a time may use it."""
        return _Stream(self)


class _Stream:
    __slots__ = ("_library", "_state")

    def __init__(self, library: Md5Library) -> None:
        self._library = library
        self._state = ctypes.create_string_buffer(_STREAM_BYTES)
        library.begin(self._state)

    def update(self, data: Buffer, /) -> None:
        view = _PyBuffer()
        _get_buffer(data, view, _PyBUF_SIMPLE)  # BufferError for what is not one piece
        try:
            self._library.update(self._state, view.buf, view.len)
        finally:
            _release_buffer(view)

    def digest(self) -> bytes:
        digest = ctypes.create_string_buffer(16)
        self._library.digest(self._state, digest)
        return digest.raw


class Hashlib:
    """The standard library's MD5, one stream at a time."""

    lanes = 1

    def new(self) -> Md5:
        return hashlib.md5(usedforsecurity=False)


Implementation = Md5Library | Hashlib


def found_at(path: Path) -> Implementation:
    """Return the library at a path, or, where there is none that works here, hashlib."""
    try:
        return Md5Library(path)
    except OSError:
        return Hashlib()


_found = found_at(LIBRARY)

LANES: int = _found.lanes
"""The number of streams that a core of this machine hashes at once."""

new_md5 = _found.new
