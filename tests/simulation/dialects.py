"""Kinds of S3 that a node may meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

Conditions = Literal["honoured", "ignored", "refused", "unquoted", "creates"]
"""`unquoted`: ETags are compared without their quotes, so that no If-Match holds that has them. `creates`: it honours
If-None-Match, and refuses If-Match."""

_CONDITIONS: tuple[Conditions, ...] = ("honoured", "ignored", "refused", "unquoted", "creates")


REQUESTS_OF_A_FLUSH = 17
"""One after another: 11 of the probe of its bucket, then of the write: HEAD, Create, a part, HEAD, Complete, and one
more that is under way when the origin comes back."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What kind of S3 the origin is. Latencies in seconds, one way.

    `drawn`: each of the kinds of requests honours, ignores or refuses conditions as the dice of the history say, and
    whether uploads are listed and forgotten they say, too.
    """

    name: str
    on_put: Conditions = "honoured"
    on_complete: Conditions = "honoured"
    on_delete: Conditions = "honoured"
    opaque_etags: bool = False
    local_etags: bool = False
    """The node's slots take ETags of its own where those of the origin cannot be foretold; parts' are opaque, too."""

    encrypted_later: bool = False
    """Its buckets' encryption is changed at some moment: from then on ETags are no MD5s."""

    own_multipart_etags: bool = False
    """Those of objects of parts are its own, the others MD5s."""

    corrupts: bool = False
    """A few objects become others on its disks. Their ETags tell."""

    hides_absence: bool = False
    """Its key pair may not list buckets: a HEAD where nothing is, it answers 403."""

    lists_uploads: bool = True
    forgets_uploads: bool = False
    latency_seconds: tuple[float, float] = (0.001, 0.05)
    outages: tuple[str, ...] = ("unreachable", "503", "silent", "500", "lost answers", "errors in 200")
    drawn: bool = False

    @property
    def flush_seconds(self) -> float:
        """What a flush may take of the origin's time, where its bucket is new: it waits for the probe."""
        return REQUESTS_OF_A_FLUSH * 2 * self.latency_seconds[1]

    @property
    def may_be_opaque(self) -> bool:
        """Whether it may happen that nobody can foretell an ETag."""
        return self.opaque_etags or self.encrypted_later or self.own_multipart_etags

    def drawn_by(self, dice: Random) -> Dialect:
        """As it is in one history."""
        if not self.drawn:
            return self
        return replace(
            self,
            on_put=dice.choice(_CONDITIONS),
            on_complete=dice.choice(_CONDITIONS),
            on_delete=dice.choice(_CONDITIONS),
            lists_uploads=dice.random() < 0.7,
            forgets_uploads=dice.random() < 0.3,
        )


CLUSTER = "cluster"
"""In the place of a dialect: several nodes that read from each other, over an S3 without quirks."""

WRITING = "writing-nodes"
"""Several nodes that write, and find each other's writes in Redis."""

DIALECTS: Mapping[str, Dialect] = {
    one.name: one
    for one in (
        Dialect("aws"),
        Dialect("rgw", on_put="unquoted", on_complete="ignored", on_delete="ignored"),
        Dialect(
            "oss",
            on_put="creates",
            on_complete="creates",
            on_delete="refused",
            lists_uploads=False,
            own_multipart_etags=True,
        ),
        Dialect("no-conditions", on_put="refused", on_complete="refused", on_delete="refused"),
        Dialect("ignored-conditions", on_put="ignored", on_complete="ignored", on_delete="ignored"),
        Dialect("mixed", drawn=True),
        Dialect("opaque-etags", opaque_etags=True),
        Dialect("local-etags", opaque_etags=True, local_etags=True),
        Dialect("local-etags-unlike-s3", local_etags=True, own_multipart_etags=True, on_put="ignored"),
        Dialect("local-etags-later", local_etags=True, encrypted_later=True, on_complete="ignored"),
        Dialect("own-multipart-etags", own_multipart_etags=True),
        Dialect("encrypted-later", encrypted_later=True),
        Dialect("corrupting", corrupts=True),
        Dialect("hides-absence", hides_absence=True),
        Dialect("no-upload-lists", lists_uploads=False),
        Dialect("forgetful", forgets_uploads=True),
        Dialect("slow", latency_seconds=(1.0, 15.0)),
    )
}
