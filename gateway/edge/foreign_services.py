"""Requests that were meant for another AWS service, answered so that its client shows the way out.

`AWS_ENDPOINT_URL` moves every AWS client of a process to this port, STS among them. Each family of services reads
errors in a form of its own; S3's would be shown as "Unknown".
"""

from __future__ import annotations

import orjson

from gateway.operations.context import Response
from gateway.s3.requests import S3Request
from gateway.s3.xml_writer import document, element

_QUERY_API = "application/x-www-form-urlencoded"

_CODE = "InvalidRequest"


def foreign_service_reply(request: S3Request, service: str) -> Response:
    """Return the refusal of a request for `service`, in the form of the protocol that the request speaks."""
    message = (
        f"This request is meant for {service}, and this is an S3 gateway (Forebay). AWS_ENDPOINT_URL moves every AWS "
        "service here: set AWS_ENDPOINT_URL_S3 instead."
    )
    if request.headers.get("content-type", "").startswith(_QUERY_API):
        fields = element("Type", "Sender") + element("Code", _CODE) + element("Message", message)
        return Response(400, [("content-type", "text/xml")], document("ErrorResponse", f"<Error>{fields}</Error>"))
    if "x-amz-target" in request.headers or "json" in request.headers.get("content-type", ""):
        body = orjson.dumps({"__type": _CODE, "message": message})
        return Response(400, [("content-type", "application/x-amz-json-1.1"), ("x-amzn-errortype", _CODE)], body)
    fields = element("Code", _CODE) + element("Message", message)
    return Response(400, [("content-type", "application/xml")], document("Error", fields))
