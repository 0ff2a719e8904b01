"""Which blocks a slot takes in and which it gives up: pure policies over a slot's books."""
