"""AWS_ENDPOINT_URL moves every AWS client to the gateway; each must show what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.parsers import JSONParser, QueryParser

from tests.support.asgi import ACCESS_KEY_ID, HOST, SECRET_ACCESS_KEY, Answer, call
from tests.support.gateway_app import gateway_app


async def ask(directory: Path, service: str, headers: dict[str, str], body: bytes) -> Answer:
    async with gateway_app(directory) as gateway:
        request = AWSRequest("POST", f"http://{HOST}/", headers, body)
        SigV4Auth(Credentials(ACCESS_KEY_ID, SECRET_ACCESS_KEY), service, "us-east-1").add_auth(request)
        sent = {**dict(request.headers.items()), "Host": HOST}
        return await call(gateway.app, "POST", "/", sent, body, sign=False)


async def test_an_sts_client_shows_the_variable_to_set(tmp_path: Path) -> None:
    """What botocore makes of the answer for STS names AWS_ENDPOINT_URL_S3."""
    headers = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}
    answer = await ask(tmp_path, "sts", headers, b"Action=GetCallerIdentity&Version=2011-06-15")
    response = {"status_code": answer.status, "headers": answer.headers, "body": answer.body}
    error = QueryParser().parse(response, None)["Error"]
    assert "meant for sts" in error["Message"]
    assert "AWS_ENDPOINT_URL_S3" in error["Message"]


async def test_a_client_of_a_json_service_shows_the_variable_to_set(tmp_path: Path) -> None:
    """What botocore makes of the answer for DynamoDB names AWS_ENDPOINT_URL_S3."""
    headers = {"Content-Type": "application/x-amz-json-1.0", "X-Amz-Target": "DynamoDB_20120810.ListTables"}
    answer = await ask(tmp_path, "dynamodb", headers, b"{}")
    response = {"status_code": answer.status, "headers": answer.headers, "body": answer.body}
    error = JSONParser().parse(response, None)["Error"]
    assert (error["Code"], json.loads(answer.body)["__type"]) == ("InvalidRequest", "InvalidRequest")
    assert "AWS_ENDPOINT_URL_S3" in error["Message"]


@pytest.mark.parametrize("service", ["ecr", "execute-api"])
async def test_any_other_service_gets_an_answer_that_people_can_read(tmp_path: Path, service: str) -> None:
    """Without a known protocol the answer is a plain error document with the same advice."""
    answer = await ask(tmp_path, service, {}, b"")
    assert answer.status == 400
    message = ElementTree.fromstring(answer.body).findtext("{*}Message") or ""
    assert "AWS_ENDPOINT_URL_S3" in message
