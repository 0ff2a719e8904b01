"""`s3://bucket/prefix`: the part of the namespace that a credential or a slot is about."""

from __future__ import annotations

from dataclasses import dataclass

_SCHEME = "s3://"


@dataclass(frozen=True, slots=True)
class Prefix:
    """All keys of `bucket` that begin with `key_prefix`; an empty bucket stands for every bucket.

    >>> str(Prefix.parse("s3://train/imagenet/"))
    's3://train/imagenet/'
    """

    bucket: str
    key_prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> Prefix:
        """`s3://` is everything; `s3://b` and `s3://b/` are the whole bucket. Raises ValueError otherwise."""
        if not text.startswith(_SCHEME):
            raise ValueError(f"{text!r} does not begin with s3://")
        bucket, _, key_prefix = text[len(_SCHEME) :].partition("/")
        if not bucket and key_prefix:
            raise ValueError(f"{text!r} names a key but no bucket")
        return cls(bucket, key_prefix)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.bucket}/{self.key_prefix}" if self.bucket else _SCHEME

    def covers(self, bucket: str, key_prefix: str) -> bool:
        """Whether every key of `bucket` that begins with `key_prefix` lies within."""
        return not self.bucket or (bucket == self.bucket and key_prefix.startswith(self.key_prefix))
