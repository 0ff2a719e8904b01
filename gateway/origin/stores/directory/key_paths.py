"""Which keys can be files, and which names of files are keys."""

from __future__ import annotations

from gateway.core.errors import S3Error
from gateway.s3.error_codes import s3_error

OWN = ".forebay-origin"
"""The directory in each bucket that Forebay keeps for itself. It is no object, and nothing in it is."""

_NAME_BYTES_MAX = 255
KEY_BYTES_MAX = 1024


def components(key: str) -> tuple[bytes, ...] | None:
    """Return the names on the way to the file of a key, that of a directory for `dir/`; None: it can be none."""
    return tuple(key.removesuffix("/").encode().split(b"/")) if refusal(key) is None else None


def refusal(key: str) -> S3Error | None:
    """Return why no file can have this key."""
    names = key.removesuffix("/").encode().split(b"/")
    if any(len(name) > _NAME_BYTES_MAX for name in names):
        size = str(max(map(len, names)))
        message = "Your key is too long: the origin is a directory, where a name has at most 255 bytes."
        return s3_error("KeyTooLongError", message, Size=size, MaxSizeAllowed=str(_NAME_BYTES_MAX))
    why = ""
    if b"" in names:
        why = "has an empty name between two slashes"
    elif b"." in names or b".." in names:
        why = "has the name . or .. in it"
    elif b"\0" in key.encode():
        why = "has a NUL in it"
    elif names[0] == OWN.encode():
        why = f"lies under {OWN}/, which is Forebay's own"
    if not why:
        return None
    return s3_error("InvalidArgument", f"The origin is a directory, and no file can be called so: the key {why}.")
