"""Buckets and what hangs on them; sub-resources of objects: forwarded, and never mixed up with the plain thing."""

from __future__ import annotations

from collections.abc import Iterator

from tests.scenarios.transparency.steps import Case, Step, delete, etag, get, head, md5_header, pattern, post, put

BODY = pattern(500)
K = "/{bucket}/k"
_GIVEN = (put(K, BODY),)

_VERSIONING = "<VersioningConfiguration><Status>{}</Status></VersioningConfiguration>"
_TAGGING = b"<Tagging><TagSet><Tag><Key>a</Key><Value>b c</Value></Tag></TagSet></Tagging>"
_CORS = (
    b"<CORSConfiguration><CORSRule><AllowedMethod>GET</AllowedMethod><AllowedOrigin>http://web.example</AllowedOrigin>"
    b"<ExposeHeader>ETag</ExposeHeader><MaxAgeSeconds>60</MaxAgeSeconds></CORSRule></CORSConfiguration>"
)
_LIFECYCLE = (
    b"<LifecycleConfiguration><Rule><ID>r</ID><Filter><Prefix>logs/</Prefix></Filter><Status>Enabled</Status>"
    b"<Expiration><Days>3</Days></Expiration></Rule></LifecycleConfiguration>"
)
_POLICY = (
    b'{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"s3:GetObject",'
    b'"Resource":"arn:aws:s3:::anything/*"}]}'
)
_ENCRYPTION = (
    b"<ServerSideEncryptionConfiguration><Rule><ApplyServerSideEncryptionByDefault><SSEAlgorithm>AES256</SSEAlgorithm>"
    b"</ApplyServerSideEncryptionByDefault></Rule></ServerSideEncryptionConfiguration>"
)
_WEBSITE = b"<WebsiteConfiguration><IndexDocument><Suffix>index.html</Suffix></IndexDocument></WebsiteConfiguration>"
_BLOCK = b"<PublicAccessBlockConfiguration><BlockPublicAcls>true</BlockPublicAcls></PublicAccessBlockConfiguration>"
_OWNERSHIP = (
    b"<OwnershipControls><Rule><ObjectOwnership>BucketOwnerEnforced</ObjectOwnership></Rule></OwnershipControls>"
)

_DOCUMENTS = {
    "tagging": _TAGGING,
    "cors": _CORS,
    "lifecycle": _LIFECYCLE,
    "policy": _POLICY,
    "encryption": _ENCRYPTION,
    "website": _WEBSITE,
    "publicAccessBlock": _BLOCK,
    "ownershipControls": _OWNERSHIP,
}

_SUB_RESOURCES = (
    "acl",
    "accelerate",
    "analytics",
    "cors",
    "encryption",
    "intelligent-tiering",
    "inventory",
    "lifecycle",
    "location",
    "logging",
    "metrics",
    "notification",
    "object-lock",
    "ownershipControls",
    "policy",
    "policyStatus",
    "publicAccessBlock",
    "replication",
    "requestPayment",
    "tagging",
    "versioning",
    "website",
)

_OBJECT_SUB_RESOURCES = ("acl", "tagging", "legal-hold", "retention", "torrent")
_UNKNOWN_SUB_RESOURCES = (
    "somethingNew",
    "somethingNew=1",
    "annotation",
    "acl&tagging",
    "renameObject",
    "partNumber=1&x=2",
)


def cases() -> Iterator[Case]:
    yield from _lives()
    yield from _reads()
    yield from _configurations()
    yield from _versioning()
    yield from _object_sub_resources()
    yield from _service()


def _lives() -> Iterator[Case]:
    new = "/new-{bucket}"
    location = (
        b"<CreateBucketConfiguration><LocationConstraint>eu-west-1</LocationConstraint></CreateBucketConfiguration>"
    )
    for name, body in (("plain", b""), ("location", location), ("garbage", b"no xml")):
        steps = (put(new, body), head(new), get(f"{new}?location"), get(new), delete(new), head(new), delete(new))
        yield Case(f"bucket-life-{name}", steps, only="strict" if name == "garbage" else None)
    slashed = (put(f"{new}/", b""), head(f"{new}/"), get(f"{new}/?location"), delete(f"{new}/"))
    yield Case("bucket-life-slash", slashed)
    yield Case("bucket-twice", (put("/{bucket}", b"", rule="200"), get("/{bucket}")), _GIVEN, only="strict")
    yield Case("bucket-not-empty", (delete("/{bucket}"), get(K), delete(K), delete("/{bucket}"), get(K)), _GIVEN)
    again = (get(K), delete(K), delete("/{bucket}"), put("/{bucket}", b""), get(K), put(K, b"2"), get(K))
    yield Case("bucket-made-again", again, _GIVEN)
    locked = (put(new, b"", "x-amz-bucket-object-lock-enabled: true"), get(f"{new}?object-lock"))
    yield Case("bucket-object-lock", locked)
    for name in ("aa", "A-Capital", "under_score", "dots..dots", "192.168.5.4", "a" * 63, "a" * 64, "-dash", "x-"):
        yield Case(f"bucket-name-{len(name)}-{name[:20]}", (put(f"/{name}", b""), head(f"/{name}"), delete(f"/{name}")))


def _reads() -> Iterator[Case]:
    for name in _SUB_RESOURCES:
        steps = (get(f"/{{bucket}}?{name}"), get(f"/{{bucket}}/?{name}="), get(f"/no-such-bucket-here?{name}"))
        yield Case(f"bucket-get-{name}", steps)
    plain = (head("/{bucket}"), head("/{bucket}/"), head("/no-such-bucket-here"), get("/no-such-bucket-here?location"))
    yield Case("bucket-head", plain)
    for name in ("somethingNew", "somethingNew=1", "acl&somethingNew"):
        yield Case(f"bucket-unknown-{name}", (get(f"/{{bucket}}?{name}"), head(f"/{{bucket}}?{name}")), _GIVEN)


