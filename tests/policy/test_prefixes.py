import pytest

from gateway.policy.slots import Prefix


@pytest.mark.parametrize("text", ["s3://", "s3://train/", "s3://train/imagenet/", "s3://train/a b/ü"])
def test_a_prefix_is_written_as_it_was_read(text: str) -> None:
    """Messages show prefixes as the configuration has them."""
    assert str(Prefix.parse(text)) == text


def test_a_bucket_without_slash_is_the_whole_bucket() -> None:
    """`s3://train` never covers a bucket called `training`."""
    prefix = Prefix.parse("s3://train")
    assert prefix.covers("train", "")
    assert not prefix.covers("training", "")


@pytest.mark.parametrize("text", ["", "train/", "S3://train/", "s3:///key", "https://train/"])
def test_what_is_no_prefix_is_refused(text: str) -> None:
    """A typing error never turns into a wider prefix."""
    with pytest.raises(ValueError):
        Prefix.parse(text)


def test_a_prefix_covers_listings_within_it_only() -> None:
    """Whoever may touch `a/` may list `a/b`, but neither `a` nor everything."""
    prefix = Prefix.parse("s3://train/a/")
    assert prefix.covers("train", "a/")
    assert prefix.covers("train", "a/b")
    assert not prefix.covers("train", "a")
    assert not prefix.covers("train", "")
    assert not prefix.covers("other", "a/b")
