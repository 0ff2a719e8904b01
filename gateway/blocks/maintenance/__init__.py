"""What a cache directory needs when it is opened, and now and then."""
