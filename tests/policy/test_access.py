from gateway.policy.slots import (
    EVERYTHING,
    Grant,
    Prefix,
    Slots,
    refusal_of_bucket_operation,
    refusal_of_listing,
    refusal_of_read,
    refusal_of_write,
)
from tests.support.slots import Slot

JOB = Grant((Prefix("train"), Prefix("checkpoints", "job-a/")))
READER = Grant((Prefix("train"),), read_only=True)
SLOTS = Slots([Slot("imagenet", Prefix("train", "imagenet/"), "read-only"), Slot("frozen", Prefix("old"), "read-only")])


def test_keys_outside_the_prefixes_can_be_neither_read_nor_written() -> None:
    """A credential ends at its prefixes."""
    assert refusal_of_read(JOB, "checkpoints", "job-a/1") is None
    assert refusal_of_read(JOB, "checkpoints", "job-b/1")
    assert refusal_of_write(JOB, SLOTS, "checkpoints", "job-a/1") is None
    assert refusal_of_write(JOB, SLOTS, "checkpoints", "job-ab") is not None


def test_read_only_credentials_and_slots_refuse_writes() -> None:
    """Either is enough for a refusal, and the message says which it was."""
    assert "credential is read-only" in (refusal_of_write(READER, SLOTS, "train", "x") or "")
    assert "imagenet" in (refusal_of_write(EVERYTHING, SLOTS, "train", "imagenet/x") or "")
    assert refusal_of_write(EVERYTHING, SLOTS, "train", "x") is None


def test_a_listing_must_stay_within_a_prefix() -> None:
    """A listing of the bucket would tell names that the credential does not cover."""
    assert refusal_of_listing(JOB, "checkpoints", "job-a/") is None
    assert refusal_of_listing(JOB, "checkpoints", "job-") is not None
    assert refusal_of_listing(JOB, "train", "") is None


def test_bucket_operations_need_the_whole_bucket() -> None:
    """So does the service: only a credential for everything may list buckets."""
    assert refusal_of_bucket_operation(JOB, SLOTS, "train", is_read=True) is None
    assert refusal_of_bucket_operation(JOB, SLOTS, "checkpoints", is_read=True)
    assert refusal_of_bucket_operation(JOB, SLOTS, None, is_read=True)
    assert refusal_of_bucket_operation(EVERYTHING, SLOTS, None, is_read=True) is None
    assert refusal_of_bucket_operation(READER, SLOTS, "train", is_read=False)
    assert "frozen" in (refusal_of_bucket_operation(EVERYTHING, SLOTS, "old", is_read=False) or "")
