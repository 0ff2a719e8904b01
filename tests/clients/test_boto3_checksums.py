"""Every checksum algorithm that boto3 supports, written and verified through the gateway."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.boto import boto3_client, described, read
from tests.clients.conftest import WRITTEN_BACK, Endpoint
from tests.clients.content import MIB, random_bytes

pytestmark = pytest.mark.clients

OF_THE_UPLOAD = {
    "CRC32": "vi7tbA==-3",
    "CRC32C": "zU+7Dg==-3",
    "CRC64NVME": "Pws4ii+dFTs=",
    "SHA1": "BxvC2qaY6X/Rc1Y5BgPhteSD/4k=-3",
    "SHA256": "gTqCt++lrFvhE3Hsselhdjt5fAEx48EuoyZd7/6JLoE=-3",
}
"""What S3 answers to the Complete of `_multipart`: of its parts' checksums, but CRC64NVME, which is of the whole."""

ALGORITHMS = list(OF_THE_UPLOAD)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [0, 5, 2 * MIB + 1])
def test_put_with_a_checksum(algorithm: str, size: int, through: Any, direct: Any, bucket: str) -> None:
    """The checksum that boto3 sends reaches the origin, comes back on PUT and HEAD; GET verifies it, cold and warm."""
    content = random_bytes(size)
    via = through.put_object(Bucket=bucket, Key="via", Body=content, ChecksumAlgorithm=algorithm)
    straight = direct.put_object(Bucket=bucket, Key="straight", Body=content, ChecksumAlgorithm=algorithm)
    field = f"Checksum{algorithm}"
    assert via[field] == straight[field]
    assert direct.head_object(Bucket=bucket, Key="via", ChecksumMode="ENABLED")[field] == straight[field]
    for _ in range(2):
        response = through.get_object(Bucket=bucket, Key="via", ChecksumMode="ENABLED")
        assert response["Body"].read() == content
        assert response[field] == straight[field]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_wrong_checksum_is_refused_and_stores_nothing(algorithm: str, through: Any, direct: Any, bucket: str) -> None:
    """A body that is not what its checksum says answers 400 and never becomes visible at the origin."""
    wrong = direct.put_object(Bucket=bucket, Key="other", Body=b"other", ChecksumAlgorithm=algorithm)
    field = f"Checksum{algorithm}"
    with pytest.raises(through.exceptions.ClientError) as failure:
        through.put_object(Bucket=bucket, Key="object", Body=b"content", **{field: wrong[field]})
    assert failure.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    with pytest.raises(direct.exceptions.ClientError):
        direct.head_object(Bucket=bucket, Key="object")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_multipart_with_checksums(algorithm: str, through: Any, direct: Any, bucket: str) -> None:
    """Parts with checksums complete to the object, and the answer, that a direct client gets.

    moto's own answers name no checksum; those of this node (4.5) do, as S3's.
    """
    via = _multipart(through, bucket, "via", algorithm)
    straight = _multipart(direct, bucket, "straight", algorithm)
    assert via["ETag"] == straight["ETag"]
    said = straight.get(f"Checksum{algorithm}")
    assert said in (None, OF_THE_UPLOAD[algorithm])
    assert via.get(f"Checksum{algorithm}") == (OF_THE_UPLOAD[algorithm] if WRITTEN_BACK else said)
    assert read(direct, bucket, "via") == read(through, bucket, "via") == read(direct, bucket, "straight")


@pytest.mark.parametrize("setting", ["when_required", "when_supported"])
@pytest.mark.parametrize("signed", [True, False])
def test_without_checksum_or_payload_signature(
    setting: str, signed: bool, endpoint: Endpoint, direct: Any, bucket: str
) -> None:
    """The cheaper settings that trainers use to save CPU store the same bytes."""
    client = boto3_client(
        endpoint.url,
        endpoint.ca_file,
        request_checksum_calculation=setting,
        response_checksum_validation=setting,
        s3={"payload_signing_enabled": signed},
    )
    content = random_bytes(MIB)
    client.put_object(Bucket=bucket, Key="object", Body=content)
    assert read(direct, bucket, "object") == content == read(client, bucket, "object")


def _multipart(client: Any, bucket: str, key: str, algorithm: str) -> dict[str, Any]:
    upload = client.create_multipart_upload(Bucket=bucket, Key=key, ChecksumAlgorithm=algorithm)["UploadId"]
    parts = []
    for number, size in ((1, 5 * MIB), (2, 5 * MIB), (3, 17)):
        answer = client.upload_part(
            Bucket=bucket,
            Key=key,
            UploadId=upload,
            PartNumber=number,
            Body=random_bytes(size, seed=number),
            ChecksumAlgorithm=algorithm,
        )
        field = f"Checksum{algorithm}"
        parts.append({"PartNumber": number, "ETag": answer["ETag"], field: answer[field]})
    return described(
        client.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
    )
