"""A small S3 in this process: the fake that behaves, for tests, with faults on demand."""

from tests.support.memory_origin.origin import MemoryOrigin

__all__ = ["MemoryOrigin"]