def _configurations() -> Iterator[Case]:
    for name, document in _DOCUMENTS.items():
        target = f"/{{bucket}}?{name}"
        written = put(target, document, md5_header(document), "content-type: application/xml")
        steps = (get(target), written, get(target), delete(target), get(target), head("/{bucket}"))
        yield Case(f"bucket-{name}", steps)
        yield Case(
            f"bucket-{name}-garbage", (put(target, b"garbage", md5_header(b"garbage")), get(target)), only="strict"
        )
    wrong = put("/{bucket}?tagging", _TAGGING, md5_header(b"?"), rule="400 BadDigest")
    yield Case("bucket-tagging-wrong-md5", (wrong, get("/{bucket}?tagging")))
    acl = (put("/{bucket}?acl", b"", "x-amz-acl: public-read"), get("/{bucket}?acl"))
    yield Case("bucket-acl", acl)
    web = "origin: http://web.example"
    asked = (get(K, web), head(K, web), get(K, "origin: http://other.example"), get(K), get("/{bucket}", web))
    yield Case("cors-answers", asked, (*_GIVEN, put("/{bucket}?cors", _CORS, md5_header(_CORS))), only="moto")


def _versioning() -> Iterator[Case]:
    on, off = (_VERSIONING.format(status).encode() for status in ("Enabled", "Suspended"))
    enabled = put("/{bucket}?versioning", on)
    first = put(K, b"first", capture={})
    reads = (get(K), head(K), get("/{bucket}?list-type=2"))
    steps = (enabled, get("/{bucket}?versioning"), first, *reads, put(K, b"second"), *reads, delete(K), *reads)
    yield Case("versioning", (*steps, put(K, b"third"), *reads, put("/{bucket}?versioning", off), put(K, b"4"), *reads))
    multi = b"<Delete><Object><Key>k</Key></Object></Delete>"
    deleted = post("/{bucket}?delete", multi, md5_header(multi))
    yield Case("versioning-multi-delete", (enabled, first, deleted, get(K), head(K), delete(K)))
    copied = put(K, b"", "x-amz-copy-source: {bucket}/k", "x-amz-metadata-directive: REPLACE")
    yield Case("versioning-copy-itself", (enabled, first, copied, get(K)))
    target = K + "?versionId={version}"
    yield Case("versioning-by-id", _by_version(target), (enabled, first, put(K, b"second")), only="moto")


def _by_version(target: str) -> tuple[Step, ...]:
    listed = get("/{bucket}?versions", capture={"version": "VersionId"})
    reads = (get(target), head(target), get(target, "range: bytes=0-1"), get(target, 'if-match: "other"'))
    copied = put("/{bucket}/copy", b"", "x-amz-copy-source: {bucket}/k?versionId={version}")
    gone = (delete(target), get(target), get(K))
    return (listed, *reads, copied, get("/{bucket}/copy"), get(target + "&tagging"), *gone)


def _object_sub_resources() -> Iterator[Case]:
    for name in _OBJECT_SUB_RESOURCES:
        steps = (get(f"{K}?{name}"), get(f"/{{bucket}}/absent?{name}"), get(K), get(f"{K}?{name}="))
        yield Case(f"object-get-{name}", steps, _GIVEN)
    for name in _UNKNOWN_SUB_RESOURCES:
        only = "strict" if name in ("annotation", "renameObject") else None
        yield Case(f"object-unknown-{name}", (get(f"{K}?{name}"), get(K)), _GIVEN, only=only)
    tags = f"{K}?tagging"
    written = put(tags, _TAGGING, md5_header(_TAGGING))
    yield Case("object-tagging", (get(K), written, get(tags), get(K), head(K), delete(tags), get(tags), get(K)), _GIVEN)
    yield Case("object-tagging-absent", (put("/{bucket}/absent?tagging", _TAGGING, md5_header(_TAGGING)),))
    acl = (put(f"{K}?acl", b"", "x-amz-acl: public-read"), get(f"{K}?acl"), get(K))
    yield Case("object-acl", acl, _GIVEN)
    for names in ("ETag", "ObjectSize", "ETag,ObjectSize,StorageClass,Checksum,ObjectParts", "Nonsense"):
        attributes = get(f"{K}?attributes", f"x-amz-object-attributes: {names}")
        yield Case(f"object-attributes-{names[:20]}", (attributes, get(K)), _GIVEN)
    hold = b"<LegalHold><Status>ON</Status></LegalHold>"
    yield Case("object-legal-hold", (put(f"{K}?legal-hold", hold, md5_header(hold)), get(f"{K}?legal-hold")), _GIVEN)
    restore = b"<RestoreRequest><Days>1</Days></RestoreRequest>"
    yield Case("object-restore", (post(f"{K}?restore", restore), head(K)), _GIVEN)
    yield Case("object-put-unknown", (put(f"{K}?somethingNew", b"x"), get(K)), _GIVEN, only="strict")
    yield Case("object-delete-unknown", (delete(f"{K}?somethingNew"), get(K)), _GIVEN, only="strict")
    posted = post(K, b"", rule="405 MethodNotAllowed")
    yield Case("object-post", (posted, get(K, f"if-match: {etag(BODY)}")), _GIVEN)


def _service() -> Iterator[Case]:
    yield Case("bucket-post", (post("/{bucket}", b"", "content-type: text/plain"),), only="strict")
    for method in ("PATCH", "TRACE", "PROPFIND"):
        step = Step(method, K, rule="405 MethodNotAllowed", only_gateway=True)
        yield Case(f"method-{method}", (step, get(K)), _GIVEN)
