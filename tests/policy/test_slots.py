from gateway.policy.slots import DEFAULT_SLOT, Prefix, Slots
from tests.support.slots import Slot


def test_the_longest_prefix_wins_whatever_the_order() -> None:
    """A slot within another one owns its keys."""
    outer = Slot("outer", Prefix("train", "a/"))
    inner = Slot("inner", Prefix("train", "a/b/"))
    for slots in (Slots([outer, inner]), Slots([inner, outer])):
        assert slots.find("train", "a/b/c") is inner
        assert slots.find("train", "a/c") is outer
        assert slots.find("train", "b") is DEFAULT_SLOT
        assert slots.find("other", "a/b/c") is DEFAULT_SLOT


def test_a_slot_of_every_bucket_stands_behind_the_slots_of_one() -> None:
    """`s3://` as a slot's prefix replaces the built-in default."""
    everything = Slot("everything", Prefix(""))
    bucket = Slot("bucket", Prefix("train"))
    slots = Slots([everything, bucket])
    assert slots.find("train", "k") is bucket
    assert slots.find("other", "k") is everything
