"""The admin port against its own OpenAPI document, by schemathesis: a running gateway with write-back data is asked
what the document allows and what it does not, and every answer is one that the document describes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import boto3
import httpx
import pytest
import schemathesis
from botocore.config import Config
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from gateway.admin.app import describe
from gateway.api import LINES_TYPE, MANIFEST_TYPE
from gateway.s3.requests import Operation
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.faults import Answer
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

TOKEN = "a-token-of-sixteen-characters-or-more"
BEARER = {"authorization": f"Bearer {TOKEN}"}
EXAMPLES = int(os.environ.get("FOREBAY_API_EXAMPLES", "0"))
"""Of each path and method; 0: a few, always the same."""

SERIALIZED = (MANIFEST_TYPE, LINES_TYPE)


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    """With writes that fail, a conflict, an open upload, a checkpoint, an index, a snapshot, a job and a pin."""
    keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    with StrictOrigin() as origin:
        bucket = origin.model.create_bucket("bucket")
        for number in range(3):
            origin.model.put("bucket", f"data/{number}", b"x" * 1000)
        config: dict[str, Any] = {
            "admin": {"token": TOKEN},
            "origin": {"endpoint_url": origin.endpoint_url, **keys},
            "cache": {"persistent": True},
            "slots": [
                {"name": "back", "prefix": "s3://bucket/back/", "write": "back", "max_unflushed_bytes": "8MiB"},
                {"name": "data", "prefix": "s3://bucket/data/", "consistency": "immutable", "index": True},
            ],
        }
        with GatewayProcess(config) as one, one.explaining():
            client = boto3.client(
                "s3",
                endpoint_url=one.s3_url,
                aws_access_key_id=ACCESS_KEY_ID,
                aws_secret_access_key=SECRET_ACCESS_KEY,
                region_name="us-east-1",
                config=Config(s3={"addressing_style": "path"}),
            )
            client.put_object(Bucket="bucket", Key="back/theirs", Body=b"x")
            eventually(lambda: "back/theirs" in bucket.objects)
            origin.model.inject(
                lambda call: call.operation is Operation.PUT_OBJECT, Answer(403, "AccessDenied"), times=None
            )
            for key in ("back/fails", "back/step-1/__0_0.distcp", "back/step-1/.metadata", "back/theirs"):
                client.put_object(Bucket="bucket", Key=key, Body=b"y" * 100)
            origin.model.put("bucket", "back/theirs", b"of somebody else")
            client.create_multipart_upload(Bucket="bucket", Key="back/open")
            client.get_object(Bucket="bucket", Key="data/0")["Body"].read()
            ask(one, "POST", "/api/v1/snapshots", {"name": "v1", "prefix": "s3://bucket/data/"})
            ask(one, "POST", "/api/v1/pin", {"prefix": "s3://bucket/data/"})
            ask(one, "POST", "/api/v1/flush", {"prefix": "s3://"})
            eventually(lambda: ask(one, "GET", "/api/v1/writeback")["conflicts"] == 1)
            yield one


def ask(gateway: GatewayProcess, method: str, path: str, document: Any = None) -> Any:
    answer = httpx.request(method, f"{gateway.admin_url}{path}", json=document, headers=BEARER, timeout=30)
    answer.raise_for_status()
    return answer.json()


def strict() -> dict[str, Any]:
    """The document, with answers that have no members but those that are named."""
    document = copy.deepcopy(describe())
    for item in document["paths"].values():
        for method in item.keys() & {"get", "put", "post", "delete"}:
            _close(item[method]["responses"])
    return document


def _close(schema: Any) -> None:
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _close(value)
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict) and "type" in schema:
        schema.setdefault("additionalProperties", False)


@schemathesis.serializer(*SERIALIZED)
def _lines(_context: Any, value: Any) -> Any:
    return value if isinstance(value, bytes) else str(value).encode()


EVENT = {
    "Records": [
        {
            "eventVersion": "2.1",
            "eventSource": "aws:s3",
            "eventName": "ObjectCreated:Put",
            "s3": {"bucket": {"name": "bucket"}, "object": {"key": "data/0"}},
        },
        {"eventSource": "aws:sns"},
    ]
}
OPEN_ENDED = {
    ("/api/v1/events", "post"): "what S3, SNS, SQS and EventBridge send is theirs to describe",
    ("/api/v1/slots/{name}", "put"): "which settings go together is no matter of a schema",
    ("/api/v1/warm", "post"): "a manifest is no JSON",
    ("/api/v1/evict", "post"): "a manifest is no JSON",
    ("/api/v1/snapshots/{name}", "put"): "its lines are no JSON document",
    ("/api/v1/checkpoints", "get"): "after is what the page before has given",
    ("/api/v1/writeback/objects", "get"): "after is what the page before has given",
    ("/api/v1/writeback/uploads", "get"): "after is what the page before has given",
}
"""Where more may be refused than the document can say."""

schema = schemathesis.openapi.from_dict(strict())


@pytest.mark.api
def test_answers_about_what_there_is_are_described(gateway: GatewayProcess) -> None:
    """What no generated name hits: a job, a conflict, an open upload, a snapshot, what is different in it, a slot."""
    [conflict] = [
        one for one in ask(gateway, "GET", "/api/v1/writeback/objects")["objects"] if one["state"] == "conflict"
    ]
    [upload] = ask(gateway, "GET", "/api/v1/writeback/uploads")["uploads"]
    job = ask(gateway, "GET", "/api/v1/jobs")["jobs"][0]["id"]
    eventually(lambda: ask(gateway, "GET", "/api/v1/snapshots")["snapshots"] != [])
    through = ask(gateway, "POST", "/api/v1/flush", {"prefix": "s3://"})["through"]
    slot = {"prefix": "s3://bucket/job/"}
    decision = {"object": "s3://bucket/back/theirs", "decision": "keep-theirs", "sequence": conflict["sequence"]}
    for method, path, asked, body, status in (
        ("GET", "/api/v1/jobs/{job_id}", f"/api/v1/jobs/{job}", None, 200),
        ("DELETE", "/api/v1/jobs/{job_id}", f"/api/v1/jobs/{job}", None, 200),
        ("GET", "/api/v1/snapshots/{name}", "/api/v1/snapshots/v1", None, 200),
        ("GET", "/api/v1/snapshots/{name}/objects", "/api/v1/snapshots/v1/objects", None, 200),
        ("GET", "/api/v1/snapshots/{name}/diff", "/api/v1/snapshots/v1/diff?with=v1", None, 200),
        ("POST", "/api/v1/snapshots", "/api/v1/snapshots", {"name": "v2", "prefix": "s3://bucket/data/"}, 202),
        ("GET", "/api/v1/explain", "/api/v1/explain?object=s3://bucket/back/theirs", None, 200),
        ("GET", "/api/v1/explain", "/api/v1/explain?object=s3://bucket/data/0", None, 200),
        ("GET", "/api/v1/flush", f"/api/v1/flush?through={through}", None, 200),
        ("GET", "/api/v1/writeback/objects", "/api/v1/writeback/objects?problems=true", None, 200),
        ("GET", "/api/v1/overview", "/api/v1/overview?history=true", None, 200),
        ("POST", "/api/v1/writeback/resolve", "/api/v1/writeback/resolve", decision, 200),
        ("POST", "/api/v1/writeback/abort", "/api/v1/writeback/abort", {"upload_ids": [upload["upload_id"]]}, 200),
        ("POST", "/api/v1/events", "/api/v1/events", EVENT, 200),
        ("PUT", "/api/v1/slots/{name}", "/api/v1/slots/job", slot, 200),
        ("DELETE", "/api/v1/slots/{name}", "/api/v1/slots/job", None, 200),
        ("GET", "/api/v1/slots", "/api/v1/slots", None, 200),
        ("GET", "/api/v1/callers", "/api/v1/callers", None, 200),
        ("GET", "/api/v1/indexes", "/api/v1/indexes", None, 200),
        ("GET", "/api/v1/status", "/api/v1/status", None, 200),
        ("GET", "/readyz", "/readyz", None, 200),
    ):
        answer = httpx.request(method, f"{gateway.admin_url}{asked}", json=body, headers=BEARER, timeout=30)
        assert answer.status_code == status, (asked, answer.text)
        schema[path][method].validate_response(answer)


@pytest.mark.api
def test_a_description_that_lacks_a_member_is_found(gateway: GatewayProcess) -> None:
    """So the other tests can fail: here `region` of the origin is not described."""
    document = strict()
    described = document["paths"]["/api/v1/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    of_origin = described["properties"]["origin"]
    del of_origin["properties"]["region"]
    of_origin["required"].remove("region")
    answer = httpx.get(f"{gateway.admin_url}/api/v1/status", headers=BEARER, timeout=30)
    with pytest.raises(Exception, match="region") as caught:
        schemathesis.openapi.from_dict(document)["/api/v1/status"]["GET"].validate_response(answer)
    assert "Response violates schema" in str(caught.value)


@pytest.mark.api
@schema.parametrize()
@settings(
    max_examples=EXAMPLES or 25,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_one_that_the_document_describes(case: schemathesis.Case, gateway: GatewayProcess) -> None:
    """Whatever is asked: no 5xx but those that are described, what is allowed is taken, what is not is refused."""
    is_open_ended = (case.operation.path, case.operation.method) in OPEN_ENDED
    with gateway.explaining():
        case.call_and_validate(
            base_url=gateway.admin_url,
            headers=BEARER,
            excluded_checks=[positive_data_acceptance] if is_open_ended else [],
            timeout=30,
        )
