"""S3's error codes: the status and the message that go with each, and the XML document that tells a client.

Source: the S3 API page "Error responses". Messages are S3's own where clients or people know them by heart.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core.errors import S3Error
from gateway.s3.xml_writer import PROLOG, escape

CODES: Mapping[str, tuple[int, str]] = {
    "AccessDenied": (403, "Access Denied"),
    "AuthorizationHeaderMalformed": (400, "The authorization header that you provided is not valid."),
    "AuthorizationQueryParametersError": (400, "The authorization query parameters that you provided are not valid."),
    "BadDigest": (400, "The Content-MD5 or checksum value that you specified did not match what the server received."),
    "BucketAlreadyExists": (409, "The requested bucket name is not available. Select a different name and try again."),
    "BucketAlreadyOwnedByYou": (409, "Your previous request to create the named bucket succeeded and you own it."),
    "BucketNotEmpty": (409, "The bucket that you tried to delete is not empty."),
    "ConditionalRequestConflict": (409, "A conflicting operation occurred during the request. Try again."),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed object size."),
    "EntityTooSmall": (400, "Your proposed upload is smaller than the minimum allowed object size."),
    "ExpiredToken": (400, "The provided token has expired."),
    "IllegalVersioningConfigurationException": (400, "The versioning configuration in the request is invalid."),
    "IncompleteBody": (400, "You did not provide the number of bytes specified by the Content-Length HTTP header."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "InvalidAccessKeyId": (403, "The AWS access key ID that you provided does not exist in our records."),
    "InvalidArgument": (400, "Invalid Argument"),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
    "InvalidBucketState": (409, "The request is not valid with the current state of the bucket."),
    "InvalidChunkSizeError": (403, "Only the last chunk is allowed to have a size less than 8192 bytes."),
    "InvalidDigest": (400, "The Content-MD5 you specified is not valid."),
    "InvalidEncryptionAlgorithmError": (400, "The encryption request that you specified is not valid."),
    "InvalidLocationConstraint": (400, "The specified location constraint is not valid."),
    "InvalidObjectState": (403, "The operation is not valid for the current state of the object."),
    "InvalidPart": (
        400,
        "One or more of the specified parts could not be found. The part may not have been uploaded, "
        "or the specified entity tag may not match the part's entity tag.",
    ),
    "InvalidPartNumber": (416, "The requested partnumber is not satisfiable"),
    "InvalidPartOrder": (400, "The list of parts was not in ascending order. Parts must be ordered by part number."),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    "InvalidRequest": (400, "Invalid Request"),
    "InvalidStorageClass": (400, "The storage class you specified is not valid."),
    "InvalidToken": (400, "The provided token is malformed or otherwise not valid."),
    "InvalidURI": (400, "Couldn't parse the specified URI."),
    "KeyTooLongError": (400, "Your key is too long."),
    "LoopDetected": (508, "The request came back to this gateway: its origin endpoint leads to itself."),
    "MalformedPOSTRequest": (400, "The body of your POST request is not well-formed multipart/form-data."),
    "MalformedTrailerError": (400, "The request contained trailing data that was not well-formed."),
    "MalformedXML": (400, "The XML you provided was not well-formed or did not validate against our published schema."),
    "MaxMessageLengthExceeded": (400, "Your request was too large."),
    "MetadataTooLarge": (400, "Your metadata headers exceed the maximum allowed metadata size."),
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "MissingRequestBodyError": (400, "Request body is empty."),
    "MissingSecurityHeader": (400, "Your request is missing a required header."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchUpload": (
        404,
        "The specified multipart upload does not exist. The upload ID may be invalid, or the upload may have been "
        "aborted or completed.",
    ),
    "NoSuchVersion": (404, "The specified version does not exist."),
    "NotImplemented": (501, "A header or parameter that you provided implies functionality that is not implemented."),
    "NotModified": (304, "Not Modified"),
    "OperationAborted": (409, "A conflicting conditional operation is currently in progress against this resource."),
    "OutcomeUnknown": (
        424,
        "The origin may or may not have carried out the request: its answer was lost. Look at the object before you "
        "send the request again.",
    ),
    "PermanentRedirect": (301, "The bucket that you are attempting to access must be addressed by another endpoint."),
    "PreconditionFailed": (412, "At least one of the pre-conditions you specified did not hold"),
    "RequestHeaderSectionTooLarge": (400, "Your request header section exceeds the maximum allowed size."),
    "RequestTimeout": (
        400,
        "Your socket connection to the server was not read from or written to within the timeout period.",
    ),
    "RequestTimeTooSkewed": (403, "The difference between the request time and the current time is too large."),
    "ServiceUnavailable": (503, "Service is unable to handle request."),
    "SignatureDoesNotMatch": (
        403,
        "The request signature we calculated does not match the signature you provided. Check your key and signing "
        "method.",
    ),
    "SlowDown": (503, "Please reduce your request rate."),
    "TemporaryRedirect": (307, "Please re-send this request to the specified temporary endpoint."),
    "TooManyBuckets": (400, "You have attempted to create more buckets than are allowed for your account."),
    "TooManyParts": (400, "You have attempted to add more parts than allowed."),
    "UnexpectedContent": (400, "This request contains unsupported content."),
    "XAmzContentSHA256Mismatch": (400, "The provided 'x-amz-content-sha256' header does not match what was computed."),
}
"""Code → (HTTP status, default message)."""


def s3_error(
    code: str,
    message: str | None = None,
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
    **elements: str,
) -> S3Error:
    """Return an S3Error with the code's own status and message where none is given.

    A code that is not in the table needs both `message` and `status`; ValueError otherwise. `elements` become XML
    elements of the answer, in the order given.
    """
    default_status, default_message = CODES.get(code, (None, None))
    status = status or default_status
    message = message or default_message
    if status is None or message is None:
        raise ValueError(f"{code} is no known S3 error code: it needs a status and a message")
    return S3Error(code, message, status, elements=elements, headers=headers)


ECHO_CHARACTERS_MAX = 1024
"""The most characters of a request that one field of an error document repeats."""

SIGNED_CHARACTERS_MAX = 8 * 1024
"""The limit for the canonical request and the string to sign, which people compare with their own."""

_SIGNED_FIELDS = frozenset(("CanonicalRequest", "StringToSign"))


def error_document(error: S3Error, *, resource: str, request_id: str, host_id: str) -> bytes:
    """Return the `<Error>` document in UTF-8, without a namespace, as SDKs parse it. An empty `resource` is left out.

    Characters that XML 1.0 cannot carry, even escaped, become U+FFFD, so that clients can read the error. Long values
    are cut, and say so: an answer costs little more than the request did.
    """
    fields = [("Code", error.code), ("Message", error.message)]
    if resource:
        fields.append(("Resource", resource))
    fields += [("RequestId", request_id), ("HostId", host_id), *error.elements.items()]
    body = "".join(f"<{name}>{escape(_cut(name, value))}</{name}>" for name, value in fields)
    return f"{PROLOG}<Error>{body}</Error>".encode()


def _cut(name: str, value: str) -> str:
    shown = SIGNED_CHARACTERS_MAX if name in _SIGNED_FIELDS else ECHO_CHARACTERS_MAX
    if len(value) <= shown:
        return value
    return f"{value[:shown]} [cut here: {shown} of {len(value)} characters]"
